"""A residual generator in the manner of BigGAN: blocks that double, told the latent and the label at each."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sluice.generators.architecture import Architecture, UnfitSynthesizer
from sluice.generators.dcgan import halvings
from sluice.generators.im2col import Size

GROUPS = 8


@dataclass(frozen=True, kw_only=True)
class Residual(Architecture):
    kind: ClassVar[str] = "conditional-residual-generator"
    limits: ClassVar[dict[str, tuple[int, int]]] = {"features": (GROUPS, 1024)}

    features: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.features % GROUPS:
            raise UnfitSynthesizer(f"features is no multiple of {GROUPS}: they are normalised in groups")

    def network(self) -> "ResidualGenerator":
        return ResidualGenerator(self)


class Told(nn.Module):
    """Normalises each image by itself, then scales and shifts by what the latent and the label say.

    BigGAN normalises over the batch here; an image would then depend on those made with it.
    """

    def __init__(self, features: int, told: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Linear(told, features), nn.Linear(told, features)

    def forward(self, x: Tensor, about: Tensor) -> Tensor:
        scale, shift = (part(about)[:, :, None, None] for part in (self.scale, self.shift))
        return F.group_norm(x, GROUPS) * (1 + scale) + shift


class Block(nn.Module):
    """Two convolutions beside a way straight through, both at the new size."""

    def __init__(self, features: int, told: int, size: Size) -> None:
        super().__init__()
        self.size = size
        self.first_told, self.second_told = Told(features, told), Told(features, told)
        self.first, self.second = (nn.Conv2d(features, features, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor, about: Tensor) -> Tensor:
        wide = F.interpolate(x, self.size)
        y = self.first(F.interpolate(F.relu(self.first_told(x, about)), self.size))
        return wide + self.second(F.relu(self.second_told(y, about)))


class ResidualGenerator(nn.Module):
    """Images in [-1, 1] from latents and labels, one block for each doubling, at any size from 8 to 64."""

    def __init__(self, shape: Residual) -> None:
        super().__init__()
        *sizes, self.start = halvings(shape.height, shape.width)
        self.label = nn.Embedding(shape.classes, shape.latent)
        told = 2 * shape.latent
        self.seed = nn.Linear(told, shape.features * self.start[0] * self.start[1])
        self.body = nn.ModuleList(Block(shape.features, told, size) for size in sizes[::-1])
        self.told = Told(shape.features, told)
        self.paint = nn.Conv2d(shape.features, shape.channels, 3, padding=1)

    def forward(self, latents: Tensor, labels: Tensor) -> Tensor:
        about = torch.cat([latents, self.label(labels)], 1)
        x = self.seed(about).unflatten(1, (-1, *self.start))
        for block in self.body:
            x = block(x, about)
        return torch.tanh(self.paint(F.relu(self.told(x, about))))
