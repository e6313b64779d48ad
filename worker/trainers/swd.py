"""DP-SWD: a generator follows the sliced Wasserstein distance to noisy projections of batches."""

import numpy as np
import torch
from torch import Tensor

from core.faults import Failure, Fault
from sluice.generators.dct import LowFrequencies
from sluice.generators.image import ImageSynthesizer
from sluice.methods.sliced import GeneratorRecipe
from sluice.methods.swd import SWDPlan, SWDRecipe, row_length
from worker.mechanisms.projections import (
    Moments,
    ProjectionMechanism,
    append_labels,
    clip_differentiably,
    private_rows,
    smoothed_distance,
    sort_rows,
)
from worker.mechanisms.sampling import BLANK
from worker.trainers.base import NETWORKS, BaseTrainer, P, R, cosine_decay, seed
from worker.trainers.generator import LearningGenerator
from worker.trainers.networks import BatchNormed

# Weight of the moments between pixels and labels: they are few, and they make the classes.
CROSS_WEIGHT = 10.0


class GeneratorTrainer(BaseTrainer[P, R]):
    """What both forms of SWD share: the generator, and fast random numbers for it."""

    generator_recipe: GeneratorRecipe

    def build_generator(self, recipe: GeneratorRecipe, *, steps: int) -> None:
        self.generator_recipe, self.generator_steps = recipe, steps
        # Generated images are not secret, so a fast generator that the secure one seeds is enough.
        self.random = torch.Generator().manual_seed(seed(self.rng))
        self.shape = self.architecture(
            NETWORKS[recipe.network], features=recipe.features, latent=recipe.latent
        )
        with self.seeded():
            network = BatchNormed(self.shape.network())
        self.generator = LearningGenerator(
            self.shape,
            network,
            rate=recipe.rate,
            betas=recipe.betas,
            average_decay=recipe.average_decay,
            device=self.device,
        )

    def generate(self, labels: Tensor) -> Tensor:
        return self.generator(torch.randn(len(labels), self.shape.latent, generator=self.random), labels)

    def follow(self, outputs: Tensor, gradient: Tensor) -> None:
        """One step of the generator, at a learning rate that falls along a cosine."""
        decay = cosine_decay(int(self.generator.taken), self.generator_steps)
        self.generator.optimizer.param_groups[0]["lr"] = self.generator_recipe.rate * decay
        self.generator.follow(outputs, gradient)

    def build_synthesizer(self) -> ImageSynthesizer:
        return self.generator.synthesizer()


class Trainer(GeneratorTrainer[SWDPlan, SWDRecipe]):
    """Algorithm 1 of the paper in the loop of a generator.

    Guarantee: each step releases noisy projections of a batch of fixed size, drawn without replacement, whose
    rows are clipped one by one; see docs/guarantees.md#swd. The generator is computed from these releases and
    from randomness. Only what does not depend on the order of a batch is used of them.
    """

    mechanism: ProjectionMechanism

    def build(self) -> None:
        plan, recipe, schema = self.plan, self.recipe, self.schema
        self.build_generator(recipe, steps=recipe.moment_steps or plan.known_steps)
        self.public_steps_planned = recipe.moment_steps
        self.moments = Moments(plan.dim if recipe.moment_steps else 0, plan.geometry, self.device)
        size = (schema.channels, schema.height, schema.width)
        self.basis = plan.frequencies and LowFrequencies(
            *size, plan.frequencies, dtype=torch.float32, device=self.device
        )
        self.pixels = plan.dim - self.classes
        if plan.dim != row_length(
            schema.height, schema.width, schema.channels, self.classes, plan.frequencies
        ):
            raise Failure(Fault.SCHEMA_MISMATCH)

    def make_mechanism(self) -> ProjectionMechanism:
        return ProjectionMechanism(self.plan, self.rng)

    def step(self, batch: np.ndarray) -> None:
        directions, noisy = self.mechanism.project(self.private_rows(batch))
        if self.recipe.moment_steps:
            self.moments.add(directions, noisy)
        else:
            rows = self.generated_rows(self.plan.batch)
            self.follow(rows, self.gradient(rows.detach(), directions, sort_rows(noisy)))

    def private_rows(self, batch: np.ndarray) -> Tensor:
        present = batch != BLANK
        rows = self.rows(*self.take(batch[present]))
        return private_rows(rows, present, bound=self.mechanism.clip_norm)

    def rows(self, images: Tensor, labels: Tensor) -> Tensor:
        """Pixels from 0 to 1, or their lowest frequencies, and the label: linear, so that gradients pass."""
        images = (images + 1) / 2
        values = self.basis.coefficients(images) if self.basis else images.flatten(1)
        return append_labels(values, labels, classes=self.classes, weight=self.plan.label_weight)

    def generated_rows(self, count: int) -> Tensor:
        labels = torch.randint(self.classes, (count,), generator=self.random).to(self.device)
        return clip_differentiably(self.rows(self.generate(labels), labels), self.plan.row_bound)

    def gradient(self, rows: Tensor, directions: Tensor, quantiles: Tensor) -> Tensor:
        """The gradient at generated rows of their distance from the release."""
        distance, gradient = smoothed_distance(
            rows,
            directions,
            quantiles,
            noise_stddev=self.plan.noise_stddev,
            noises=self.recipe.noises,
            source=self.random,
        )
        self.measured = {"distance": distance}
        return gradient

    def public_step(self) -> None:
        """A step of the generator towards the moments estimated from all releases."""
        rows = self.generated_rows(self.recipe.moment_images)
        mean, square = self.moments.estimate(self.plan.noise_stddev)
        label = torch.arange(self.plan.dim, device=self.device) >= self.pixels
        weights = torch.where(label[:, None] == label, 1.0, CROSS_WEIGHT).double()
        # Each half moves by the error of the other: by its own it would contract.
        gradients, halves = [], rows.detach().double().tensor_split(2)
        for half, other in zip(halves, halves[::-1], strict=True):
            error = other.T @ other / len(other) - square
            gradients.append(2 * (other.mean(0) - mean) + 4 * half @ (weights * error))
        self.measured = {"distance": error.square().sum().item()}
        self.follow(rows, torch.cat(gradients).float() / len(rows))

    def state(self) -> dict[str, Tensor]:
        return {**self.generator.state(), **self.moments.state()}
