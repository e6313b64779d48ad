"""The generator of "Private GANs, Revisited": transposed convolutions from latents and labels."""

from dataclasses import dataclass
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sluice.generators.architecture import Architecture, UnfitSynthesizer
from sluice.generators.im2col import Size, doubled, enlarged, half, halving_kernel

SLOPE = 0.2


@dataclass(frozen=True, kw_only=True)
class DCGAN(Architecture):
    kind: ClassVar[str] = "conditional-dcgan-generator"
    limits: ClassVar[dict[str, tuple[int, int]]] = {"features": (2, 1024)}

    features: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.features % 2:
            raise UnfitSynthesizer("features is odd: half of them are for the label")

    def network(self) -> "Generator":
        return Generator(self)


def halvings(height: int, width: int) -> list[Size]:
    """Sizes from the image down to about 4 x 4, each half of the one before: 28, 14, 7, 4."""
    sizes = [(height, width)]
    while max(sizes[-1]) > 4 or len(sizes) < 3:
        sizes.append(half(sizes[-1]))
    return sizes


class Generator(nn.Module):
    """Images in [-1, 1] from latents and labels: the generator of "Private GANs, Revisited" at any size.

    The layers are transposed convolutions, computed as matrix products. The last has so few channels that it
    is one product with all of its weights, whose pieces are then added at their positions.
    """

    def __init__(self, shape: DCGAN) -> None:
        super().__init__()
        *sizes, self.start = halvings(shape.height, shape.width)
        self.sizes = sizes[::-1]
        widest = shape.features << len(sizes) - 1
        self.seed = nn.ConvTranspose2d(shape.latent, widest // 2, self.start)
        self.label = nn.ConvTranspose2d(shape.classes, widest // 2, self.start)
        widths = [*(widest >> level for level in range(len(sizes))), shape.channels]
        self.body = nn.ModuleList(
            nn.ConvTranspose2d(inputs, outputs, halving_kernel(size), stride=2, padding=1)
            for inputs, outputs, size in zip(widths, widths[1:], self.sizes, strict=False)
        )

    def forward(self, latents: Tensor, labels: Tensor) -> Tensor:
        seeds = (latents @ pieces(self.seed)).unflatten(1, (*self.start, -1)) + self.seed.bias
        marks = pieces(self.label)[labels].unflatten(1, (*self.start, -1)) + self.label.bias
        x = F.leaky_relu(torch.cat([seeds, marks], 3), SLOPE).permute(1, 2, 0, 3)
        *layers, last = cast(list[nn.ConvTranspose2d], list(self.body))
        for layer, size in zip(layers, self.sizes, strict=False):
            x = enlarged(x, layer, size, slope=SLOPE)
        x = doubled((x @ pieces(last)).permute(2, 0, 1, 3).flatten(1, 2), self.sizes[-1])
        x = x + cast(Tensor, last.bias)
        return torch.tanh(x).permute(0, 3, 1, 2)


def pieces(layer: nn.ConvTranspose2d) -> Tensor:
    """What an input channel adds around its position: channels, kernel * output channels."""
    return layer.weight.permute(0, 2, 3, 1).flatten(1)
