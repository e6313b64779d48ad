"""How a trainer learns, as far as that has no influence on the cost: networks, rates, schedules."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, Self

from sluice.privacy.problems import InvalidPlan


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Each plan has its own, with presets by name: `paper`, and `fast-cpu` for minutes on two cores.

    Fields are declared with their default and range by the functions below.
    """

    presets: ClassVar[dict[str, dict[str, Any]]]

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, list):
                object.__setattr__(self, item.name, value := tuple(value))
            check(item.name, "allows" not in item.metadata or item.metadata["allows"](value))

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
        """A recipe from a plan's JSON: the name of a preset, an object with its numbers, or null."""
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
        names = [item.name for item in fields(cls)]
        if unknown := sorted(set(body) - set(names)):
            raise InvalidPlan(f"A recipe has only the fields {', '.join(names)}.", given=unknown)
        try:
            return cls(**body)
        except TypeError:
            raise InvalidPlan("A value of the recipe is not a number; see the presets.") from None


def check(name: str, good: bool) -> None:
    if not good:
        raise InvalidPlan(f"{name} of the recipe is out of range; see the presets for examples.")


def _declared(default: Any, allows: Callable[[Any], bool]) -> Any:
    return field(default=default, metadata={"allows": allows})


def whole(default: int | None, *, most: int, least: int = 1, even: bool = False) -> Any:
    """A whole number; None is allowed if it is the default."""

    def allows(value: Any) -> bool:
        if value is None:
            return default is None
        return type(value) is int and least <= value <= most and not (even and value % 2)

    return _declared(default, allows)


def positive(default: float, *, most: float = 1) -> Any:
    return _declared(default, lambda value: 0 < value <= most)


def between(default: float, low: float, high: float) -> Any:
    return _declared(default, lambda value: low <= value <= high)


def decay(default: float | None, *, optional: bool = True) -> Any:
    """The weight of the past in a running average; None, if optional, for no average."""
    return _declared(default, lambda value: (optional and value is None) or 0 <= value < 1)


def betas(*default: float) -> Any:
    """The two decays of Adam."""
    return _declared(default, lambda value: len(value) == 2 and all(0 <= beta < 1 for beta in value))


def one_of(*names: str) -> Any:
    """One of these names; the first is the default."""
    return _declared(names[0], lambda value: value in names)
