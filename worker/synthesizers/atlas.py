"""An atlas of every class: charts to draw images from, and a judge who says which of several to keep."""

import math
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from worker.synthesizers.architecture import Architecture, UnfitSynthesizer

# Of the judge's filters: how many angles, how wide, how long, how fast they swing.
ANGLES, SIDE, WIDTH, SLANT, PACE = 8, 7, 1.0, 0.5, 3 * math.pi / 4
# The judge's constant, and how sharply scores become probabilities.
CONSTANT, SHARPNESS = 0.1, 10.0


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


@cache
def filters() -> Tensor:
    """Waves under a window, the even ones of all angles and then the odd; none answers to a plain area."""
    reach = torch.arange(SIDE) - SIDE // 2.0
    down, across = torch.meshgrid(reach, reach, indexing="ij")
    evens, odds = [], []
    for step in range(ANGLES):
        angle = math.pi * step / ANGLES
        along = across * math.cos(angle) + down * math.sin(angle)
        aside = down * math.cos(angle) - across * math.sin(angle)
        window = torch.exp(-(along**2 + (SLANT * aside) ** 2) / (2 * WIDTH**2))
        even, odd = window * torch.cos(PACE * along), window * torch.sin(PACE * along)
        even = even - window * (even.sum() / window.sum())
        length = (even.square().sum() + odd.square().sum()).sqrt()
        evens.append(even / length)
        odds.append(odd / length)
    return torch.stack(evens + odds)[:, None]


class Features:
    """What the judge sees of an image: waves at eight angles and two scales, and waves of these (scattering).

    Each group of maps is centred and brought to almost the same length; a vector is no longer than one.
    """

    def __init__(self, channels: int, height: int, width: int) -> None:
        self.cells = (min(7, height // 4), min(7, width // 4))
        self.size = channels * (1 + 2 * ANGLES + ANGLES**2) * math.prod(self.cells)
        self.groups = channels * (3 + ANGLES)

    def of(self, images: Tensor) -> Tensor:
        """Of images from 0 to 1; one row for each."""
        planes = images.flatten(0, 1)[:, None]
        fine = swings(planes)
        seconds = swings(F.avg_pool2d(fine, 2).flatten(0, 1)[:, None]).unflatten(0, (-1, ANGLES))
        maps = [planes, fine, swings(F.avg_pool2d(planes, 2)), *seconds.unbind(1)]
        parts = []
        for part in maps:
            part = F.adaptive_avg_pool2d(part, self.cells).flatten(1)
            part = part - part.mean(1, keepdim=True)
            length = torch.linalg.vector_norm(part, dim=1, keepdim=True)
            parts.append(part / (length + 1e-3 * math.sqrt(part.shape[1])))
        return torch.cat(parts, 1).unflatten(0, (len(images), -1)).flatten(1) / math.sqrt(self.groups)


def swings(planes: Tensor) -> Tensor:
    """How strongly each angle's waves swing around each place."""
    even, odd = F.conv2d(planes, filters().to(planes.device), padding=SIDE // 2).chunk(2, 1)
    return even.square_().addcmul_(odd, odd).add_(1e-6).sqrt_()


@dataclass(frozen=True, kw_only=True)
class Atlas(Architecture):
    """`charts` to a class, each with `axes`; thousandths of tries go `between` classes, up to `detour`."""

    kind: ClassVar[str] = "conditional-atlas"
    limits: ClassVar[dict[str, tuple[int, int]]] = {
        "frequencies": (1, 64),
        "axes": (1, 1024),
        "charts": (1, 1000),
        "tries": (1, 16),
        "between": (0, 1000),
        "detour": (0, 1000),
    }

    frequencies: int = 16
    axes: int = 60
    charts: int = 10
    tries: int = 3
    between: int = 500
    detour: int = 600

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.axes > self.cosines.size or self.latent != self.tries * self.each:
            raise UnfitSynthesizer("axes are no more than cosines, and latents as many as the tries need")

    @classmethod
    def fitting(cls, **sizes: int) -> Self:
        """With as many axes as there can be, and as many latents as are needed."""
        slow = Cosines(*(sizes[name] for name in ("channels", "height", "width", "frequencies")))
        axes = min(sizes["axes"], slow.size)
        return cls(**{**sizes, "axes": axes, "latent": sizes["tries"] * (4 + axes + slow.size)})

    @property
    def cosines(self) -> Cosines:
        return Cosines(self.channels, self.height, self.width, self.frequencies)

    @property
    def features(self) -> Features:
        return Features(self.channels, self.height, self.width)

    @property
    def each(self) -> int:
        """Latents of one try: which charts, whether between, how far, and a place on either chart."""
        return 4 + self.axes + self.cosines.size

    def network(self) -> "AtlasNetwork":
        return AtlasNetwork(self)


class AtlasNetwork(nn.Module):
    """Images in [-1, 1], each from its own latent and label.

    A chart is a centre and a factor in the first `axes` directions of all cosines; in the other directions
    an image strays from its class by `strays`. The first try that the judge takes for its label is kept, or
    the one that comes nearest.
    """

    def __init__(self, shape: Atlas) -> None:
        super().__init__()
        self.shape, self.cosines, self.features = shape, shape.cosines, shape.features
        size, charts = self.cosines.size, (shape.classes, shape.charts)

        def zeros(*sizes: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(*sizes), requires_grad=False)

        self.means = zeros(shape.classes, size)
        self.directions = zeros(size, size)
        self.strays = zeros(size - shape.axes)
        self.weights = zeros(*charts)
        self.centres = zeros(*charts, shape.axes)
        self.factors = zeros(*charts, shape.axes, shape.axes)
        self.judge = zeros(shape.classes, self.features.size + 1)

    def forward(self, latents: Tensor, labels: Tensor) -> Tensor:
        tries = latents.view(len(labels), self.shape.tries, -1)
        left = torch.arange(len(labels), device=labels.device)
        best = latents.new_full((len(labels),), -math.inf)
        out = latents.new_zeros(len(labels), *self.cosines.shape)
        for turn in range(self.shape.tries):
            wanted = labels[left]
            made = self.drawn(tries[left, turn], wanted).clamp(0, 1)
            if self.shape.tries > 1:
                chances = self.chances(made)
                liked = chances.gather(1, wanted[:, None])[:, 0]
                better = liked > best[left]
                out[left[better]], best[left[better]] = made[better], liked[better]
                left = left[chances.argmax(1) != wanted]
            else:
                out = made
        return out * 2 - 1

    def drawn(self, latents: Tensor, labels: Tensor) -> Tensor:
        """One try each, not yet held between black and white."""
        classes, axes = self.shape.classes, self.shape.axes
        which, place, other_place, stray = latents.split([4, axes, axes, self.cosines.size - axes], 1)
        levels = torch.special.ndtr(which)
        vectors = self.placed(labels, levels[:, 0], place)
        if self.shape.between and classes > 1:
            # One uniform number decides whether to go between classes and, if so, towards which.
            away = levels[:, 1] * 1000 / self.shape.between
            other = (labels + 1 + (away * (classes - 1)).long().clamp(max=classes - 2)) % classes
            far = torch.where(away < 1, levels[:, 2] * self.shape.detour / 1000, 0)[:, None]
            vectors = vectors + far * (self.placed(other, levels[:, 3], other_place) - vectors)
        return self.cosines.pixels(vectors + (stray * self.strays) @ self.directions[:, axes:].T)

    def placed(self, labels: Tensor, level: Tensor, place: Tensor) -> Tensor:
        bounds = self.weights[labels].cumsum(1)
        chart = (level[:, None] * bounds[:, -1:] > bounds).sum(1).clamp(max=self.shape.charts - 1)
        spread = torch.einsum("nij,nj->ni", self.factors[labels, chart], place)
        directions = self.directions[:, : self.shape.axes]
        return self.means[labels] + (self.centres[labels, chart] + spread) @ directions.T

    def chances(self, images: Tensor) -> Tensor:
        """What the judge takes images from 0 to 1 for."""
        return judged(self.judge, self.features.of(images)).softmax(1)


def judged(judge: Tensor, features: Tensor) -> Tensor:
    """Scores of a linear judge, whose last column is its constant."""
    return SHARPNESS * (features @ judge[:, :-1].T + CONSTANT * judge[:, -1])
