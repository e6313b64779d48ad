"""DP-Sinkhorn: a generator follows noised Sinkhorn gradients, or points moved by a noised semi-dual one."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from sluice.methods.base import Clipping, Plan, PublishedReading
from sluice.methods.published import poisson_claim
from sluice.methods.recipe import Recipe, check
from sluice.privacy.events import MOST_ROWS, PoissonGaussian, Query, positive, probability, require, whole
from sluice.privacy.problems import InvalidPlan


@dataclass(frozen=True, kw_only=True)
class SinkhornRecipe(Recipe):
    """How the generator learns. Public, and without any bearing on the cost.

    The loss is the paper's: fraction `debiasing` (p) of the images compared with are drawn afresh, the cost
    is L2^2 + `absolute_weight` (m) * L1, labels are one-hot times `class_weight` (alpha_c), `entropy` is
    lambda, reached by halving and then held for `iterations`. What is released has the lowest `frequencies`
    by `frequencies` of a cosine basis; as many as an image has pixels are all of it.

    For semidual clipping alone: points end under `points_entropy` to a pixel and remember past releases by
    `memory`. After the last release as many steps follow, each `fitting_steps` of the generator on the loss
    above, between `fitting_images` images and as many points.
    """

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {},
        # Measured on MNIST in docs/decisions/0030-sinkhorn-by-its-semi-dual.md.
        "fast-cpu": {
            "features": 32,
            "rate": 3e-3,
            "weight_decay": 0.0,
            "absolute_weight": 0.0,
            "entropy": 1.0,
            "frequencies": 12,
            "average_decay": 0.995,
            "fitting_steps": 50,
        },
    }

    network: str = "dcgan"
    features: int = 64
    latent: int = 12
    optimizer: str = "adam"
    rate: float = 1e-5
    weight_decay: float = 2e-5
    debiasing: float = 0.2
    absolute_weight: float = 1.0
    class_weight: float = 15.0
    entropy: float = 0.05
    iterations: int = 5
    frequencies: int = 64
    average_decay: float | None = None
    points_entropy: float = 0.002
    memory: float = 0.9
    fitting_steps: int = 50
    fitting_images: int = 100

    def __post_init__(self) -> None:
        check("network", self.network in ("dcgan", "residual"))
        check("optimizer", self.optimizer in ("adam", "sgd"))
        check("features", type(self.features) is int and 8 <= self.features <= 1024 and not self.features % 8)
        for name, most in (
            ("frequencies", 64),
            ("latent", 4096),
            ("iterations", 10_000),
            ("fitting_images", 10_000),
        ):
            check(name, _whole(getattr(self, name), most))
        check("fitting_steps", _whole(self.fitting_steps, 100_000))
        check("rate", 0 < self.rate <= 1)
        check("debiasing", 0 <= self.debiasing <= 1)
        for name in ("weight_decay", "absolute_weight", "class_weight"):
            check(name, 0 <= getattr(self, name) <= 1e6)
        for name in ("entropy", "points_entropy"):
            check(name, 1e-6 <= getattr(self, name) <= 1e6)
        check("memory", 0 <= self.memory < 1)
        check("average_decay", self.average_decay is None or 0 <= self.average_decay < 1)


def _whole(value: object, most: int) -> bool:
    return type(value) is int and 1 <= value <= most


@dataclass(frozen=True, kw_only=True)
class SinkhornPlan(Plan):
    """What a step releases about its Poisson batch, clipped to `clip_norm` and noised.

    Joint and per image: the gradient of the Sinkhorn loss at `images` generated images. Every row depends on
    the whole batch, so the sensitivity is 2 * clip_norm, or 2 * clip_norm * sqrt(images). Semidual: the
    gradient of the semi-dual at `images` points and their potentials, a sum over records in which each is
    clipped by itself, so the sensitivity is clip_norm. `noise_multiplier` is noise_stddev over that. Without
    a recipe the preset for the worker's device is taken. docs/guarantees.md#sinkhorn
    """

    kind: ClassVar[str] = "sinkhorn"
    recipes: ClassVar[type[Recipe]] = SinkhornRecipe
    sampling_prob: float
    images: int = 300
    clipping: Clipping = Clipping.SEMIDUAL
    clip_norm: float = 1.0
    recipe: SinkhornRecipe | None = None

    def check(self) -> None:
        probability("sampling_prob", self.sampling_prob, problem=InvalidPlan)
        whole("images", self.images, most=MOST_ROWS, problem=InvalidPlan)
        positive("clip_norm", self.clip_norm, problem=InvalidPlan)
        good = isinstance(self.clipping, Clipping)
        known = ", ".join(Clipping)
        require(good, f"clipping must be one of {known}.", given=self.clipping, problem=InvalidPlan)

    @property
    def query(self) -> Query:
        return Query.SUM if self.clipping is Clipping.SEMIDUAL else Query.FUNCTION

    @property
    def progress_steps(self) -> int:
        return self.known_steps * (2 if self.clipping is Clipping.SEMIDUAL else 1)

    @property
    def rows(self) -> int:
        return self.images if self.clipping is Clipping.PER_IMAGE else 1

    @property
    def unit_noise(self) -> float:
        """The sensitivity, add-or-remove: a sum moves by one contribution, a function across its ball."""
        if self.clipping is Clipping.SEMIDUAL:
            return self.clip_norm
        return 2 * self.clip_norm * math.sqrt(self.rows)

    def event(self) -> PoissonGaussian:
        return PoissonGaussian(
            query=self.query,
            bound=self.clip_norm,
            rows=self.rows,
            noise_stddev=self.noise_stddev,
            steps=self.known_steps,
            sampling_prob=self.sampling_prob,
        )

    def published_reading(self, delta: float) -> PublishedReading | None:
        if self.clipping is not Clipping.PER_IMAGE:
            return None
        claim = poisson_claim(
            rate=self.sampling_prob,
            ratio=2 * self.clip_norm / self.noise_stddev,
            compositions=self.known_steps * self.images,
            delta=delta,
        )
        return PublishedReading(
            claimed_epsilon=claim,
            formula="steps * images independently sampled Gaussian mechanisms, classic conversion",
            flaw="The images of a step share one batch, so sampling amplifies once a step, not per image.",
        )
