"""Samplers: which records are in a batch, and the event that noisy releases of such batches amount to."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor

from core.schema import ImageSchema
from sluice.privacy.events import Gaussian, Geometry, PoissonGaussian, Query, Rotation, SlicedProjection
from worker.mechanisms.noise import Rng

# Records sampled at a time, to bound the memory.
CHUNK = 2**20
# Index of a row without a record.
BLANK = -1


class Records(Protocol):
    """Private records as trainers see them."""

    schema: ImageSchema

    def __len__(self) -> int: ...

    def take(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        """Images, float32 in [-1, 1] as N, C, H, W, and their labels; empty for no index."""
        ...


@dataclass(frozen=True, kw_only=True)
class PoissonSampling:
    """Every record by itself, in every step, with probability `prob`.

    Guarantee: a record is in when its own uniform 64-bit word is below floor(prob * 2^64), so it is in with
    exactly prob for prob >= 2^-12, and otherwise with at most 2^-64 less: never more often than charged. The
    records drawn are independent of each other and of the past. No one drawn is an ordinary batch.
    """

    prob: float
    steps: int

    def draw(self, population: int, rng: Rng, step: int = 0) -> np.ndarray:
        del step
        numerator, denominator = self.prob.as_integer_ratio()
        threshold = (numerator << 64) // denominator
        if threshold >= 1 << 64:
            return np.arange(population)
        parts = [
            start + np.flatnonzero(rng.words(min(CHUNK, population - start)) < np.uint64(threshold))
            for start in range(0, population, CHUNK)
        ]
        return np.concatenate(parts) if parts else np.arange(0)

    def event(self, *, query: Query, bound: float, noise_stddev: float, rows: int = 1) -> PoissonGaussian:
        """What a Gaussian release of these batches costs."""
        return PoissonGaussian(
            query=query,
            bound=bound,
            rows=rows,
            noise_stddev=noise_stddev,
            steps=self.steps,
            sampling_prob=self.prob,
        )


@dataclass(frozen=True, kw_only=True)
class WithoutReplacement:
    """Batches of exactly `batch` of at least `population` rows, afresh in every step.

    `population` is the public number that the cost was computed with. Where there are fewer records, blank
    rows (index -1) stand in for the missing, so the size of a batch says nothing; where there are more, the
    draw is over all of them. Nothing fails for having few records. docs/guarantees.md#swd

    Guarantee: every sequence of `batch` different rows is equally likely. Rows are drawn one after the other,
    uniformly by rejection, and one that was drawn already is passed over.
    """

    batch: int
    population: int
    steps: int

    def draw(self, population: int, rng: Rng, step: int = 0) -> np.ndarray:
        del step
        slots = max(population, self.population)
        # Leaving out few is quicker than picking many.
        picked = distinct(min(self.batch, slots - self.batch), slots, rng)
        if self.batch > slots - self.batch:
            kept = np.ones(slots, dtype=bool)
            kept[picked] = False
            picked = np.flatnonzero(kept)
            picked = picked[np.argsort(rng.words(len(picked)))]
        return np.where(picked < population, picked, BLANK)

    def event(
        self, *, geometry: Geometry, directions: int, dim: int, row_bound: float, noise_stddev: float
    ) -> SlicedProjection:
        """What noisy projections of these batches cost."""
        return SlicedProjection(
            geometry=geometry,
            directions=directions,
            dim=dim,
            row_bound=row_bound,
            records=self.population,
            batch=self.batch,
            noise_stddev=noise_stddev,
            steps=self.steps,
        )


@dataclass(frozen=True, kw_only=True)
class EveryRecord:
    """All records in every step: nothing is random, and there is no amplification by sampling."""

    steps: int = 1

    def draw(self, population: int, rng: Rng, step: int = 0) -> np.ndarray:
        del rng, step
        return np.arange(population)

    def event(self, *, query: Query, bound: float, noise_stddev: float, rows: int = 1) -> Gaussian:
        """What a Gaussian release of all records costs."""
        return Gaussian(query=query, bound=bound, rows=rows, noise_stddev=noise_stddev, steps=self.steps)


@dataclass(frozen=True, kw_only=True)
class PartRotation:
    """Disjoint parts of the records, `panel` of them in a step, in a fixed public order that starts over.

    A step draws `batch` rows of each of its parts, with replacement: panel, batch as indices. A part without
    records gives blank rows (index -1).

    Guarantee: the part of a record is AES of its index under `key`, modulo `parts`: every record is in one
    of them, and who else is in the data has no say in which. A step has rows of its panel's parts alone, each
    row independently and exactly uniformly one of the part's records, wherever these stand. So the records of
    each batch have the same law in whatever order the dataset is. docs/guarantees.md#gswgan
    """

    parts: int
    panel: int
    batch: int
    steps: int
    key: bytes = field(repr=False)
    _members: dict[int, tuple[np.ndarray, np.ndarray]] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    @property
    def panels(self) -> int:
        return self.parts // self.panel

    def turn(self, step: int) -> range:
        """The parts that answer in a step, counted from 0."""
        first = step % self.panels * self.panel
        return range(first, first + self.panel)

    def part_of(self, population: int) -> np.ndarray:
        stream = Cipher(algorithms.AES(self.key), modes.CTR(bytes(16))).encryptor()
        blocks = [stream.update(bytes(16 * len(some))) for some in chunks(population)]
        words = np.frombuffer(b"".join(blocks), dtype=np.uint64)[::2]
        return (words % np.uint64(self.parts)).astype(np.int64)

    def members(self, population: int) -> tuple[np.ndarray, np.ndarray]:
        """Records in the order of their parts, and where each part starts in that order."""
        if population not in self._members:
            part_of = self.part_of(population)
            order = np.argsort(part_of, kind="stable")
            self._members[population] = order, np.searchsorted(part_of[order], np.arange(self.parts + 1))
        return self._members[population]

    def draw(self, population: int, rng: Rng, step: int = 0) -> np.ndarray:
        (members, starts), turn = self.members(population), self.turn(step)
        first, sizes = starts[turn], starts[1:][turn] - starts[turn]
        among = np.repeat(np.maximum(sizes, 1).astype(np.uint64), self.batch)
        words = rng.words(len(among))
        # Words below 2^64 modulo the size would favour the records that come first: they are drawn again.
        favoured = (np.uint64(0) - among) % among
        while (again := words < favoured).any():
            words[again] = rng.words(int(again.sum()))
        index = first[:, None] + (words % among).astype(np.int64).reshape(self.panel, self.batch)
        return np.where(sizes[:, None] > 0, np.append(members, BLANK)[np.minimum(index, len(members))], BLANK)

    def event(self, *, query: Query, bound: float, noise_stddev: float, rows: int = 1) -> Rotation:
        """What noisy answers of these panels cost."""
        return Rotation(
            query=query,
            bound=bound,
            rows=rows,
            noise_stddev=noise_stddev,
            steps=self.steps,
            parts=self.panels,
        )


def chunks(count: int) -> Iterator[range]:
    return (range(start, min(start + CHUNK, count)) for start in range(0, count, CHUNK))


def uniform(count: int, below: int, rng: Rng) -> np.ndarray:
    """Independent whole numbers below `below`, each exactly as likely as any other."""
    fair = (1 << 64) // below * below  # words from here on would favour small remainders
    kept: list[np.ndarray] = []
    while (missing := count - sum(map(len, kept))) > 0:
        words = rng.words(missing)
        kept.append(words if fair == 1 << 64 else words[words < np.uint64(fair)])
    return (np.concatenate([np.arange(0, dtype=np.uint64), *kept]) % np.uint64(below)).astype(np.int64)


def distinct(count: int, below: int, rng: Rng) -> np.ndarray:
    """The first `count` different numbers of a uniform sequence: a uniform set, in the order drawn."""
    seen = np.arange(0)
    while len(seen) < count:
        longer = np.concatenate([seen, uniform(count - len(seen), below, rng)])
        seen = longer[np.sort(np.unique(longer, return_index=True)[1])]
    return seen
