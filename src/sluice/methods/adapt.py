"""Domain adaptation by DP-SWD: a classifier of public images is adapted to unlabelled private ones."""

from dataclasses import dataclass
from typing import Any, ClassVar

from sluice.methods import recipe
from sluice.methods.base import Target
from sluice.methods.method import Method, Options, Output, PublicFacts
from sluice.methods.recipe import Recipe
from sluice.methods.sliced import SlicedPlan
from sluice.privacy.events import whole
from sluice.privacy.problems import InvalidPlan


@dataclass(frozen=True, kw_only=True)
class AdaptRecipe(Recipe):
    """How the classifier learns. Public, and without influence on the cost.

    `source_steps` come first, on public images only. In the steps that follow, the classifier learns at
    `rate` and the lens at `lens_rate`, both falling to zero along a cosine; latents of public images are
    compared under `noises` draws of the noise.
    """

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {"features": 32, "source_steps": 5000, "noises": 1},
        "fast-cpu": {},
    }

    features: int = recipe.whole(16, most=512)
    source_steps: int = recipe.whole(500, most=10**6)
    source_rate: float = recipe.positive(1e-3)
    rate: float = recipe.positive(1e-3)
    lens_rate: float = recipe.positive(1e-2)
    noises: int = recipe.whole(4, most=1000)


@dataclass(frozen=True, kw_only=True)
class AdaptPlan(SlicedPlan):
    """Each step draws `batch` of `records` private images and releases noisy projections of their latents.

    `dim` is the number of latents. The latents of an image, less a public centre and over a public scale, are
    clipped to `row_bound`. Without a recipe the preset `fast-cpu` is used. docs/guarantees.md#swd
    """

    kind: ClassVar[str] = "adapt"
    recipes: ClassVar[type[Recipe]] = AdaptRecipe
    batch: int = 128
    directions: int = 8
    dim: int = 32
    recipe: AdaptRecipe | None = None

    def check(self) -> None:
        super().check()
        whole("dim", self.dim, most=4096, problem=InvalidPlan)

    @property
    def known_recipe(self) -> AdaptRecipe:
        return self.recipe or AdaptRecipe.preset("fast-cpu")

    @property
    def progress_steps(self) -> int:
        return self.known_recipe.source_steps + self.known_steps


def defaults(facts: PublicFacts, _target: Target) -> Options:
    return {"records": facts.records, "batch": min(128, facts.records), "steps": 1_500}


METHOD = Method(
    plan=AdaptPlan,
    description="A classifier of public images, adapted to private images by noisy projections.",
    defaults=defaults,
    needs_source=True,
    makes=Output.CLASSIFIER,
)
