"""An atlas of every class: charts to draw images from, each set upright and put back into a pose."""

import math
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from worker.synthesizers.architecture import Architecture, UnfitSynthesizer

# How wide and high an image is taken to be if nothing else is known, in halves of its sides, and how much
# wider each is made, so that a dot and a blank have a size.
TYPICAL, LEAST = 0.36, 0.07
# How far images differ that are moved, widened, slanted or heightened by one, if their pixels are from 0 to 1
# and as many as one.
WEIGHTS = (2.0, 2.0, 0.5, 0.6, 0.5)
# A pose is further from that of its class in no number.
FURTHEST = 1.5


@cache
def cosines(height: int, width: int, frequencies: int) -> Tensor:
    """The slowest orthonormal cosines of an image, one to a row, slow ones first."""

    def along(size: int) -> Tensor:
        waves, places = torch.arange(size)[:, None].double(), torch.arange(size) + 0.5
        found = torch.cos(math.pi * waves * places / size) * math.sqrt(2 / size)
        found[0] /= math.sqrt(2)
        return found

    down, across = along(height), along(width)
    pairs = sorted(
        (u * u + v * v, u, v)
        for u in range(height)
        for v in range(width)
        if u * u + v * v < frequencies * frequencies
    )
    return torch.stack([torch.outer(down[u], across[v]).flatten() for _, u, v in pairs]).float()


class Cosines:
    """Images, from 0 to 1, as vectors of their slow cosines, channel after channel, and back."""

    def __init__(self, channels: int, height: int, width: int, frequencies: int) -> None:
        self.shape, self.rows = (channels, height, width), cosines(height, width, frequencies)
        self.size = channels * len(self.rows)

    def of(self, images: Tensor) -> Tensor:
        return (images.flatten(2) @ self.rows.to(images.device).T).flatten(1)

    def pixels(self, vectors: Tensor) -> Tensor:
        """What the cosines add up to, which may be darker than black and brighter than white."""
        pixels = vectors.unflatten(1, (self.shape[0], -1)) @ self.rows.to(vectors.device)
        return pixels.unflatten(2, self.shape[1:])


class Poses:
    """How the brightness of an image lies: where, how wide, how slanted and how high; five numbers.

    A pose maps a frame to the image: across = p0 + exp(p2) x + p3 y, down = p1 + exp(p4) y, in halves of the
    sides from the middle, such that brightness has `TYPICAL` spread in the frame in every direction.
    """

    size: ClassVar[int] = len(WEIGHTS)

    def __init__(self, channels: int, height: int, width: int) -> None:
        self.shape = (channels, height, width)
        self.weights = torch.tensor(WEIGHTS) * math.sqrt(channels * height * width)

    def places(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Where the pixels are, across and down."""
        _, height, width = self.shape
        down, across = (((2 * torch.arange(side) + 1) / side - 1).to(device) for side in (height, width))
        return across[None, None, :].expand(1, height, width), down[None, :, None].expand(1, height, width)

    def of(self, images: Tensor) -> Tensor:
        """Of images from 0 to 1; one row for each."""
        bright, (across, down) = images.mean(1), self.places(images.device)

        def mean(of: Tensor) -> Tensor:
            return (bright * of).sum((1, 2), keepdim=True) / (bright.sum((1, 2), keepdim=True) + 1e-3)

        x, y = mean(across), mean(down)
        wide, high = (mean((at - to) ** 2) + LEAST**2 for at, to in ((across, x), (down, y)))
        slant = mean((across - x) * (down - y)) / high.sqrt()
        wide = (wide - slant**2).clamp(min=LEAST**2 / 2).sqrt()
        found = x, y, (wide / TYPICAL).log(), slant / TYPICAL, (high.sqrt() / TYPICAL).log()
        return torch.cat(found, 1)[..., 0]

    def moved(self, images: Tensor, old: Tensor, new: Tensor) -> Tensor:
        """Images that had the old pose, in the new one. What was outside is black."""
        across, down = self.places(images.device)
        x, y, wide, slant, high = (number[:, None, None] for number in new.unbind(1))
        framed = (down - y) / high.exp()
        across, down = (across - x - slant * framed) / wide.exp(), framed
        x, y, wide, slant, high = (number[:, None, None] for number in old.unbind(1))
        across, down = x + wide.exp() * across + slant * down, y + high.exp() * down
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
            raise UnfitSynthesizer("axes are no more than coordinates, and latents one more than these")

    @classmethod
    def fitting(cls, **sizes: int) -> Self:
        """With as many axes as there can be, and as many latents as are needed."""
        slow = Cosines(*(sizes[name] for name in ("channels", "height", "width", "frequencies")))
        size = slow.size + Poses.size
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

    A chart is a centre and a factor in the first `axes` directions of all coordinates; in the other
    directions an image strays from its class by `strays`.
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
        which, place, stray = latents.split([1, self.shape.axes, len(self.strays)], 1)
        bounds = self.weights[labels].cumsum(1)
        chart = (torch.special.ndtr(which) * bounds[:, -1:] > bounds).sum(1).clamp(max=self.shape.charts - 1)
        spread = torch.einsum("nij,nj->ni", self.factors[labels, chart], place)
        steps = torch.cat([self.centres[labels, chart] + spread, stray * self.strays], 1)
        vectors = self.means[labels] + steps @ self.directions.T
        upright, turned = vectors.split([self.cosines.size, Poses.size], 1)
        usual = self.poses[labels]
        turned = usual + (turned / self.posing.weights.to(turned.device)).clamp(-FURTHEST, FURTHEST)
        images = self.posing.moved(self.cosines.pixels(upright), usual, turned)
        return images.clamp(0, 1) * 2 - 1
