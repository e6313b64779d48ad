"""Random numbers from a cryptographic stream, and Gaussian noise made of them."""

import math
import os
from dataclasses import dataclass
from typing import NoReturn, Protocol

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor

# Bytes drawn under one key, far below what would distinguish AES in counter mode from random.
KEY_LIFETIME = 2**36
# Numbers per call: fits the second-level cache, and amortises the call.
CHUNK = 2**15
# Grid cells per standard deviation, as a power of two: fine enough to leave the privacy loss unchanged, and
# so much coarser than float64 that a cell holds about 2^28 of its values.
GRID_BITS = 24

_forks = 0


def _forked() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_forked)


class Rng(Protocol):
    """The source of every random number of a mechanism."""

    def words(self, count: int) -> np.ndarray:
        """Independent uniform 64-bit words, as uint64."""
        ...

    def normals(self, count: int) -> Tensor:
        """Independent standard normals, as float64."""
        ...


class SecureRng:
    """AES-256 in counter mode, under a key that the operating system draws at first use.

    It cannot be seeded, copied or stored, and a forked child draws its own key.
    """

    def __init__(self) -> None:
        self._born: tuple[int, int] | None = None
        self._left = 0

    def __reduce__(self) -> NoReturn:
        raise TypeError("a SecureRng cannot be copied or stored")

    def words(self, count: int) -> np.ndarray:
        here, size = (os.getpid(), _forks), 8 * count
        if self._born != here or self._left < size:
            self._stream = Cipher(algorithms.AES(os.urandom(32)), modes.CTR(bytes(16))).encryptor()
            self._born, self._left = here, KEY_LIFETIME
        self._left -= size
        out = bytearray(size)
        self._stream.update_into(bytes(size), out)
        return np.frombuffer(out, dtype=np.uint64)

    def normals(self, count: int) -> Tensor:
        """Box-Muller, two normals from two words; tails reach 9.4 standard deviations."""
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
    """Noise of `stddev` on a vector of `size` numbers.

    Guarantee: a noised total is a function of round(total / grid) + round(normal * stddev / grid), a sum of
    integers that is exact in float64. The total only shifts the set of possible values, so low bits reveal
    nothing. Rounding moves a total by less than grid / 2 in each coordinate: records are clipped to
    `inner(clip_norm)`, which leaves room for that, and the sensitivity of what is noised is then at most
    clip_norm. docs/guarantees.md#floating-point
    """

    stddev: float
    size: int

    @property
    def grid(self) -> float:
        return 2.0 ** (math.floor(math.log2(self.stddev)) - GRID_BITS)

    def inner(self, clip_norm: float, coordinates: float | None = None) -> float:
        """The norm to clip to, so that rounding `coordinates` (all, by default) stays within `clip_norm`."""
        inner = clip_norm - self.grid * math.sqrt(self.size if coordinates is None else coordinates)
        if inner <= clip_norm / 2:
            raise ValueError("the noise is too coarse for vectors of this length: raise the clip norm")
        return inner

    def add(self, total: Tensor, rng: Rng) -> Tensor:
        """The total with fresh noise, in float64 on the total's device."""
        noisy = torch.empty(self.size, dtype=torch.float64)
        for part, out in zip(total.detach().cpu().split(CHUNK), noisy.split(CHUNK), strict=True):
            cells = part.double().div(self.grid).round_()
            noise = rng.normals(len(part)).mul_(self.stddev / self.grid).round_()
            torch.add(cells, noise, out=out).mul_(self.grid)
        return noisy.to(total.device)
