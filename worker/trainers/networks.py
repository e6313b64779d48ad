"""The discriminator of "Private GANs, Revisited", for images of any size from 8 to 64."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from worker.mechanisms.clipping import Shares, rule, squared
from worker.patches import Size, halved, halving_kernel
from worker.synthesizers.dcgan import DCGAN, SLOPE, halvings


class LabelPlanes(nn.Conv2d):
    """A convolution over one-hot label planes, by looking up instead of convolving.

    A plane is all ones or all zeros, so the output at a place is the sum of those weights of the label's
    channel that fall inside the image there.
    """

    def __init__(self, classes: int, channels: int, size: Size) -> None:
        super().__init__(classes, channels, halving_kernel(size))
        self.size = size

    def inside(self) -> Tensor:
        """Which weights fall inside the image: places, kernel."""
        return halved(self.weight.new_ones(1, *self.size, 1))[0]

    def forward(self, labels: Tensor) -> Tensor:
        table = self.weight.permute(1, 2, 3, 0).flatten(1, 2)
        return (torch.matmul(self.inside(), table) + self.bias)[labels]


@rule(LabelPlanes)
class LabelPlanesGradients:
    """A record moves one channel of the weights, by an amount small enough to form."""

    def __init__(self, layer: LabelPlanes, given: Tensor, gradient: Tensor) -> None:
        self.layer, self.labels = layer, given
        self.weight, self.bias = torch.matmul(layer.inside().T, gradient), gradient.sum(1)

    def squares(self) -> Tensor:
        return squared(self.weight) + squared(self.bias)

    def add(self, weights: Tensor, shares: Shares) -> None:
        weight = shares[self.layer.weight]
        table = weight.new_zeros(weight.shape[1], *self.weight.shape[1:])
        table.index_add_(0, self.labels, self.weight * weights[:, None, None])
        weight += table.unflatten(1, weight.shape[2:]).permute(3, 0, 1, 2)
        shares[self.layer.bias] += weights @ self.bias


class Discriminator(nn.Module):
    """Scores images with their labels: high for real. No layer looks at more than one record.

    Convolutions are written as linear layers over patches, channels last: quicker than convolving at these
    sizes, and the patches are what per-record gradients are made of.
    """

    def __init__(self, shape: DCGAN, features: int) -> None:
        super().__init__()
        first, *middle, last = self.sizes = halvings(shape.height, shape.width)
        self.image = nn.Linear(area(halving_kernel(first)) * shape.channels, features // 2)
        self.label = LabelPlanes(shape.classes, features // 2, first)
        self.body = nn.ModuleList(
            nn.Linear(area(halving_kernel(size)) * (features << level), features << level + 1)
            for level, size in enumerate(middle)
        )
        self.score = nn.Linear(area(last) * (features << len(middle)), 1)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        seen = halved(images.permute(0, 2, 3, 1))
        x = F.leaky_relu(torch.cat([self.image(seen), self.label(labels)], 2), SLOPE)
        for layer, size in zip(self.body, self.sizes[1:], strict=False):
            x = F.leaky_relu(layer(halved(x.unflatten(1, size))), SLOPE)
        return self.score(x.flatten(1)).flatten()


def area(size: Size) -> int:
    return size[0] * size[1]
