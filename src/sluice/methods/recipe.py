"""How a trainer learns, as far as that has no bearing on what it costs: networks, rates, rhythms."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Self

from sluice.privacy.problems import InvalidPlan


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Each plan has its own, with presets by name: `paper`, and `fast-cpu` for minutes on two cores."""

    presets: ClassVar[dict[str, dict[str, Any]]]

    @classmethod
    def for_device(cls, device: str) -> Self:
        return cls.preset("fast-cpu" if device == "cpu" else "paper")

    @classmethod
    def preset(cls, name: str) -> Self:
        if name not in cls.presets:
            raise InvalidPlan(f"There is no preset of that name; there are {', '.join(cls.presets)}.")
        return cls(**cls.presets[name])

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
        return {name: list(x) if isinstance(x, tuple) else x for name, x in asdict(self).items()}

    @classmethod
    def from_dict(cls, body: Mapping[str, Any]) -> Self:
        known = [field.name for field in fields(cls)]
        if odd := set(body) - set(known):
            raise InvalidPlan(f"A recipe has no {', '.join(sorted(odd))}; it has {', '.join(known)}.")
        try:
            return cls(**body)
        except TypeError:
            raise InvalidPlan("The recipe has something that is no number; see the presets.") from None


def check(name: str, good: bool) -> None:
    if not good:
        raise InvalidPlan(f"{name} of the recipe is out of range; see the presets for examples.")
