"""Atlas generator: each class is a mixture of Gaussians (charts) over cosine coefficients and poses."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sluice.generators.architecture import Architecture, UnfitSynthesizer
from sluice.generators.dct import cosines

# The default width and height of the brightness of an image, in halves of its sides, and what is added to
# both, so that a single dot and a blank image have a size.
TYPICAL, LEAST = 0.36, 0.07
# How far an image moves, per pixel, if one of the five numbers of its pose changes by one.
WEIGHTS = (2.0, 2.0, 0.5, 0.6, 0.5)
# The largest difference, in each number, of a pose from the usual pose of its class.
FURTHEST = 1.5
# Pixels and cosines are multiplied as multiples of this. Sums of such products stay below 2^53 for images of
# up to 64 pixels a side, so in float64 they are exact and independent of order.
UNIT = 2.0**-20


def on_grid(numbers: Tensor, unit: float = UNIT) -> Tensor:
    """Rounded to multiples of a unit, which is a power of two."""
    return numbers.double().div(unit).round_().mul_(unit)


def elementwise(function: Callable[[float], float], numbers: Tensor) -> Tensor:
    """Applies a function to one number at a time: vectorised code may round by position in the tensor."""
    return numbers.cpu().clone().apply_(function).to(numbers.device)


@cache
def low_frequencies(height: int, width: int, frequencies: int) -> Tensor:
    """The orthonormal cosines of an image below a frequency, one per row, lowest first."""
    down, across = cosines(height, height), cosines(width, width)
    pairs = sorted(
        (u * u + v * v, u, v)
        for u in range(height)
        for v in range(width)
        if u * u + v * v < frequencies * frequencies
    )
    return torch.stack([torch.outer(down[u], across[v]).flatten() for _, u, v in pairs]).float()


class Cosines:
    """Images, from 0 to 1, as vectors of their low frequencies, channel after channel, and back."""

    def __init__(self, channels: int, height: int, width: int, frequencies: int) -> None:
        self.shape, self.rows = (channels, height, width), low_frequencies(height, width, frequencies)
        self.size = channels * len(self.rows)

    def of(self, images: Tensor) -> Tensor:
        """Guarantee: the vector of an image does not depend on the rest of the batch, to the last bit."""
        return (on_grid(images).flatten(2) @ on_grid(self.rows).to(images.device).T).flatten(1)

    def pixels(self, vectors: Tensor) -> Tensor:
        """The sum of the cosines, which may lie below 0 and above 1."""
        pixels = vectors.unflatten(1, (self.shape[0], -1)) @ self.rows.to(vectors.device)
        return pixels.unflatten(2, self.shape[1:])


class Poses:
    """The position, width, slant and height of the brightness of an image: five numbers.

    A pose maps a frame to the image: across = p0 + exp(p2) x + p3 y, down = p1 + exp(p4) y, in halves of the
    sides from the middle, such that brightness has `TYPICAL` spread in the frame in every direction.
    """

    size: ClassVar[int] = len(WEIGHTS)

    def __init__(self, channels: int, height: int, width: int) -> None:
        self.shape = (channels, height, width)
        self.weights = torch.tensor(WEIGHTS) * math.sqrt(channels * height * width)

    def coordinates(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The coordinates of the pixels, across and down."""
        _, height, width = self.shape
        down, across = (((2 * torch.arange(side) + 1) / side - 1).to(device) for side in (height, width))
        return across[None, None, :], down[None, :, None]

    def moments(self, images: Tensor) -> Tensor:
        """Sums of brightness times 1, x, y, xx, xy, yy: exact, as coordinates are multiples of 1 / side."""
        _, height, width = self.shape
        down, across = (2 * torch.arange(side).double() + 1 - side for side in (height, width))
        x, y = (grid.flatten() for grid in torch.meshgrid(across, down, indexing="xy"))
        powers = torch.stack([torch.ones_like(x), x, y, x * x, x * y, y * y], 1).to(images.device)
        sides = [1, width, height, width * width, width * height, height * height]
        return on_grid(images).sum(1).flatten(1) @ powers / torch.tensor(sides, device=images.device)

    def of(self, images: Tensor) -> Tensor:
        """Of images from 0 to 1, one row per image.

        Guarantee: the pose of an image does not depend on the rest of the batch, to the last bit.
        """
        bright, sx, sy, sxx, sxy, syy = self.moments(images).unbind(1)
        most = bright + 1e-3 * self.shape[0]
        x, y = sx / most, sy / most
        wide, high = (
            (squares - 2 * mean * sums + mean * mean * bright) / most + LEAST**2
            for squares, sums, mean in ((sxx, sx, x), (syy, sy, y))
        )
        high = elementwise(math.sqrt, high)
        slant = (sxy - x * sy - y * sx + x * y * bright) / most / high
        wide = elementwise(math.sqrt, (wide - slant * slant).clamp(min=LEAST**2 / 2))
        wide, high = (elementwise(math.log, size / TYPICAL) for size in (wide, high))
        return torch.stack([x, y, wide, slant / TYPICAL, high], 1)

    def moved(self, images: Tensor, old: Tensor, new: Tensor) -> Tensor:
        """Images that had the old pose, in the new one. What comes from outside the image is black."""
        across, down = self.coordinates(images.device)
        old, new = old.to(images.dtype), new.to(images.dtype)
        x, y, wide, slant, high = (number[:, None, None] for number in new.unbind(1))
        framed = (down - y) / elementwise(math.exp, high)
        across, down = (across - x - slant * framed) / elementwise(math.exp, wide), framed
        x, y, wide, slant, high = (number[:, None, None] for number in old.unbind(1))
        across = x + elementwise(math.exp, wide) * across + slant * down
        down = (y + elementwise(math.exp, high) * down).expand_as(across)
        # grid_sample handles images one by one, so none depends on another.
        return F.grid_sample(images, torch.stack([across, down], -1), align_corners=False)


@dataclass(frozen=True, kw_only=True)
class Atlas(Architecture):
    """`charts` to a class, each with `axes`."""

    kind: ClassVar[str] = "conditional-atlas"
    limits: ClassVar[dict[str, tuple[int, int]]] = {
        "frequencies": (1, 64),
        "axes": (1, 1024),
        "charts": (1, 1000),
    }

    frequencies: int = 16
    axes: int = 60
    charts: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.axes > self.size or self.latent != self.size + 1:
            raise UnfitSynthesizer("axes are at most the coordinates, and latents are one more than these")

    @classmethod
    def fitting(cls, **sizes: int) -> Self:
        """With at most as many axes as coordinates, and the number of latents that this needs."""
        cosines = Cosines(*(sizes[name] for name in ("channels", "height", "width", "frequencies")))
        size = cosines.size + Poses.size
        return cls(**{**sizes, "axes": min(sizes["axes"], size), "latent": size + 1})

    @property
    def cosines(self) -> Cosines:
        return Cosines(self.channels, self.height, self.width, self.frequencies)

    @property
    def poses(self) -> Poses:
        return Poses(self.channels, self.height, self.width)

    @property
    def size(self) -> int:
        """Coordinates of an image: cosines and pose."""
        return self.cosines.size + Poses.size

    def network(self) -> "AtlasNetwork":
        return AtlasNetwork(self)


class AtlasNetwork(nn.Module):
    """Images in [-1, 1], each from its own latent and label.

    A chart is a centre and a covariance factor in the first `axes` directions of all coordinates; in other
    directions images deviate from the class mean by `strays`.
    """

    def __init__(self, shape: Atlas) -> None:
        super().__init__()
        self.shape, self.cosines, self.posing = shape, shape.cosines, shape.poses
        charts = (shape.classes, shape.charts)

        def zeros(*sizes: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(*sizes), requires_grad=False)

        self.poses = zeros(shape.classes, Poses.size)
        self.means = zeros(shape.classes, shape.size)
        self.directions = zeros(shape.size, shape.size)
        self.strays = zeros(shape.size - shape.axes)
        self.weights = zeros(*charts)
        self.centres = zeros(*charts, shape.axes)
        self.factors = zeros(*charts, shape.axes, shape.axes)

    def forward(self, latents: Tensor, labels: Tensor) -> Tensor:
        choice, position, stray = latents.split([1, self.shape.axes, len(self.strays)], 1)
        bounds = self.weights[labels].cumsum(1)
        chart = (torch.special.ndtr(choice) * bounds[:, -1:] > bounds).sum(1).clamp(max=self.shape.charts - 1)
        spread = torch.einsum("nij,nj->ni", self.factors[labels, chart], position)
        steps = torch.cat([self.centres[labels, chart] + spread, stray * self.strays], 1)
        vectors = self.means[labels] + steps @ self.directions.T
        upright, turned = vectors.split([self.cosines.size, Poses.size], 1)
        usual = self.poses[labels]
        turned = usual + (turned / self.posing.weights.to(turned.device)).clamp(-FURTHEST, FURTHEST)
        images = self.posing.moved(self.cosines.pixels(upright), usual, turned)
        return images.clamp(0, 1) * 2 - 1
