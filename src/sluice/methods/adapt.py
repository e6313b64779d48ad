"""Domain adaptation by DP-SWD: a classifier of public images learns to know private ones without labels."""

from dataclasses import dataclass
from typing import Any, ClassVar

from sluice.methods.base import Plan
from sluice.methods.recipe import Recipe, check
from sluice.privacy.events import Geometry, SlicedProjection, positive, require, whole
from sluice.privacy.problems import InvalidPlan


@dataclass(frozen=True, kw_only=True)
class AdaptRecipe(Recipe):
    """How the classifier learns. Public, and without any bearing on the cost.

    `source_steps` come first, on public images alone. In the steps that follow the classifier goes on at
    `rate` and the lens learns at `lens_rate`, both sinking to zero along a cosine; latents of public images
    are compared under `noises` noises.
    """

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {"features": 32, "source_steps": 5000, "noises": 1},
        "fast-cpu": {},
    }

    features: int = 16
    source_steps: int = 500
    source_rate: float = 1e-3
    rate: float = 1e-3
    lens_rate: float = 1e-2
    noises: int = 4

    def __post_init__(self) -> None:
        for name, most in (("features", 512), ("source_steps", 10**6), ("noises", 1000)):
            check(name, type(value := getattr(self, name)) is int and 1 <= value <= most)
        for name in ("source_rate", "rate", "lens_rate"):
            check(name, 0 < getattr(self, name) <= 1)


@dataclass(frozen=True, kw_only=True)
class AdaptPlan(Plan):
    """Each step draws `batch` of `records` private images and releases noisy projections of their latents.

    `dim` is how many latents there are. The latents of an image, less a public centre and over a public
    scale, are clipped to `row_bound` by themselves. `noise_multiplier` is noise_stddev over 2 * row_bound.
    Without a recipe it is that of `fast-cpu`. docs/guarantees.md#swd
    """

    kind: ClassVar[str] = "adapt"
    recipes: ClassVar[type[Recipe]] = AdaptRecipe
    records: int
    batch: int = 128
    directions: int = 8
    dim: int = 32
    geometry: Geometry = Geometry.SPHERE
    row_bound: float = 0.5
    recipe: AdaptRecipe | None = None

    def check(self) -> None:
        for name in ("records", "batch", "directions"):
            whole(name, getattr(self, name), most=10**12, problem=InvalidPlan)
        whole("dim", self.dim, most=4096, problem=InvalidPlan)
        positive("row_bound", self.row_bound, problem=InvalidPlan)
        good = isinstance(self.geometry, Geometry)
        known = ", ".join(Geometry)
        require(good, f"geometry must be one of {known}.", given=self.geometry, problem=InvalidPlan)
        good = self.batch <= self.records
        require(good, "batch is larger than records; draw at most all of them.", problem=InvalidPlan)
        good = self.geometry is Geometry.SPHERE or self.directions % self.dim == 0
        require(good, "Orthonormal blocks need directions to be a multiple of dim.", problem=InvalidPlan)

    @property
    def unit_noise(self) -> float:
        return 2 * self.row_bound

    @property
    def known_recipe(self) -> AdaptRecipe:
        return self.recipe or AdaptRecipe.preset("fast-cpu")

    @property
    def progress_steps(self) -> int:
        return self.known_recipe.source_steps + self.known_steps

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
