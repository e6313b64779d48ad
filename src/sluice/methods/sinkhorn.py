"""DP-Sinkhorn: a generator learns from noised Sinkhorn gradients, or from points that these move."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from sluice.methods import recipe
from sluice.methods.base import Clipping, Plan, PublishedReading, Target
from sluice.methods.method import Method, Options, PublicFacts
from sluice.methods.published import poisson_claim
from sluice.methods.recipe import Recipe, check
from sluice.privacy.events import MOST_ROWS, PoissonGaussian, Query, positive, probability, require, whole
from sluice.privacy.problems import InvalidPlan


@dataclass(frozen=True, kw_only=True)
class SinkhornRecipe(Recipe):
    """How the generator learns. Public, and without influence on the cost.

    The loss is the paper's: fraction `debiasing` (p) of the images compared with are drawn afresh, the cost
    is L2^2 + `absolute_weight` (m) * L1, labels are one-hot times `class_weight` (alpha_c), `entropy` is
    lambda, reached by halving and then kept for `iterations`. Releases are in the lowest `frequencies` by
    `frequencies` of a cosine basis; as many as an image has pixels are the whole image.

    For semidual clipping only: points end under `points_entropy` per pixel, and past releases count with
    weight `memory`. After the last release as many steps follow, each `fitting_steps` of the generator on the
    loss above, between `fitting_images` images and as many points.
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

    network: str = recipe.one_of("dcgan", "residual")
    features: int = recipe.whole(64, least=8, most=1024)
    latent: int = recipe.whole(12, most=4096)
    optimizer: str = recipe.one_of("adam", "sgd")
    rate: float = recipe.positive(1e-5)
    weight_decay: float = recipe.between(2e-5, 0, 1e6)
    debiasing: float = recipe.between(0.2, 0, 1)
    absolute_weight: float = recipe.between(1.0, 0, 1e6)
    class_weight: float = recipe.between(15.0, 0, 1e6)
    entropy: float = recipe.between(0.05, 1e-6, 1e6)
    iterations: int = recipe.whole(5, most=10_000)
    frequencies: int = recipe.whole(64, most=64)
    average_decay: float | None = recipe.decay(None)
    points_entropy: float = recipe.between(0.002, 1e-6, 1e6)
    memory: float = recipe.decay(0.9, optional=False)
    fitting_steps: int = recipe.whole(50, most=100_000)
    fitting_images: int = recipe.whole(100, most=10_000)

    def __post_init__(self) -> None:
        super().__post_init__()
        check("features", self.features % 8 == 0)


@dataclass(frozen=True, kw_only=True)
class SinkhornPlan(Plan):
    """Each step releases a vector about its Poisson batch, clipped to `clip_norm` and noised.

    Joint and per image: the gradient of the Sinkhorn loss at `images` generated images. Every row depends on
    the whole batch, so the sensitivity is 2 * clip_norm, or 2 * clip_norm * sqrt(images). Semidual: the
    gradient of the semi-dual at `images` points and their potentials, a sum over records with each record's
    contribution clipped, so the sensitivity is clip_norm. `noise_multiplier` is noise_stddev over the
    sensitivity. Without a recipe the preset for the worker's device is used. docs/guarantees.md#sinkhorn
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
        """The sensitivity under add-or-remove: one term of a sum, or the diameter of a function's ball."""
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


def defaults(facts: PublicFacts, _target: Target) -> Options:
    return {"records": facts.records, "batch": min(6_000, facts.records), "steps": 60}


METHOD = Method(
    plan=SinkhornPlan,
    description="A generator fitted by noised gradients of the Sinkhorn divergence.",
    defaults=defaults,
    paper={"batch": 50, "steps": 160_000, "clipping": "joint", "images": 50},
)
