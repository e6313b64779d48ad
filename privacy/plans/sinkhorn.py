"""DP-Sinkhorn: a generator follows the noised gradient of a Sinkhorn loss on a Poisson batch."""

import math
from dataclasses import dataclass
from typing import ClassVar

from privacy.events import MOST_ROWS, PoissonGaussian, Query, positive, probability, require, whole
from privacy.plans.base import Clipping, Plan, PublishedReading
from privacy.plans.published import poisson_claim
from privacy.problems import InvalidPlan


@dataclass(frozen=True, kw_only=True)
class SinkhornPlan(Plan):
    """The gradient at `images` generated images, clipped jointly or per image, noised and followed.

    Every row depends on the same batch, so a step is one release of sensitivity 2 * clip_norm (joint) or
    2 * clip_norm * sqrt(images) (per image); `noise_multiplier` is noise_stddev over that.
    docs/guarantees.md#sinkhorn
    """

    kind: ClassVar[str] = "sinkhorn"
    sampling_prob: float
    images: int = 50
    clipping: Clipping = Clipping.JOINT
    clip_norm: float = 1.0

    def check(self) -> None:
        probability("sampling_prob", self.sampling_prob, problem=InvalidPlan)
        whole("images", self.images, most=MOST_ROWS, problem=InvalidPlan)
        positive("clip_norm", self.clip_norm, problem=InvalidPlan)
        good = isinstance(self.clipping, Clipping)
        require(good, f"clipping is {self.clipping!r}; give one of {[*Clipping]}.", problem=InvalidPlan)

    @property
    def rows(self) -> int:
        return self.images if self.clipping is Clipping.PER_IMAGE else 1

    @property
    def unit_noise(self) -> float:
        return 2 * self.clip_norm * math.sqrt(self.rows)

    def event(self) -> PoissonGaussian:
        return PoissonGaussian(
            query=Query.FUNCTION,
            bound=self.clip_norm,
            rows=self.rows,
            noise_stddev=self.noise_stddev,
            steps=self.known_steps,
            sampling_prob=self.sampling_prob,
        )

    def published_reading(self, delta: float) -> PublishedReading | None:
        if self.clipping is Clipping.JOINT:
            return None
        claim = poisson_claim(
            rate=self.sampling_prob,
            ratio=2 * self.clip_norm / self.noise_stddev,
            compositions=self.known_steps * self.images,
            delta=delta,
        )
        return PublishedReading(
            claimed_epsilon=claim,
            formula="steps * images independently sampled Gaussian mechanisms, classic conversion",
            flaw="The images of a step share one batch, so sampling amplifies once a step, not per image.",
        )
