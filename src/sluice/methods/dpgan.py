"""DPGAN: a discriminator is trained by DP-SGD; the generator learns from the noised discriminator only."""

from dataclasses import dataclass
from typing import Any, ClassVar

from sluice.methods import recipe
from sluice.methods.base import Plan, Target
from sluice.methods.method import Method, Options, PublicFacts
from sluice.methods.recipe import Recipe, check
from sluice.privacy.events import PoissonGaussian, Query, positive, probability
from sluice.privacy.problems import InvalidPlan


@dataclass(frozen=True, kw_only=True)
class DPGANRecipe(Recipe):
    """How generator and discriminator learn. Public, and without influence on the cost.

    `network` is "conv", the paper's, or "dense": hidden layers of so many features, with batch norm in the
    generator; an order of magnitude faster on a CPU. A dense discriminator also learns the labels of real
    records, with `label_weight`. `discriminator_decay` is a weight decay against the drift that noise causes.
    `variety` rewards a generator whose images of one label differ.

    There are `discriminator_steps` for each generator step. With `accuracy_floor` this number rises along 1,
    2, 5, 10, ... when the average accuracy on generated images has fallen to the floor, but not within
    2 / (1 - accuracy_decay) generator steps of the last rise. With `average_decay` the synthesizer has the
    running average of the generator's weights. `physical_batch` records are in memory at a time.
    """

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {"physical_batch": 512},
        "fast-cpu": {
            "network": "dense",
            "discriminator_features": 128,
            "generator_features": 256,
            "latent": 32,
            "discriminator_rate": 1e-3,
            "generator_rate": 1e-3,
            "discriminator_decay": 1.0,
            "label_weight": 1.0,
            "variety": 5.0,
            "accuracy_floor": None,
            "average_decay": 0.995,
            "physical_batch": 2048,
        },
    }

    network: str = recipe.one_of("conv", "dense")
    discriminator_features: int = recipe.whole(128, least=16, most=1024, even=True)
    generator_features: int = recipe.whole(128, least=16, most=1024, even=True)
    latent: int = recipe.whole(128, most=100_000)
    discriminator_rate: float = recipe.positive(2e-4)
    generator_rate: float = recipe.positive(2e-4)
    betas: tuple[float, float] = recipe.betas(0.5, 0.999)
    discriminator_decay: float = recipe.between(0.0, 0, 1e3)
    label_weight: float = recipe.between(0.0, 0, 1e3)
    variety: float = recipe.between(0.0, 0, 1e3)
    discriminator_steps: int = recipe.whole(1, most=100_000)
    accuracy_floor: float | None = recipe.decay(0.6)
    accuracy_decay: float = recipe.decay(0.99, optional=False)
    average_decay: float | None = recipe.decay(None)
    physical_batch: int = recipe.whole(32, most=100_000)

    def __post_init__(self) -> None:
        super().__post_init__()
        check("accuracy_floor", self.accuracy_floor != 0)
        check("label_weight", self.network == "dense" or self.label_weight == 0)


@dataclass(frozen=True, kw_only=True)
class DPGANPlan(Plan):
    """Per-record gradients are clipped to `clip_norm`, summed over a Poisson batch, noised, then divided.

    `noise_multiplier` is noise_stddev / clip_norm. The divisor is `expected_batch`, a public constant and not
    the size of the drawn batch. Without a recipe the preset for the worker's device is used.
    docs/guarantees.md#dpgan
    """

    kind: ClassVar[str] = "dpgan"
    recipes: ClassVar[type[Recipe]] = DPGANRecipe
    sampling_prob: float
    expected_batch: float = 1.0
    clip_norm: float = 1.0
    recipe: DPGANRecipe | None = None

    def check(self) -> None:
        probability("sampling_prob", self.sampling_prob, problem=InvalidPlan)
        positive("expected_batch", self.expected_batch, problem=InvalidPlan)
        positive("clip_norm", self.clip_norm, problem=InvalidPlan)

    @property
    def unit_noise(self) -> float:
        return self.clip_norm

    def event(self) -> PoissonGaussian:
        return PoissonGaussian(
            query=Query.SUM,
            bound=self.clip_norm,
            noise_stddev=self.noise_stddev,
            steps=self.known_steps,
            sampling_prob=self.sampling_prob,
        )


def defaults(facts: PublicFacts, _target: Target) -> Options:
    return {"records": facts.records, "batch": min(512, facts.records), "steps": 1_500, "clip": 5.0}


METHOD = Method(
    plan=DPGANPlan,
    description="A GAN whose discriminator is trained by DP-SGD.",
    defaults=defaults,
    paper={"batch": 512, "steps": 174_000},
)
