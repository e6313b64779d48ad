"""The generator of DP-MERF and DP-SWD, for images of any size from 8 to 64.

Two dense layers make a small image of many channels; convolutions follow each doubling of its sides.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sluice.generators.architecture import Architecture
from sluice.generators.dense import DenseBody


@dataclass(frozen=True, kw_only=True)
class Upsampling(Architecture):
    kind: ClassVar[str] = "conditional-upsampling-generator"
    limits: ClassVar[dict[str, tuple[int, int]]] = {"features": (2, 4096), "planes": (1, 256)}

    features: int = 200
    planes: int = 16

    def network(self) -> "UpsamplingGenerator":
        return UpsamplingGenerator(self)


class UpsamplingGenerator(DenseBody):
    def __init__(self, shape: Upsampling) -> None:
        sizes = [(-(-shape.height // part), -(-shape.width // part)) for part in (4, 2, 1)]
        area = sizes[0][0] * sizes[0][1]
        super().__init__(shape.classes, (shape.latent + shape.classes, shape.features, shape.planes * area))
        self.planes, self.sizes = shape.planes, sizes
        self.middle = nn.Conv2d(shape.planes, shape.planes, 5, padding=2)
        self.paint = nn.Conv2d(shape.planes, shape.channels, 5, padding=2)

    def render(self, x: Tensor) -> Tensor:
        x = x.unflatten(1, (self.planes, *self.sizes[0]))
        x = F.relu(self.middle(F.interpolate(x, self.sizes[1], mode="bilinear")))
        return torch.tanh(self.paint(F.interpolate(x, self.sizes[2], mode="bilinear")))
