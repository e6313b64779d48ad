"""DP-SWD: a generator matches noisy random projections of batches, or one noisy release of all of them."""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, Self

from sluice.methods.base import Plan, PublishedReading, Target
from sluice.methods.published import bernstein_square, clt_square, wbk_claim
from sluice.methods.recipe import Recipe, check
from sluice.privacy.events import Gaussian, Geometry, Query, SlicedProjection, positive, require, whole
from sluice.privacy.problems import InvalidPlan


@dataclass(frozen=True, kw_only=True)
class GeneratorRecipe(Recipe):
    """The generator of both forms and how it follows. Public, and without any bearing on the cost.

    `rate` sinks to zero along a cosine over the steps of the training. With `average_decay` the synthesizer
    has the running average of the generator's weights.
    """

    network: str = "upsampling"
    features: int = 200
    latent: int = 10
    rate: float = 1e-3
    betas: tuple[float, float] = (0.5, 0.99)
    average_decay: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas))
        check("network", self.network in ("dense", "upsampling"))
        check("features", type(self.features) is int and 2 <= self.features <= 1024 and not self.features % 2)
        check("latent", type(self.latent) is int and 1 <= self.latent <= 4096)
        check("rate", 0 < self.rate <= 1)
        check("betas", len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas))
        check("average_decay", self.average_decay is None or 0 <= self.average_decay < 1)


@dataclass(frozen=True, kw_only=True)
class SWDRecipe(GeneratorRecipe):
    """With every release the generator moves along its directions, as in the paper.

    It makes as many images as a batch has records, and each is compared under `noises` noises. With
    `moment_steps` it waits instead: under noise that is wider than the rows, sorted projections tell their
    mean and their variance and no more, and those add up over releases. After the last release so many steps
    follow, each with `moment_images` images, towards the moments that all releases tell together.
    """

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        # The paper's network, its code of ten numbers and its optimizer.
        "paper": {"rate": 1e-4, "betas": (0.9, 0.999)},
        "fast-cpu": {
            "rate": 5e-3,
            "average_decay": 0.98,
            "moment_steps": 300,
            "moment_images": 500,
        },
    }

    noises: int = 1
    moment_steps: int = 0
    moment_images: int = 200

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("noises", 1), ("moment_steps", 0), ("moment_images", 2)):
            check(name, type(value := getattr(self, name)) is int and least <= value <= 10**6)


@dataclass(frozen=True, kw_only=True)
class OneShotRecipe(GeneratorRecipe):
    """`generator_steps` follow the release, each with `images` of every class along `compared` directions."""

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {"generator_steps": 20_000, "average_decay": 0.999},
        "fast-cpu": {"latent": 12, "rate": 3e-3, "average_decay": 0.98},
    }

    generator_steps: int = 1500
    images: int = 20
    compared: int = 400

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("generator_steps", "images", "compared"):
            check(name, type(value := getattr(self, name)) is int and 1 <= value <= 10**6)


class Features(StrEnum):
    """What the one-shot form sums over records, for each direction.

    HISTOGRAMS: one count in one bin. WAVES: a cosine and a sine, together of norm one.
    """

    HISTOGRAMS = "histograms"
    WAVES = "waves"


def row_length(height: int, width: int, channels: int, classes: int, frequencies: int | None) -> int:
    """How many numbers a row has: an image's pixels or slowest cosines, and one for each class."""
    down, across = (min(side, frequencies or side) for side in (height, width))
    return channels * down * across + classes


@dataclass(frozen=True, kw_only=True)
class SWDPlan(Plan):
    """Each step draws `batch` of `records` rows without replacement and releases X U + V.

    A row holds the pixels of a record, from 0 to 1, and `label_weight` at its class; with `frequencies`, that
    many by that many of the image's slowest cosines stand for its pixels. `dim` is the length that results.
    Every row is clipped to `row_bound` by itself. `noise_multiplier` is noise_stddev over 2 * row_bound, the
    furthest two rows can be apart. Without a recipe it is that of `fast-cpu`. docs/guarantees.md#swd
    """

    kind: ClassVar[str] = "swd"
    recipes: ClassVar[type[Recipe]] = SWDRecipe
    records: int
    batch: int
    directions: int = 1000
    dim: int
    geometry: Geometry = Geometry.SPHERE
    row_bound: float = 0.5
    label_weight: float = 8.0
    frequencies: int | None = None
    recipe: SWDRecipe | None = None

    def check(self) -> None:
        for name in ("records", "batch", "directions", "dim"):
            whole(name, getattr(self, name), most=10**12, problem=InvalidPlan)
        if self.frequencies is not None:
            whole("frequencies", self.frequencies, most=64, problem=InvalidPlan)
        positive("row_bound", self.row_bound, problem=InvalidPlan)
        positive("label_weight", self.label_weight, problem=InvalidPlan)
        good = isinstance(self.geometry, Geometry)
        known = ", ".join(Geometry)
        require(good, f"geometry must be one of {known}.", given=self.geometry, problem=InvalidPlan)
        good = self.batch <= self.records
        require(good, "batch is larger than records; draw at most all of them.", problem=InvalidPlan)
        good = self.geometry is Geometry.SPHERE or self.directions % self.dim == 0
        require(good, "Orthonormal blocks need directions to be a multiple of dim.", problem=InvalidPlan)

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
        """Not by device: how many steps a job shows is known before a worker has it."""
        return self.recipe or SWDRecipe.preset("fast-cpu")

    @property
    def progress_steps(self) -> int:
        return self.known_steps + self.known_recipe.moment_steps

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


class Patterns(StrEnum):
    """What images are projected on, drawn from a public seed.

    UNIFORM: uniform on the unit sphere. SMOOTH: unit patterns of blurred noise, most of them under a window
    somewhere in the image, of many sizes: what neighbouring pixels have to do with each other.
    """

    UNIFORM = "uniform"
    SMOOTH = "smooth"


@dataclass(frozen=True, kw_only=True)
class SWDOneShotPlan(Plan):
    """All records, once: for each class `directions` histograms or pairs of waves, summed over its records.

    A record adds to those of its class alone, a vector of norm sqrt(directions); `noise_multiplier` is
    noise_stddev over that. Histograms have `bins` bins between bounds that follow from those of the pixels.
    `pattern_seed` fixes the patterns, which are public, and nothing else. Training on the noisy release costs
    nothing more. Without a recipe it is that of `fast-cpu`. docs/guarantees.md#one-shot
    """

    kind: ClassVar[str] = "swd_one_shot"
    recipes: ClassVar[type[Recipe]] = OneShotRecipe
    steps: int | None = 1
    directions: int = 1000
    features: Features = Features.HISTOGRAMS
    bins: int = 24
    patterns: Patterns = Patterns.SMOOTH
    pattern_seed: int = 1
    recipe: OneShotRecipe | None = None

    def check(self) -> None:
        whole("directions", self.directions, most=10**6, problem=InvalidPlan)
        whole("bins", self.bins, most=10**4, problem=InvalidPlan)
        whole("pattern_seed", self.pattern_seed, most=2**31, problem=InvalidPlan)
        require(self.steps == 1, "A one-shot plan has one step; leave steps at 1.", problem=InvalidPlan)
        for name, enum in (("features", Features), ("patterns", Patterns)):
            value = getattr(self, name)
            good = isinstance(value, enum)
            known = ", ".join(enum)
            require(good, f"{name} must be one of {known}.", given=value, problem=InvalidPlan)

    @property
    def known_recipe(self) -> OneShotRecipe:
        """Not by device: how many steps a job shows is known before a worker has it."""
        return self.recipe or OneShotRecipe.preset("fast-cpu")

    @property
    def progress_steps(self) -> int:
        return self.known_steps + self.known_recipe.generator_steps

    @property
    def unit_noise(self) -> float:
        return math.sqrt(self.directions)

    def event(self) -> Gaussian:
        return Gaussian(
            query=Query.COUNTS if self.features is Features.HISTOGRAMS else Query.SUM,
            bound=1.0,
            rows=self.directions,
            noise_stddev=self.noise_stddev,
            steps=1,
        )

    def stretched(self, target: Target) -> Self:
        del target
        raise InvalidPlan("A one-shot plan has one step; use calibrated(target) to choose its noise.")
