"""What is said about quotes and jobs over HTTP."""

import dataclasses
import uuid
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, Union

from pydantic import Field, create_model

from core.tables import Job
from privacy.accountant import Accountant
from privacy.plans import PLANS, Plan
from privacy.relation import Relation
from service.datasets.schemas import Finite, Whole
from service.deps import Body, View

_NUMBERS = {int: Whole, int | None: Whole | None, float: Finite, float | None: Finite | None}


def _body_of(plan: type[Plan]) -> Any:
    """The fields of a plan as a body: their names and types are checked here, their values by the plan."""
    fields: dict[str, Any] = {
        field.name: (
            _NUMBERS.get(field.type, field.type),
            ... if field.default is dataclasses.MISSING else field.default,
        )
        for field in dataclasses.fields(plan)
    }
    kind: Any = Literal[plan.kind]  # type: ignore[name-defined]
    return create_model(plan.__name__, __base__=Body, __doc__=plan.__doc__, kind=(kind, ...), **fields)


PlanBody = Annotated[
    Union[tuple(_body_of(plan) for plan in PLANS.values())],  # noqa: UP007 (of a tuple)
    Field(
        discriminator="kind",
        description="`kind` and the numbers of that plan, as `sluice quote KIND --json` prints them.",
        examples=[{"kind": "dpgan", "sampling_prob": 0.0085, "expected_batch": 512, "steps": 20000}],
    ),
]


class TargetBody(Body):
    """Solve for the noise that keeps the job within this epsilon, at the account's delta."""

    epsilon: Annotated[Finite, Field(ge=1e-6, le=1e6, examples=[1.0])]
    accountant: Accountant = Accountant.RENYI


class NewQuote(Body):
    dataset: Annotated[uuid.UUID, Field(examples=["0b6f9f4e-6f0e-4d3b-9d3c-2f6d7a1c5e80"])]
    plan: PlanBody
    target: TargetBody | None = Field(default=None, description="Leave out to price the plan's own noise.")


class NewJob(NewQuote):
    pass


class Readings(View):
    """Epsilon at the account's delta, by each accountant; null where one has no answer within its limits."""

    renyi: float | None
    pld: float | None


class Remaining(View):
    """Integer cost at the account's order, and the epsilon of one release that would use it up."""

    cost: int
    epsilon: float


class Published(View):
    """What the paper's own formula would claim. Not a guarantee."""

    claimed_epsilon: float
    formula: str
    flaw: str


class QuoteView(View):
    plan: dict[str, Any]
    event: dict[str, Any]
    relation: Relation
    delta: float
    order: int
    cost: int
    epsilon: Readings
    total_after: Readings = Field(description="Of everything the account has paid for and this job together.")
    left: Remaining
    left_after: Remaining | None = Field(description="Null where it does not fit.")
    fits: int = Field(description="How many such jobs fit into what is left.")
    largest_epsilon: float | None = Field(
        description="Where it does not fit: the largest epsilon that would."
    )
    published: Published | None = Field(
        description="What the paper's own formula would claim. Not a guarantee."
    )


class Progress(View):
    step: int
    steps: int
    started_at: datetime | None
    eta: datetime | None = Field(description="When it should be done, at the rate so far.")


class JobView(View):
    id: uuid.UUID
    dataset: uuid.UUID
    account: uuid.UUID
    plan: dict[str, Any]
    event: dict[str, Any]
    cost: int
    epsilon: Readings
    state: str
    fault: str | None
    progress: Progress
    created_at: datetime
    finished_at: datetime | None
    cancel_asked: bool

    @classmethod
    def of(cls, row: Job) -> "JobView":
        return cls(
            id=row.id, dataset=row.dataset_id, account=row.account_id, plan=row.plan, event=row.event,
            cost=row.cost, epsilon=Readings.model_validate(row.readings), state=row.state, fault=row.fault,
            progress=Progress(step=row.step, steps=row.steps, started_at=row.started_at, eta=_eta(row)),
            created_at=row.created_at, finished_at=row.finished_at,
            cancel_asked=row.cancel_asked_at is not None,
        )  # fmt: skip


def _eta(row: Job) -> datetime | None:
    if row.state != "running" or row.started_at is None or row.step == 0:
        return None
    now = datetime.now(UTC)
    return now + (now - row.started_at) / row.step * (row.steps - row.step)
