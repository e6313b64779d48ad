"""Trainers: one module per method, `worker.trainers.NAME`, whose `Trainer` runs that method's plans.

`TRAINERS[plan.kind]` imports the module at first use: torch takes seconds to import, and a worker starts
without it. See `worker.trainers.base` for what a trainer does and promises.
"""

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from sluice.methods import METHODS

if TYPE_CHECKING:
    from worker.trainers.base import BaseTrainer

    Training = BaseTrainer[Any, Any]


class _Trainers(Mapping[str, "Callable[..., Training]"]):
    def __getitem__(self, name: str) -> "Callable[..., Training]":
        if name not in METHODS:
            raise KeyError(name)
        trainer: Callable[..., Training] = import_module(f"worker.trainers.{name}").Trainer
        return trainer

    def __iter__(self) -> Iterator[str]:
        return iter(METHODS)

    def __len__(self) -> int:
        return len(METHODS)


TRAINERS = _Trainers()
