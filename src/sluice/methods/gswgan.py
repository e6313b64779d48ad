"""GS-WGAN: discriminators learn disjoint parts of the data; only their noised gradients leave."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from sluice.methods import recipe
from sluice.methods.base import Clipping, Plan, PublishedReading, Target
from sluice.methods.method import Method, Options, PublicFacts
from sluice.methods.published import wbk_claim
from sluice.methods.recipe import Recipe
from sluice.privacy.events import MOST_ROWS, Query, Rotation, positive, require, whole
from sluice.privacy.problems import InvalidPlan


@dataclass(frozen=True, kw_only=True)
class GSWGANRecipe(Recipe):
    """How generator and discriminators learn. Public, and without influence on the cost.

    Discriminators read, and return gradients in, the lowest `frequencies` of each side of an image, or all of
    them. In each turn a discriminator takes `discriminator_steps` on `part_batch` records of its part and as
    many generated images; in its first turn, `first_steps`. `penalty` weighs max(0, |gradient| - 1)^2 between
    the two. `abreast` discriminators are in memory at a time. `variety` rewards a generator whose images of
    one label differ. With `average_decay` the synthesizer has the running average of the generator's weights.
    """

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        # The paper's numbers, with dense networks.
        "paper": {
            "discriminator_features": 64,
            "generator_features": 256,
            "discriminator_steps": 5,
            "first_steps": 2000,
            "discriminator_rate": 1e-4,
            "generator_rate": 1e-4,
            "average_decay": None,
        },
        "fast-cpu": {
            "frequencies": 10,
            "discriminator_steps": 2,
            "first_steps": 20,
            "part_batch": 16,
            "variety": 0.5,
            "generator_rate": 4e-4,
            "abreast": 200,
        },
    }

    frequencies: int | None = recipe.whole(None, most=64)
    discriminator_features: int = recipe.whole(32, most=4096)
    generator_features: int = recipe.whole(128, least=2, most=4096)
    latent: int = recipe.whole(16, most=4096)
    discriminator_steps: int = recipe.whole(3, most=100_000)
    first_steps: int = recipe.whole(30, most=100_000)
    part_batch: int = recipe.whole(32, least=2, most=4096)
    penalty: float = recipe.positive(10.0, most=1e6)
    variety: float = recipe.between(0.0, 0, 1e3)
    discriminator_rate: float = recipe.positive(2e-3)
    generator_rate: float = recipe.positive(2e-3)
    average_decay: float | None = recipe.decay(0.9)
    abreast: int = recipe.whole(100, most=4096)


@dataclass(frozen=True, kw_only=True)
class GSWGANPlan(Plan):
    """`parts` discriminators take turns in a fixed public order, `panel` of them at a time.

    Each releases its gradient at `images` images ceil(steps / (parts / panel)) times, clipped jointly or per
    image; the gradients of a panel are summed and noised once. A discriminator keeps its weights between
    turns, so its gradient is a function of its whole part. A record is in one part and so in one term of the
    sum: the sensitivity is 2 * clip_norm (joint) or 2 * clip_norm * sqrt(images) (per image) for any panel.
    docs/guarantees.md#gswgan
    """

    kind: ClassVar[str] = "gswgan"
    recipes: ClassVar[type[Recipe]] = GSWGANRecipe
    parts: int = 1000
    panel: int = 1
    images: int = 32
    clipping: Clipping = Clipping.JOINT
    clip_norm: float = 1.0
    recipe: GSWGANRecipe | None = None

    def check(self) -> None:
        whole("parts", self.parts, most=MOST_ROWS, problem=InvalidPlan)
        whole("panel", self.panel, most=self.parts, problem=InvalidPlan)
        even = self.parts % self.panel == 0
        require(even, "panel does not divide parts; every part belongs to one panel.", problem=InvalidPlan)
        whole("images", self.images, most=MOST_ROWS, problem=InvalidPlan)
        positive("clip_norm", self.clip_norm, problem=InvalidPlan)
        known = [Clipping.JOINT, Clipping.PER_IMAGE]
        good = isinstance(self.clipping, Clipping) and self.clipping in known
        require(good, f"clipping must be one of {known}.", given=self.clipping, problem=InvalidPlan)

    @property
    def rows(self) -> int:
        return self.images if self.clipping is Clipping.PER_IMAGE else 1

    @property
    def unit_noise(self) -> float:
        return 2 * self.clip_norm * math.sqrt(self.rows)

    def event(self) -> Rotation:
        return Rotation(
            query=Query.FUNCTION,
            bound=self.clip_norm,
            rows=self.rows,
            noise_stddev=self.noise_stddev,
            steps=self.known_steps,
            parts=self.parts // self.panel,
        )

    def published_reading(self, delta: float) -> PublishedReading | None:
        if self.clipping is Clipping.JOINT or self.parts == 1 or self.panel > 1:
            return None
        claim = wbk_claim(
            rate=1 / self.parts,
            ratio=2 * self.clip_norm / self.noise_stddev,
            compositions=self.known_steps * self.images,
            delta=delta,
        )
        return PublishedReading(
            claimed_epsilon=claim,
            formula="steps * images mechanisms, each sampled at 1 / parts, classic conversion",
            flaw="Discriminators remember their part, so hiding which one answered amplifies nothing.",
        )


def defaults(_facts: PublicFacts, _target: Target) -> Options:
    return {"parts": 500, "panel": 500, "images": 20, "steps": 400}


METHOD = Method(
    plan=GSWGANPlan,
    description="A GAN with one discriminator for each part of the records; their noised gradient trains it.",
    defaults=defaults,
    paper={"parts": 1000, "steps": 20_000},
    can_relay=True,
)
