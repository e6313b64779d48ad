"""DP-SWD: a generator matches noisy random projections of batches, or one noisy release of all of them."""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Self

from privacy.events import Gaussian, Geometry, Query, SlicedProjection, positive, require, whole
from privacy.plans.base import Plan, PublishedReading, Target
from privacy.plans.published import bernstein_square, clt_square, wbk_claim
from privacy.problems import InvalidPlan


class Features(StrEnum):
    """What the one-shot form sums over records, for each direction.

    HISTOGRAMS: one count in one bin. WAVES: a cosine and a sine, together of norm one.
    """

    HISTOGRAMS = "histograms"
    WAVES = "waves"


@dataclass(frozen=True, kw_only=True)
class SWDPlan(Plan):
    """Each step draws `batch` of `records` rows without replacement and releases X U + V.

    A row (labels ride inside it) is clipped to `row_bound` by itself. `noise_multiplier` is noise_stddev
    over 2 * row_bound, the furthest two rows can be apart. docs/guarantees.md#swd
    """

    kind: ClassVar[str] = "swd"
    records: int
    batch: int
    directions: int = 1000
    dim: int
    geometry: Geometry = Geometry.SPHERE
    row_bound: float = 0.5

    def check(self) -> None:
        for name in ("records", "batch", "directions", "dim"):
            whole(name, getattr(self, name), most=10**12, problem=InvalidPlan)
        positive("row_bound", self.row_bound, problem=InvalidPlan)
        good = isinstance(self.geometry, Geometry)
        require(good, f"geometry is {self.geometry!r}; give one of {[*Geometry]}.", problem=InvalidPlan)
        good = self.batch <= self.records
        require(good, "batch is larger than records; draw at most all of them.", problem=InvalidPlan)
        good = self.geometry is Geometry.SPHERE or self.directions % self.dim == 0
        require(good, "Orthonormal blocks need directions to be a multiple of dim.", problem=InvalidPlan)

    @property
    def unit_noise(self) -> float:
        return 2 * self.row_bound

    def event(self) -> SlicedProjection:
        return SlicedProjection(
            geometry=self.geometry,
            directions=self.directions,
            dim=self.dim,
            row_bound=self.row_bound,
            records=self.records,
            batch=self.batch,
            noise_stddev=self.noise_stddev,
            steps=self.known_steps,
        )

    def published_reading(self, delta: float, *, bound: str = "clt") -> PublishedReading | None:
        """The paper's epsilon with its "clt" or its "bernstein" bound on the sensitivity."""
        if self.geometry is not Geometry.SPHERE or self.batch == self.records:
            return None
        square = {"clt": clt_square, "bernstein": bernstein_square}[bound](
            self.directions, self.dim, delta / 2
        )
        claim = wbk_claim(
            rate=self.batch / self.records,
            ratio=math.sqrt(square) * self.unit_noise / self.noise_stddev,
            compositions=self.known_steps,
            delta=delta / 2,
        )
        return PublishedReading(
            claimed_epsilon=claim,
            formula=f"sensitivity by the {bound} bound at delta/2, once for all steps; sampled Gaussians",
            flaw="The bound may fail in every step, so its delta is spent once per step and not once in all.",
        )


@dataclass(frozen=True, kw_only=True)
class SWDOneShotPlan(Plan):
    """All records, once: `directions` histograms or pairs of waves, summed over records and noised.

    A record contributes a vector of norm sqrt(directions); `noise_multiplier` is noise_stddev over that.
    Training on the noisy release costs nothing more. docs/guarantees.md#one-shot
    """

    kind: ClassVar[str] = "swd_one_shot"
    steps: int | None = 1
    directions: int = 1000
    features: Features = Features.HISTOGRAMS

    def check(self) -> None:
        whole("directions", self.directions, most=10**6, problem=InvalidPlan)
        require(self.steps == 1, "A one-shot plan has one step; leave steps at 1.", problem=InvalidPlan)
        good = isinstance(self.features, Features)
        require(good, f"features is {self.features!r}; give one of {[*Features]}.", problem=InvalidPlan)

    @property
    def unit_noise(self) -> float:
        return math.sqrt(self.directions)

    def event(self) -> Gaussian:
        return Gaussian(
            query=Query.COUNTS if self.features is Features.HISTOGRAMS else Query.SUM,
            bound=1.0,
            rows=self.directions,
            noise_stddev=self.noise_stddev,
            steps=1,
        )

    def stretched(self, target: Target) -> Self:
        del target
        raise InvalidPlan("A one-shot plan has one step; use calibrated(target) to choose its noise.")
