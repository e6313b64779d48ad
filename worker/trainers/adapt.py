"""Domain adaptation: Algorithm 2 of the DP-SWD paper, without the gradient that it must not have.

A classifier is an encoder and a head. It first learns public images with their labels; a copy of its encoder
is then fixed, and gives public and private images alike their latents. A lens, through which public images
are seen from then on, learns to make their latents distributed as noisy projections say that those of
private images are, while the classifier goes on learning what it sees through the lens, labels and all.

In the paper one encoder serves both, and its gradient flows through private images too. That gradient holds
the derivative of the encoder at private images, which is no function of the noisy projections.
"""

import math
from collections.abc import Iterator, Mapping
from copy import deepcopy

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.faults import Failure, Fault
from sluice.generators.classifier import Classifier, ClassifierShape, Network
from sluice.methods.adapt import AdaptPlan, AdaptRecipe
from sluice.methods.base import trainable
from worker.mechanisms.noise import GaussianNoise, Rng
from worker.mechanisms.projections import (
    clipped,
    directions,
    inner_bound,
    ordered,
    private_rows,
    smoothed,
)
from worker.mechanisms.sampling import BLANK, WithoutReplacement, uniform
from worker.trainers.descent import descend
from worker.trainers.networks import start_state
from worker.trainers.progress import Progress
from worker.trainers.swd import ImageRows, fill, kept

# Public images in a step on them alone, and those that the centre and the scale of latents come from.
SOURCE_BATCH, MEASURED = 128, 2000
# How much of a pixel beyond black or white still counts: without any it would have no gradient.
BEYOND = 0.05


class Lens(nn.Module):
    """Moves, stretches and turns images, blurs or sharpens them, sets their brightness: all of them alike."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.frame = nn.Parameter(torch.eye(2, 3))
        self.blur = nn.Parameter(torch.zeros(channels, 1, 5, 5))
        self.light = nn.Parameter(torch.zeros(channels))
        nn.init.dirac_(self.blur, groups=channels)

    def forward(self, images: Tensor) -> Tensor:
        places = F.affine_grid(self.frame.expand(len(images), 2, 3), list(images.shape), align_corners=False)
        moved = F.grid_sample((images + 1) / 2, places, align_corners=False)
        seen = F.conv2d(moved, self.blur, self.light, padding=2, groups=len(self.blur))
        inside = seen.clamp(0, 1)
        return 2 * (inside + BEYOND * (seen - inside)) - 1


class AdaptTraining:
    """Learns from `source`, which is public, labels and all, and from private `records` without theirs.

    Guarantee: each step releases noisy projections of the latents of a batch of fixed size, drawn without
    replacement; the latents of an image depend on it and on public things alone, and are clipped by
    themselves; see docs/guarantees.md#swd. Classifier and lens are computed from these releases, from the
    source and from randomness.
    """

    def __init__(
        self,
        plan: AdaptPlan,
        records: ImageRows,
        source: ImageRows,
        *,
        rng: Rng,
        recipe: AdaptRecipe | None = None,
        device: str | None = None,
    ) -> None:
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.plan, self.records, self.source, self.rng = plan, records, source, rng
        self.recipe = recipe = recipe or plan.known_recipe
        self.shape = shape_of(records, source, plan, recipe)
        # What is made up has no secret to keep: a quick source, started by the secure one, will do.
        self.random = torch.Generator().manual_seed(int(rng.words(1)[0]) >> 1)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(rng.words(1)[0]) >> 1)
            self.network = Network(self.shape).to(self.device)
        self.fixed = deepcopy(self.network.encoder)
        self.lens = Lens(self.shape.channels).to(self.device)
        self.centre = torch.zeros(plan.dim, device=self.device)
        self.scale = torch.ones((), device=self.device)
        self.optimizers = {
            "network": torch.optim.Adam(self.network.parameters(), fused=True),
            "lens": torch.optim.Adam(self.lens.parameters(), betas=(0.9, 0.99), fused=True),
        }
        for optimizer in self.optimizers.values():
            start_state(optimizer)
        self.learned = 0
        self.seen: dict[str, float] = {}

        steps = plan.known_steps
        self.sampling = WithoutReplacement(batch=plan.batch, population=plan.records, steps=steps)
        self.noise = GaussianNoise(stddev=plan.noise_stddev, size=plan.directions * plan.batch, steps=steps)
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
        while self.learned < self.recipe.source_steps:
            self.learn_source()
            if self.learned == self.recipe.source_steps:
                self.fix()
            yield self.progress()
        for batch in self.draws:
            self.adapt(*self.released(batch))
            yield self.progress()

    def progress(self) -> Progress:
        steps = self.recipe.source_steps + self.plan.known_steps
        return Progress(self.learned + self.draws.drawn, steps)

    # Public

    def learn_source(self) -> None:
        images, labels = self.known(SOURCE_BATCH)
        self.descend("network", F.cross_entropy(self.network(images), labels), self.recipe.source_rate)
        self.learned += 1

    @torch.no_grad()
    def fix(self) -> None:
        """From here on private images have these latents; centre and scale are those of public images."""
        self.fixed.load_state_dict(self.network.encoder.state_dict())
        latents = self.fixed(self.known(MEASURED)[0])
        self.centre.copy_(latents.mean(0))
        self.scale.copy_((latents - self.centre).norm(dim=1).mean().clamp(min=1e-6) / self.plan.row_bound)

    def known(self, count: int) -> tuple[Tensor, Tensor]:
        images, labels = self.source.take(uniform(count, len(self.source), self.rng))
        return images.to(self.device), labels.to(self.device)

    def rows(self, latents: Tensor) -> Tensor:
        return (latents - self.centre) / self.scale

    def adapt(self, along: Tensor, quantiles: Tensor) -> None:
        """A step towards the release: post-processing. Public images alone are differentiated at."""
        images, labels = self.known(self.plan.batch)
        seen = self.lens(images)
        rows = clipped(self.rows(self.fixed(seen)), self.plan.row_bound)
        how = {"noise_stddev": self.plan.noise_stddev, "noises": self.recipe.noises}
        distance, pull = smoothed(rows.detach(), along, quantiles, source=self.random, **how)
        loss = F.cross_entropy(self.network(seen.detach().clamp(-1, 1)), labels)
        self.seen = {"distance": distance, "loss": loss.item()}
        left = max((1 + math.cos(math.pi * self.draws.drawn / self.plan.known_steps)) / 2, 0.01)
        self.descend("lens", (rows * pull).sum(), left * self.recipe.lens_rate)
        self.descend("network", loss, left * self.recipe.rate)

    def descend(self, name: str, loss: Tensor, rate: float) -> None:
        optimizer = self.optimizers[name]
        [group] = optimizer.param_groups
        group["lr"] = rate
        descend(optimizer, torch.autograd.grad(loss, group["params"]))

    # Private

    def released(self, batch: np.ndarray) -> tuple[Tensor, Tensor]:
        """Fresh directions, and what is known of the batch: noisy projections of its latents, in order."""
        plan = self.plan
        along = directions(plan.geometry, plan.directions, plan.dim, self.rng).to(self.device)
        projected = along @ self.latent_rows(batch).T
        noisy = self.releases.release(projected.flatten()).view(plan.directions, plan.batch)
        return along, ordered(noisy.float())

    @torch.no_grad()
    def latent_rows(self, batch: np.ndarray) -> Tensor:
        there = batch != BLANK
        images, _ = self.records.take(batch[there])
        return private_rows(self.rows(self.fixed(images.to(self.device))), there, bound=self.row_bound)

    # Kept

    def tensors(self) -> dict[str, Tensor]:
        found = {"centre": self.centre, "scale": self.scale}
        for name in ("network", "fixed", "lens"):
            part: nn.Module = getattr(self, name)
            found |= {f"{name}.{key}": value for key, value in part.state_dict().items()}
        for name, optimizer in self.optimizers.items():
            for index, parameter in enumerate(optimizer.param_groups[0]["params"]):
                for key, value in optimizer.state[parameter].items():
                    found[f"{name}_optimizer.{index}.{key}"] = value
        return found

    def checkpoint(self) -> dict[str, Tensor]:
        counts = {"drawn": torch.tensor(self.draws.drawn), "learned": torch.tensor(self.learned)}
        return kept({**counts, **self.tensors()})

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Goes on where the checkpoint was taken, with fresh randomness under the same charge."""
        fill(self.tensors(), tensors)
        self.learned, drawn = int(tensors["learned"]), int(tensors["drawn"])
        self.draws = self.sampling.batches(self.records, self.rng, drawn=drawn)
        self.releases = self.noise.releases(self.rng, made=drawn)

    def diagnostics(self) -> dict[str, float]:
        return {name: value for name, value in self.seen.items() if math.isfinite(value)}

    def synthesizer(self) -> Classifier:
        if not self.draws.drawn == self.releases.made == self.plan.known_steps:
            raise Failure(Fault.ACCOUNTING_MISMATCH)
        network = deepcopy(self.network).cpu()
        # A function of noised releases, so that it may be known.
        if not all(parameter.isfinite().all() for parameter in network.parameters()):
            raise Failure(Fault.DIVERGED)
        return Classifier(self.shape, network)


def shape_of(records: ImageRows, source: ImageRows, plan: AdaptPlan, recipe: AdaptRecipe) -> ClassifierShape:
    """The shape of a classifier of both, which have to be images of one size."""
    ours, theirs = records.schema, source.schema
    same = all(
        getattr(ours, name) == getattr(theirs, name) for name in ("kind", "height", "width", "channels")
    )
    if not same or ours.kind != "image" or not trainable(ours.height, ours.width):
        raise Failure(Fault.SCHEMA_MISMATCH)
    return ClassifierShape(
        height=ours.height,
        width=ours.width,
        channels=ours.channels,
        classes=len(theirs.classes),
        features=recipe.features,
        latent=plan.dim,
    )
