"""What the methods with random projections share: the plan and the generator's recipe."""

from dataclasses import dataclass

from sluice.methods import recipe
from sluice.methods.base import Plan
from sluice.methods.recipe import Recipe
from sluice.privacy.events import Geometry, SlicedProjection, positive, require, whole
from sluice.privacy.problems import InvalidPlan


@dataclass(frozen=True, kw_only=True)
class GeneratorRecipe(Recipe):
    """The generator and how it learns. Public, and without influence on the cost.

    `rate` falls to zero along a cosine over the steps of the training. With `average_decay` the synthesizer
    has the running average of the generator's weights.
    """

    network: str = recipe.one_of("upsampling", "dense")
    features: int = recipe.whole(200, least=2, most=1024, even=True)
    latent: int = recipe.whole(10, most=4096)
    rate: float = recipe.positive(1e-3)
    betas: tuple[float, float] = recipe.betas(0.5, 0.99)
    average_decay: float | None = recipe.decay(None)


@dataclass(frozen=True, kw_only=True)
class SlicedPlan(Plan):
    """Each step draws `batch` of `records` rows without replacement and releases X U + V.

    Every row has length `dim` and is clipped to norm `row_bound`; U has `directions` directions.
    `noise_multiplier` is noise_stddev over 2 * row_bound, the largest distance between two rows.
    """

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
        good, known = isinstance(self.geometry, Geometry), ", ".join(Geometry)
        require(good, f"geometry must be one of {known}.", given=self.geometry, problem=InvalidPlan)
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
