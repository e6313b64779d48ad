"""The only thing said of a training while it runs."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    step: int
    steps: int
