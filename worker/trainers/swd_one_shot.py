"""One-shot SWD: one noisy release of all records in many directions, and a generator trained on it."""

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from core.schema import ImageSchema
from sluice.methods.swd_one_shot import Features, OneShotRecipe, Patterns, SWDOneShotPlan
from sluice.privacy.events import Query
from worker.mechanisms.clipping import ROOM
from worker.mechanisms.mechanism import Mechanism
from worker.mechanisms.noise import GaussianNoise
from worker.mechanisms.projections import sliced_distance
from worker.mechanisms.sampling import EveryRecord
from worker.trainers.swd import GeneratorTrainer

# Projections computed at a time, so that memory does not grow with the records.
CHUNK = 2**22
# Records are projected in multiples of this, and of 1/255 for pixels. In float64 such sums are exact in any
# order: which bin a record falls into cannot depend on other records.
UNIT = 2.0**-20
# Blurs of smooth patterns and spreads of their windows, as shares of the side; the share without a window.
BLURS, NARROWEST, WIDEST, WHOLE = (0.025, 0.045, 0.07, 0.125), 0.1, 0.5, 0.2


def patterns(plan: SWDOneShotPlan, schema: ImageSchema) -> Tensor:
    """The directions: unit rows of length C * H * W. Public: they follow from the plan."""
    source = torch.Generator().manual_seed(plan.pattern_seed)
    noise = torch.randn(plan.directions, schema.channels, schema.height, schema.width, generator=source)
    if plan.patterns is Patterns.SMOOTH:
        side = max(schema.height, schema.width)
        parts = noise.tensor_split(len(BLURS))
        noise = torch.cat([blurred(part, blur * side) for part, blur in zip(parts, BLURS, strict=True)])
        uniforms = torch.rand(plan.directions, 4, generator=source).T
        spread = side * NARROWEST * (WIDEST / NARROWEST) ** uniforms[0]
        spread[uniforms[1] < WHOLE] = math.inf
        windows = [
            torch.exp(-((torch.arange(size) - size * centre[:, None]) ** 2) / (2 * spread[:, None] ** 2))
            for size, centre in ((schema.height, uniforms[2]), (schema.width, uniforms[3]))
        ]
        noise *= windows[0][:, None, :, None] * windows[1][:, None, None, :]
    return F.normalize(noise.flatten(1), dim=1)


def blurred(images: Tensor, blur: float) -> Tensor:
    reach = math.ceil(3 * blur)
    weights = torch.exp(-(torch.arange(-reach, reach + 1.0) ** 2) / (2 * blur**2))
    flat = images.flatten(0, 1)[:, None]
    flat = F.conv2d(flat, weights[None, None, :, None], padding=(reach, 0))
    return F.conv2d(flat, weights[None, None, None, :], padding=(0, reach)).view_as(images)


class Histograms:
    """For each class and direction, how many records of the class fall into each bin.

    Guarantee: a record adds one to one bin of each histogram of its class: norm sqrt(directions), and no
    negative entry.
    """

    def __init__(self, plan: SWDOneShotPlan, directions: Tensor, classes: int) -> None:
        self.bins, self.shape = plan.bins, (classes, plan.directions, plan.bins)
        # A projection of pixels from 0 to 1 lies between the sums of its negative and its positive weights.
        # Those of images lie in the middle half; what is outside is counted in the first and last bin.
        self.low, self.high = directions.clamp(max=0).sum(1) / 2, directions.clamp(min=0).sum(1) / 2
        self.quantiles = torch.empty(0)

    @property
    def ready(self) -> bool:
        return len(self.quantiles) > 0

    def add(self, total: Tensor, values: Tensor, labels: Tensor, norm: float) -> None:
        """Counts values, directions by records."""
        del norm  # a count is one
        low, width = self.low[:, None], (self.high - self.low)[:, None] / self.bins
        # Clamped before the conversion: a value of 1e30 does not fit an integer.
        index = ((values - low) / width).clamp(0, self.bins - 1).long()
        index += (torch.arange(len(values))[:, None] + labels * len(values)) * self.bins
        total += torch.bincount(index.flatten(), minlength=len(total))

    def learn_from(self, noisy: Tensor, images: int, norm: float) -> None:
        """Computes the quantiles of every class in every direction, one per image to compare with."""
        del norm
        counts = noisy.view(self.shape)
        # All histograms of a class have the same sum, so the mean of these sums has little noise.
        size = counts.sum((1, 2)) / self.shape[1]
        shares = project_to_simplex(counts / size.clamp(min=1)[:, None, None])
        below = shares.cumsum(2)
        levels = ((torch.arange(images) + 0.5) / images).double().expand(*below.shape[:2], -1).contiguous()
        bins = torch.searchsorted(below, levels).clamp(max=self.bins - 1)
        share = shares.gather(2, bins)
        inside = ((levels - below.gather(2, bins) + share) / share.clamp(min=1e-12)).clamp(0, 1)
        width = (self.high - self.low) / self.bins
        quantiles = self.low[:, None] + width[:, None] * (bins + inside)
        self.quantiles = quantiles.transpose(0, 1).float().contiguous()

    def gradient(self, values: Tensor, chosen: Tensor) -> tuple[float, Tensor]:
        """Of the mean of W2^2, at values of directions by classes by images."""
        distance, gradient = sliced_distance(values.flatten(0, 1), self.quantiles[chosen].flatten(0, 1))
        return distance, gradient.view_as(values)


class Waves:
    """For each class and direction, the sum over the class of a cosine and a sine of the projection.

    Guarantee: a record adds a vector of norm `norm` for each direction of its class.
    """

    def __init__(self, plan: SWDOneShotPlan, directions: Tensor, classes: int) -> None:
        self.shape = (classes, plan.directions, 2)
        source = torch.Generator().manual_seed(plan.pattern_seed)
        # From half a wave to four over the range of a projection; the first has frequency zero, and its
        # cosines count the records of a class.
        waves = 0.5 * 8 ** torch.rand(plan.directions, generator=source)
        self.frequency = 2 * math.pi * waves / directions.abs().sum(1)
        self.frequency[0] = 0
        self.means = torch.empty(0)

    @property
    def ready(self) -> bool:
        return len(self.means) > 0

    def add(self, total: Tensor, values: Tensor, labels: Tensor, norm: float) -> None:
        """Adds the waves of values, directions by records."""
        angles = values * self.frequency[:, None]
        both = torch.stack([angles.cos(), angles.sin()], 2).transpose(0, 1).flatten(1)
        total.view(self.shape[0], -1).index_add_(0, labels, norm * both)

    def learn_from(self, noisy: Tensor, images: int, norm: float) -> None:
        """Computes the mean waves of every class."""
        del images
        sums = noisy.view(self.shape) / norm
        means = sums / sums[:, :1, :1].clamp(min=1)
        self.means = means.transpose(0, 1).float().contiguous()

    def gradient(self, values: Tensor, chosen: Tensor) -> tuple[float, Tensor]:
        """Of the mean squared distance of mean waves, at values of directions by classes by images."""
        frequency = self.frequency[chosen][:, None, None]
        cos, sin = (values * frequency).cos(), (values * frequency).sin()
        gap = torch.stack([cos.mean(2), sin.mean(2)], 2) - self.means[chosen]
        turned = gap[..., 1:] * cos - gap[..., :1] * sin
        return gap.square().sum(2).mean().item(), turned * frequency * (2 / values.numel())


class Trainer(GeneratorTrainer[SWDOneShotPlan, OneShotRecipe]):
    """Releases once, and trains the generator on that release.

    Guarantee: one Gaussian release of a sum over records, to which each record adds a vector of norm at most
    sqrt(directions); see docs/guarantees.md#one-shot. A checkpoint includes the release, so that a restored
    training reads no records again.
    """

    def build(self) -> None:
        plan = self.plan
        self.build_generator(self.recipe, steps=self.recipe.generator_steps)
        self.public_steps_planned = self.recipe.generator_steps
        self.directions = patterns(plan, self.schema)
        self.counting = plan.features is Features.HISTOGRAMS
        kind = Histograms if self.counting else Waves
        self.query: Histograms | Waves = kind(plan, self.directions, self.classes)
        self.release = torch.zeros(math.prod(self.query.shape), dtype=torch.float64)

    def make_mechanism(self) -> Mechanism:
        return Mechanism(
            EveryRecord(steps=self.plan.known_steps),
            GaussianNoise(stddev=self.plan.noise_stddev, size=len(self.release)),
            self.rng,
            query=Query.COUNTS if self.counting else Query.SUM,
            bound=1.0,
            rows=self.plan.directions,
        )

    def step(self, batch: np.ndarray) -> None:
        self.release = self.mechanism.release(self.total(batch))

    def total(self, batch: np.ndarray) -> Tensor:
        """The sum over records, a chunk at a time."""
        norm = self.mechanism.clip_norm * (1 - ROOM)
        total, weights = torch.zeros_like(self.release), (self.directions.double() / UNIT).round()
        for start in range(0, max(len(batch), 1), CHUNK // self.plan.directions + 1):
            images, labels = self.take_finite(batch[start : start + CHUNK // self.plan.directions + 1])
            pixels = ((images.cpu().flatten(1).double() + 1) * 127.5).round().clamp(0, 255)
            self.query.add(total, weights @ pixels.T * (UNIT / 255), labels.cpu(), norm)
        return total

    def public_step(self) -> None:
        """A step of the generator on random directions of the release."""
        if not self.query.ready:
            self.query.learn_from(self.release, self.recipe.images, self.mechanism.clip_norm * (1 - ROOM))
        labels = torch.arange(self.classes, device=self.device).repeat_interleave(self.recipe.images)
        chosen = torch.randperm(self.plan.directions, generator=self.random)[: self.recipe.compared]
        directions = self.directions[chosen].to(self.device)
        pixels = ((self.generate(labels) + 1) / 2).flatten(1)
        values = (directions @ pixels.detach().T).unflatten(1, (self.classes, self.recipe.images))
        distance, gradient = self.query.gradient(values.cpu(), chosen)
        self.measured = {"distance": distance}
        self.follow(pixels, gradient.to(self.device).flatten(1).T @ directions)

    def state(self) -> dict[str, Tensor]:
        return {"release": self.release, **self.generator.state()}


def project_to_simplex(shares: Tensor) -> Tensor:
    """The nearest shares along the last axis that are not negative and sum to one.

    Negative counts are noise. Setting them to zero would leave the positive noise of empty bins; this
    subtracts the same amount from all, so that the sum is one.
    """
    descending, _ = shares.sort(-1, descending=True)
    excess = descending.cumsum(-1) - 1
    ranks = torch.arange(1, shares.shape[-1] + 1, dtype=shares.dtype)
    last = ((descending - excess / ranks) > 0).sum(-1, keepdim=True)
    return (shares - excess.gather(-1, last - 1) / last).clamp(min=0)
