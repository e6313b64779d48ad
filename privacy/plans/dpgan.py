"""DPGAN: a discriminator trained by DP-SGD; the generator only ever sees the noised discriminator."""

from dataclasses import dataclass
from typing import ClassVar

from privacy.events import PoissonGaussian, Query, positive, probability
from privacy.plans.base import Plan
from privacy.plans.recipes import DPGANRecipe
from privacy.problems import InvalidPlan


@dataclass(frozen=True, kw_only=True)
class DPGANPlan(Plan):
    """Per-record gradients clipped to `clip_norm`, summed over a Poisson batch, noised, then divided.

    `noise_multiplier` is noise_stddev / clip_norm. The divisor is `expected_batch`, a public constant,
    never the size of the drawn batch. Without a recipe the preset for the worker's device is taken.
    docs/guarantees.md#dpgan
    """

    kind: ClassVar[str] = "dpgan"
    sampling_prob: float
    expected_batch: float = 1.0
    clip_norm: float = 1.0
    recipe: DPGANRecipe | None = None

    def check(self) -> None:
        probability("sampling_prob", self.sampling_prob, problem=InvalidPlan)
        positive("expected_batch", self.expected_batch, problem=InvalidPlan)
        positive("clip_norm", self.clip_norm, problem=InvalidPlan)

    @property
    def unit_noise(self) -> float:
        return self.clip_norm

    def event(self) -> PoissonGaussian:
        return PoissonGaussian(
            query=Query.SUM,
            bound=self.clip_norm,
            noise_stddev=self.noise_stddev,
            steps=self.known_steps,
            sampling_prob=self.sampling_prob,
        )
