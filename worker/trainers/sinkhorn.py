"""DP-Sinkhorn: a generator follows the Sinkhorn loss, through noised gradients or through noised points."""

import math

import numpy as np
import torch
from torch import Tensor

from core.faults import Failure, Fault
from sluice.generators.dct import LowFrequencies
from sluice.generators.image import ImageSynthesizer
from sluice.methods.base import Clipping
from sluice.methods.sinkhorn import SinkhornPlan, SinkhornRecipe
from worker.mechanisms.clipping import ROOM, clip_rows
from worker.mechanisms.mechanism import Mechanism
from worker.mechanisms.noise import GaussianNoise
from worker.mechanisms.sampling import PoissonSampling, uniform
from worker.mechanisms.transport import Cost, semi_debiased, squared_distances
from worker.trainers.base import NETWORKS, BaseTrainer, counter
from worker.trainers.generator import LearningGenerator

# A record that pulls a single point over this distance, a root mean square over pixels, has a pull of norm
# one; its mass is weighted like this. Digits are about that far from their points.
UNIT_DISTANCE, MASS_WEIGHT = 0.3, 0.7
# Points start this far around grey, a root mean square, with this much entropy per pixel, which falls to the
# recipe's within this share of the releases.
SPREAD, START_ENTROPY, COOLING = 0.01, 0.05, 0.7
# The generator learns from points with at least this share of the mass of an even division.
HEAVY = 0.4
# Records compared with points at a time, to bound the memory.
CHUNK = 4096


class Trainer(BaseTrainer[SinkhornPlan, SinkhornRecipe]):
    """Noised gradients of a Sinkhorn loss, or noised points of its semi-dual, and a generator that follows.

    Guarantee: each step is a Poisson-sampled Gaussian mechanism: on a function of the batch, of norm at most
    clip_norm * sqrt(rows), or on a sum over records with contributions of norm at most clip_norm. Everything
    else is computed from noised releases and from randomness; see docs/guarantees.md#sinkhorn.
    """

    def build(self) -> None:
        recipe = self.recipe
        self.public_steps_planned = self.plan.progress_steps - self.plan.known_steps
        self.shape = self.architecture(
            NETWORKS[recipe.network], features=recipe.features, latent=recipe.latent
        )
        with self.seeded():
            network = self.shape.network()
        self.generator = LearningGenerator(
            self.shape,
            network,
            rate=recipe.rate,
            weight_decay=recipe.weight_decay,
            sgd=recipe.optimizer == "sgd",
            average_decay=recipe.average_decay,
            device=self.device,
        )
        self.basis = LowFrequencies(
            self.shape.channels,
            self.shape.height,
            self.shape.width,
            recipe.frequencies,
            dtype=torch.float64,
            device=self.device,
        )
        kind = SemiDual if self.plan.clipping is Clipping.SEMIDUAL else Gradients
        self.query: SemiDual | Gradients = kind(self)

    def make_mechanism(self) -> Mechanism:
        plan = self.plan
        return Mechanism(
            PoissonSampling(prob=plan.sampling_prob, steps=plan.known_steps),
            GaussianNoise(stddev=plan.noise_stddev, size=self.query.size),
            self.rng,
            query=plan.query,
            bound=plan.clip_norm,
            rows=plan.rows,
        )

    def step(self, batch: np.ndarray) -> None:
        total = self.query.total(*self.take_finite(batch), clip_norm=self.mechanism.clip_norm)
        self.measured = self.query.measured
        self.query.learn(self.mechanism.release(total))

    def public_step(self) -> None:
        self.query.fit()

    def generate(self, labels: Tensor) -> Tensor:
        latents = self.rng.normals(len(labels) * self.shape.latent).view(len(labels), -1)
        return self.generator(latents.float(), labels)

    def uniform_labels(self, count: int) -> Tensor:
        """Uniform, whatever the labels of the records are."""
        return torch.from_numpy(uniform(count, self.classes, self.rng)).to(self.device)

    def loss(
        self, generated: Tensor, labels: Tensor, real: Tensor, real_labels: Tensor, *, images: int
    ) -> tuple[Tensor, Tensor]:
        recipe = self.recipe
        return semi_debiased(
            generated,
            labels,
            real,
            real_labels,
            images=images,
            cost=Cost(absolute_weight=recipe.absolute_weight, class_weight=recipe.class_weight),
            entropy=recipe.entropy,
            iterations=recipe.iterations,
        )

    def follow(self, images: Tensor, gradient: Tensor) -> None:
        self.generator.follow(images, gradient.view_as(images).float())

    def state(self) -> dict[str, Tensor]:
        return {**self.generator.state(), **self.query.state()}

    def build_synthesizer(self) -> ImageSynthesizer:
        return self.generator.synthesizer()


class Gradients:
    """Algorithm 1: the gradient at the generated images, clipped as a whole or image by image.

    Guarantee: `total` has norm at most clip_norm * sqrt(rows) for any batch. The rows without noise belong to
    images that are compared with generated ones alone.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.plan = trainer, trainer.plan
        self.size = self.plan.images * trainer.basis.size
        self.measured: dict[str, float] = {}

    def total(self, images: Tensor, labels: Tensor, *, clip_norm: float) -> Tensor:
        count, trainer = self.plan.images, self.trainer
        fake_labels = trainer.uniform_labels(count + math.floor(count * trainer.recipe.debiasing))
        self.fakes = trainer.generate(fake_labels)
        flat = self.fakes.detach().flatten(1)
        value, gradient = trainer.loss(flat, fake_labels, images.flatten(1), labels, images=count)
        rows = trainer.basis.coefficients(gradient.view(self.fakes.shape))
        if self.plan.clipping is Clipping.JOINT:
            clipped, norms = clip_rows(rows[:count].reshape(1, -1), clip_norm)
            self.public_rows = rows[count:] * (clip_norm / max(rows[count:].norm().item(), clip_norm))
        else:
            clipped, norms = clip_rows(rows[:count], clip_norm)
            self.public_rows, _ = clip_rows(rows[count:], clip_norm)
        self.measured = {
            "loss": value.item(),
            "gradient_norm": norms.median().item(),
            "clipped": (norms > clip_norm).double().mean().item(),
        }
        return clipped.flatten()

    def learn(self, noisy: Tensor) -> None:
        gradient = torch.cat([noisy.view(self.plan.images, -1), self.public_rows])
        self.trainer.follow(self.fakes, self.trainer.basis.images(gradient))

    def fit(self) -> None:
        """Nothing is left to do after the last release."""

    def state(self) -> dict[str, Tensor]:
        return {}


class SemiDual:
    """The semi-dual of entropic transport between points x with potentials f and records y:

        mean_i f_i - lambda * mean_j log mean_i exp((f_i - c(x_i, y_j)) / lambda)

    Its gradient in (x, f) is a sum over records: record j pulls point i with the share pi_ij that a softmax
    over points gives it, and adds that share to the point's mass. Points and potentials are functions of
    earlier releases, so each record's contribution, pulls and mass together, can be clipped by itself.

    Guarantee: one record moves `total` by at most clip_norm.

    The cost has squares alone here. Frequencies outside the basis add the same to the cost of every point and
    cancel in the softmax, so that coefficients give the shares exactly.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.plan, self.basis = trainer, trainer.plan, trainer.basis
        plan, shape, device = trainer.plan, trainer.shape, trainer.device
        if plan.images < trainer.classes:
            raise Failure(Fault.SCHEMA_MISMATCH)
        self.pixels = shape.height * shape.width * shape.channels
        self.unit = UNIT_DISTANCE * math.sqrt(self.pixels)
        self.size = plan.images * (self.basis.size + 1)
        self.labels = torch.arange(plan.images, device=device) % trainer.classes
        start = trainer.rng.normals(plan.images * self.basis.size).view(plan.images, -1).to(device)
        self.points = start * (SPREAD * math.sqrt(self.pixels))
        self.potentials, self.masses = (torch.zeros_like(self.points[:, 0]) for _ in range(2))
        self.sums, self.released = torch.zeros_like(self.points), counter()
        self.measured: dict[str, float] = {}

    @property
    def entropy(self) -> float:
        """lambda of the next release, on a public schedule: at first it spreads points over the classes."""
        final = min(1.0, self.trainer.recipe.points_entropy / START_ENTROPY)
        cooled = min(1.0, self.released.item() / (COOLING * self.plan.known_steps))
        return self.pixels * START_ENTROPY * final**cooled

    def total(self, images: Tensor, labels: Tensor, *, clip_norm: float) -> Tensor:
        entropy, class_weight = self.entropy, self.trainer.recipe.class_weight
        between_classes = Cost(absolute_weight=0, class_weight=class_weight).between_classes
        pulls, masses = torch.zeros_like(self.points), torch.zeros_like(self.masses)
        norms = [masses[:0]]
        for chunk, chunk_labels in zip(images.split(CHUNK), labels.split(CHUNK), strict=True):
            rows = self.basis.coefficients(chunk)
            squares = squared_distances(rows, self.points)
            cost = squares + between_classes * (chunk_labels[:, None] != self.labels)
            shares = ((self.potentials - cost) / entropy).softmax(1)
            norm = (shares.square() * (squares / self.unit**2 + MASS_WEIGHT**2)).sum(1).sqrt()
            shares *= (clip_norm * (1 - ROOM) / norm).clamp(max=1)[:, None]
            norms.append(norm)
            pulls += shares.T @ rows
            masses += shares.sum(0)
        pulls -= masses[:, None] * self.points
        all_norms = torch.cat(norms)
        self.measured = {"records": float(len(all_norms))}
        if len(all_norms):
            self.measured["contribution_norm"] = all_norms.median().item()
            self.measured["clipped"] = (all_norms > clip_norm).double().mean().item()
        return torch.cat([(pulls / self.unit).flatten(), MASS_WEIGHT * masses])

    @property
    def least_mass(self) -> float:
        """Twice the noise in the averaged masses: a smaller mass means little."""
        return 2 * self.plan.noise_stddev / MASS_WEIGHT / math.sqrt(1 - self.trainer.recipe.memory**2)

    @property
    def even_masses(self) -> Tensor:
        """The mass of each point if its class were divided evenly, by the noised masses."""
        by_class = torch.bincount(self.labels, self.masses, self.trainer.classes)
        return (by_class / torch.bincount(self.labels))[self.labels].clamp(min=self.least_mass)

    def learn(self, noisy: Tensor) -> None:
        """Moves points to the mean of what pulls them, and potentials to divide each class evenly.

        Both use pulls over masses, averaged over releases with a fading memory.
        """
        entropy, memory = self.entropy, self.trainer.recipe.memory
        pulls = noisy[: -self.plan.images].view_as(self.points)
        masses = noisy[-self.plan.images :] / MASS_WEIGHT
        self.masses = memory * self.masses + masses
        self.sums = memory * self.sums + pulls * self.unit + masses[:, None] * self.points
        # A point with next to no mass moves less: most of what pulls it is noise.
        divisor = self.masses.clamp(min=self.least_mass)
        moved = self.points + (self.sums - self.masses[:, None] * self.points) / divisor[:, None]
        self.points = self.basis.coefficients(self.basis.images(moved).clamp(-1, 1))
        self.potentials -= entropy / 2 * (divisor / self.even_masses).log().clamp(-1, 1)
        self.released += 1

    def fit(self) -> None:
        """Trains the generator on the points: post-processing, as the points are functions of releases."""
        trainer, recipe = self.trainer, self.trainer.recipe
        images = self.basis.images(self.points).clamp(-1, 1).flatten(1).float()
        fresh = math.floor(recipe.fitting_images * recipe.debiasing)
        # Points with little mass are mostly noise. A class without others uses all of its points.
        heavy = self.masses >= self.even_masses * HEAVY
        without = torch.bincount(self.labels[heavy], minlength=trainer.classes) == 0
        pool = (heavy | without[self.labels]).nonzero().flatten()
        for _ in range(recipe.fitting_steps):
            drawn = pool[uniform(recipe.fitting_images + fresh, len(pool), trainer.rng)]
            labels, chosen = self.labels[drawn], drawn[: recipe.fitting_images]
            fakes = trainer.generate(labels)
            flat = fakes.detach().flatten(1)
            _, gradient = trainer.loss(flat, labels, images[chosen], self.labels[chosen], images=len(chosen))
            trainer.follow(fakes, gradient)

    def state(self) -> dict[str, Tensor]:
        names = ("points", "potentials", "masses", "sums", "released")
        return {f"points.{name}": getattr(self, name) for name in names}
