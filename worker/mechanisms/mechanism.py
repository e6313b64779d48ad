"""One private query of a training: a sampler, a clipping bound, noise, and the event they amount to."""

import math
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from core.faults import Failure, Fault
from sluice.privacy.events import Composition, Event, Query, SlicedProjection
from worker.mechanisms.noise import GaussianNoise, Rng
from worker.mechanisms.sampling import Records


class Sampler(Protocol):
    """Draws batches of records as indices, in `steps` steps."""

    @property
    def steps(self) -> int: ...

    def draw(self, population: int, rng: Rng, step: int = 0) -> np.ndarray: ...

    # What noised functions of such batches cost; each sampler has its own facts about the function.
    @property
    def event(self) -> Any: ...


class Mechanism:
    """Draws batches, and adds noise to what a trainer computes from each of them.

    `query` describes that computation as the sampler's event does: what it is, and how far a record moves it.

    Guarantee: `event` is made from the sampler and the noise that `batches` and `release` use, so what is
    charged is what is done. Draws and releases are counted, and there are never more than `steps` of either.
    A trainer clips contributions to `clip_norm`: the event's bound, less room for rounding to the noise grid.
    """

    def __init__(self, sampler: Sampler, noise: GaussianNoise, rng: Rng, **query: Any) -> None:
        self.sampler, self.noise, self.rng = sampler, noise, rng
        self.event: Event = sampler.event(noise_stddev=noise.stddev, **query)
        self.clip_norm = clip_norm(self.event, noise)
        self.counts = torch.zeros(2, dtype=torch.int64)  # drawn, released

    @property
    def steps(self) -> int:
        return self.sampler.steps

    @property
    def drawn(self) -> int:
        return int(self.counts[0])

    @property
    def released(self) -> int:
        return int(self.counts[1])

    @property
    def finished(self) -> bool:
        return self.drawn == self.released == self.steps

    def batches(self, records: Records) -> Iterator[np.ndarray]:
        """The batches of the remaining steps, as indices. An empty batch is an ordinary batch."""
        while self.drawn < self.steps:
            yield self.draw(records)

    def draw(self, records: Records) -> np.ndarray:
        if self.drawn >= self.steps:
            raise Failure(Fault.ACCOUNTING_MISMATCH)
        self.counts[0] += 1
        return self.sampler.draw(len(records), self.rng, self.drawn - 1)

    def release(self, total: Tensor) -> Tensor:
        """The total with fresh noise."""
        if self.released >= self.steps or total.shape != (self.noise.size,):
            raise Failure(Fault.ACCOUNTING_MISMATCH)
        self.counts[1] += 1
        return self.noise.add(total, self.rng)

    def state(self) -> dict[str, Tensor]:
        return {"mechanism.counts": self.counts}


class StagedMechanism(Mechanism):
    """Mechanisms that follow one another, each with its own noise; their costs compose."""

    def __init__(self, stages: dict[str, Mechanism]) -> None:
        self.stages = stages
        self.event: Event = Composition(events=tuple(stage.event for stage in stages.values()))

    @property
    def stage(self) -> str:
        """The stage that the next release belongs to."""
        for name, mechanism in self.stages.items():
            if mechanism.released < mechanism.steps:
                return name
        raise Failure(Fault.ACCOUNTING_MISMATCH)

    @property
    def steps(self) -> int:
        return sum(stage.steps for stage in self.stages.values())

    @property
    def drawn(self) -> int:
        return sum(stage.drawn for stage in self.stages.values())

    @property
    def released(self) -> int:
        return sum(stage.released for stage in self.stages.values())

    def draw(self, records: Records) -> np.ndarray:
        return self.stages[self.stage].draw(records)

    def release(self, total: Tensor) -> Tensor:
        return self.stages[self.stage].release(total)

    def state(self) -> dict[str, Tensor]:
        return {f"mechanism.{name}.counts": stage.counts for name, stage in self.stages.items()}


def clip_norm(event: Any, noise: GaussianNoise) -> float:
    """The norm to clip to, so that rounding to the noise grid stays within the event's bound."""
    if isinstance(event, SlicedProjection):
        # Rounding moves the difference of two rows by less than the grid in each of k projections, at most
        # grid * sqrt(k) together. Rows shorter by grid * sqrt(dim) / 2 each give that back, as k projections
        # have sqrt(k / dim) of a row's length: surely on orthonormal directions, and on independent ones in
        # the means that the cost is made of. docs/guarantees.md#swd
        return noise.inner(event.row_bound, event.dim / 4)
    if event.query is Query.COUNTS:
        if noise.grid > 1:
            raise ValueError("the noise is too coarse for counts: take less")
        return float(event.bound)  # integers are on the grid already, so nothing is rounded
    rows = math.sqrt(event.rows)
    return noise.inner(event.bound * rows) / rows
