"""One-shot DP-SWD: a generator matches one noisy release of projections of all records."""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, Self

from sluice.methods import recipe
from sluice.methods.base import Plan, Target
from sluice.methods.method import Method, Options, PublicFacts
from sluice.methods.recipe import Recipe
from sluice.methods.sliced import GeneratorRecipe
from sluice.privacy.events import Gaussian, Query, require, whole
from sluice.privacy.problems import InvalidPlan


@dataclass(frozen=True, kw_only=True)
class OneShotRecipe(GeneratorRecipe):
    """`generator_steps` follow the release, each with `images` of every class along `compared` directions."""

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {"generator_steps": 20_000, "average_decay": 0.999},
        "fast-cpu": {"latent": 12, "rate": 3e-3, "average_decay": 0.98},
    }

    generator_steps: int = recipe.whole(1500, most=10**6)
    images: int = recipe.whole(20, most=10**6)
    compared: int = recipe.whole(400, most=10**6)


class Features(StrEnum):
    """What is summed over records for each direction.

    HISTOGRAMS: one count in one bin. WAVES: a cosine and a sine, together of norm one.
    """

    HISTOGRAMS = "histograms"
    WAVES = "waves"


class Patterns(StrEnum):
    """The directions that images are projected on, drawn from a public seed.

    UNIFORM: uniform on the unit sphere. SMOOTH: unit patterns of blurred noise, most of them limited to a
    window of the image, in many sizes; they show how neighbouring pixels are related.
    """

    UNIFORM = "uniform"
    SMOOTH = "smooth"


@dataclass(frozen=True, kw_only=True)
class SWDOneShotPlan(Plan):
    """One sum over all records: for each class, `directions` histograms or pairs of waves of its records.

    A record contributes to its own class only, a vector of norm sqrt(directions); `noise_multiplier` is
    noise_stddev over that. Histograms have `bins` bins between bounds that follow from those of the pixels.
    `pattern_seed` determines the patterns, which are public, and nothing else. Training on the noisy release
    costs nothing more. Without a recipe the preset `fast-cpu` is used. docs/guarantees.md#one-shot
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
            good, known = isinstance(value, enum), ", ".join(enum)
            require(good, f"{name} must be one of {known}.", given=value, problem=InvalidPlan)

    @property
    def known_recipe(self) -> OneShotRecipe:
        """Independent of the device, because a job states its number of steps before a worker has it."""
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

    def with_max_steps(self, target: Target) -> Self:
        del target
        raise InvalidPlan("A one-shot plan has one step; use calibrated(target) to choose its noise.")


def defaults(_facts: PublicFacts, _target: Target) -> Options:
    return {"directions": 3000}


METHOD = Method(
    plan=SWDOneShotPlan,
    description="A generator that matches one noisy release of projections of all records.",
    defaults=defaults,
    paper={"directions": 3000},
)
