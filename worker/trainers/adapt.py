"""Domain adaptation: Algorithm 2 of the DP-SWD paper, with a fixed encoder for private images.

A classifier is an encoder and a head. It first learns public images with their labels; a copy of its encoder
is then fixed, and gives latents of public and private images. A lens, which transforms public images from
then on, learns to give their latents the distribution of private latents that the noisy projections describe,
while the classifier goes on learning the transformed images with their labels.

In the paper one encoder serves both, and its gradient flows through private images. That gradient contains
the derivative of the encoder at private images, which is not a function of the noisy projections.
"""

from collections.abc import Iterator
from copy import deepcopy

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.faults import Failure, Fault
from sluice.generators.classifier import Classifier, ClassifierShape
from sluice.methods.adapt import AdaptPlan, AdaptRecipe
from worker.mechanisms.projections import (
    ProjectionMechanism,
    clip_differentiably,
    private_rows,
    smoothed_distance,
    sort_rows,
)
from worker.mechanisms.sampling import BLANK, uniform
from worker.trainers.base import BaseTrainer, Progress, cosine_decay, seed, tensors_of
from worker.trainers.generator import adam, apply_gradients

# Public images in a step on them alone, and those that give the centre and the scale of latents.
SOURCE_BATCH, MEASURED = 128, 2000
# The slope beyond black and white: without any, such pixels would have no gradient.
BEYOND = 0.05


class Lens(nn.Module):
    """An affine map, a blur and a brightness, the same for all images."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.frame = nn.Parameter(torch.eye(2, 3))
        self.blur = nn.Parameter(torch.zeros(channels, 1, 5, 5))
        self.light = nn.Parameter(torch.zeros(channels))
        nn.init.dirac_(self.blur, groups=channels)

    def forward(self, images: Tensor) -> Tensor:
        grid = F.affine_grid(self.frame.expand(len(images), 2, 3), list(images.shape), align_corners=False)
        moved = F.grid_sample((images + 1) / 2, grid, align_corners=False)
        blurred = F.conv2d(moved, self.blur, self.light, padding=2, groups=len(self.blur))
        inside = blurred.clamp(0, 1)
        return 2 * (inside + BEYOND * (blurred - inside)) - 1


class Trainer(BaseTrainer[AdaptPlan, AdaptRecipe]):
    """Learns from `source`, which is public, with its labels, and from private records without theirs.

    Guarantee: each step releases noisy projections of the latents of a batch of fixed size, drawn without
    replacement; the latents of an image depend on that image and on public data alone, and are clipped one by
    one; see docs/guarantees.md#swd. Classifier and lens are computed from these releases, from the source and
    from randomness.
    """

    mechanism: ProjectionMechanism

    def build(self) -> None:
        self.public_steps_planned = self.recipe.source_steps
        if self.source is None:
            raise Failure(Fault.SCHEMA_MISMATCH)
        private, public = (
            [getattr(schema, name) for name in ("kind", "height", "width", "channels")]
            for schema in (self.schema, self.source.schema)
        )
        if private != public:
            raise Failure(Fault.SCHEMA_MISMATCH)
        self.public, self.classes = self.source, len(self.source.schema.classes)
        self.shape = self.architecture(ClassifierShape, features=self.recipe.features, latent=self.plan.dim)
        # Public images are not secret, so a fast generator that the secure one seeds is enough.
        self.random = torch.Generator().manual_seed(seed(self.rng))
        with self.seeded():
            self.network = self.shape.network().to(self.device)
        self.fixed = deepcopy(self.network.encoder)
        self.lens = Lens(self.shape.channels).to(self.device)
        self.centre = torch.zeros(self.plan.dim, device=self.device)
        self.scale = torch.ones((), device=self.device)
        self.network_optimizer = adam(self.network.parameters())
        self.lens_optimizer = adam(self.lens.parameters(), betas=(0.9, 0.99))

    def make_mechanism(self) -> ProjectionMechanism:
        return ProjectionMechanism(self.plan, self.rng)

    def steps(self) -> Iterator[Progress]:
        yield from self.take_public_steps()
        yield from super().steps()

    def public_step(self) -> None:
        images, labels = self.take_public(SOURCE_BATCH)
        loss = F.cross_entropy(self.network(images), labels)
        minimize(self.network_optimizer, loss, self.recipe.source_rate)
        if int(self.public_steps) == self.public_steps_planned - 1:
            self.fix_encoder()

    @torch.no_grad()
    def fix_encoder(self) -> None:
        """Fixes the latents of private images; public images give their centre and scale."""
        self.fixed.load_state_dict(self.network.encoder.state_dict())
        latents = self.fixed(self.take_public(MEASURED)[0])
        self.centre.copy_(latents.mean(0))
        self.scale.copy_((latents - self.centre).norm(dim=1).mean().clamp(min=1e-6) / self.plan.row_bound)

    def take_public(self, count: int) -> tuple[Tensor, Tensor]:
        images, labels = self.public.take(uniform(count, len(self.public), self.rng))
        return images.to(self.device), labels.to(self.device)

    def rows(self, images: Tensor) -> Tensor:
        return (self.fixed(images) - self.centre) / self.scale

    def step(self, batch: np.ndarray) -> None:
        directions, noisy = self.mechanism.project(self.private_rows(batch))
        self.adapt(directions, sort_rows(noisy))

    @torch.no_grad()
    def private_rows(self, batch: np.ndarray) -> Tensor:
        present = batch != BLANK
        images, _ = self.take(batch[present])
        return private_rows(self.rows(images), present, bound=self.mechanism.clip_norm)

    def adapt(self, directions: Tensor, quantiles: Tensor) -> None:
        """A step towards the release: post-processing. Gradients are those at public images."""
        images, labels = self.take_public(self.plan.batch)
        transformed = self.lens(images)
        rows = clip_differentiably(self.rows(transformed), self.plan.row_bound)
        distance, gradient = smoothed_distance(
            rows.detach(),
            directions,
            quantiles,
            noise_stddev=self.plan.noise_stddev,
            noises=self.recipe.noises,
            source=self.random,
        )
        loss = F.cross_entropy(self.network(transformed.detach().clamp(-1, 1)), labels)
        self.measured = {"distance": distance, "loss": loss.item()}
        decay = cosine_decay(self.mechanism.drawn, self.plan.known_steps)
        minimize(self.lens_optimizer, (rows * gradient).sum(), decay * self.recipe.lens_rate)
        minimize(self.network_optimizer, loss, decay * self.recipe.rate)

    def state(self) -> dict[str, Tensor]:
        return tensors_of(
            centre=self.centre,
            scale=self.scale,
            network=self.network,
            fixed=self.fixed,
            lens=self.lens,
            network_optimizer=self.network_optimizer,
            lens_optimizer=self.lens_optimizer,
        )

    def build_synthesizer(self) -> Classifier:
        return Classifier(self.shape, deepcopy(self.network).cpu())


def minimize(optimizer: torch.optim.Optimizer, loss: Tensor, rate: float) -> None:
    [group] = optimizer.param_groups
    group["lr"] = rate
    apply_gradients(optimizer, torch.autograd.grad(loss, group["params"]))
