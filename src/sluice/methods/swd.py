"""DP-SWD: a generator matches noisy random projections of batches."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from sluice.methods import recipe
from sluice.methods.base import PublishedReading, Target
from sluice.methods.method import Method, Options, PublicFacts
from sluice.methods.published import bernstein_square, clt_square, wbk_claim
from sluice.methods.recipe import Recipe
from sluice.methods.sliced import GeneratorRecipe, SlicedPlan
from sluice.privacy.events import Geometry, positive, require, whole
from sluice.privacy.problems import InvalidPlan


@dataclass(frozen=True, kw_only=True)
class SWDRecipe(GeneratorRecipe):
    """With every release the generator moves along its directions, as in the paper.

    It makes as many images as a batch has records, and each is compared under `noises` draws of the noise.
    With `moment_steps` the generator learns after the last release instead: under noise that is wider than
    the rows, sorted projections determine the mean and the variance of the rows and nothing more, and these
    add up over releases. Each of the `moment_steps` fits `moment_images` images to the moments of all
    releases together.
    """

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        # The paper's network, its latent of ten numbers and its optimizer.
        "paper": {"rate": 1e-4, "betas": (0.9, 0.999)},
        "fast-cpu": {"rate": 5e-3, "average_decay": 0.98, "moment_steps": 300, "moment_images": 500},
    }

    noises: int = recipe.whole(1, most=10**6)
    moment_steps: int = recipe.whole(0, least=0, most=10**6)
    moment_images: int = recipe.whole(200, least=2, most=10**6)


def row_length(height: int, width: int, channels: int, classes: int, frequencies: int | None) -> int:
    """The length of a row: an image's pixels or its lowest cosines, and one number for each class."""
    down, across = (min(side, frequencies or side) for side in (height, width))
    return channels * down * across + classes


@dataclass(frozen=True, kw_only=True)
class SWDPlan(SlicedPlan):
    """Noisy projections of rows that hold a record's pixels, from 0 to 1, and `label_weight` at its class.

    With `frequencies`, that many by that many of the image's lowest cosines replace its pixels; `dim` is the
    resulting length. Without a recipe the preset `fast-cpu` is used. docs/guarantees.md#swd
    """

    kind: ClassVar[str] = "swd"
    recipes: ClassVar[type[Recipe]] = SWDRecipe
    label_weight: float = 8.0
    frequencies: int | None = None
    recipe: SWDRecipe | None = None

    def check(self) -> None:
        super().check()
        if self.frequencies is not None:
            whole("frequencies", self.frequencies, most=64, problem=InvalidPlan)
        positive("label_weight", self.label_weight, problem=InvalidPlan)

    def require_fit(self, height: int, width: int, channels: int, classes: int) -> None:
        length = row_length(height, width, channels, classes, self.frequencies)
        require(
            self.dim == length,
            f"dim must be {length}, the length of a row of these images.",
            given=self.dim,
            problem=InvalidPlan,
        )

    @property
    def known_recipe(self) -> SWDRecipe:
        """Independent of the device, because a job states its number of steps before a worker has it."""
        return self.recipe or SWDRecipe.preset("fast-cpu")

    @property
    def progress_steps(self) -> int:
        return self.known_steps + self.known_recipe.moment_steps

    def published_reading(self, delta: float, *, bound: str = "clt") -> PublishedReading | None:
        """The paper's epsilon with its "clt" or its "bernstein" bound on the sensitivity."""
        if self.geometry is not Geometry.SPHERE or self.batch == self.records:
            return None
        square = {"clt": clt_square, "bernstein": bernstein_square}[bound](
            self.directions, self.dim, delta / 2
        )
        claim = wbk_claim(
            rate=self.batch / self.records,
            ratio=math.sqrt(square) * self.unit_noise / self.noise_stddev,
            compositions=self.known_steps,
            delta=delta / 2,
        )
        return PublishedReading(
            claimed_epsilon=claim,
            formula=f"sensitivity by the {bound} bound at delta/2, once for all steps; sampled Gaussians",
            flaw="The bound may fail in every step, so its delta is spent once per step and not once in all.",
        )


def defaults(facts: PublicFacts, _target: Target) -> Options:
    length = row_length(facts.height, facts.width, facts.channels, facts.classes, 8)
    return {
        "records": facts.records, "batch": min(100, facts.records), "steps": 80_000, "frequencies": 8,
        "label_weight": 8.0, "geometry": "orthonormal", "dim": length, "directions": length,
    }  # fmt: skip


METHOD = Method(
    plan=SWDPlan,
    description="A generator that matches noisy random projections of batches.",
    defaults=defaults,
    paper={"batch": 100, "steps": 60_100, "dim": 28 * 28 + 10},
)
