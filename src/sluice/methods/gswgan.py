"""GS-WGAN: discriminators on disjoint parts of the data; only the gradient at the images leaves, noised."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from sluice.methods.base import Clipping, Plan, PublishedReading
from sluice.methods.published import wbk_claim
from sluice.methods.recipe import Recipe, check
from sluice.privacy.events import MOST_ROWS, Query, Rotation, positive, require, whole
from sluice.privacy.problems import InvalidPlan


@dataclass(frozen=True, kw_only=True)
class GSWGANRecipe(Recipe):
    """How generator and discriminators learn. Public, and without any bearing on the cost.

    Discriminators see, and answer in, the lowest `frequencies` of each side of an image, or all of them. In a
    turn each takes `discriminator_steps` on `part_batch` records of its part and as many fakes; in its first,
    `first_steps`. `penalty` weighs max(0, |gradient| - 1)^2 between the two. `abreast` discriminators are in
    memory at a time. `variety` rewards a generator whose images of one label differ. With `average_decay` the
    synthesizer has the running average of the generator's weights.
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

    frequencies: int | None = None
    discriminator_features: int = 32
    generator_features: int = 128
    latent: int = 16
    discriminator_steps: int = 3
    first_steps: int = 30
    part_batch: int = 32
    penalty: float = 10.0
    variety: float = 0.0
    discriminator_rate: float = 2e-3
    generator_rate: float = 2e-3
    average_decay: float | None = 0.9
    abreast: int = 100

    def __post_init__(self) -> None:
        check("frequencies", self.frequencies is None or is_whole(self.frequencies, most=64))
        for name in ("discriminator_features", "generator_features", "latent", "part_batch", "abreast"):
            check(name, is_whole(getattr(self, name), most=4096))
        check("part_batch", self.part_batch >= 2)
        check("generator_features", self.generator_features >= 2)
        for name in ("discriminator_steps", "first_steps"):
            check(name, is_whole(getattr(self, name), most=100_000))
        check("variety", 0 <= self.variety <= 1e3)
        check("penalty", 0 < self.penalty <= 1e6)
        for name in ("discriminator_rate", "generator_rate"):
            check(name, 0 < getattr(self, name) <= 1)
        check("average_decay", self.average_decay is None or 0 <= self.average_decay < 1)


def is_whole(value: object, *, most: int) -> bool:
    return type(value) is int and 1 <= value <= most


@dataclass(frozen=True, kw_only=True)
class GSWGANPlan(Plan):
    """`parts` discriminators take turns in a fixed public order, `panel` of them at a time.

    Each answers ceil(steps / (parts / panel)) times, with its gradient at `images` images, clipped jointly or
    per image; the answers of a panel are summed and noised once. A discriminator remembers its part between
    turns, so its answer is a function of the whole part, and a record has a part in one answer of the sum
    only: sensitivity 2 * clip_norm (joint) or 2 * clip_norm * sqrt(images) (per image), whatever the panel.
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
