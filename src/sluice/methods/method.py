"""The description of a method, the one place for its facts: service, commands and benches read it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from sluice.methods.base import SIDES, Plan, Target

Options = dict[str, Any]


class Output(StrEnum):
    """What a training ends with, and so what a release of it holds."""

    SAMPLES = "samples"
    CLASSIFIER = "classifier"


@dataclass(frozen=True, kw_only=True)
class PublicFacts:
    """What a curator declared about a dataset. Nothing here is measured on the records."""

    kind: str  # "image" or "table"
    records: int
    height: int = 0
    width: int = 0
    channels: int = 0
    classes: int = 0

    @classmethod
    def of(cls, schema: Mapping[str, Any], records: int) -> "PublicFacts":
        """From a dataset's declared schema and record count."""
        if schema.get("kind") != "image":
            return cls(kind=schema.get("kind", ""), records=records)
        sizes = {name: schema[name] for name in ("height", "width", "channels")}
        return cls(kind="image", records=records, classes=len(schema["classes"]), **sizes)


def no_reason(facts: PublicFacts, target: Target, device: str) -> str:
    del facts, target, device
    return "the only method for such a training"


@dataclass(frozen=True, kw_only=True)
class Method:
    """One method. Each module of this package that has a `METHOD` is found by `sluice.methods.METHODS`.

    The plan turns numbers into an event and knows the recipe and the formula of the paper. `defaults` gives
    the options that `sluice train` and POST /v1/jobs use for a dataset; `paper` those of the paper. Without a
    method in the request, the one with the lowest `rank` among those that fit is used, and `why` says why.
    """

    plan: type[Plan]
    description: str
    defaults: Callable[[PublicFacts, Target], Options]
    paper: Options = field(default_factory=dict)
    sides: range = SIDES  # of images that it can learn; empty for none
    channels: frozenset[int] = frozenset([1, 3])
    tables: bool = False
    needs_source: bool = False  # a public dataset with labels, beside the private one
    can_relay: bool = False  # whether a job on another dataset can continue from its generator
    makes: Output = Output.SAMPLES
    rank: int = 100
    why: Callable[[PublicFacts, Target, str], str] = no_reason

    @property
    def name(self) -> str:
        return self.plan.kind

    def can_learn(self, facts: PublicFacts) -> bool:
        if facts.kind == "table":
            return self.tables
        fits = facts.height in self.sides and facts.width in self.sides and facts.channels in self.channels
        return facts.kind == "image" and fits

    @property
    def learns(self) -> str:
        """What it can learn, in words."""
        images = f"images with sides of {self.sides[0]} to {self.sides[-1]} pixels" if self.sides else ""
        return " and ".join(filter(None, [images, "tables" if self.tables else ""]))
