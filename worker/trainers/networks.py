"""Networks that exist only during training: discriminators, and a generator with batch norm."""

from copy import deepcopy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sluice.generators.architecture import Architecture
from sluice.generators.dcgan import SLOPE, halvings
from sluice.generators.dense import DenseBody
from sluice.generators.im2col import Size, halved, halving_kernel
from worker.mechanisms.clipping import Sums, rule, squared


class LabelPlanes(nn.Conv2d):
    """A convolution over one-hot label planes, computed by table lookup.

    A plane is all ones or all zeros, so the output at a position is the sum of those weights of the label's
    channel that fall inside the image there.
    """

    bias: nn.Parameter

    def __init__(self, classes: int, channels: int, size: Size) -> None:
        super().__init__(classes, channels, halving_kernel(size))
        self.size = size

    def inside(self) -> Tensor:
        """Which weights fall inside the image: positions, kernel."""
        return halved(self.weight.new_ones(1, *self.size, 1))[0]

    def forward(self, labels: Tensor) -> Tensor:
        table = self.weight.permute(1, 2, 3, 0).flatten(1, 2)
        return (torch.matmul(self.inside(), table) + self.bias)[labels]


@rule(LabelPlanes)
class LabelPlanesGradients:
    """A record moves one channel of the weights; its gradient is small enough to compute."""

    def __init__(self, layer: LabelPlanes, labels: Tensor, gradient: Tensor) -> None:
        self.layer, self.labels = layer, labels
        self.weight, self.bias = torch.matmul(layer.inside().T, gradient), gradient.sum(1)

    def squares(self) -> Tensor:
        return squared(self.weight) + squared(self.bias)

    def add(self, weights: Tensor, sums: Sums) -> None:
        weight = sums[self.layer.weight]
        table = weight.new_zeros(weight.shape[1], *self.weight.shape[1:])
        table.index_add_(0, self.labels, self.weight * weights[:, None, None])
        weight += table.unflatten(1, weight.shape[2:]).permute(3, 0, 1, 2)
        sums[self.layer.bias] += weights @ self.bias


class Discriminator(nn.Module):
    """The discriminator of "Private GANs, Revisited", for images of any size from 8 to 64.

    It scores images with their labels, high for real, each record by itself. Convolutions are linear layers
    over patches, channels last: faster at these sizes, and per-record gradients are computed from patches.
    """

    def __init__(self, shape: Architecture, features: int) -> None:
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
        patches = halved(images.permute(0, 2, 3, 1))
        x = F.leaky_relu(torch.cat([self.image(patches), self.label(labels)], 2), SLOPE)
        for layer, size in zip(self.body, self.sizes[1:], strict=False):
            x = F.leaky_relu(layer(halved(x.unflatten(1, size))), SLOPE)
        scores: Tensor = self.score(x.flatten(1)).flatten()
        return scores


class DenseDiscriminator(nn.Module):
    """Two hidden layers, and the score of Miyato and Koyama 2018: (v + v_label) . h(image).

    v_label . h(image) is also the logit of the label. Pixels are scaled to [0, 1], so that a dark background
    adds nothing to a record's gradient.
    """

    def __init__(self, shape: Architecture, features: int) -> None:
        super().__init__()
        pixels = shape.channels * shape.height * shape.width
        self.body = nn.ModuleList([nn.Linear(pixels, features), nn.Linear(features, features)])
        self.score = nn.Linear(features, 1)
        self.label = nn.Linear(features, shape.classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return self.scores_and_logits(images, labels)[0]

    def scores_and_logits(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Scores, and the logits of all labels."""
        x = (images.flatten(1) + 1) / 2
        for layer in self.body:
            x = F.leaky_relu(layer(x), SLOPE)
        logits = self.label(x)
        return self.score(x).flatten() + logits.gather(1, labels[:, None]).flatten(), logits


class BatchNormed(nn.Module):
    """A dense generator with batch norm while it learns: without, its images collapse in the first steps.

    A generator sees no record, so mixing its images is post-processing. A synthesizer gets `folded()`.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        assert isinstance(network, DenseBody)  # noqa: S101
        self.network = network
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for width in network.widths)

    def forward(self, latents: Tensor, labels: Tensor) -> Tensor:
        x = self.network.inputs(latents, labels)
        for layer, norm in zip(self.network.body, self.norms, strict=True):
            x = F.relu(norm(layer(x)))
        return self.network.render(x)

    @torch.no_grad()
    def folded(self) -> DenseBody:
        """The generator with running statistics folded into its weights, so that images are independent."""
        network = deepcopy(self.network).cpu()
        layer: Any
        norm: Any
        for layer, norm in zip(network.body, self.norms, strict=True):
            scale = (norm.weight / (norm.running_var + norm.eps).sqrt()).cpu()
            layer.bias.sub_(norm.running_mean.cpu()).mul_(scale).add_(norm.bias.cpu())
            layer.weight.mul_(scale[:, None])
        return network


def area(size: Size) -> int:
    return size[0] * size[1]


def diversity(images: Tensor) -> Tensor:
    """The mean distance between the two halves of a batch, which have the same labels and other latents.

    Generators are rewarded for it (Mao et al. 2019): a discriminator sees one image at a time, and under
    noise does not push a generator towards more than one image per label.
    """
    first, second = images.chunk(2)
    return (first - second).abs().mean()
