"""Toy: one noisy sum of all images. Planted by test_toy_method.py as src/sluice/methods/toy.py."""

from dataclasses import dataclass
from typing import Any, ClassVar

from sluice.methods import recipe
from sluice.methods.base import Plan, Target
from sluice.methods.method import Method, Options, PublicFacts
from sluice.methods.recipe import Recipe
from sluice.privacy.events import Gaussian, Query, positive
from sluice.privacy.problems import InvalidPlan


@dataclass(frozen=True, kw_only=True)
class ToyRecipe(Recipe):
    """Width of the generator."""

    presets: ClassVar[dict[str, dict[str, Any]]] = {"paper": {}, "fast-cpu": {}}
    features: int = recipe.whole(4, most=64)


@dataclass(frozen=True, kw_only=True)
class ToyPlan(Plan):
    """`steps` sums over all records, each record clipped to `clip_norm`. docs/guarantees.md#toy"""

    kind: ClassVar[str] = "toy"
    recipes: ClassVar[type[Recipe]] = ToyRecipe
    clip_norm: float = 1.0
    recipe: ToyRecipe | None = None

    def check(self) -> None:
        positive("clip_norm", self.clip_norm, problem=InvalidPlan)

    @property
    def unit_noise(self) -> float:
        return self.clip_norm

    def event(self) -> Gaussian:
        return Gaussian(
            query=Query.SUM, bound=self.clip_norm, noise_stddev=self.noise_stddev, steps=self.known_steps
        )


def defaults(_facts: PublicFacts, _target: Target) -> Options:
    return {"steps": 3, "clip": 2.0}


METHOD = Method(plan=ToyPlan, description="The noisy mean of all images.", defaults=defaults)
