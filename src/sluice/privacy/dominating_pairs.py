"""The pair of distributions that dominates an event under a relation: no two neighbouring datasets exceed it.

Each function states which theorem of docs/guarantees.md it implements. Sensitivity is decided nowhere else.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

from sluice.privacy.events import (
    Composition,
    Event,
    Gaussian,
    Geometry,
    PoissonGaussian,
    Query,
    Rotation,
    SlicedProjection,
)
from sluice.privacy.problems import UnknownEvent
from sluice.privacy.relation import Relation
from sluice.privacy.special import LARGEST_ON_A_CURVE, log_1f1


@dataclass(frozen=True)
class GaussianBase:
    """N(0, 1) against N(ratio, 1); `square` is (sensitivity / stddev)^2, exactly."""

    square: Fraction

    @property
    def ratio(self) -> float:
        return math.sqrt(self.square)


@dataclass(frozen=True)
class SlicedBase:
    """(U, V) against (U, U^T z + V) for |z| = ratio, V standard normal, U independent unit directions."""

    square: Fraction
    directions: int
    dim: int

    @property
    def ratio(self) -> float:
        return math.sqrt(self.square)


Base = GaussianBase | SlicedBase


@dataclass(frozen=True)
class Plain:
    """The base pair (Q, P) itself. A symmetry exchanges Q and P, so one direction is enough."""

    base: Base


@dataclass(frozen=True)
class OneSided:
    """(1 - q) Q + q P against Q, and the reverse: batches with and without a record."""

    sampling_prob: float
    base: Base


@dataclass(frozen=True)
class Symmetric:
    """The pair whose profile is q * delta_base(log(1 + (e^epsilon - 1)/q)), mirrored below zero."""

    sampling_prob: float
    base: Base


@dataclass(frozen=True)
class Antipodal:
    """(1 - q) N(0, 1) + q N(ratio, 1) against (1 - q) N(0, 1) + q N(-ratio, 1)."""

    sampling_prob: float
    base: GaussianBase


Pair = Plain | OneSided | Symmetric | Antipodal


def squared_sensitivity(event: Gaussian, relation: Relation) -> Fraction:
    """The squared distance that a record can move the released vector (docs/guarantees.md#sensitivity)."""
    factor = {
        (Query.SUM, Relation.ADD_REMOVE): 1,
        (Query.SUM, Relation.REPLACE_ONE): 4,
        (Query.COUNTS, Relation.ADD_REMOVE): 1,
        (Query.COUNTS, Relation.REPLACE_ONE): 2,
        (Query.FUNCTION, Relation.ADD_REMOVE): 4,
        (Query.FUNCTION, Relation.REPLACE_ONE): 4,
    }[event.query, relation]
    return factor * Fraction(event.bound) ** 2 * event.rows


def dominating(event: Event, relation: Relation) -> list[tuple[Pair, int]]:
    """The pairs that dominate an event, and the number of compositions of each."""
    match event:
        case Composition():
            return [pair for part in event.events for pair in dominating(part, relation)]
        case PoissonGaussian():
            return [(poisson_pair(event, relation), event.steps)]
        case Rotation():
            return [(Plain(gaussian_base(event, relation)), -(-event.steps // event.parts))]
        case Gaussian():
            return [(Plain(gaussian_base(event, relation)), event.steps)]
        case SlicedProjection():
            return [(sliced_pair(event, relation), event.steps)]
        case _:
            raise UnknownEvent(f"{event!r} is not an event of sluice.privacy.events.")


def gaussian_base(event: Gaussian, relation: Relation) -> GaussianBase:
    return GaussianBase(squared_sensitivity(event, relation) / Fraction(event.noise_stddev) ** 2)


def poisson_pair(event: PoissonGaussian, relation: Relation) -> Pair:
    """docs/guarantees.md#poisson. A record is drawn independently of the rest of the batch."""
    rate, base = event.sampling_prob, gaussian_base(event, relation)
    if rate == 1.0:
        return Plain(base)
    if relation is Relation.ADD_REMOVE:
        return OneSided(rate, base)
    if event.query is Query.FUNCTION:
        return Symmetric(rate, base)
    # The worst case is a record and a replacement at opposite points of the clipping ball.
    return Antipodal(rate, GaussianBase(base.square / 4))


def sliced_pair(event: SlicedProjection, relation: Relation) -> Pair:
    """docs/guarantees.md#swd. A drawn row is replaced by another, at most 2 * row_bound away.

    Adding a record when there are fewer than declared replaces a blank row that may be drawn as well. Its
    Rényi divergence is at most that of OneSided; on independent directions, if there is enough noise.
    """
    square = (2 * Fraction(event.row_bound) / Fraction(event.noise_stddev)) ** 2
    base: Base
    if event.geometry is Geometry.ORTHONORMAL:
        base = GaussianBase(square * (event.directions // event.dim))
    else:
        base = SlicedBase(square, event.directions, event.dim)
    if event.batch == event.records:
        return Plain(base)
    if relation is Relation.ADD_REMOVE and covers_blank_rows(base):
        return OneSided(event.sampling_prob, base)
    return Symmetric(event.sampling_prob, base)


def covers_blank_rows(base: Base) -> bool:
    """Whether E exp(x) - 1 <= 2 E x, for x = |U^T z|^2 / 4 in units of the noise: "fewer records" in #swd."""
    if isinstance(base, GaussianBase):
        return True
    quarter = float(base.square) / 4
    mean = quarter * base.directions / base.dim
    # E exp(x) is at least exp(E x), which is too large from 1.26 on: no need to sum the series then.
    if quarter > LARGEST_ON_A_CURVE or mean > 1.3:
        return False
    return base.directions * log_1f1(base.dim, quarter) <= math.log1p(2 * mean)
