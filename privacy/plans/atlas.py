"""Atlas: noisy means, spreads and charts of every class, and a noisy judge; all images follow from these."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from privacy.events import Composition, Gaussian, Query, require, whole
from privacy.plans.base import Plan, Target
from privacy.plans.recipe import Recipe, check
from privacy.problems import InvalidPlan


@dataclass(frozen=True, kw_only=True)
class AtlasRecipe(Recipe):
    """What is summed and how images follow from it. Public, and without any bearing on the cost.

    An image is described by its cosines of up to `frequencies` half waves; of these, the `axes` along which
    classes vary most have charts. The axes are drawn nearer to each other by `whitening` (0: not, 1: to the
    same spread) before charts are laid, and lengths beyond `reach` times the typical are clipped.

    The judge descends at `rate` with `momentum` by gradients clipped to `judge_clip`, slower where noise
    would lead its weights further `astray` in all.

    A made image has `tries` chances to please the judge; with probability `between` a try lies on the way to
    another class, at most `detour` of the way. What sets images off from their class is stretched by
    `stretch`, and their contrast raised by a factor within `contrast`.
    """

    presets: ClassVar[dict[str, dict[str, Any]]] = {"paper": {}, "fast-cpu": {}, "demo": {"axes": 50}}

    frequencies: int = 16
    axes: int = 60
    whitening: float = 0.3
    reach: float = 1.15
    rate: float = 10.0
    astray: float = 0.25
    judge_clip: float = 1.0
    momentum: float = 0.9
    tries: int = 3
    between: float = 1.0
    detour: float = 0.6
    stretch: float = 1.2
    contrast: tuple[float, float] = (1.0, 1.3)

    def __post_init__(self) -> None:
        object.__setattr__(self, "contrast", tuple(self.contrast))
        for name, most in (("frequencies", 64), ("axes", 1024), ("tries", 16)):
            check(name, type(value := getattr(self, name)) is int and 1 <= value <= most)
        for name in ("whitening", "momentum", "between", "detour"):
            check(name, 0 <= getattr(self, name) <= 1)
        check("momentum", self.momentum < 1)
        check("contrast", len(self.contrast) == 2 and 0 < self.contrast[0] <= self.contrast[1] <= 10)
        check("stretch", 0 < self.stretch <= 10)
        check("reach", 0 < self.reach <= 100)
        check("rate", 0 < self.rate <= 100)
        check("astray", 0 < self.astray <= 100)
        check("judge_clip", 0 < self.judge_clip <= 2)


@dataclass(frozen=True, kw_only=True)
class AtlasPlan(Plan):
    """`steps` sums over all records, each record's part clipped by itself, each with the same noise.

    First the means of the classes, then their common spread, `rounds` times the centres of `charts` charts to
    a class, then the shape of every chart, and in all other steps the gradient of a linear judge. Bounds are
    such that their squares add to one over all steps: `noise_multiplier` is noise_stddev over that. The judge
    has `judge_share` of that sum. docs/guarantees.md#atlas
    """

    kind: ClassVar[str] = "atlas"
    recipes: ClassVar[type[Recipe]] = AtlasRecipe
    # Of what the judge leaves.
    SHARES: ClassVar[dict[str, float]] = {"means": 0.08, "spread": 0.17, "centres": 0.25, "shapes": 0.5}

    steps: int | None = 67
    rounds: int = 4
    charts: int = 10
    judge_share: float = 0.5
    recipe: AtlasRecipe | None = None

    def check(self) -> None:
        whole("rounds", self.rounds, most=1000, problem=InvalidPlan)
        whole("charts", self.charts, most=1000, problem=InvalidPlan)
        share = isinstance(self.judge_share, float) and 0 < self.judge_share < 1
        require(share, "judge_share is not between 0 and 1.", problem=InvalidPlan)
        enough = self.steps is None or self.steps > self.rounds + 3
        require(enough, "An atlas has rounds + 3 steps, and one at least for its judge.", problem=InvalidPlan)

    @property
    def known_recipe(self) -> AtlasRecipe:
        return self.recipe or AtlasRecipe.preset("fast-cpu")

    @property
    def stages(self) -> dict[str, int]:
        """What the steps are, in their order, and how many of each."""
        judge = self.known_steps - self.rounds - 3
        return {"means": 1, "spread": 1, "centres": self.rounds, "shapes": 1, "judge": judge}

    def bound(self, stage: str) -> float:
        """The norm of what one record adds to a sum of this stage."""
        share = self.judge_share if stage == "judge" else (1 - self.judge_share) * self.SHARES[stage]
        return math.sqrt(share / self.stages[stage])

    @property
    def unit_noise(self) -> float:
        return 1.0

    def event(self) -> Composition:
        return Composition(
            events=tuple(
                Gaussian(
                    query=Query.SUM, bound=self.bound(stage), noise_stddev=self.noise_stddev, steps=steps
                )
                for stage, steps in self.stages.items()
            )
        )

    def stretched(self, target: Target) -> Self:
        del target
        raise InvalidPlan("More steps of an atlas cost the same; use calibrated(target) to choose its noise.")
