"""What the pairs are made of while they learn: discriminators, and a generator not yet as it leaves."""

from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sluice.generators.architecture import Architecture
from sluice.generators.dcgan import DCGAN, SLOPE, halvings
from sluice.generators.dense import DenseGenerator
from sluice.generators.im2col import Size, halved, halving_kernel
from worker.mechanisms.clipping import Shares, rule, squared


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

    The one of "Private GANs, Revisited", for images of any size from 8 to 64. Convolutions are written as
    linear layers over patches, channels last: quicker than convolving at these sizes, and the patches are
    what per-record gradients are made of.
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


class DenseDiscriminator(nn.Module):
    """Two hidden layers; the label turns the direction that the last of them is scored in.

    The score is that of Miyato and Koyama 2018, (v + v_label) . h(image), and v_label . h(image) is also how
    likely the label is. Pixels come from 0 to 1: a dark background then is no part of any record's gradient.
    """

    def __init__(self, shape: Architecture, features: int) -> None:
        super().__init__()
        pixels = shape.channels * shape.height * shape.width
        self.body = nn.ModuleList([nn.Linear(pixels, features), nn.Linear(features, features)])
        self.score = nn.Linear(features, 1)
        self.label = nn.Linear(features, shape.classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return self.judged(images, labels)[0]

    def judged(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Scores, and the logits of every label."""
        x = (images.flatten(1) + 1) / 2
        for layer in self.body:
            x = F.leaky_relu(layer(x), SLOPE)
        logits = self.label(x)
        return self.score(x).flatten() + logits.gather(1, labels[:, None]).flatten(), logits


class BatchNormed(nn.Module):
    """A dense generator as it learns, with batch norm: without, its images become one in the first steps.

    A generator sees no record, so mixing what it makes is post-processing. What leaves is `folded`.
    """

    def __init__(self, network: DenseGenerator) -> None:
        super().__init__()
        self.network = network
        self.norms = nn.ModuleList(nn.BatchNorm1d(layer.out_features) for layer in network.body)

    def forward(self, latents: Tensor, labels: Tensor) -> Tensor:
        x = self.network.given(latents, labels)
        for layer, norm in zip(self.network.body, self.norms, strict=True):
            x = F.relu(norm(layer(x)))
        return self.network.made(x)

    @torch.no_grad()
    def folded(self) -> DenseGenerator:
        """The same with running statistics inside the weights: each image from its own latent and label."""
        network = deepcopy(self.network).cpu()
        for layer, norm in zip(network.body, self.norms, strict=True):
            scale = (norm.weight / (norm.running_var + norm.eps).sqrt()).cpu()
            layer.bias.sub_(norm.running_mean.cpu()).mul_(scale).add_(norm.bias.cpu())
            layer.weight.mul_(scale[:, None])
        return network


def area(size: Size) -> int:
    return size[0] * size[1]


def difference(images: Tensor) -> Tensor:
    """How far images of the first half are from those of the second, of the same labels and other latents.

    Generators are rewarded for it (Mao et al. 2019): a discriminator sees one image at a time, and under
    noise does not ask for more than one of a label.
    """
    one, other = images.chunk(2)
    return (one - other).abs().mean()


def numbers(module: nn.Module) -> list[Tensor]:
    """Weights, and the statistics of batch norms where there are any."""
    return [value for value in module.state_dict().values() if value.is_floating_point()]


def start_state(optimizer: torch.optim.Optimizer) -> None:
    """Gives Adam the state it would make at its first step, so that any checkpoint has the same tensors."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
