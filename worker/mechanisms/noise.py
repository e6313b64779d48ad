"""Randomness from a cryptographic stream, and the Gaussian noise that makes a sum releasable."""

import math
import os
from dataclasses import dataclass, field
from typing import NoReturn, Protocol

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor

from core.faults import Failure, Fault

# Bytes under one key: far from where AES in counter mode could be told from random.
KEY_LIFETIME = 2**36
# Small enough for the second-level cache, large enough to hide the calls.
CHUNK = 2**15
# Cells of noise to a standard deviation, as a power of two: fine enough to cost nothing, and so much coarser
# than float64 that a cell holds about 2^28 of its values.
GRID_BITS = 24

_forks = 0


def _forked() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_forked)


class Rng(Protocol):
    """Where every random number of a mechanism comes from."""

    def words(self, count: int) -> np.ndarray:
        """Independent uniform 64-bit words, as uint64."""
        ...

    def normals(self, count: int) -> Tensor:
        """Independent standard normals, as float64."""
        ...


class SecureRng:
    """AES-256 in counter mode under a key of the operating system's, drawn where it is first used.

    Nobody can seed it, copy it or store it, and a forked child draws a key of its own.
    """

    def __init__(self) -> None:
        self._born: tuple[int, int] | None = None
        self._left = 0

    def __reduce__(self) -> NoReturn:
        raise TypeError("randomness is drawn where it is used; it is not copied or stored")

    def words(self, count: int) -> np.ndarray:
        here, size = (os.getpid(), _forks), 8 * count
        if self._born != here or self._left < size:
            self._stream = Cipher(algorithms.AES(os.urandom(32)), modes.CTR(bytes(16))).encryptor()
            self._born, self._left = here, KEY_LIFETIME
        self._left -= size
        out = np.empty(size, dtype=np.uint8)
        self._stream.update_into(bytes(size), out)
        return out.view(np.uint64)

    def normals(self, count: int) -> Tensor:
        """Box and Muller, two normals from two words; tails reach 9.4 standard deviations."""
        out = torch.empty(count + count % 2, dtype=torch.float64)
        for pairs in out.split(CHUNK):
            signed = torch.from_numpy(self.words(len(pairs)).view(np.int64)).double()
            first, second = signed.chunk(2)
            radius = first.abs_().mul_(2.0**-63).add_(2.0**-64).log_().mul_(-2).sqrt_()
            angle = second.mul_(math.pi * 2.0**-63)
            torch.mul(radius, angle.cos(), out=pairs[: len(radius)])
            torch.mul(radius, angle.sin_(), out=pairs[len(radius) :])
        return out[:count]


@dataclass(frozen=True, kw_only=True)
class GaussianNoise:
    """Noise of `stddev` on a vector of `size` numbers, `steps` times.

    Guarantee: a release is a function of round(total / grid) + round(normal * stddev / grid), a sum of whole
    numbers that is exact in float64. What it can be does not depend on the total except by a shift, so the
    low bits of a release say nothing. Rounding moves a total by less than grid / 2 in each coordinate:
    records are clipped to `inner(clip_norm)`, which leaves room for that, and the sensitivity of what is
    noised is then at most clip_norm. docs/guarantees.md#floating-point
    """

    stddev: float
    size: int
    steps: int

    @property
    def grid(self) -> float:
        return 2.0 ** (math.floor(math.log2(self.stddev)) - GRID_BITS)

    def inner(self, clip_norm: float) -> float:
        """The norm to clip to, so that rounding to the grid stays within `clip_norm`."""
        inner = clip_norm - self.grid * math.sqrt(self.size)
        if inner <= clip_norm / 2:
            raise ValueError("the noise is too coarse for so many parameters: raise the clip norm")
        return inner

    def releases(self, rng: Rng, *, made: int = 0) -> "Releases":
        """Counts its releases; `made` of them were made before, by an attempt this one continues."""
        return Releases(self, rng, made)


@dataclass
class Releases:
    """The noise of one training: one draw for each logical step, and no more than planned."""

    noise: GaussianNoise
    rng: Rng = field(repr=False)
    made: int

    def release(self, total: Tensor) -> Tensor:
        """The total with its noise. Never without: every call draws afresh."""
        if self.made >= self.noise.steps or total.shape != (self.noise.size,):
            raise Failure(Fault.ACCOUNTING_MISMATCH)
        self.made += 1
        grid, stddev = self.noise.grid, self.noise.stddev
        noisy = torch.empty(self.noise.size, dtype=torch.float64)
        for part, out in zip(total.detach().cpu().split(CHUNK), noisy.split(CHUNK), strict=True):
            cells = part.double().div(grid).round_()
            torch.add(cells, self.rng.normals(len(part)).mul_(stddev / grid).round_(), out=out).mul_(grid)
        return noisy.to(total.device)
