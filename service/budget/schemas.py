"""What is said about accounts and the ledger over HTTP."""

import uuid
from datetime import datetime
from typing import Annotated, Any

from pydantic import Field

from core.tables import Grant
from service.datasets.schemas import Finite, Text, Whole
from service.deps import Body, View
from service.jobs.schemas import Readings, Remaining
from sluice.privacy.accountant import Accountant
from sluice.privacy.relation import Relation


class AccountView(View):
    """Balances are integer costs at the account's order (1e-9 units); readings are epsilons at its delta."""

    id: uuid.UUID
    relation: Relation
    epsilon: float
    delta: float
    order: int
    granted: int
    held: int
    settled: int
    left: Remaining
    spent: Readings = Field(description="Everything promised or spent, composed as if chosen in advance.")
    datasets: int
    moves: int
    head: str
    last_move_at: datetime


class Chain(View):
    """Whether every row follows from the one before, and the balance from the rows."""

    ok: bool
    broken_row: int | None = Field(default=None, description="The first row that does not follow.")
    why: str | None = None


class EntryView(View):
    account: uuid.UUID
    number: int
    kind: str
    cost: int
    job: uuid.UUID | None
    event: dict[str, Any] | None
    readings: dict[str, Any] | None
    terms: dict[str, Any] | None = Field(description="What a grant rests on.")
    actor: str
    reason: str
    at: str
    previous: str
    digest: str


class LedgerView(View):
    account: AccountView
    chain: Chain
    entries: list[EntryView]
    next: int | None = Field(default=None, description="Give it as `after` for the following rows.")


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

    @classmethod
    def of(cls, row: Grant) -> "GrantView":
        return cls(
            id=row.id, account=row.account_id, epsilon=row.epsilon, reason=row.reason, state=row.state,
            proposed_by=row.proposed_by, proposed_at=row.proposed_at, decided_by=row.decided_by,
            decided_at=row.decided_at,
        )  # fmt: skip


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
    """`behind` names accounts with a reason and the values that the witness knows.

    `behind`: this database has forgotten spending; acknowledge the generation, and the sweeper's next round
    clears it. `altered`: the balance does not follow from the ledger rows; it has to be corrected. With
    `lost`, entries of the witness itself are missing.
    """

    checked_at: datetime | None
    generation: int
    behind: dict[str, Any] | None
    acknowledged: int


class Acknowledgement(Body):
    generation: Annotated[Whole, Field(ge=1, le=2**62, examples=[17])]
    reason: Text
