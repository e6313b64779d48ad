"""Atlas: noisy sums give the poses, means, spread and charts of every class; images are drawn from these."""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from sluice.methods import recipe
from sluice.methods.base import Plan, Target
from sluice.methods.method import Method, Options, PublicFacts
from sluice.methods.recipe import Recipe
from sluice.privacy.events import Composition, Gaussian, Query, require, whole
from sluice.privacy.problems import InvalidPlan


@dataclass(frozen=True, kw_only=True)
class AtlasRecipe(Recipe):
    """What is summed and how images are drawn from the sums. Public, and without influence on the cost.

    An image is described by its pose and, after it is set upright, by its cosines of up to `frequencies` half
    waves; the `axes` along which classes vary most have charts. `whitening` makes the spreads of the axes
    more alike (0: not at all, 1: equal) before charts are placed, and lengths beyond `reach` times the
    typical are clipped. Images are set upright if their edges are dark: no brighter, on average, than `edge`
    times the whole image.
    """

    presets: ClassVar[dict[str, dict[str, Any]]] = {"paper": {}, "fast-cpu": {}, "demo": {}}

    frequencies: int = recipe.whole(16, most=64)
    axes: int = recipe.whole(60, most=1024)
    whitening: float = recipe.between(0.3, 0, 1)
    reach: float = recipe.positive(1.15, most=100)
    edge: float = recipe.between(0.06, 0, 10)


@dataclass(frozen=True, kw_only=True)
class AtlasPlan(Plan):
    """`steps` sums over all records, each record's contribution clipped, each sum with the same noise.

    The stages are the poses of the classes, their means, their common spread, `rounds` times the centres of
    `charts` charts per class, and the shape of every chart. The squares of the clipping bounds add to one
    over all steps, so `noise_multiplier` is noise_stddev. docs/guarantees.md#atlas
    """

    kind: ClassVar[str] = "atlas"
    recipes: ClassVar[type[Recipe]] = AtlasRecipe
    # The share of each stage in the sum of the squared bounds.
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
        right = self.steps == self.rounds + 4
        require(right, "steps is the number of rounds plus four; leave it out.", problem=InvalidPlan)

    @property
    def known_recipe(self) -> AtlasRecipe:
        return self.recipe or AtlasRecipe.preset("fast-cpu")

    @property
    def stages(self) -> dict[str, int]:
        """The stages in their order, and the number of steps of each."""
        return {name: self.rounds if name == "centres" else 1 for name in self.SHARES}

    def bound(self, stage: str) -> float:
        """The norm that a record's contribution to a sum of this stage is clipped to."""
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


# At most so many charts per class; records per chart should be at least this multiple of a count's noise.
MOST_CHARTS, ABOVE_NOISE = 10, 60


@lru_cache(maxsize=256)
def count_noise(target: Target) -> float:
    """The noise of the record count of a chart, in a plan that meets the target."""
    plan = AtlasPlan().calibrated(target)
    return math.sqrt(3) * plan.noise_stddev / plan.bound("shapes")


def defaults(facts: PublicFacts, target: Target) -> Options:
    """As many charts per class as have enough records to stand out from the noise."""
    charts = int(facts.records / facts.classes / (ABOVE_NOISE * count_noise(target)))
    return {"charts": max(1, min(MOST_CHARTS, charts))}


def why(facts: PublicFacts, target: Target, device: str) -> str:
    per_class, noise = facts.records / facts.classes, count_noise(target)
    room = f"{per_class:,.0f} records of a class against a noise of {noise:.2g}"
    if per_class < ABOVE_NOISE * noise:
        return f"{room} show little more than the mean of each class; more epsilon or records help most"
    where = "needs no GPU" if device == "cuda" else "takes seconds on a CPU"
    charts = defaults(facts, target)["charts"]
    kinds = f"{charts} kinds of images" if charts > 1 else "one kind of images"
    return f"best of all methods measured, {where}; {room} leave room for {kinds} in each class"


METHOD = Method(
    plan=AtlasPlan,
    description="Noisy sums describe every class by charts, from which images are drawn; nothing is trained.",
    defaults=defaults,
    rank=1,  # ahead of every other method in every measure of docs/benchmarks.md, and the fastest
    why=why,
)
