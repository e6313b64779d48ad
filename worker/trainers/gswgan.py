"""GS-WGAN: discriminators on disjoint parts, whose gradients at the images leave noised ("GS-WGAN", 2020)."""

import math
import tempfile
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from core.faults import Failure, Fault
from sluice.generators.dcgan import SLOPE
from sluice.generators.dct import LowFrequencies
from sluice.generators.dense import Dense
from sluice.generators.image import ImageSynthesizer
from sluice.methods.gswgan import GSWGANPlan, GSWGANRecipe
from sluice.privacy.events import Query
from worker.mechanisms.clipping import clip_rows
from worker.mechanisms.mechanism import Mechanism
from worker.mechanisms.noise import GaussianNoise
from worker.mechanisms.sampling import PartRotation, uniform
from worker.trainers.base import BaseTrainer, load_into, snapshot
from worker.trainers.generator import LearningGenerator, apply_gradients
from worker.trainers.networks import BatchNormed, diversity


class Discriminators:
    """Several discriminators side by side, each with one hidden layer: (v + v_label) . h(frequencies).

    They share nothing: every product is batched over discriminators.
    """

    def __init__(self, weights: Tensor, *, inputs: int, classes: int) -> None:
        features = weights.shape[1] // (inputs + classes + 2)
        pieces = weights.view(len(weights), -1, features).split((inputs, 1, 1, classes), 1)
        self.weights = [piece.contiguous().requires_grad_() for piece in pieces]
        self.body, self.bias, self.score, self.label = self.weights

    @staticmethod
    def initial(count: int, *, inputs: int, classes: int, features: int) -> Tensor:
        """Random hidden layers and scores of zero: the first answers come from what the part taught."""
        weights = torch.zeros(count, (inputs + classes + 2) * features)
        weights[:, : inputs * features].normal_(std=1 / math.sqrt(inputs))
        return weights

    def scores(self, x: Tensor, labels: Tensor) -> Tensor:
        hidden = torch.baddbmm(self.bias, x, self.body)
        return (F.leaky_relu(hidden, SLOPE) * self.directions(labels)).sum(2)

    def gradients(self, x: Tensor, labels: Tensor) -> Tensor:
        """Of each score at its own input, differentiable in the weights."""
        with torch.no_grad():
            slopes = torch.where(torch.baddbmm(self.bias, x, self.body) > 0, 1.0, SLOPE)
        return torch.bmm(slopes * self.directions(labels), self.body.transpose(1, 2))

    def directions(self, labels: Tensor) -> Tensor:
        index = labels[..., None].expand(-1, -1, self.label.shape[2])
        return self.score + torch.gather(self.label, 1, index)


class Trainer(BaseTrainer[GSWGANPlan, GSWGANRecipe]):
    """A generator that follows many discriminators, each trained on one part of the records.

    Guarantee: a step releases the sum of a panel's clipped gradients with noise. A record is in one part, so
    it moves one term of that sum, by at most 2 * clip_norm (* sqrt(images) if clipped per image), and only in
    the steps of its panel; see docs/guarantees.md#gswgan. Discriminators never leave the trainer. The
    generator is computed from noised sums and from randomness.
    """

    on_cpu = True

    def build(self) -> None:
        recipe = self.recipe
        self.shape = self.architecture(Dense, features=recipe.generator_features, latent=recipe.latent)
        sides = (self.shape.channels, self.shape.height, self.shape.width)
        self.basis = LowFrequencies(*sides, recipe.frequencies or max(sides), dtype=torch.float32)
        self.scale = 2 / math.sqrt(self.shape.height * self.shape.width)  # to numbers of about one
        with self.seeded():
            network = BatchNormed(self.shape.network())
            self.discriminators = self.weights_on_disk()
        self.generator = LearningGenerator(
            self.shape,
            network,
            rate=recipe.generator_rate,
            betas=(0.5, 0.99),
            average_decay=recipe.average_decay,
            device=self.device,
        )
        self.key = torch.from_numpy(self.rng.words(4).view(np.uint8).copy())
        # An even number, for pairs; two at least, for batch norm.
        self.generated = self.plan.images + self.plan.images % 2

    def weights_on_disk(self) -> Tensor:
        """Weights of all discriminators in an unlinked file: memory holds only those that learn."""
        plan, recipe = self.plan, self.recipe
        sizes = {
            "inputs": self.basis.size,
            "classes": self.classes,
            "features": recipe.discriminator_features,
        }
        width = Discriminators.initial(0, **sizes).shape[1]
        with tempfile.TemporaryFile() as file:
            weights = torch.from_numpy(
                np.memmap(file, dtype=np.float32, mode="w+", shape=(plan.parts, width))
            )
        for chunk in weights.split(recipe.abreast):
            chunk.copy_(Discriminators.initial(len(chunk), **sizes))
        return weights

    def sampler(self) -> PartRotation:
        return PartRotation(
            parts=self.plan.parts,
            panel=self.plan.panel,
            batch=self.recipe.part_batch,
            steps=self.plan.known_steps,
            key=self.key.numpy().tobytes(),
        )

    def make_mechanism(self) -> Mechanism:
        plan, size = self.plan, self.plan.images * self.basis.size
        noise, self.rotation = GaussianNoise(stddev=plan.noise_stddev, size=size), self.sampler()
        query = {"query": Query.FUNCTION, "bound": plan.clip_norm, "rows": plan.rows}
        return Mechanism(self.rotation, noise, self.rng, **query)

    def step(self, batch: np.ndarray) -> None:
        latents, labels = self.latents(self.generated)
        images = self.generator(latents, labels)
        inputs = self.inputs(images[: self.plan.images])
        total = self.answers(batch, inputs.detach(), labels[: self.plan.images])
        noisy = self.mechanism.release(total)
        # Divided by the longest sum that a panel can give: a public constant.
        gradient = (noisy / (self.plan.panel * self.plan.clip_norm)).float().view_as(inputs)
        self.follow(images, inputs, gradient)

    def follow(self, images: Tensor, inputs: Tensor, gradient: Tensor) -> None:
        """One step of the generator along the noised answers: post-processing."""
        self.generator.minimize((inputs * gradient).sum() - self.recipe.variety * diversity(images))

    def inputs(self, images: Tensor) -> Tensor:
        """What discriminators see of images: their lowest frequencies."""
        return self.basis.coefficients(images) * self.scale

    def answers(self, batch: np.ndarray, inputs: Tensor, labels: Tensor) -> Tensor:
        """The sum over the panel of gradients at the images, each discriminator's clipped by itself."""
        recipe, step, clip_norm = self.recipe, self.mechanism.drawn - 1, self.mechanism.clip_norm
        turn = self.rotation.turn(step)
        takes = recipe.first_steps if step < self.rotation.panels else recipe.discriminator_steps
        fakes = [self.sample_fakes(recipe.part_batch) for _ in range(takes)]
        present = torch.from_numpy(batch >= 0)
        images, classes = self.take(batch[batch >= 0])
        real = torch.zeros(*batch.shape, self.basis.size)
        real[present] = self.inputs(torch.nan_to_num(images, nan=0.0).clamp(-1, 1))
        real_labels = torch.zeros(batch.shape, dtype=torch.int64)
        real_labels[present] = classes
        total = torch.zeros(inputs.numel(), dtype=torch.float64)
        norms, gaps = [], []
        for start in range(0, len(turn), recipe.abreast):
            some = slice(start, min(start + recipe.abreast, len(turn)))
            weights = self.discriminators[turn[some.start] : turn[some.start] + some.stop - some.start]
            several = Discriminators(weights.clone(), inputs=self.basis.size, classes=self.classes)
            gaps.append(self.learn(several, real[some], real_labels[some], present[some, 0], fakes))
            with torch.no_grad():
                weights.copy_(torch.cat(several.weights, 1).flatten(1))
                # Uphill for the score is downhill for the generator's loss.
                uphill = several.gradients(*repeated(inputs, labels, len(weights)))
                rows = -uphill.flatten(0, 1) if self.plan.rows > 1 else -uphill.flatten(1)
                clipped, lengths = clip_rows(rows, clip_norm)
                total += clipped.view(len(weights), -1).sum(0)
                norms.append(lengths)
        lengths = torch.cat(norms)
        self.measured = {
            "score_gap": torch.cat(gaps).median().item(),
            "answer_norm": lengths.median().item(),
            "answers_clipped": (lengths > clip_norm).double().mean().item(),
            "agreement": total.norm().item() / (len(turn) * math.sqrt(self.plan.rows) * clip_norm),
        }
        return total

    def learn(
        self,
        several: Discriminators,
        real: Tensor,
        real_labels: Tensor,
        present: Tensor,
        fakes: list[tuple[Tensor, Tensor]],
    ) -> Tensor:
        """Wasserstein loss with a gradient penalty per sample. Returns gaps between real and fake scores.

        The optimizer starts afresh in each turn, so that only weights are stored.
        """
        optimizer = torch.optim.Adam(
            several.weights, lr=self.recipe.discriminator_rate, betas=(0.5, 0.9), fused=True
        )
        gap = torch.zeros(len(real))
        for fake_batch in fakes:
            fake, labels = repeated(*fake_batch, len(real))
            scores = several.scores(real, real_labels).mean(1) * present
            gap = scores - several.scores(fake, labels).mean(1)
            share = self.uniforms(*real.shape[:2], 1)
            between = several.gradients(share * real + (1 - share) * fake, real_labels)
            # One-sided: a discriminator need not be steep where it knows nothing, so that they agree more.
            excess = F.relu((between.square().sum(2) + 1e-12).sqrt() - 1)
            loss = self.recipe.penalty * excess.square().mean(1) - gap
            # A sum over discriminators that share nothing: each gets its own gradient.
            apply_gradients(optimizer, torch.autograd.grad(loss.sum(), several.weights))
        return gap.detach().nan_to_num()

    def latents(self, count: int) -> tuple[Tensor, Tensor]:
        """Latents, and consecutive labels from a random one on, the same for both halves of the batch."""
        normals = self.rng.normals(count * self.shape.latent).view(count, -1)
        first = int(uniform(1, self.classes, self.rng)[0])
        return normals.float(), (first + torch.arange(count) % (count // 2)) % self.classes

    @torch.no_grad()
    def sample_fakes(self, count: int) -> tuple[Tensor, Tensor]:
        latents, labels = self.latents(count)
        return self.inputs(self.generator(latents, labels)), labels

    def uniforms(self, *shape: int) -> Tensor:
        words = self.rng.words(math.prod(shape)) >> np.uint64(40)
        return torch.from_numpy(words.astype(np.float32)).mul_(2.0**-24).view(shape)

    def state(self) -> dict[str, Tensor]:
        """With the key of the partition and the discriminators: private, for the vault alone."""
        private = {"partition.key": self.key, "discriminator.weights": self.discriminators}
        return {**private, **self.generator.state()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Continues on the same parts."""
        super().restore(tensors)
        self.mechanism.sampler = self.rotation = replace(self.rotation, key=self.key.numpy().tobytes())

    def handed_on(self) -> dict[str, Tensor]:
        """What the next owner's training continues from: computed from noised sums alone."""
        return snapshot(self.generator.weights())

    def take_over(self, tensors: Mapping[str, Tensor]) -> None:
        """Continues from the generator of another owner's training, on records of its own."""
        own = self.generator.weights()
        if {name: value.shape for name, value in own.items()} != {n: v.shape for n, v in tensors.items()}:
            raise Failure(Fault.SCHEMA_MISMATCH)
        load_into(own, tensors)

    def build_synthesizer(self) -> ImageSynthesizer:
        return self.generator.synthesizer()


def repeated(x: Tensor, labels: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The same images and labels for each of `count` discriminators."""
    return x.expand(count, *x.shape), labels.expand(count, -1)
