"""The closed set of events: what a mechanism did to the records, in the terms that its cost follows from.

An event has facts (what was released, the actual sampling rate, the noise, the steps) but no sensitivity and
no relation: `sluice.privacy.dominating_pairs` derives both from the kind of query, so a caller cannot pass a
wrong one. Rows computed from one batch are `rows` of one release; they cannot be stated as separately sampled
mechanisms.
"""

import json
import math
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, ClassVar

from sluice.privacy.problems import InvalidEvent, Problem, UnknownEvent

VERSION = 1
MOST_STEPS = 10**12
MOST_ROWS = 10**9


class Query(StrEnum):
    """How a released vector depends on the records of its batch.

    SUM: a sum over records, each contribution clipped to norm `bound`. One record more or less moves
        it by `bound`, one replaced by 2 * bound.
    COUNTS: a sum whose contributions have no negative entry (histograms). One record more or less
        moves it by `bound`, one replaced by sqrt(2) * bound.
    FUNCTION: any function of the batch, clipped as a whole to norm `bound`. It moves by up to 2 * bound
        under both relations.
    """

    SUM = "sum"
    COUNTS = "counts"
    FUNCTION = "function"


class Geometry(StrEnum):
    """How projection directions are drawn, independently of the data.

    SPHERE: every direction uniform on the unit sphere, independently.
    ORTHONORMAL: blocks of `dim` orthonormal directions, so projections keep lengths exactly.
    """

    SPHERE = "sphere"
    ORTHONORMAL = "orthonormal"


def require(ok: bool, detail: str, *, given: object = None, problem: type[Problem] = InvalidEvent) -> None:
    if not ok:
        raise problem(detail, given=given)


def whole(name: str, value: object, *, most: int, problem: type[Problem] = InvalidEvent) -> None:
    good = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most
    require(good, f"{name} must be a whole number from 1 to {most}.", given=value, problem=problem)


def positive(name: str, value: object, *, problem: type[Problem] = InvalidEvent) -> None:
    good = isinstance(value, float) and math.isfinite(value) and 1e-12 <= value <= 1e12
    require(good, f"{name} must be a finite number from 1e-12 to 1e12.", given=value, problem=problem)


def probability(name: str, value: object, *, problem: type[Problem] = InvalidEvent) -> None:
    good = isinstance(value, float) and 1e-12 <= value <= 1.0
    require(good, f"{name} must be a probability from 1e-12 to 1.", given=value, problem=problem)


@dataclass(frozen=True, kw_only=True)
class Event:
    """Base of all events: a kind, and a versioned JSON form from which the same event is read."""

    kind: ClassVar[str]

    def to_dict(self) -> dict[str, Any]:
        body = {field.name: plain(getattr(self, field.name)) for field in fields(self)}
        return {"version": VERSION, "kind": self.kind, **body}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), sort_keys=True, allow_nan=False)


@dataclass(frozen=True, kw_only=True)
class Gaussian(Event):
    """`steps` releases of a query over all records, each with Gaussian noise of `noise_stddev`.

    The released matrix has `rows` rows, each of norm at most `bound`, released together: the joint
    bound is bound * sqrt(rows). Add-remove: a record appears or disappears in every release.
    Replace-one: it changes in every release.
    """

    kind: ClassVar[str] = "gaussian"
    query: Query
    bound: float
    rows: int = 1
    noise_stddev: float
    steps: int = 1

    def __post_init__(self) -> None:
        require(isinstance(self.query, Query), f"query must be one of {', '.join(Query)}.", given=self.query)
        positive("bound", self.bound)
        whole("rows", self.rows, most=MOST_ROWS)
        positive("noise_stddev", self.noise_stddev)
        whole("steps", self.steps, most=MOST_STEPS)


@dataclass(frozen=True, kw_only=True)
class PoissonGaussian(Gaussian):
    """Like `Gaussian`, but each step first draws a batch: every record independently with `sampling_prob`.

    `sampling_prob` is the actual rate of the sampler, not batch / records. Amplification applies
    once per drawn batch, to all rows together. Add-remove: batches with and without the record.
    Replace-one: with the record or with its replacement, both present with the same probability.
    """

    kind: ClassVar[str] = "poisson_gaussian"
    sampling_prob: float

    def __post_init__(self) -> None:
        super().__post_init__()
        probability("sampling_prob", self.sampling_prob)
        if self.query is Query.COUNTS:
            raise InvalidEvent("query is 'counts' in a sampled event; state it as 'sum', which covers it.")


@dataclass(frozen=True, kw_only=True)
class Rotation(Gaussian):
    """`steps` queries that visit `parts` disjoint parts of the records in a fixed public order.

    A record is in one part, which does not depend on other records; its replacement is in the same part. So
    it is read ceil(steps / parts) times; the parts compose in parallel. Nothing is sampled.
    """

    kind: ClassVar[str] = "rotation"
    parts: int

    def __post_init__(self) -> None:
        super().__post_init__()
        whole("parts", self.parts, most=MOST_ROWS)


@dataclass(frozen=True, kw_only=True)
class SlicedProjection(Event):
    """`steps` noisy random projections X U + V of batches of fixed size drawn without replacement.

    Each row of X has norm at most `row_bound` by its own clipping, so two rows are at most
    2 * row_bound apart. U holds `directions` unit directions of dimension `dim`, drawn anew, independently
    of the data, and released with the result. `records` is the public number of rows drawn from: the
    draw is over at least that many (blank rows fill up), and batch / records is the rate. Add-remove:
    the drawn batch has the record in place of another, or of a blank row. Replace-one: the row is replaced.
    """

    kind: ClassVar[str] = "sliced_projection"
    geometry: Geometry
    directions: int
    dim: int
    row_bound: float = 0.5
    records: int
    batch: int
    noise_stddev: float
    steps: int

    def __post_init__(self) -> None:
        require(
            isinstance(self.geometry, Geometry),
            f"geometry must be one of {', '.join(Geometry)}.",
            given=self.geometry,
        )
        whole("directions", self.directions, most=10**6)
        whole("dim", self.dim, most=10**8)
        positive("row_bound", self.row_bound)
        whole("records", self.records, most=10**12)
        whole("batch", self.batch, most=10**12)
        positive("noise_stddev", self.noise_stddev)
        whole("steps", self.steps, most=MOST_STEPS)
        require(self.batch <= self.records, "batch is larger than records; draw at most all of them.")
        if self.geometry is Geometry.ORTHONORMAL:
            good = self.directions % self.dim == 0
            require(good, "orthonormal directions come in blocks: make directions a multiple of dim.")

    @property
    def sampling_prob(self) -> float:
        return self.batch / self.records


@dataclass(frozen=True, kw_only=True)
class Composition(Event):
    """Several events on the same records; their costs add."""

    kind: ClassVar[str] = "composition"
    events: tuple[Event, ...]

    def __post_init__(self) -> None:
        good = isinstance(self.events, tuple) and 1 <= len(self.events) <= 10_000
        require(good, "a composition holds a tuple of 1 to 10,000 events.")
        for event in self.events:
            require(type(event) in KINDS.values(), f"{event!r} is not an event.")
            require(
                not isinstance(event, Composition), "a composition holds no composition: list its events."
            )


KINDS: dict[str, type[Event]] = {
    cls.kind: cls for cls in (Gaussian, PoissonGaussian, Rotation, SlicedProjection, Composition)
}


def plain(value: Any) -> Any:
    """The JSON form of a field."""
    if isinstance(value, tuple):
        return [item.to_dict() for item in value]
    return value.value if isinstance(value, StrEnum) else value


def from_dict(body: object) -> Event:
    """Reads an event; refuses unknown versions, kinds and fields."""
    if not isinstance(body, dict):
        raise UnknownEvent("An event is a JSON object with version, kind and the fields of that kind.")
    rest = dict(body)
    version, kind = rest.pop("version", None), rest.pop("kind", None)
    if version != VERSION or isinstance(version, bool):
        raise UnknownEvent(f"Event version {version!r} is not known; this is version {VERSION}.")
    if not isinstance(kind, str) or kind not in KINDS:
        raise UnknownEvent(f"Event kind {kind!r} is not known; known are {', '.join(KINDS)}.")
    cls = KINDS[kind]
    known = {field.name for field in fields(cls)}
    if known != set(rest):
        odd = sorted(map(str, known ^ set(rest)))
        raise UnknownEvent(f"A {kind} event has exactly the fields {sorted(known)}; look at {odd}.")
    return cls(**{name: typed(cls, name, value) for name, value in rest.items()})


def typed(cls: type[Event], name: str, value: Any) -> Any:
    """Converts a JSON value to its field's type if that is exact; `__post_init__` refuses the rest."""
    if name == "events":
        return tuple(map(from_dict, value)) if isinstance(value, list) else value
    for enum in (Query, Geometry):
        if name == enum.__name__.lower() and isinstance(value, str) and value in [*enum]:
            return enum(value)
    wants_float = any(field.name == name and field.type is float for field in fields(cls))
    if wants_float and isinstance(value, int) and not isinstance(value, bool) and abs(value) <= 2**53:
        return float(value)
    return value


def from_json(text: str) -> Event:
    return from_dict(read_json(text))


def read_json(text: str) -> Any:
    """Parses strict JSON: no NaN, no infinity, no repeated names."""

    def no_constant(name: str) -> Any:
        raise UnknownEvent(f"{name} is not a number; write a finite one.")

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) != len(pairs):
            raise UnknownEvent("A field is given twice; keep one of them.")
        return dict(pairs)

    try:
        return json.loads(text, parse_constant=no_constant, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise UnknownEvent(f"The text is not JSON ({error}); write one JSON object.") from None
