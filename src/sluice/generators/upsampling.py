"""Two dense layers to a small picture of many channels, then convolutions between doublings.

The generator of DP-MERF, which the DP-SWD paper used too, for images of any size from 8 to 64.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sluice.generators.architecture import Architecture


@dataclass(frozen=True, kw_only=True)
class Upsampling(Architecture):
    kind: ClassVar[str] = "conditional-upsampling-generator"
    limits: ClassVar[dict[str, tuple[int, int]]] = {"features": (2, 4096), "planes": (1, 256)}

    features: int = 200
    planes: int = 16

    def network(self) -> "UpsamplingGenerator":
        return UpsamplingGenerator(self)


class UpsamplingGenerator(nn.Module):
    """Images in [-1, 1] from latents and one-hot labels."""

    def __init__(self, shape: Upsampling) -> None:
        super().__init__()
        self.shape = shape
        self.sizes = [(-(-shape.height // part), -(-shape.width // part)) for part in (4, 2, 1)]
        small = self.sizes[0][0] * self.sizes[0][1]
        widths = (shape.latent + shape.classes, shape.features, shape.planes * small)
        self.body = nn.ModuleList(nn.Linear(given, made) for given, made in pairwise(widths))
        self.middle = nn.Conv2d(shape.planes, shape.planes, 5, padding=2)
        self.paint = nn.Conv2d(shape.planes, shape.channels, 5, padding=2)

    def forward(self, latents: Tensor, labels: Tensor) -> Tensor:
        x = self.given(latents, labels)
        for layer in self.body:
            x = F.relu(layer(x))
        return self.made(x)

    def given(self, latents: Tensor, labels: Tensor) -> Tensor:
        return torch.cat([latents, F.one_hot(labels, self.shape.classes).to(latents.dtype)], 1)

    def made(self, x: Tensor) -> Tensor:
        x = x.unflatten(1, (self.shape.planes, *self.sizes[0]))
        x = F.relu(self.middle(F.interpolate(x, self.sizes[1], mode="bilinear")))
        return torch.tanh(self.paint(F.interpolate(x, self.sizes[2], mode="bilinear")))
