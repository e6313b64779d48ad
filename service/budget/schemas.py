"""Request and response bodies for accounts and the ledger."""

import uuid
from datetime import datetime
from typing import Annotated, Any

from pydantic import Field

from service.jobs.schemas import Readings, Remaining
from service.schemas import Body, Finite, Text, View, Whole
from sluice.privacy.accountant import Accountant
from sluice.privacy.relation import Relation


class AccountView(View):
    """Balances are integer costs at the account's order in units of 1e-9; `spent` is epsilon at its delta."""

    id: uuid.UUID
    relation: Relation
    epsilon: float
    delta: float
    order: int
    granted: int
    held: int
    settled: int
    left: Remaining
    spent: Readings = Field(
        description="Everything reserved or spent, composed as if all plans had been chosen in advance."
    )
    datasets: int
    moves: int
    head: str
    last_move_at: datetime


class Chain(View):
    """Whether the hash chain of the rows and the balance computed from them are consistent."""

    ok: bool
    broken_row: int | None = Field(default=None, description="The first inconsistent row.")
    why: str | None = None


class EntryView(View):
    account: uuid.UUID
    number: int
    kind: str
    cost: int
    job: uuid.UUID | None
    event: dict[str, Any] | None
    readings: dict[str, Any] | None
    terms: dict[str, Any] | None = Field(description="Of a grant: the terms of the account.")
    actor: str
    reason: str
    at: str
    previous: str
    digest: str


class LedgerView(View):
    account: AccountView
    chain: Chain
    entries: list[EntryView]
    next: int | None = Field(default=None, description="Pass it as `after` to get the next rows.")


class NewGrant(Body):
    epsilon: Annotated[
        Finite,
        Field(ge=1e-6, le=1e6, description="The new, larger epsilon of the account.", examples=[12.0]),
    ]
    reason: Annotated[Text, Field(examples=["A second cohort joined the study"])]


class GrantView(View):
    id: uuid.UUID
    account: uuid.UUID
    epsilon: float
    reason: str
    state: str
    proposed_by: uuid.UUID
    proposed_at: datetime
    decided_by: uuid.UUID | None
    decided_at: datetime | None


class Reread(View):
    number: int
    job: uuid.UUID | None
    stored: float | None
    now: float | None
    changed: bool


class Recomputed(View):
    accountant: Accountant
    delta: float
    total: float | None
    rows: list[Reread]


class WitnessView(View):
    """`behind` lists accounts with a reason and the values recorded by the witness.

    `behind`: this database lacks spending that the witness recorded; acknowledge the generation, and the
    sweeper clears it with its next round. `altered`: the balance does not follow from the ledger rows and has
    to be corrected. `lost`: entries of the witness itself are missing.
    """

    checked_at: datetime | None
    generation: int
    behind: dict[str, Any] | None
    acknowledged: int


class Acknowledgement(Body):
    generation: Annotated[Whole, Field(ge=1, le=2**62, examples=[17])]
    reason: Text
