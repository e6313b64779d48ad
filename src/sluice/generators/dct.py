"""The orthonormal cosine basis (DCT-II) of images: a public, linear change of coordinates."""

import math

import torch
from torch import Tensor


def cosines(side: int, count: int) -> Tensor:
    """The `count` lowest frequencies of a side, one orthonormal row each, in float64."""
    waves, centres = torch.arange(min(count, side))[:, None].double(), torch.arange(side) + 0.5
    rows = torch.cos(math.pi * waves * centres / side) * math.sqrt(2 / side)
    rows[0] /= math.sqrt(2)
    return rows


class LowFrequencies:
    """Images as the coefficients of their lowest `count` x `count` frequencies, channel by channel.

    The basis is orthonormal, so coefficients are never longer than the image they come from.
    """

    def __init__(
        self, channels: int, height: int, width: int, count: int, *, dtype: torch.dtype, device: str = "cpu"
    ) -> None:
        self.down, self.across = (cosines(side, count).to(device, dtype) for side in (height, width))
        self.size = channels * len(self.down) * len(self.across)

    def coefficients(self, images: Tensor) -> Tensor:
        """N, C, H, W to N, size."""
        return (self.down @ images.to(self.down.dtype) @ self.across.T).flatten(1)

    def images(self, coefficients: Tensor) -> Tensor:
        """N, size to N, C, H, W; frequencies outside the basis are zero."""
        return self.down.T @ coefficients.unflatten(1, (-1, len(self.down), len(self.across))) @ self.across
