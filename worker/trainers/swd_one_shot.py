"""SWD at once: one noisy look at all records from many directions, which a generator then learns from."""

import math
from collections.abc import Iterator, Mapping

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from core.faults import Failure, Fault
from core.schema import ImageSchema
from sluice.generators.image import ImageSynthesizer
from sluice.methods.swd_one_shot import Features, OneShotRecipe, Patterns, SWDOneShotPlan
from sluice.privacy.events import Query
from worker.mechanisms.clipping import ROOM
from worker.mechanisms.noise import GaussianNoise, Rng
from worker.mechanisms.projections import sliced
from worker.mechanisms.sampling import EveryRecord
from worker.trainers.progress import Progress
from worker.trainers.swd import ImageRows, Learner, fill, kept

# Numbers that are looked at in one go, so that memory does not grow with the records.
CHUNK = 2**22
# Records are projected in whole numbers of this, and of 1/255 for pixels. In float64 such sums are exact in
# any order: into which bin a record falls cannot depend on who else is there.
UNIT = 2.0**-20
# Blurs of smooth patterns and spreads of their windows, as shares of the side; so many have no window.
BLURS, NARROWEST, WIDEST, WHOLE = (0.025, 0.045, 0.07, 0.125), 0.1, 0.5, 0.2


def patterns(plan: SWDOneShotPlan, schema: ImageSchema) -> Tensor:
    """The directions: unit rows of length C * H * W, public and the same wherever they are drawn."""
    source = torch.Generator().manual_seed(plan.pattern_seed)
    noise = torch.randn(plan.directions, schema.channels, schema.height, schema.width, generator=source)
    if plan.patterns is Patterns.SMOOTH:
        side = max(schema.height, schema.width)
        parts = noise.tensor_split(len(BLURS))
        noise = torch.cat([blurred(part, blur * side) for part, blur in zip(parts, BLURS, strict=True)])
        order = torch.rand(plan.directions, 4, generator=source).T
        spread = side * NARROWEST * (WIDEST / NARROWEST) ** order[0]
        spread[order[1] < WHOLE] = math.inf
        near = [
            torch.exp(-((torch.arange(size) - size * centre[:, None]) ** 2) / (2 * spread[:, None] ** 2))
            for size, centre in ((schema.height, order[2]), (schema.width, order[3]))
        ]
        noise *= near[0][:, None, :, None] * near[1][:, None, None, :]
    return F.normalize(noise.flatten(1), dim=1)


def blurred(images: Tensor, blur: float) -> Tensor:
    reach = math.ceil(3 * blur)
    weights = torch.exp(-(torch.arange(-reach, reach + 1.0) ** 2) / (2 * blur**2))
    flat = images.flatten(0, 1)[:, None]
    flat = F.conv2d(flat, weights[None, None, :, None], padding=(reach, 0))
    return F.conv2d(flat, weights[None, None, None, :], padding=(0, reach)).view_as(images)


class Histograms:
    """For each class and direction, how many of the class fall into each bin.

    Guarantee: a record adds one to one bin of each histogram of its class: norm sqrt(directions), and no
    negative entry.
    """

    def __init__(self, plan: SWDOneShotPlan, along: Tensor, classes: int) -> None:
        self.bins, self.shape = plan.bins, (classes, plan.directions, plan.bins)
        # A projection of pixels from 0 to 1 lies between the sums of its negative and positive weights; those
        # of images keep to the middle half, and what does not is counted at the ends.
        self.low, self.high = along.clamp(max=0).sum(1) / 2, along.clamp(min=0).sum(1) / 2
        self.quantiles = torch.empty(0)

    def add(self, total: Tensor, values: Tensor, labels: Tensor) -> None:
        """Counts values, directions by records."""
        low, width = self.low[:, None], (self.high - self.low)[:, None] / self.bins
        # Clamped first: a value of 1e30 is no whole number that a machine knows.
        place = ((values - low) / width).clamp(0, self.bins - 1).long()
        place += (torch.arange(len(values))[:, None] + labels * len(values)) * self.bins
        total += torch.bincount(place.flatten(), minlength=len(total))

    def learn_from(self, noisy: Tensor, images: int) -> None:
        """The quantiles of every class along every direction, as many as images are compared with."""
        counts = noisy.view(self.shape)
        # Every histogram of a class has the same sum, so that their mean is hardly noisy.
        size = counts.sum((1, 2)) / self.shape[1]
        shares = on_simplex(counts / size.clamp(min=1)[:, None, None])
        below = shares.cumsum(2)
        levels = ((torch.arange(images) + 0.5) / images).double().expand(*below.shape[:2], -1).contiguous()
        place = torch.searchsorted(below, levels).clamp(max=self.bins - 1)
        share = shares.gather(2, place)
        inside = ((levels - below.gather(2, place) + share) / share.clamp(min=1e-12)).clamp(0, 1)
        width = (self.high - self.low) / self.bins
        quantiles = self.low[:, None] + width[:, None] * (place + inside)
        self.quantiles = quantiles.transpose(0, 1).float().contiguous()

    def gradient(self, values: Tensor, chosen: Tensor) -> tuple[float, Tensor]:
        """Of the mean of W2^2, at values of directions by classes by images."""
        distance, gradient = sliced(values.flatten(0, 1), self.quantiles[chosen].flatten(0, 1))
        return distance, gradient.view_as(values)


class Waves:
    """For each class and direction, the sum over the class of a cosine and a sine of the projection.

    Guarantee: a record adds a vector of norm `share` for each direction of its class.
    """

    def __init__(self, plan: SWDOneShotPlan, along: Tensor, classes: int, share: float) -> None:
        self.shape, self.share = (classes, plan.directions, 2), share
        source = torch.Generator().manual_seed(plan.pattern_seed)
        # From half a wave to four over all that a projection can be; the first stands still, and its cosines
        # count the records of a class.
        waves = 0.5 * 8 ** torch.rand(plan.directions, generator=source)
        self.pace = 2 * math.pi * waves / along.abs().sum(1)
        self.pace[0] = 0
        self.means = torch.empty(0)

    def add(self, total: Tensor, values: Tensor, labels: Tensor) -> None:
        """Adds those of values, directions by records."""
        angles = values * self.pace[:, None]
        both = torch.stack([angles.cos(), angles.sin()], 2).transpose(0, 1).flatten(1)
        total.view(self.shape[0], -1).index_add_(0, labels, self.share * both)

    def learn_from(self, noisy: Tensor, images: int) -> None:
        """The mean waves of every class."""
        del images
        sums = noisy.view(self.shape) / self.share
        means = sums / sums[:, :1, :1].clamp(min=1)
        self.means = means.transpose(0, 1).float().contiguous()

    def gradient(self, values: Tensor, chosen: Tensor) -> tuple[float, Tensor]:
        """Of the mean squared distance of mean waves, at values of directions by classes by images."""
        pace = self.pace[chosen][:, None, None]
        cos, sin = (values * pace).cos(), (values * pace).sin()
        apart = torch.stack([cos.mean(2), sin.mean(2)], 2) - self.means[chosen]
        turned = apart[..., 1:] * cos - apart[..., :1] * sin
        return apart.square().sum(2).mean().item(), turned * pace * (2 / values.numel())


class SWDOneShotTraining:
    """Released once, learned from without end.

    Guarantee: one Gaussian release of a sum over records, to which each adds a vector of norm at most
    sqrt(directions); see docs/guarantees.md#one-shot. A checkpoint keeps the release, so that no records are
    looked at again.
    """

    def __init__(
        self,
        plan: SWDOneShotPlan,
        records: ImageRows,
        *,
        rng: Rng,
        recipe: OneShotRecipe | None = None,
        device: str | None = None,
    ) -> None:
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.plan, self.records, self.rng = plan, records, rng
        self.recipe = recipe = recipe or plan.known_recipe
        schema = records.schema
        self.learner = Learner(schema, recipe, steps=recipe.generator_steps, rng=rng, device=self.device)
        self.classes = len(schema.classes)
        self.along = patterns(plan, schema)
        self.seen: dict[str, float] = {}

        counting = plan.features is Features.HISTOGRAMS
        size = self.classes * plan.directions * (plan.bins if counting else 2)
        self.sampling = EveryRecord(steps=plan.known_steps)
        self.noise = GaussianNoise(stddev=plan.noise_stddev, size=size, steps=plan.known_steps)
        norm = math.sqrt(plan.directions)
        self.query: Histograms | Waves
        if counting:
            # Whole numbers lie on the grid as they are; nothing is rounded.
            if self.noise.grid > 1:
                raise ValueError("the noise is too coarse for counts: take less")
            self.query = Histograms(plan, self.along, self.classes)
        else:
            self.query = Waves(plan, self.along, self.classes, self.noise.inner(norm) * (1 - ROOM) / norm)
        event = self.sampling.event(
            query=Query.COUNTS if counting else Query.SUM,
            bound=1.0,
            rows=plan.directions,
            noise_stddev=self.noise.stddev,
        )
        if event != plan.event():
            raise Failure(Fault.ACCOUNTING_MISMATCH)
        self.draws = self.sampling.batches(records)
        self.releases = self.noise.releases(rng)
        self.release = torch.zeros(size, dtype=torch.float64)

    def steps(self) -> Iterator[Progress]:
        for everyone in self.draws:
            self.release = self.releases.release(self.total(everyone))
            yield self.progress()
        if self.learner.taken < self.recipe.generator_steps:
            self.query.learn_from(self.release, self.recipe.images)
        while self.learner.taken < self.recipe.generator_steps:
            self.learn()
            yield self.progress()

    def progress(self) -> Progress:
        steps = self.plan.known_steps + self.recipe.generator_steps
        return Progress(self.draws.drawn + self.learner.taken, steps)

    def total(self, everyone: np.ndarray) -> Tensor:
        """The sum over records, a piece at a time; a record that is not finite adds nothing."""
        total, weights = torch.zeros_like(self.release), (self.along.double() / UNIT).round()
        for start in range(0, max(len(everyone), 1), CHUNK // self.plan.directions + 1):
            some = everyone[start : start + CHUNK // self.plan.directions + 1]
            images, labels = self.records.take(some)
            finite = images.flatten(1).isfinite().all(1)
            pixels = ((images[finite].flatten(1).double() + 1) * 127.5).round().clamp(0, 255)
            labels = labels[finite].clamp(0, self.classes - 1)
            self.query.add(total, weights @ pixels.T * (UNIT / 255), labels)
        return total

    def learn(self) -> None:
        """A step of the generator: post-processing of the release."""
        shape = (self.classes, self.recipe.images)
        labels = torch.arange(self.classes, device=self.device).repeat_interleave(self.recipe.images)
        chosen = torch.randperm(self.plan.directions, generator=self.learner.source)[: self.recipe.compared]
        along = self.along[chosen].to(self.device)
        made = ((self.learner.made(labels) + 1) / 2).flatten(1)
        values = (along @ made.detach().T).unflatten(1, shape)
        distance, gradient = self.query.gradient(values.cpu(), chosen)
        self.seen = {"distance": distance}
        self.learner.follow(made, gradient.to(self.device).flatten(1).T @ along)

    def checkpoint(self) -> dict[str, Tensor]:
        counts = {"drawn": torch.tensor(self.draws.drawn), "taken": torch.tensor(self.learner.taken)}
        return kept({**counts, "release": self.release, **self.learner.tensors()})

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Goes on where the checkpoint was taken. What was released stays; nothing is drawn again."""
        fill({"release": self.release, **self.learner.tensors()}, tensors)
        self.learner.taken, drawn = int(tensors["taken"]), int(tensors["drawn"])
        self.draws = self.sampling.batches(self.records, drawn=drawn)
        self.releases = self.noise.releases(self.rng, made=drawn)

    def diagnostics(self) -> dict[str, float]:
        return {name: value for name, value in self.seen.items() if math.isfinite(value)}

    def synthesizer(self) -> ImageSynthesizer:
        released = self.draws.drawn == self.releases.made == self.plan.known_steps
        if not released or self.learner.taken != self.recipe.generator_steps:
            raise Failure(Fault.ACCOUNTING_MISMATCH)
        return self.learner.synthesizer()


def on_simplex(shares: Tensor) -> Tensor:
    """The nearest shares along the last axis that are not negative and sum to one.

    Counts below zero are noise. Cutting them off would leave the noise above zero where nothing is; this
    takes as much from all as brings the sum to one.
    """
    falling, _ = shares.sort(-1, descending=True)
    excess = falling.cumsum(-1) - 1
    ranks = torch.arange(1, shares.shape[-1] + 1, dtype=shares.dtype)
    last = ((falling - excess / ranks) > 0).sum(-1, keepdim=True)
    return (shares - excess.gather(-1, last - 1) / last).clamp(min=0)
