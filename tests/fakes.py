"""Small stand-ins for what is slow, random or far away."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# Networks of tests are small: more threads would wait for each other longer than they work.
torch.set_num_threads(1)


class SeededRng:
    """Randomness that repeats. It lives here: production randomness cannot be seeded."""

    def __init__(self, seed: int = 0) -> None:
        self.source = np.random.default_rng(seed)

    def words(self, count: int) -> np.ndarray:
        return self.source.integers(0, 2**64, count, dtype=np.uint64)

    def normals(self, count: int) -> Tensor:
        return torch.from_numpy(self.source.standard_normal(count))


@dataclass(repr=False)
class ImageRows:
    """Records in memory, with the reading side of the real thing."""

    images: Tensor
    labels: Tensor

    @classmethod
    def random(cls, count: int, shape: tuple[int, int, int] = (1, 8, 8), classes: int = 3) -> "ImageRows":
        source = torch.Generator().manual_seed(count)
        images = torch.rand(count, *shape, generator=source) * 2 - 1
        return cls(images, torch.randint(classes, (count,), generator=source))

    def __len__(self) -> int:
        return len(self.images)

    def take(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        chosen = torch.from_numpy(indices)
        return self.images[chosen], self.labels[chosen]


class FixedSampler:
    """Draws the given batches, one per step; the last one again after that."""

    def __init__(self, *batches: np.ndarray, steps: int) -> None:
        self.batches, self.steps = batches, steps

    def draw(self, population: int, rng: object, step: int = 0) -> np.ndarray:
        del population, rng
        return self.batches[min(step, len(self.batches) - 1)]
