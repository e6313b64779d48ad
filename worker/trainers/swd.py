"""DP-SWD: a generator follows the sliced Wasserstein distance to noisy projections of batches."""

import math
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from core.faults import Failure, Fault
from core.schema import ImageSchema
from sluice.generators.architecture import Architecture
from sluice.generators.dense import Dense
from sluice.generators.image import ImageSynthesizer
from sluice.generators.upsampling import Upsampling
from sluice.methods.base import trainable
from sluice.methods.sliced import GeneratorRecipe
from sluice.methods.swd import SWDPlan, SWDRecipe, row_length
from worker.mechanisms.noise import GaussianNoise, Rng
from worker.mechanisms.projections import (
    Moments,
    Pixels,
    clipped,
    directions,
    inner_bound,
    labelled,
    ordered,
    private_rows,
    smoothed,
)
from worker.mechanisms.sampling import BLANK, Rows, WithoutReplacement
from worker.trainers.descent import descend, remember
from worker.trainers.networks import BatchNormed, numbers, start_state
from worker.trainers.progress import Progress

# How much more the moments between pixels and labels count: they are few, and they make the classes.
ACROSS = 10.0


class ImageRows(Rows, Protocol):
    schema: ImageSchema


def architecture(schema: ImageSchema, recipe: GeneratorRecipe) -> Architecture:
    if schema.kind != "image" or not trainable(schema.height, schema.width):
        raise Failure(Fault.SCHEMA_MISMATCH)
    return {"dense": Dense, "upsampling": Upsampling}[recipe.network](
        height=schema.height,
        width=schema.width,
        channels=schema.channels,
        classes=len(schema.classes),
        features=recipe.features,
        latent=recipe.latent,
    )


class Learner:
    """The generator, its optimizer and its running average. It sees noised releases and no records."""

    def __init__(
        self, schema: ImageSchema, recipe: GeneratorRecipe, *, steps: int, rng: Rng, device: str
    ) -> None:
        self.shape, self.recipe, self.steps, self.device = architecture(schema, recipe), recipe, steps, device
        self.taken = 0
        # What is made up has no secret to keep: a quick source, started by the secure one, will do.
        self.source = torch.Generator().manual_seed(int(rng.words(1)[0]) >> 1)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(rng.words(1)[0]) >> 1)
            self.generator = BatchNormed(self.shape.network()).to(device)
        self.average = deepcopy(self.generator)
        self.parameters = list(self.generator.parameters())
        self.optimizer = torch.optim.Adam(self.parameters, lr=recipe.rate, betas=recipe.betas, fused=True)
        start_state(self.optimizer)

    def normals(self, *size: int) -> Tensor:
        return torch.randn(*size, generator=self.source).to(self.device)

    def made(self, labels: Tensor) -> Tensor:
        return self.generator(self.normals(len(labels), self.shape.latent), labels.to(self.device))

    def follow(self, made: Tensor, gradient: Tensor) -> None:
        """One step down a gradient that is given at something made of its images."""
        left = (1 + math.cos(math.pi * self.taken / self.steps)) / 2
        self.optimizer.param_groups[0]["lr"] = self.recipe.rate * max(left, 0.01)
        descend(self.optimizer, torch.autograd.grad(made, self.parameters, gradient))
        self.taken += 1
        remember(
            numbers(self.average),
            numbers(self.generator),
            steps=self.taken,
            decay=self.recipe.average_decay,
        )

    def synthesizer(self) -> ImageSynthesizer:
        network = self.average if self.recipe.average_decay is not None else self.generator
        # A function of noised releases, so that it may be known.
        if not all(value.isfinite().all() for value in numbers(network)):
            raise Failure(Fault.DIVERGED)
        return ImageSynthesizer(self.shape, network.folded())

    def tensors(self) -> dict[str, Tensor]:
        """All that changes while it learns, but for its randomness and the number of steps it took."""
        found = {
            f"{name}.{key}": value
            for name in ("generator", "average")
            for key, value in getattr(self, name).state_dict().items()
        }
        for index, parameter in enumerate(self.parameters):
            for key, value in self.optimizer.state[parameter].items():
                found[f"optimizer.{index}.{key}"] = value
        return found


class SWDTraining:
    """Algorithm 1 of the paper in the loop of a generator.

    Guarantee: each step releases noisy projections of a batch of fixed size, drawn without replacement, whose
    rows are clipped one by one; see docs/guarantees.md#swd. The generator is computed from these releases and
    from randomness. Only what does not depend on the order of a batch is used of them.
    """

    def __init__(
        self,
        plan: SWDPlan,
        records: ImageRows,
        *,
        rng: Rng,
        recipe: SWDRecipe | None = None,
        device: str | None = None,
    ) -> None:
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.plan, self.records, self.rng = plan, records, rng
        self.recipe = recipe = recipe or plan.known_recipe
        schema = records.schema
        turns = recipe.moment_steps or plan.known_steps
        self.learner = Learner(schema, recipe, steps=turns, rng=rng, device=self.device)
        self.moments = Moments(plan.dim if recipe.moment_steps else 0, plan.geometry, self.device)
        self.classes = len(schema.classes)
        self.pixels = Pixels(schema.channels, schema.height, schema.width, plan.frequencies)
        if plan.dim != row_length(
            schema.height, schema.width, schema.channels, self.classes, plan.frequencies
        ):
            raise Failure(Fault.SCHEMA_MISMATCH)
        self.seen: dict[str, float] = {}

        steps, stddev = plan.known_steps, plan.noise_stddev
        self.sampling = WithoutReplacement(batch=plan.batch, population=plan.records, steps=steps)
        self.noise = GaussianNoise(stddev=stddev, size=plan.directions * plan.batch, steps=steps)
        self.row_bound = inner_bound(plan.row_bound, dim=plan.dim, noise=self.noise)
        event = self.sampling.event(
            geometry=plan.geometry,
            directions=plan.directions,
            dim=plan.dim,
            row_bound=plan.row_bound,
            noise_stddev=self.noise.stddev,
        )
        if event != plan.event():
            raise Failure(Fault.ACCOUNTING_MISMATCH)
        self.draws = self.sampling.batches(records, rng)
        self.releases = self.noise.releases(rng)

    def steps(self) -> Iterator[Progress]:
        for batch in self.draws:
            along, noisy = self.released(batch)
            if self.recipe.moment_steps:
                self.moments.add(along, noisy)
            else:
                self.learn(along, ordered(noisy))
            yield self.progress()
        while self.learner.taken < self.recipe.moment_steps:
            self.learn_moments()
            yield self.progress()

    def progress(self) -> Progress:
        later = self.learner.taken if self.recipe.moment_steps else 0
        return Progress(self.draws.drawn + later, self.plan.known_steps + self.recipe.moment_steps)

    def released(self, batch: np.ndarray) -> tuple[Tensor, Tensor]:
        """Fresh directions, and what is known of the batch: its noisy projections on them."""
        plan = self.plan
        along = directions(plan.geometry, plan.directions, plan.dim, self.rng).to(self.device)
        projected = along @ self.rows(batch).T
        noisy = self.releases.release(projected.flatten()).view(plan.directions, plan.batch)
        return along, noisy.float()

    def rows(self, batch: np.ndarray) -> Tensor:
        there = batch != BLANK
        images, labels = self.records.take(batch[there])
        # A label outside the declared classes must not stop the training: stopping would tell of it.
        labels = labels.to(self.device).clamp(0, self.classes - 1)
        rows = self.labelled(images.to(self.device), labels)
        return private_rows(rows, there, bound=self.row_bound)

    def labelled(self, images: Tensor, labels: Tensor) -> Tensor:
        return labelled(self.pixels.of(images), labels, classes=self.classes, weight=self.plan.label_weight)

    def made_rows(self, count: int) -> Tensor:
        labels = torch.randint(self.classes, (count,), generator=self.learner.source).to(self.device)
        return clipped(self.labelled(self.learner.made(labels), labels), self.plan.row_bound)

    def learn(self, along: Tensor, quantiles: Tensor) -> None:
        """A step of the generator: post-processing of the release."""
        rows = self.made_rows(self.plan.batch)
        self.learner.follow(rows, self.pull(rows.detach(), along, quantiles))

    def learn_moments(self) -> None:
        """A step of the generator towards moments: post-processing of all releases."""
        rows = self.made_rows(self.recipe.moment_images)
        mean, square = self.moments.told(self.plan.noise_stddev)
        label = torch.arange(self.plan.dim, device=self.device) >= self.pixels.size
        weights = torch.where(label[:, None] == label, 1.0, ACROSS).double()
        seen = rows.detach().double()
        # Each half is pulled by how far the other is off: by its own it would be pulled together.
        pulls = []
        for half, other in zip(seen.tensor_split(2), seen.tensor_split(2)[::-1], strict=True):
            off = other.T @ other / len(other) - square
            pulls.append(2 * (other.mean(0) - mean) + 4 * half @ (weights * off))
        self.seen = {"distance": off.square().sum().item()}
        self.learner.follow(rows, torch.cat(pulls).float() / len(rows))

    def pull(self, rows: Tensor, along: Tensor, quantiles: Tensor) -> Tensor:
        """The gradient at made rows of their distance from the release."""
        how = {"noise_stddev": self.plan.noise_stddev, "noises": self.recipe.noises}
        distance, gradient = smoothed(rows, along, quantiles, source=self.learner.source, **how)
        self.seen = {"distance": distance}
        return gradient

    def checkpoint(self) -> dict[str, Tensor]:
        counts = {"step": torch.tensor(self.draws.drawn), "taken": torch.tensor(self.learner.taken)}
        return kept({**counts, **self.tensors()})

    def tensors(self) -> dict[str, Tensor]:
        return {**self.learner.tensors(), **self.moments.tensors()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Goes on where the checkpoint was taken, with fresh randomness under the same charge."""
        fill(self.tensors(), tensors)
        step, self.learner.taken = int(tensors["step"]), int(tensors["taken"])
        self.draws = self.sampling.batches(self.records, self.rng, drawn=step)
        self.releases = self.noise.releases(self.rng, made=step)

    def diagnostics(self) -> dict[str, float]:
        return {name: value for name, value in self.seen.items() if math.isfinite(value)}

    def synthesizer(self) -> ImageSynthesizer:
        released = self.draws.drawn == self.releases.made == self.plan.known_steps
        if not released or self.learner.taken < self.recipe.moment_steps:
            raise Failure(Fault.ACCOUNTING_MISMATCH)
        return self.learner.synthesizer()


def kept(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().cpu().clone().contiguous() for name, value in tensors.items()}


def fill(parts: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    missing = set(parts) - set(tensors)
    if missing:
        raise ValueError(f"the checkpoint lacks {len(missing)} tensors")
    with torch.no_grad():
        for name, value in parts.items():
            value.copy_(tensors[name])
