"""Who is in a batch: draws at the rate that was paid for, counted, and the event they amount to."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor

from core.faults import Failure, Fault
from sluice.privacy.events import Gaussian, Geometry, PoissonGaussian, Query, Rotation, SlicedProjection
from worker.mechanisms.noise import Rng

# Records looked at in one go, so that ten million of them need no more memory than one million.
CHUNK = 2**20
BLANK = -1


class Rows(Protocol):
    """Private records as mechanisms see them: how many, and some of them by index."""

    def __len__(self) -> int: ...

    def take(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        """Images, float32 in [-1, 1] as N, C, H, W, and their labels; none of either for no index."""
        ...


@dataclass
class Draws:
    """The batches of one training, as indices. Ends after the planned ones; asking for more is a fault."""

    steps: int
    _draw: Callable[[], np.ndarray] = field(repr=False)
    drawn: int

    def __iter__(self) -> Iterator[np.ndarray]:
        while self.drawn < self.steps:
            yield self.draw()

    def draw(self) -> np.ndarray:
        if self.drawn >= self.steps:
            raise Failure(Fault.ACCOUNTING_MISMATCH)
        self.drawn += 1
        return self._draw()


@dataclass(frozen=True, kw_only=True)
class PoissonSampling:
    """Every record by itself, in every step, with probability `prob`.

    Guarantee: a record is in when its own uniform 64-bit word is below floor(prob * 2^64), so it is in with
    exactly prob for prob >= 2^-12, and otherwise with at most 2^-64 less: never more often than charged. The
    records drawn are independent of each other and of the past. No one drawn is an ordinary batch.
    """

    prob: float
    steps: int

    def batches(self, records: Rows, rng: Rng, *, drawn: int = 0) -> Draws:
        """Counts its draws; `drawn` of them were made before, by an attempt this one continues."""
        return Draws(self.steps, lambda: self.draw(len(records), rng), drawn)

    def draw(self, population: int, rng: Rng) -> np.ndarray:
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

    def batches(self, records: Rows, rng: Rng, *, drawn: int = 0) -> Draws:
        """Counts its draws; `drawn` of them were made before, by an attempt this one continues."""
        return Draws(self.steps, lambda: self.draw(len(records), rng), drawn)

    def draw(self, population: int, rng: Rng) -> np.ndarray:
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
    """All records, in every step. Nothing is drawn, so nothing is random and nothing is amplified."""

    steps: int = 1

    def batches(self, records: Rows, *, drawn: int = 0) -> Draws:
        """Counts its draws; `drawn` of them were made before, by an attempt this one continues."""
        return Draws(self.steps, lambda: np.arange(len(records)), drawn)

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

    def batches(self, records: Rows, rng: Rng, *, drawn: int = 0) -> Draws:
        """Counts its draws; `drawn` of them were made before, by an attempt this one continues."""
        part_of = self.part_of(len(records))
        members = np.argsort(part_of, kind="stable")
        starts = np.searchsorted(part_of[members], np.arange(self.parts + 1))
        draws = Draws(self.steps, lambda: self.draw(members, starts, draws.drawn - 1, rng), drawn)
        return draws

    def draw(self, members: np.ndarray, starts: np.ndarray, step: int, rng: Rng) -> np.ndarray:
        turn = self.turn(step)
        first, sizes = starts[turn], starts[1:][turn] - starts[turn]
        among = np.repeat(np.maximum(sizes, 1).astype(np.uint64), self.batch)
        words = rng.words(len(among))
        # 2^64 modulo the size; words below it would favour the records that stand first.
        odd = (np.uint64(0) - among) % among
        while (again := words < odd).any():
            words[again] = rng.words(int(again.sum()))
        places = first[:, None] + (words % among).astype(np.int64).reshape(self.panel, self.batch)
        blank = np.append(members, BLANK)
        return np.where(sizes[:, None] > 0, blank[np.minimum(places, len(members))], BLANK)

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
