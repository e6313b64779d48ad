"""DPGAN: a discriminator trained by DP-SGD and a generator that follows it ("Private GANs, Revisited")."""

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sluice.generators.dcgan import DCGAN
from sluice.generators.image import ImageSynthesizer
from sluice.methods.dpgan import DPGANPlan, DPGANRecipe
from sluice.privacy.events import Query
from worker.mechanisms.clipping import Clipped, Loss, clipped_sum, validate, views_like
from worker.mechanisms.mechanism import Mechanism
from worker.mechanisms.noise import GaussianNoise
from worker.mechanisms.sampling import PoissonSampling, uniform
from worker.trainers.base import NETWORKS, BaseTrainer, tensors_of
from worker.trainers.generator import LearningGenerator, apply_gradients, start_state
from worker.trainers.networks import BatchNormed, DenseDiscriminator, Discriminator, diversity

# The values that the number of discriminator steps per generator step grows through.
LADDER = [digit * 10**power for power in range(5) for digit in (1, 2, 5)]


class StepSchedule:
    """When the generator takes a step: the adaptive frequency of section 6.2, by accuracy on fakes."""

    def __init__(self, recipe: DPGANRecipe) -> None:
        self.recipe = recipe
        self.every = torch.tensor(recipe.discriminator_steps)
        self.taken, self.since_change = torch.tensor(0), torch.tensor(0)
        self.accuracy = torch.tensor(math.nan, dtype=torch.float64)

    def generator_turn(self) -> bool:
        """Counts a discriminator step; True if a generator step follows it."""
        self.taken.add_(1).remainder_(self.every)
        return int(self.taken) == 0

    def update(self, accuracy: float) -> None:
        """Averages the accuracy on the fakes of generator steps; where it is low, they become rarer."""
        decay, floor = self.recipe.accuracy_decay, self.recipe.accuracy_floor
        before = accuracy if self.accuracy.isnan() else self.accuracy.item()
        self.accuracy.fill_(decay * before + (1 - decay) * accuracy)
        self.since_change += 1
        if floor is not None and self.accuracy <= floor and self.since_change >= round(2 / (1 - decay)):
            self.every.fill_(next((rung for rung in LADDER if rung > self.every), int(self.every)))
            self.since_change.zero_()

    def state(self) -> dict[str, Tensor]:
        names = ("every", "taken", "since_change", "accuracy")
        return {f"schedule.{name}": getattr(self, name) for name in names}


def adversarial_loss(discriminator: nn.Module, images: Tensor, labels: Tensor, real: Tensor) -> Tensor:
    """-log D for real images, -log(1 - D) for fakes: one loss per record."""
    return F.softplus(discriminator(images, labels) * torch.where(real, -1.0, 1.0))


def labelled_loss(weight: float) -> Loss:
    """The same, plus the cross entropy of real records' labels: one loss per record."""

    def loss(discriminator: DenseDiscriminator, images: Tensor, labels: Tensor, real: Tensor) -> Tensor:
        scores, logits = discriminator.scores_and_logits(images, labels)
        adversarial = F.softplus(scores * torch.where(real, -1.0, 1.0))
        return adversarial + weight * real * F.cross_entropy(logits, labels, reduction="none")

    return loss


class Trainer(BaseTrainer[DPGANPlan, DPGANRecipe]):
    """Algorithm 1 of the paper.

    Guarantee: each step is a Poisson-sampled Gaussian mechanism on a sum over records, with sensitivity
    clip_norm under add-or-remove; see docs/guarantees.md#dpgan. Everything else (fakes, generator, schedule,
    averaging) is computed from noised discriminators and from randomness.
    """

    def build(self) -> None:
        recipe = self.recipe
        self.shape = self.architecture(
            NETWORKS[recipe.network], features=recipe.generator_features, latent=recipe.latent
        )
        with self.seeded():
            kind = Discriminator if isinstance(self.shape, DCGAN) else DenseDiscriminator
            self.discriminator = kind(self.shape, recipe.discriminator_features).to(self.device)
            network = self.shape.network()
        self.generator = LearningGenerator(
            self.shape,
            network if isinstance(self.shape, DCGAN) else BatchNormed(network),
            rate=recipe.generator_rate,
            betas=recipe.betas,
            average_decay=recipe.average_decay,
            device=self.device,
        )
        # Without weight decay AdamW is Adam.
        self.optimizer = torch.optim.AdamW(
            self.discriminator.parameters(),
            lr=recipe.discriminator_rate,
            betas=recipe.betas,
            weight_decay=recipe.discriminator_decay,
            fused=True,
        )
        start_state(self.optimizer)
        self.loss = labelled_loss(recipe.label_weight) if recipe.label_weight else adversarial_loss
        self.schedule = StepSchedule(recipe)
        # As many fakes as records are expected: public, unlike the number of records that were drawn.
        # Two at least, for batch norm.
        self.fakes = max(2, round(self.plan.expected_batch))
        self.clipped: Clipped | None = None
        with torch.no_grad():
            validate(self.discriminator, self.sample_fakes(3))

    def make_mechanism(self) -> Mechanism:
        plan, size = self.plan, sum(p.numel() for p in self.discriminator.parameters())
        sampler = PoissonSampling(prob=plan.sampling_prob, steps=plan.known_steps)
        noise = GaussianNoise(stddev=plan.noise_stddev, size=size)
        return Mechanism(sampler, noise, self.rng, query=Query.SUM, bound=plan.clip_norm)

    def step(self, batch: np.ndarray) -> None:
        self.clipped = self.clipped_gradients(*self.take(batch))
        noisy = self.mechanism.release(self.clipped.total)
        # Divided by the expected size: the drawn size depends on who is in the data.
        self.improve_discriminator(noisy / (2 * self.plan.expected_batch))
        if self.schedule.generator_turn():
            self.improve_generator()

    def clipped_gradients(self, images: Tensor, labels: Tensor) -> Clipped:
        """The sum over real records and fakes, each clipped by itself."""
        fakes, fake_labels = self.sample_fakes(self.fakes)
        rows = (
            torch.cat([images, fakes]),
            torch.cat([labels, fake_labels]),
            torch.arange(len(labels) + self.fakes, device=self.device) < len(labels),
        )
        return clipped_sum(
            self.discriminator,
            self.loss,
            rows,
            clip_norm=self.mechanism.clip_norm,
            physical_batch=self.recipe.physical_batch,
        )

    def improve_discriminator(self, gradient: Tensor) -> None:
        parameters = list(self.discriminator.parameters())
        apply_gradients(self.optimizer, views_like(parameters, gradient.float()))

    def improve_generator(self) -> None:
        """One step on -log D of fresh fakes: post-processing of the noised discriminator."""
        latents, labels = self.latents(self.fakes)
        half = self.fakes // 2
        labels[half : 2 * half] = labels[:half]
        images = self.generator(latents, labels)
        scores = self.discriminator(images, labels)
        self.generator.minimize(
            F.softplus(-scores).mean() - self.recipe.variety * diversity(images[: 2 * half])
        )
        self.schedule.update((scores < 0).double().mean().item())

    def latents(self, count: int) -> tuple[Tensor, Tensor]:
        """Latents, and labels that are uniform whatever the labels of the records are."""
        normals = self.rng.normals(count * self.shape.latent).view(count, -1)
        labels = torch.from_numpy(uniform(count, self.classes, self.rng))
        return normals.float().to(self.device), labels.to(self.device)

    @torch.no_grad()
    def sample_fakes(self, count: int) -> tuple[Tensor, Tensor]:
        latents, labels = self.latents(count)
        return self.generator(latents, labels), labels

    def state(self) -> dict[str, Tensor]:
        discriminator = tensors_of(discriminator=self.discriminator, discriminator_optimizer=self.optimizer)
        return {**discriminator, **self.generator.state(), **self.schedule.state()}

    def diagnostics(self) -> dict[str, float]:
        self.measured = {
            "discriminator_steps": float(self.schedule.every),
            "accuracy_on_fakes": self.schedule.accuracy.item(),
        }
        if self.clipped is not None:
            real = len(self.clipped.norms) - self.fakes
            for name, part in (("real", slice(0, real)), ("fake", slice(real, None))):
                norms, losses = self.clipped.norms[part], self.clipped.losses[part]
                self.measured[f"{name}_records"] = float(len(norms))
                if len(norms):
                    self.measured[f"{name}_loss"] = losses.mean().item()
                    self.measured[f"{name}_gradient_norm"] = norms.median().item()
                    clipped = (norms > self.mechanism.clip_norm).double().mean()
                    self.measured[f"{name}_clipped"] = clipped.item()
        return super().diagnostics()

    def build_synthesizer(self) -> ImageSynthesizer:
        return self.generator.synthesizer()
