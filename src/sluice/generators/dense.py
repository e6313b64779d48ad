"""A generator without convolutions: three dense layers from latents and labels, fast on a CPU."""

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


class DenseBody(nn.Module):
    """Dense layers on latents and one-hot labels, and a last part that renders the image, in [-1, 1]."""

    def __init__(self, classes: int, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.classes, self.widths = classes, widths[1:]
        self.body = nn.ModuleList(nn.Linear(inputs, outputs) for inputs, outputs in pairwise(widths))

    def forward(self, latents: Tensor, labels: Tensor) -> Tensor:
        x = self.inputs(latents, labels)
        for layer in self.body:
            x = F.relu(layer(x))
        return self.render(x)

    def inputs(self, latents: Tensor, labels: Tensor) -> Tensor:
        return torch.cat([latents, F.one_hot(labels, self.classes).to(latents.dtype)], 1)

    def render(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class DenseGenerator(DenseBody):
    def __init__(self, shape: Dense) -> None:
        super().__init__(shape.classes, (shape.latent + shape.classes, shape.features, 2 * shape.features))
        self.size = (shape.channels, shape.height, shape.width)
        self.pixels = nn.Linear(2 * shape.features, shape.channels * shape.height * shape.width)

    def render(self, x: Tensor) -> Tensor:
        return torch.tanh(self.pixels(x)).unflatten(1, self.size)
