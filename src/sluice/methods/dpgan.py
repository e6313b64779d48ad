"""DPGAN: a discriminator trained by DP-SGD; the generator only ever sees the noised discriminator."""

from dataclasses import dataclass
from typing import Any, ClassVar

from sluice.methods.base import Plan
from sluice.methods.recipe import Recipe, check
from sluice.privacy.events import PoissonGaussian, Query, positive, probability
from sluice.privacy.problems import InvalidPlan


@dataclass(frozen=True, kw_only=True)
class DPGANRecipe(Recipe):
    """How the pair learns. Public, and without any bearing on the cost.

    `network` is "conv", the paper's, or "dense": hidden layers of so many features, with batch norm in the
    generator; an order of magnitude quicker on a CPU. A dense discriminator is also taught the labels of real
    records, with `label_weight`. `discriminator_decay` pulls weights back to zero, which noise drives away
    from it. `variety` rewards a generator whose images of one label differ.

    `discriminator_steps` are taken for each generator step. With `accuracy_floor` they go up the ladder 1, 2,
    5, 10, ... when the average accuracy on fakes has sunk to it, but no sooner than 2 / (1 - accuracy_decay)
    generator steps after the last time. With `average_decay` the synthesizer has the running average of the
    generator's weights. `physical_batch` records are held at a time.
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

    network: str = "conv"
    discriminator_features: int = 128
    generator_features: int = 128
    latent: int = 128
    discriminator_rate: float = 2e-4
    generator_rate: float = 2e-4
    betas: tuple[float, float] = (0.5, 0.999)
    discriminator_decay: float = 0.0
    label_weight: float = 0.0
    variety: float = 0.0
    discriminator_steps: int = 1
    accuracy_floor: float | None = 0.6
    accuracy_decay: float = 0.99
    average_decay: float | None = None
    physical_batch: int = 32

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas))
        check("network", self.network in ("conv", "dense"))
        for name in ("discriminator_features", "generator_features"):
            check(name, type(value := getattr(self, name)) is int and 16 <= value <= 1024 and value % 2 == 0)
        for name in ("latent", "discriminator_steps", "physical_batch"):
            check(name, type(value := getattr(self, name)) is int and 1 <= value <= 100_000)
        for name in ("discriminator_rate", "generator_rate"):
            check(name, 0 < getattr(self, name) <= 1)
        check("discriminator_decay", 0 <= self.discriminator_decay <= 1e3)
        check("variety", 0 <= self.variety <= 1e3)
        check("label_weight", 0 <= self.label_weight <= (1e3 if self.network == "dense" else 0))
        check("betas", len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas))
        check("accuracy_floor", self.accuracy_floor is None or 0 < self.accuracy_floor < 1)
        check("accuracy_decay", 0 <= self.accuracy_decay < 1)
        check("average_decay", self.average_decay is None or 0 <= self.average_decay < 1)


@dataclass(frozen=True, kw_only=True)
class DPGANPlan(Plan):
    """Per-record gradients clipped to `clip_norm`, summed over a Poisson batch, noised, then divided.

    `noise_multiplier` is noise_stddev / clip_norm. The divisor is `expected_batch`, a public constant,
    never the size of the drawn batch. Without a recipe the preset for the worker's device is taken.
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
