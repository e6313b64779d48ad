"""Atlas: noisy poses, means, spreads and charts of every class; all images follow from these."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from sluice.methods.base import Plan, Target
from sluice.methods.recipe import Recipe, check
from sluice.privacy.events import Composition, Gaussian, Query, require, whole
from sluice.privacy.problems import InvalidPlan


@dataclass(frozen=True, kw_only=True)
class AtlasRecipe(Recipe):
    """What is summed and how images follow from it. Public, and without any bearing on the cost.

    An image is described by its pose and by its cosines of up to `frequencies` half waves once it is set
    upright; of these, the `axes` along which classes vary most have charts. The axes are drawn nearer to each
    other by `whitening` (0: not, 1: to the same spread) before charts are laid, and lengths beyond `reach`
    times the typical are clipped. Images are set upright if their edges are dark: no brighter, on average,
    than `edge` of the whole.
    """

    presets: ClassVar[dict[str, dict[str, Any]]] = {"paper": {}, "fast-cpu": {}, "demo": {}}

    frequencies: int = 16
    axes: int = 60
    whitening: float = 0.3
    reach: float = 1.15
    edge: float = 0.06

    def __post_init__(self) -> None:
        for name, most in (("frequencies", 64), ("axes", 1024)):
            check(name, type(value := getattr(self, name)) is int and 1 <= value <= most)
        check("whitening", 0 <= self.whitening <= 1)
        check("reach", 0 < self.reach <= 100)
        check("edge", 0 <= self.edge <= 10)


@dataclass(frozen=True, kw_only=True)
class AtlasPlan(Plan):
    """`steps` sums over all records, each record's part clipped by itself, each with the same noise.

    The poses of the classes, then their means, their common spread, `rounds` times the centres of `charts`
    charts to a class, and the shape of every chart. Bounds are such that their squares add to one over all
    steps: `noise_multiplier` is noise_stddev over that. docs/guarantees.md#atlas
    """

    kind: ClassVar[str] = "atlas"
    recipes: ClassVar[type[Recipe]] = AtlasRecipe
    # Of the squares of all bounds.
    SHARES: ClassVar[dict[str, float]] = {
        "poses": 0.05, "means": 0.05, "spread": 0.15, "centres": 0.25, "shapes": 0.5,
    }  # fmt: skip

    by_steps: ClassVar[bool] = False

    steps: int | None = None
    rounds: int = 4
    charts: int = 10
    recipe: AtlasRecipe | None = None

    def check(self) -> None:
        whole("rounds", self.rounds, most=1000, problem=InvalidPlan)
        whole("charts", self.charts, most=1000, problem=InvalidPlan)
        if self.steps is None:
            object.__setattr__(self, "steps", self.rounds + 4)
        enough = self.steps == self.rounds + 4
        require(enough, "An atlas has as many steps as rounds, and four more.", problem=InvalidPlan)

    @property
    def known_recipe(self) -> AtlasRecipe:
        return self.recipe or AtlasRecipe.preset("fast-cpu")

    @property
    def stages(self) -> dict[str, int]:
        """What the steps are, in their order, and how many of each."""
        return {name: self.rounds if name == "centres" else 1 for name in self.SHARES}

    def bound(self, stage: str) -> float:
        """The norm of what one record adds to a sum of this stage."""
        return math.sqrt(self.SHARES[stage] / self.stages[stage])

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
