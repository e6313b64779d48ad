"""GS-WGAN: discriminators on disjoint parts, whose gradients at the images leave noised ("GS-WGAN", 2020)."""

import math
import tempfile
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from core.faults import Failure, Fault
from core.schema import ImageSchema
from sluice.generators.dcgan import SLOPE
from sluice.generators.dense import Dense
from sluice.generators.image import ImageSynthesizer
from sluice.methods.base import trainable
from sluice.methods.gswgan import GSWGANPlan, GSWGANRecipe
from sluice.privacy.events import Query
from worker.mechanisms.clipping import clip_rows
from worker.mechanisms.noise import GaussianNoise, Rng
from worker.mechanisms.sampling import PartRotation, Rows, uniform
from worker.trainers.descent import descend, remember
from worker.trainers.networks import BatchNormed, difference, numbers, start_state
from worker.trainers.progress import Progress
from worker.trainers.swd import fill, kept


class ImageRows(Rows, Protocol):
    schema: ImageSchema


class Frequencies:
    """Images as their lowest frequencies (DCT), scaled to numbers of about one. Linear, and public."""

    def __init__(self, shape: Dense, lowest: int | None) -> None:
        self.down, self.across = (waves(side, lowest or side) for side in (shape.height, shape.width))
        self.scale = 2 / math.sqrt(shape.height * shape.width)
        self.size = shape.channels * len(self.down) * len(self.across)

    def of(self, images: Tensor) -> Tensor:
        return (self.down @ images @ self.across.T).flatten(1) * self.scale


def waves(side: int, lowest: int) -> Tensor:
    """The first rows of the orthonormal cosine transform."""
    places = (torch.arange(side) + 0.5) * math.pi / side
    rows = torch.cos(torch.arange(min(lowest, side))[:, None] * places)
    return rows / rows.norm(dim=1, keepdim=True)


class Discriminators:
    """Several discriminators side by side, each with one hidden layer: (v + v_label) . h(frequencies).

    Nothing of one enters another: every product is batched over discriminators.
    """

    def __init__(self, weights: Tensor, *, given: int, classes: int) -> None:
        features = self.features(weights.shape[1], given=given, classes=classes)
        pieces = weights.view(len(weights), -1, features).split((given, 1, 1, classes), 1)
        self.weights = [piece.contiguous().requires_grad_() for piece in pieces]
        self.body, self.bias, self.score, self.label = self.weights

    @staticmethod
    def size(*, given: int, classes: int, features: int) -> int:
        return (given + classes + 2) * features

    @staticmethod
    def features(size: int, *, given: int, classes: int) -> int:
        return size // (given + classes + 2)

    def scores(self, x: Tensor, labels: Tensor) -> Tensor:
        hidden = torch.baddbmm(self.bias, x, self.body)
        return (F.leaky_relu(hidden, SLOPE) * self.directions(labels)).sum(2)

    def gradients(self, x: Tensor, labels: Tensor) -> Tensor:
        """Of each score at its own input; their own gradients at the weights are right too."""
        with torch.no_grad():
            slopes = torch.where(torch.baddbmm(self.bias, x, self.body) > 0, 1.0, SLOPE)
        return torch.bmm(slopes * self.directions(labels), self.body.transpose(1, 2))

    def directions(self, labels: Tensor) -> Tensor:
        which = labels[..., None].expand(-1, -1, self.label.shape[2])
        return self.score + torch.gather(self.label, 1, which)


def fresh_weights(count: int, *, given: int, classes: int, features: int) -> Tensor:
    """Hidden layers at random, and scores of zero: what an answer says at first is what its part taught."""
    weights = torch.zeros(count, Discriminators.size(given=given, classes=classes, features=features))
    weights[:, : given * features].normal_(std=1 / math.sqrt(given))
    return weights


class GSWGANTraining:
    """A generator that follows many discriminators, each of which knows one part of the records.

    Guarantee: a step releases the sum of a panel's clipped gradients with noise. A record lives in one part,
    so it moves one term of that sum, by at most 2 * clip_norm (* sqrt(images) if clipped per image), and only
    when its panel's turn comes; see docs/guarantees.md#gswgan. What discriminators learn stays with their
    part. The generator is computed from noised sums and from randomness.
    """

    def __init__(
        self,
        plan: GSWGANPlan,
        records: ImageRows,
        *,
        rng: Rng,
        recipe: GSWGANRecipe | None = None,
        device: str | None = None,
    ) -> None:
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.plan, self.records, self.rng = plan, records, rng
        self.recipe = recipe = recipe or plan.recipe or GSWGANRecipe.for_device(self.device)
        self.shape = architecture(records.schema, recipe)
        self.frequencies = Frequencies(self.shape, recipe.frequencies)
        self.given = self.frequencies.size
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(rng.words(1)[0]) >> 1)
            self.generator = BatchNormed(self.shape.network())
            self.discriminators = self.on_disk()
        self.average = deepcopy(self.generator)
        self.optimizer = torch.optim.Adam(
            self.generator.parameters(), lr=recipe.generator_rate, betas=(0.5, 0.99), fused=True
        )
        start_state(self.optimizer)
        # Of an even number, for pairs; two at least, for batch norm.
        self.shown = plan.images + plan.images % 2
        self.last: dict[str, float] = {}

        self.sampling = PartRotation(
            parts=plan.parts,
            panel=plan.panel,
            batch=recipe.part_batch,
            steps=plan.known_steps,
            key=rng.words(4).tobytes(),
        )
        self.noise = GaussianNoise(
            stddev=plan.noise_stddev, size=plan.images * self.given, steps=plan.known_steps
        )
        self.clip_norm = self.noise.inner(plan.clip_norm)
        event = self.sampling.event(
            query=Query.FUNCTION, bound=plan.clip_norm, noise_stddev=self.noise.stddev, rows=plan.rows
        )
        if event != plan.event():
            raise Failure(Fault.ACCOUNTING_MISMATCH)
        self.draws = self.sampling.batches(records, rng)
        self.releases = self.noise.releases(rng)

    def on_disk(self) -> Tensor:
        """Weights of all discriminators in a file without a name: in memory are those that learn."""
        sizes = {"classes": self.shape.classes, "features": self.recipe.discriminator_features}
        width = Discriminators.size(given=self.given, **sizes)
        with tempfile.TemporaryFile() as file:
            kept = np.memmap(file, dtype=np.float32, mode="w+", shape=(self.plan.parts, width))
        weights = torch.from_numpy(kept)
        for some in weights.split(self.recipe.abreast):
            some.copy_(fresh_weights(len(some), given=self.given, **sizes))
        return weights

    def steps(self) -> Iterator[Progress]:
        for batch in self.draws:
            latents, labels = self.latents(self.shown)
            images = self.generator(latents, labels)
            seen = self.frequencies.of(images[: self.plan.images])
            total = self.answers(batch, seen.detach(), labels[: self.plan.images])
            noisy = self.releases.release(total)
            # Divided by the most that a panel can say: a public constant.
            most = self.plan.panel * self.plan.clip_norm
            self.follow(images, seen, (noisy / most).float().view_as(seen))
            yield Progress(self.draws.drawn, self.plan.known_steps)

    def answers(self, batch: np.ndarray, seen: Tensor, labels: Tensor) -> Tensor:
        """The sum over the panel of gradients at the images, each discriminator's clipped by itself."""
        step = self.draws.drawn - 1
        turn = self.sampling.turn(step)
        takes = self.recipe.first_steps if step < self.sampling.panels else self.recipe.discriminator_steps
        fakes = [self.made_up(self.recipe.part_batch) for _ in range(takes)]
        blank = torch.from_numpy(batch < 0)
        images, classes = self.records.take(batch[batch >= 0])
        real = torch.zeros(*batch.shape, self.given)
        real[~blank] = self.frequencies.of(torch.nan_to_num(images, nan=0.0).clamp(-1, 1))
        kinds = torch.zeros(batch.shape, dtype=torch.int64)
        # A label outside the declared classes must not stop the training: stopping would tell of it.
        kinds[~blank] = classes.clamp(0, self.shape.classes - 1)
        total = torch.zeros(seen.numel(), dtype=torch.float64)
        norms: list[Tensor] = []
        gaps: list[Tensor] = []
        for start in range(0, len(turn), self.recipe.abreast):
            some = slice(start, min(start + self.recipe.abreast, len(turn)))
            kept = self.discriminators[turn[some.start] : turn[some.start] + some.stop - some.start]
            several = Discriminators(kept.clone(), given=self.given, classes=self.shape.classes)
            gaps.append(self.learn(several, real[some], kinds[some], ~blank[some, 0], fakes))
            with torch.no_grad():
                kept.copy_(torch.cat(several.weights, 1).flatten(1))
                # Uphill for the score is downhill for the generator's loss.
                uphill = several.gradients(*alike(seen, labels, len(kept)))
                rows = -uphill.flatten(0, 1) if self.plan.rows > 1 else -uphill.flatten(1)
                clipped, lengths = clip_rows(rows, self.clip_norm)
                total += clipped.view(len(kept), -1).sum(0)
                norms.append(lengths)
        lengths = torch.cat(norms)
        self.last = {
            "score_gap": torch.cat(gaps).median().item(),
            "answer_norm": lengths.median().item(),
            "answers_clipped": (lengths > self.clip_norm).double().mean().item(),
            "agreement": total.norm().item() / (len(turn) * math.sqrt(self.plan.rows) * self.clip_norm),
        }
        return total

    def learn(
        self,
        several: Discriminators,
        real: Tensor,
        kinds: Tensor,
        present: Tensor,
        fakes: list[tuple[Tensor, Tensor]],
    ) -> Tensor:
        """Wasserstein with a penalty on each sample's own gradient. Gives the gaps between real and fake.

        The optimizer starts afresh in each turn, so that nothing is kept but weights.
        """
        optimizer = torch.optim.Adam(
            several.weights, lr=self.recipe.discriminator_rate, betas=(0.5, 0.9), fused=True
        )
        gap = torch.zeros(len(real))
        for fake, labels in fakes:
            made = alike(fake, labels, len(real))
            scored = several.scores(real, kinds).mean(1) * present
            gap = scored - several.scores(*made).mean(1)
            share = self.shares(*real.shape[:2], 1)
            between = several.gradients(share * real + (1 - share) * made[0], kinds)
            # One-sided: none has to be steep where it knows nothing, and so they agree more.
            excess = F.relu((between.square().sum(2) + 1e-12).sqrt() - 1)
            loss = self.recipe.penalty * excess.square().mean(1) - gap
            # A sum over discriminators that share nothing: each gets its own gradient.
            descend(optimizer, torch.autograd.grad(loss.sum(), several.weights))
        return gap.detach().nan_to_num()

    def follow(self, images: Tensor, seen: Tensor, gradient: Tensor) -> None:
        """One step of the generator along the noised answers: post-processing."""
        loss = (seen * gradient).sum() - self.recipe.variety * difference(images)
        descend(self.optimizer, torch.autograd.grad(loss, list(self.generator.parameters())))
        remember(
            numbers(self.average),
            numbers(self.generator),
            steps=self.draws.drawn,
            decay=self.recipe.average_decay,
        )

    def latents(self, count: int) -> tuple[Tensor, Tensor]:
        """Latents, and labels in turn from a random one on, the same for both halves; records have no say."""
        normals = self.rng.normals(count * self.shape.latent).view(count, -1)
        first = int(uniform(1, self.shape.classes, self.rng)[0])
        return normals.float(), (first + torch.arange(count) % (count // 2)) % self.shape.classes

    @torch.no_grad()
    def made_up(self, count: int) -> tuple[Tensor, Tensor]:
        latents, labels = self.latents(count)
        return self.frequencies.of(self.generator(latents, labels)), labels

    def shares(self, *shape: int) -> Tensor:
        words = self.rng.words(math.prod(shape)) >> np.uint64(40)
        return torch.from_numpy(words.astype(np.float32)).mul_(2.0**-24).view(shape)

    def checkpoint(self) -> dict[str, Tensor]:
        """With the key of the partition and what every discriminator learnt: for the vault alone."""
        tensors = {"step": torch.tensor(self.draws.drawn), "partition.key": as_tensor(self.sampling.key)}
        for name, part in self._parts().items():
            tensors |= {f"{name}.{key}": value.detach().clone() for key, value in part.items()}
        return {name: value.contiguous() for name, value in tensors.items()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Goes on where the checkpoint was taken, on the same parts, with fresh randomness."""
        parts = self._parts()
        expected = {f"{name}.{key}" for name, part in parts.items() for key in part}
        missing = (expected | {"step", "partition.key"}) - set(tensors)
        if missing:
            raise ValueError(f"the checkpoint lacks {len(missing)} tensors")
        with torch.no_grad():
            for name, part in parts.items():
                for key, value in part.items():
                    value.copy_(tensors[f"{name}.{key}"])
        step = int(tensors["step"])
        self.sampling = replace(self.sampling, key=tensors["partition.key"].numpy().tobytes())
        self.draws = self.sampling.batches(self.records, self.rng, drawn=step)
        self.releases = self.noise.releases(self.rng, made=step)

    def _parts(self) -> dict[str, dict[str, Tensor]]:
        return {
            "discriminator": {"weights": self.discriminators},
            "generator": self.generator.state_dict(),
            "average": self.average.state_dict(),
            "generator_optimizer": {
                f"{index}.{key}": value
                for index, parameter in enumerate(self.optimizer.param_groups[0]["params"])
                for key, value in self.optimizer.state[parameter].items()
            },
        }

    def handed_on(self) -> dict[str, Tensor]:
        """What the next owner's training goes on from: computed from noised sums, and nothing of a part."""
        return kept(self._public())

    def take_over(self, tensors: Mapping[str, Tensor]) -> None:
        """Goes on from the generator of another training, on records of its own."""
        mine = self._public()
        if {name: value.shape for name, value in mine.items()} != {n: v.shape for n, v in tensors.items()}:
            raise Failure(Fault.SCHEMA_MISMATCH)
        fill(mine, tensors)

    def _public(self) -> dict[str, Tensor]:
        parts = {name: part for name, part in self._parts().items() if name != "discriminator"}
        return {f"{name}.{key}": value for name, part in parts.items() for key, value in part.items()}

    def diagnostics(self) -> dict[str, float]:
        return {name: value for name, value in self.last.items() if math.isfinite(value)}

    def synthesizer(self) -> ImageSynthesizer:
        if not self.draws.drawn == self.releases.made == self.plan.known_steps:
            raise Failure(Fault.ACCOUNTING_MISMATCH)
        network = self.average if self.recipe.average_decay is not None else self.generator
        # A function of noised sums, so that it may be known.
        if not all(value.isfinite().all() for value in numbers(network)):
            raise Failure(Fault.DIVERGED)
        return ImageSynthesizer(self.shape, network.folded())


def architecture(schema: ImageSchema, recipe: GSWGANRecipe) -> Dense:
    if schema.kind != "image" or not trainable(schema.height, schema.width):
        raise Failure(Fault.SCHEMA_MISMATCH)
    return Dense(
        height=schema.height,
        width=schema.width,
        channels=schema.channels,
        classes=len(schema.classes),
        features=recipe.generator_features,
        latent=recipe.latent,
    )


def alike(x: Tensor, labels: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The same images and labels for each of so many discriminators."""
    return x.expand(count, *x.shape), labels.expand(count, -1)


def as_tensor(key: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(key, dtype=np.uint8).copy())
