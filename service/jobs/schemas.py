"""What is said about quotes and jobs over HTTP."""

import dataclasses
import uuid
from datetime import UTC, datetime
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import Field, create_model

from core.tables import Job, JobState
from service.schemas import Body, Finite, View, Whole
from sluice.methods import PLANS
from sluice.privacy.accountant import Accountant
from sluice.privacy.relation import Relation

_Preset = Annotated[str, Field(max_length=40, description="The name of a preset.")]


def _typed(kind: Any) -> Any:
    """A field's type as it may be sent: numbers are numbers, and a part of a plan may go by a name."""
    if kind in (int, float):
        return Whole if kind is int else Finite
    if dataclasses.is_dataclass(kind):
        return Union[_Preset, _model(kind)]  # noqa: UP007 (of values)
    inner = tuple(_typed(each) for each in get_args(kind))
    if not inner:
        return kind
    return Union[inner] if get_origin(kind) is UnionType else get_origin(kind)[inner]  # noqa: UP007


def _model(described: Any, **fixed: Any) -> Any:
    """The fields of a dataclass as a body: names and types are checked here, values by the class itself."""
    fields = {
        field.name: (_typed(field.type), ... if field.default is dataclasses.MISSING else field.default)
        for field in dataclasses.fields(described)
    }
    return create_model(described.__name__, __base__=Body, __doc__=described.__doc__, **fixed, **fields)


PlanBody = Annotated[
    Union[tuple(_model(plan, kind=(Literal[name], ...)) for name, plan in PLANS.items())],  # noqa: UP007
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
    source: uuid.UUID | None = Field(
        default=None, description="For an `adapt` plan: a public dataset with labels, of the same shape."
    )
    shared: bool = Field(
        default=False,
        strict=True,
        description="For a `gswgan` plan: any curator may go on from its generator and release the result.",
    )
    after: uuid.UUID | None = Field(
        default=None, description="For a `gswgan` plan: the shared job whose generator it goes on from."
    )


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
    total_after: Readings = Field(
        description="Of everything the account has paid for and this job together, composed as if all plans "
        "had been chosen in advance. What holds however they were chosen is the budget of the account."
    )
    left: Remaining
    left_after: Remaining | None = Field(description="Null where it does not fit.")
    fits: int = Field(description="How many such jobs fit into what is left.")
    largest_epsilon: float | None = Field(
        description="Where it does not fit: the largest epsilon that would."
    )
    published: Published | None = Field(
        description="What the paper's own formula would claim. Not a guarantee."
    )
    limit_seconds: int | None = Field(
        default=None, description="How long the job may run; it is stopped then, and stays charged."
    )


class Progress(View):
    step: int
    steps: int
    started_at: datetime | None
    eta: datetime | None = Field(description="When it should be done, at the rate so far.")


class JobView(View):
    id: uuid.UUID
    dataset: uuid.UUID
    source: uuid.UUID | None
    after: uuid.UUID | None
    shared: bool
    account: uuid.UUID
    plan: dict[str, Any]
    event: dict[str, Any]
    cost: int
    epsilon: Readings
    state: str
    fault: str | None
    limit_seconds: int | None = Field(
        default=None, description="How long it may run; it is stopped then, and stays charged."
    )
    progress: Progress
    created_at: datetime
    finished_at: datetime | None
    cancel_asked: bool

    @classmethod
    def of(cls, row: Job) -> "JobView":
        return cls(
            id=row.id, dataset=row.dataset_id, source=row.source_id, after=row.after_id,
            shared=row.shared, account=row.account_id, plan=row.plan,
            event=row.event, cost=row.cost, epsilon=Readings.model_validate(row.readings), state=row.state,
            fault=row.fault, limit_seconds=row.limit_seconds,
            progress=Progress(step=row.step, steps=row.steps, started_at=row.started_at, eta=_eta(row)),
            created_at=row.created_at, finished_at=row.finished_at,
            cancel_asked=row.cancel_asked_at is not None,
        )  # fmt: skip


def _eta(row: Job) -> datetime | None:
    if row.state != JobState.RUNNING or row.started_at is None or row.step == 0:
        return None
    now = datetime.now(UTC)
    return now + (now - row.started_at) / row.step * (row.steps - row.step)
