"""DPGAN: a discriminator trained by DP-SGD and a generator that follows it ("Private GANs, Revisited")."""

import math
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.faults import Failure, Fault
from core.schema import ImageSchema
from sluice.generators.dcgan import DCGAN
from sluice.generators.dense import Dense
from sluice.generators.image import ImageSynthesizer
from sluice.methods.base import trainable
from sluice.methods.dpgan import DPGANPlan, DPGANRecipe
from sluice.privacy.events import Query
from worker.mechanisms.clipping import Clipped, Loss, clipped_sum, like, validate
from worker.mechanisms.noise import GaussianNoise, Rng
from worker.mechanisms.sampling import PoissonSampling, Rows, uniform
from worker.trainers.descent import descend, remember
from worker.trainers.networks import (
    BatchNormed,
    DenseDiscriminator,
    Discriminator,
    difference,
    numbers,
    start_state,
)
from worker.trainers.progress import Progress

LADDER = [digit * 10**power for power in range(5) for digit in (1, 2, 5)]


class ImageRows(Rows, Protocol):
    schema: ImageSchema


class Pace:
    """When the generator moves: the adaptive step frequency of section 6.2, from fakes alone."""

    def __init__(self, recipe: DPGANRecipe) -> None:
        self.recipe = recipe
        self.every, self.taken, self.since = recipe.discriminator_steps, 0, 0
        self.accuracy = math.nan

    def due(self) -> bool:
        """Counts a discriminator step; true when the generator's turn has come."""
        self.taken = (self.taken + 1) % self.every
        return self.taken == 0

    def saw(self, accuracy: float) -> None:
        """Takes in the accuracy on the fakes of a generator step, and slows the generator if it is low."""
        decay, floor = self.recipe.accuracy_decay, self.recipe.accuracy_floor
        before = accuracy if math.isnan(self.accuracy) else self.accuracy
        self.accuracy = decay * before + (1 - decay) * accuracy
        self.since += 1
        if floor is not None and self.accuracy <= floor and self.since >= round(2 / (1 - decay)):
            self.every = next((rung for rung in LADDER if rung > self.every), self.every)
            self.since = 0


def architecture(schema: ImageSchema, recipe: DPGANRecipe) -> DCGAN | Dense:
    if schema.kind != "image" or not trainable(schema.height, schema.width):
        raise Failure(Fault.SCHEMA_MISMATCH)
    return {"conv": DCGAN, "dense": Dense}[recipe.network](
        height=schema.height,
        width=schema.width,
        channels=schema.channels,
        classes=len(schema.classes),
        features=recipe.generator_features,
        latent=recipe.latent,
    )


def pair(shape: DCGAN | Dense, recipe: DPGANRecipe) -> tuple[nn.Module, nn.Module]:
    """Discriminator and generator, untrained."""
    if isinstance(shape, DCGAN):
        return Discriminator(shape, recipe.discriminator_features), shape.network()
    return DenseDiscriminator(shape, recipe.discriminator_features), BatchNormed(shape.network())


def adversarial_loss(discriminator: nn.Module, images: Tensor, labels: Tensor, real: Tensor) -> Tensor:
    """-log D for the real, -log(1 - D) for the fake: one loss for each record."""
    return F.softplus(discriminator(images, labels) * torch.where(real, -1.0, 1.0))


def labelled_loss(weight: float) -> Loss:
    """The same, and for real records how badly their label was told: one loss for each record."""

    def loss(discriminator: DenseDiscriminator, images: Tensor, labels: Tensor, real: Tensor) -> Tensor:
        scores, logits = discriminator.judged(images, labels)
        adversarial = F.softplus(scores * torch.where(real, -1.0, 1.0))
        return adversarial + weight * real * F.cross_entropy(logits, labels, reduction="none")

    return loss


class DPGANTraining:
    """Algorithm 1 of the paper.

    Guarantee: each step is a Poisson-sampled Gaussian mechanism on a sum over records, with sensitivity
    clip_norm under add-or-remove; see docs/guarantees.md#dpgan. Everything else (fakes, generator, pace,
    averaging) is computed from noised discriminators and from randomness.
    """

    def __init__(
        self,
        plan: DPGANPlan,
        records: ImageRows,
        *,
        rng: Rng,
        recipe: DPGANRecipe | None = None,
        device: str | None = None,
    ) -> None:
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.plan, self.records, self.rng = plan, records, rng
        self.recipe = recipe = recipe or plan.recipe or DPGANRecipe.for_device(self.device)
        self.shape = architecture(records.schema, recipe)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(rng.words(1)[0]) >> 1)
            discriminator, generator = pair(self.shape, recipe)
        self.discriminator, self.generator = discriminator.to(self.device), generator.to(self.device)
        self.average = deepcopy(self.generator)
        # Without weight decay AdamW is Adam.
        self.discriminator_optimizer = torch.optim.AdamW(
            self.discriminator.parameters(),
            lr=recipe.discriminator_rate,
            betas=recipe.betas,
            weight_decay=recipe.discriminator_decay,
            fused=True,
        )
        self.generator_optimizer = torch.optim.Adam(
            self.generator.parameters(), lr=recipe.generator_rate, betas=recipe.betas, fused=True
        )
        for optimizer in (self.discriminator_optimizer, self.generator_optimizer):
            start_state(optimizer)
        self.loss = labelled_loss(recipe.label_weight) if recipe.label_weight else adversarial_loss
        self.pace = Pace(recipe)
        self.generator_steps = 0
        # As many fakes as records are expected: public, unlike the number of records that were drawn.
        # Two at least, for batch norm.
        self.fakes = max(2, round(plan.expected_batch))
        self.last: Clipped | None = None

        size = sum(p.numel() for p in self.discriminator.parameters())
        self.sampling = PoissonSampling(prob=plan.sampling_prob, steps=plan.known_steps)
        self.noise = GaussianNoise(stddev=plan.noise_stddev, size=size, steps=plan.known_steps)
        self.clip_norm = self.noise.inner(plan.clip_norm)
        event = self.sampling.event(query=Query.SUM, bound=plan.clip_norm, noise_stddev=self.noise.stddev)
        if event != plan.event():
            raise Failure(Fault.ACCOUNTING_MISMATCH)
        self.draws = self.sampling.batches(records, rng)
        self.releases = self.noise.releases(rng)
        with torch.no_grad():
            validate(self.discriminator, self.made_up(3))

    def steps(self) -> Iterator[Progress]:
        for batch in self.draws:
            self.last = self.clipped_gradients(*self.records.take(batch))
            noisy = self.releases.release(self.last.total)
            # Divided by the expected size: the drawn size depends on who is in the data.
            self.descend(noisy / (2 * self.plan.expected_batch))
            if self.pace.due():
                self.improve_generator()
            yield Progress(self.draws.drawn, self.plan.known_steps)

    def clipped_gradients(self, images: Tensor, labels: Tensor) -> Clipped:
        """The sum over real records and fakes, each clipped by itself, in physical batches."""
        fakes, fake_labels = self.made_up(self.fakes)
        # A label outside the declared classes must not stop the training: stopping would tell of it.
        labels = labels.to(self.device).clamp(0, self.shape.classes - 1)
        rows = (
            torch.cat([images.to(self.device), fakes]),
            torch.cat([labels, fake_labels]),
            torch.arange(len(labels) + self.fakes, device=self.device) < len(labels),
        )
        return clipped_sum(
            self.discriminator,
            self.loss,
            rows,
            clip_norm=self.clip_norm,
            physical_batch=self.recipe.physical_batch,
        )

    def descend(self, gradient: Tensor) -> None:
        parameters = list(self.discriminator.parameters())
        descend(self.discriminator_optimizer, like(parameters, gradient.float()))

    def improve_generator(self) -> None:
        """One step on -log D of fresh fakes: post-processing of the noised discriminator."""
        latents, labels = self.latents(self.fakes)
        half = self.fakes // 2
        labels[half : 2 * half] = labels[:half]
        images = self.generator(latents, labels)
        scores = self.discriminator(images, labels)
        loss = F.softplus(-scores).mean() - self.recipe.variety * difference(images[: 2 * half])
        descend(self.generator_optimizer, torch.autograd.grad(loss, list(self.generator.parameters())))
        self.generator_steps += 1
        self.pace.saw((scores < 0).double().mean().item())
        remember(
            numbers(self.average),
            numbers(self.generator),
            steps=self.generator_steps,
            decay=self.recipe.average_decay,
        )

    def latents(self, count: int) -> tuple[Tensor, Tensor]:
        """Latents, and labels that are uniform whatever the labels of the records are."""
        normals = self.rng.normals(count * self.shape.latent).view(count, -1)
        labels = torch.from_numpy(uniform(count, self.shape.classes, self.rng))
        return normals.float().to(self.device), labels.to(self.device)

    @torch.no_grad()
    def made_up(self, count: int) -> tuple[Tensor, Tensor]:
        latents, labels = self.latents(count)
        return self.generator(latents, labels), labels

    def checkpoint(self) -> dict[str, Tensor]:
        tensors = {
            "step": torch.tensor(self.draws.drawn),
            "generator_steps": torch.tensor(self.generator_steps),
        }
        for name in ("every", "taken", "since", "accuracy"):
            tensors[f"pace.{name}"] = torch.tensor(getattr(self.pace, name), dtype=torch.float64)
        for name, part in self._parts().items():
            tensors |= {f"{name}.{key}": value.detach().cpu().clone() for key, value in part.items()}
        return {name: value.contiguous() for name, value in tensors.items()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Goes on where the checkpoint was taken, with fresh randomness under the same charge."""
        parts = self._parts()
        expected = {f"{name}.{key}" for name, part in parts.items() for key in part}
        missing = expected - set(tensors)
        if missing:
            raise ValueError(f"the checkpoint lacks {len(missing)} tensors")
        with torch.no_grad():
            for name, part in parts.items():
                for key, value in part.items():
                    value.copy_(tensors[f"{name}.{key}"])
        step = int(tensors["step"])
        self.generator_steps = int(tensors["generator_steps"])
        for name in ("every", "taken", "since"):
            setattr(self.pace, name, int(tensors[f"pace.{name}"]))
        self.pace.accuracy = float(tensors["pace.accuracy"])
        self.draws = self.sampling.batches(self.records, self.rng, drawn=step)
        self.releases = self.noise.releases(self.rng, made=step)

    def _parts(self) -> dict[str, dict[str, Tensor]]:
        parts = {name: getattr(self, name).state_dict() for name in ("discriminator", "generator", "average")}
        for name in ("discriminator", "generator"):
            optimizer = getattr(self, f"{name}_optimizer")
            parts[f"{name}_optimizer"] = {
                f"{index}.{key}": value
                for index, parameter in enumerate(optimizer.param_groups[0]["params"])
                for key, value in optimizer.state.get(parameter, {}).items()
            }
        return parts

    def diagnostics(self) -> dict[str, float]:
        found = {"discriminator_steps": float(self.pace.every), "accuracy_on_fakes": self.pace.accuracy}
        if self.last is not None:
            real = len(self.last.norms) - self.fakes
            for name, part in (("real", slice(0, real)), ("fake", slice(real, None))):
                norms, losses = self.last.norms[part], self.last.losses[part]
                found[f"{name}_records"] = float(len(norms))
                if len(norms):
                    found[f"{name}_loss"] = losses.mean().item()
                    found[f"{name}_gradient_norm"] = norms.median().item()
                    found[f"{name}_clipped"] = (norms > self.clip_norm).double().mean().item()
        return {name: value for name, value in found.items() if math.isfinite(value)}

    def synthesizer(self) -> ImageSynthesizer:
        if not self.draws.drawn == self.releases.made == self.plan.known_steps:
            raise Failure(Fault.ACCOUNTING_MISMATCH)
        network = self.average if self.recipe.average_decay is not None else self.generator
        # A function of noised gradients, so that it may be known.
        if not all(value.isfinite().all() for value in numbers(network)):
            raise Failure(Fault.DIVERGED)
        made = network.folded() if isinstance(network, BatchNormed) else deepcopy(network).cpu()
        return ImageSynthesizer(self.shape, made)
