"""A generator without convolutions: three dense layers from latents and labels, quick on a CPU."""

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sluice.generators.architecture import Architecture


@dataclass(frozen=True, kw_only=True)
class Dense(Architecture):
    kind: ClassVar[str] = "conditional-dense-generator"
    limits: ClassVar[dict[str, tuple[int, int]]] = {"features": (2, 4096)}

    features: int = 256

    def network(self) -> "DenseGenerator":
        return DenseGenerator(self)


class DenseGenerator(nn.Module):
    """Images in [-1, 1]: latents and one-hot labels, two hidden layers, pixels."""

    def __init__(self, shape: Dense) -> None:
        super().__init__()
        self.shape = shape
        self.size = (shape.channels, shape.height, shape.width)
        widths = (shape.latent + shape.classes, shape.features, 2 * shape.features)
        self.body = nn.ModuleList(nn.Linear(given, made) for given, made in pairwise(widths))
        self.pixels = nn.Linear(widths[-1], shape.channels * shape.height * shape.width)

    def forward(self, latents: Tensor, labels: Tensor) -> Tensor:
        x = self.given(latents, labels)
        for layer in self.body:
            x = F.relu(layer(x))
        return self.made(x)

    def given(self, latents: Tensor, labels: Tensor) -> Tensor:
        return torch.cat([latents, F.one_hot(labels, self.shape.classes).to(latents.dtype)], 1)

    def made(self, x: Tensor) -> Tensor:
        return torch.tanh(self.pixels(x)).unflatten(1, self.size)
