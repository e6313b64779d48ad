"""How a trainer learns, as far as that has no bearing on what it costs: networks, rates, rhythms."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from privacy.problems import InvalidPlan


@dataclass(frozen=True, kw_only=True)
class DPGANRecipe:
    """How the pair learns. Public, and without any bearing on the cost.

    `discriminator_steps` are taken for each generator step. With `accuracy_floor` they go up the ladder 1, 2,
    5, 10, ... when the average accuracy on fakes has sunk to it, but no sooner than 2 / (1 - accuracy_decay)
    generator steps after the last time. With `average_decay` the synthesizer has the running average of the
    generator's weights. `physical_batch` records are held at a time.
    """

    discriminator_features: int = 128
    generator_features: int = 128
    latent: int = 128
    discriminator_rate: float = 2e-4
    generator_rate: float = 2e-4
    betas: tuple[float, float] = (0.5, 0.999)
    discriminator_steps: int = 1
    accuracy_floor: float | None = 0.6
    accuracy_decay: float = 0.99
    average_decay: float | None = None
    physical_batch: int = 32

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas))
        for name in ("discriminator_features", "generator_features"):
            check(name, type(value := getattr(self, name)) is int and 16 <= value <= 1024 and value % 2 == 0)
        for name in ("latent", "discriminator_steps", "physical_batch"):
            check(name, type(value := getattr(self, name)) is int and 1 <= value <= 100_000)
        for name in ("discriminator_rate", "generator_rate"):
            check(name, 0 < getattr(self, name) <= 1)
        check("betas", len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas))
        check("accuracy_floor", self.accuracy_floor is None or 0 < self.accuracy_floor < 1)
        check("accuracy_decay", 0 <= self.accuracy_decay < 1)
        check("average_decay", self.average_decay is None or 0 <= self.average_decay < 1)

    @classmethod
    def for_device(cls, device: str) -> Self:
        return cls.preset("fast-cpu" if device == "cpu" else "paper")

    @classmethod
    def preset(cls, name: str) -> Self:
        if name not in PRESETS:
            raise InvalidPlan(f"There is no preset of that name; there are {', '.join(PRESETS)}.")
        return cls(**PRESETS[name])

    @classmethod
    def read(cls, value: object) -> Self | None:
        """A recipe as a plan's JSON has it: the name of a preset, its numbers, or nothing."""
        if isinstance(value, str):
            return cls.preset(value)
        if isinstance(value, dict):
            return cls.from_dict(value)
        if value is not None:
            raise InvalidPlan("recipe is the name of a preset, or an object with its numbers.")
        return None

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "betas": list(self.betas)}

    @classmethod
    def from_dict(cls, body: Mapping[str, Any]) -> Self:
        known = [field.name for field in fields(cls)]
        if odd := set(body) - set(known):
            raise InvalidPlan(f"A recipe has no {', '.join(sorted(odd))}; it has {', '.join(known)}.")
        try:
            return cls(**body)
        except TypeError:
            raise InvalidPlan("The recipe has something that is no number; see the presets.") from None


PRESETS: dict[str, dict[str, Any]] = {
    "paper": {"physical_batch": 512},
    # The paper's rhythm with narrower networks. Not shown to give a useful release in minutes: see
    # docs/decisions/0020-dpgan-on-a-cpu.md.
    "fast-cpu": {
        "discriminator_features": 32,
        "generator_features": 32,
        "latent": 64,
        "average_decay": 0.99,
        "physical_batch": 128,
    },
}


def check(name: str, good: bool) -> None:
    if not good:
        raise InvalidPlan(f"{name} of the recipe is out of range; see the presets for examples.")
