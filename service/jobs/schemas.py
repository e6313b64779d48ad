"""Bodies and answers of quotes and jobs."""

import dataclasses
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, Union, get_args, get_origin

from pydantic import (
    Field,
    JsonValue,
    SerializerFunctionWrapHandler,
    create_model,
    model_serializer,
    model_validator,
)

from core.tables import Job, JobState
from service.schemas import Body, Finite, View, Whole
from sluice.methods import METHODS, Method, Plan, plan_from_dict
from sluice.privacy.accountant import Accountant
from sluice.privacy.relation import Relation

_Preset = Annotated[str, Field(max_length=40, description="The name of a preset.")]


def _typed(kind: Any) -> Any:
    """The type of a field in a request: strict numbers, and the name of a preset instead of a recipe."""
    if kind in (int, float):
        return Whole if kind is int else Finite
    if dataclasses.is_dataclass(kind):
        return Union[_Preset, _model(kind)]  # noqa: UP007 (of values)
    inner = tuple(_typed(argument) for argument in get_args(kind))
    if not inner:
        return kind
    return Union[inner] if get_origin(kind) is UnionType else get_origin(kind)[inner]  # noqa: UP007


def _model(described: Any, **fixed: Any) -> Any:
    """A request body with the fields of a dataclass: it checks names and types, the class checks values."""
    fields: dict[str, Any] = {
        field.name: (_typed(field.type), ... if field.default is dataclasses.MISSING else field.default)
        for field in dataclasses.fields(described)
    }
    return create_model(described.__name__, __base__=Body, __doc__=described.__doc__, **fixed | fields)


if TYPE_CHECKING:
    PlanBody = Any
else:
    PlanBody = Annotated[
        Union[tuple(_model(method.plan, kind=(Literal[name], ...)) for name, method in METHODS.items())],  # noqa: UP007
        Field(
            discriminator="kind",
            description="`kind` and the numbers of that plan, as `sluice quote METHOD --json` prints them.",
        ),
    ]
_Name = Annotated[str, Field(max_length=40, pattern=r"^[\w-]+$")]
_Option = Whole | Finite | _Name | dict[_Name, JsonValue] | None


def _methods(which: Callable[[Method], bool]) -> str:
    return ", ".join(f"`{name}`" for name, method in METHODS.items() if which(method))


class TargetBody(Body):
    """Solve for the noise that keeps the job within this epsilon, at the account's delta."""

    epsilon: Annotated[Finite, Field(ge=1e-6, le=1e6, examples=[1.0])]
    accountant: Accountant = Accountant.RENYI


class NewQuote(Body):
    """A dataset and an epsilon are enough: the method and its numbers follow from what the dataset declares.

    Or give a `method` and `options` of its plan; or a whole `plan`, with or without a target.
    """

    dataset: Annotated[uuid.UUID, Field(examples=["0b6f9f4e-6f0e-4d3b-9d3c-2f6d7a1c5e80"])]
    plan: PlanBody | None = Field(default=None, description="Every number; excludes `method` and `options`.")
    target: TargetBody | None = Field(default=None, description="Leave out to price the plan's own noise.")
    method: _Name | None = Field(
        default=None, description=f"One of {_methods(lambda _: True)}; the recommended one by default."
    )
    epsilon: Annotated[Finite, Field(ge=1e-6, le=1e6)] | None = Field(
        default=None, description="Short for a `target` with this epsilon.", examples=[1.0]
    )
    options: Annotated[dict[_Name, _Option], Field(max_length=40)] | None = Field(
        default=None, description="Numbers of the plan to use instead of the method's defaults."
    )

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if self.plan is not None and (self.method is not None or self.options is not None):
            raise ValueError("give a plan, or a method and options, not both")
        if self.target is not None and self.epsilon is not None:
            raise ValueError("give a target or an epsilon, not both")
        if self.plan is None and self.aim is None:
            raise ValueError("give an epsilon, or a plan")
        return self

    @model_serializer(mode="wrap")
    def _as_sent(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leaves out new fields that are absent: replies are stored under a digest of this form."""
        absent = {name for name in ("method", "epsilon", "options") if getattr(self, name) is None}
        return {name: value for name, value in serialize(self).items() if name not in absent}

    @property
    def aim(self) -> TargetBody | None:
        return TargetBody(epsilon=self.epsilon) if self.epsilon is not None else self.target

    def own_plan(self) -> Plan | None:
        """The plan of the request, if it has one."""
        return None if self.plan is None else plan_from_dict(self.plan.model_dump())


class NewJob(NewQuote):
    source: uuid.UUID | None = Field(
        default=None,
        description=f"For {_methods(lambda m: m.needs_source)}: a public dataset with labels, same shape.",
    )
    shared: bool = Field(
        default=False,
        strict=True,
        description=f"For {_methods(lambda m: m.can_relay)}: any curator may continue from its generator "
        "and release the result.",
    )
    after: uuid.UUID | None = Field(
        default=None,
        description=f"For {_methods(lambda m: m.can_relay)}: the shared job whose generator it starts from.",
    )

    @property
    def relay(self) -> bool:
        return self.shared or self.after is not None


class Readings(View):
    """Epsilon at the account's delta, by each accountant; null if it exceeds the limits of the accountant."""

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
        "had been chosen in advance. What is guaranteed for any choice of plans is the account's budget."
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
