"""GS-WGAN: discriminators on disjoint parts of the data; only the gradient at the images leaves, noised."""

import math
from dataclasses import dataclass
from typing import ClassVar

from privacy.events import MOST_ROWS, Query, Rotation, positive, require, whole
from privacy.plans.base import Clipping, Plan, PublishedReading
from privacy.plans.published import wbk_claim
from privacy.problems import InvalidPlan


@dataclass(frozen=True, kw_only=True)
class GSWGANPlan(Plan):
    """`parts` discriminators take turns in a fixed public order; each answers ceil(steps / parts) times.

    An answer is the gradient at `images` images, clipped jointly or per image. A discriminator remembers
    its part between turns, so the answer is a function of the whole part: sensitivity 2 * clip_norm
    (joint) or 2 * clip_norm * sqrt(images) (per image). docs/guarantees.md#gswgan
    """

    kind: ClassVar[str] = "gswgan"
    parts: int = 1000
    images: int = 32
    clipping: Clipping = Clipping.JOINT
    clip_norm: float = 1.0

    def check(self) -> None:
        whole("parts", self.parts, most=MOST_ROWS, problem=InvalidPlan)
        whole("images", self.images, most=MOST_ROWS, problem=InvalidPlan)
        positive("clip_norm", self.clip_norm, problem=InvalidPlan)
        known = [Clipping.JOINT, Clipping.PER_IMAGE]
        good = isinstance(self.clipping, Clipping) and self.clipping in known
        require(good, f"clipping is {self.clipping!r}; give one of {known}.", problem=InvalidPlan)

    @property
    def rows(self) -> int:
        return self.images if self.clipping is Clipping.PER_IMAGE else 1

    @property
    def unit_noise(self) -> float:
        return 2 * self.clip_norm * math.sqrt(self.rows)

    def event(self) -> Rotation:
        return Rotation(
            query=Query.FUNCTION,
            bound=self.clip_norm,
            rows=self.rows,
            noise_stddev=self.noise_stddev,
            steps=self.known_steps,
            parts=self.parts,
        )

    def published_reading(self, delta: float) -> PublishedReading | None:
        if self.clipping is Clipping.JOINT or self.parts == 1:
            return None
        claim = wbk_claim(
            rate=1 / self.parts,
            ratio=2 * self.clip_norm / self.noise_stddev,
            compositions=self.known_steps * self.images,
            delta=delta,
        )
        return PublishedReading(
            claimed_epsilon=claim,
            formula="steps * images mechanisms, each sampled at 1 / parts, classic conversion",
            flaw="Discriminators remember their part, so hiding which one answered amplifies nothing.",
        )
