"""DP-Sinkhorn: a generator follows the Sinkhorn loss, through noised gradients or through noised points."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from core.faults import Failure, Fault
from core.schema import ImageSchema
from sluice.generators.architecture import Architecture
from sluice.generators.dcgan import DCGAN
from sluice.generators.image import ImageSynthesizer
from sluice.generators.residual import Residual
from sluice.methods.base import Clipping, trainable
from sluice.methods.sinkhorn import SinkhornPlan, SinkhornRecipe
from worker.mechanisms.clipping import ROOM, clip_rows
from worker.mechanisms.noise import GaussianNoise, Rng
from worker.mechanisms.sampling import PoissonSampling, Rows, uniform
from worker.trainers.descent import descend, remember
from worker.trainers.dpgan import start_state
from worker.trainers.progress import Progress

# A record that pulls one point alone from this far, a root mean square over pixels, has a pull of norm one;
# its mass then weighs so much. Digits are about so far from their points.
UNIT_DISTANCE, MASS_WEIGHT = 0.3, 0.7
# Points start this far around grey, a root mean square, and with this much entropy to a pixel; they have
# cooled to the recipe's after this share of the releases.
SPREAD, WARM, COOLED = 0.01, 0.05, 0.7
# The generator learns from points with at least this share of what is fair.
HEAVY = 0.4
# Records compared with points at a time, to bound the memory.
CHUNK = 4096
# Numbers that stay in the cache between one pass over them and the next.
CACHED = 2**18


class ImageRows(Rows, Protocol):
    schema: ImageSchema


# Transport


@dataclass(frozen=True, kw_only=True)
class Cost:
    """c(x, y) = |x - y|^2 + m |x - y|_1, of flat images with their labels, one-hot times alpha_c."""

    absolute_weight: float
    class_weight: float

    @property
    def between_classes(self) -> float:
        return 2 * self.class_weight**2 + 2 * self.absolute_weight * self.class_weight

    def __call__(self, x: Tensor, y: Tensor, x_labels: Tensor, y_labels: Tensor) -> Tensor:
        cost = squared_distances(x, y)
        if self.absolute_weight:
            cost += self.absolute_weight * absolute_distances(x, y)
        return cost + self.between_classes * (x_labels[:, None] != y_labels)

    def pull(self, plan: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """sum_j plan_ij times the gradient of c(x_i, y_j) in x_i."""
        plan = plan.to(x.dtype)
        found = 2 * (plan.sum(1, keepdim=True) * x - plan @ y)
        if self.absolute_weight:
            # Little entropy leaves few pairs in a plan; what all the others add would round to nothing.
            i, j = (plan > plan.amax() * 1e-12).nonzero(as_tuple=True)
            for some in torch.arange(len(i), device=i.device).split(1024):
                gaps = x.index_select(0, i[some]).sub_(y.index_select(0, j[some]))
                signs = gaps.sign_().mul_(plan[i[some], j[some], None])
                found.index_add_(0, i[some], signs, alpha=self.absolute_weight)
        return found


def squared_distances(x: Tensor, y: Tensor) -> Tensor:
    x, y = x.double(), y.double()  # small differences of large numbers
    lengths = x.square().sum(1)[:, None] + y.square().sum(1)
    return lengths.addmm_(x, y.T, alpha=-2).clamp_min_(0)


def absolute_distances(x: Tensor, y: Tensor) -> Tensor:
    """A few rows at a time, so that gaps stay in the cache: faster than torch.cdist, and nearer the truth."""
    rows = max(1, CACHED // y.numel())
    found, gaps = x.new_empty(len(x), len(y)), x.new_empty(rows, *y.shape)
    for some, sums in zip(x.split(rows), found.split(rows), strict=True):
        torch.sum(torch.sub(some[:, None], y, out=gaps[: len(some)]).abs_(), 2, out=sums)
    return found


def log_sum_exp(x: Tensor, dim: int) -> Tensor:
    """As torch's, in a quarter of its time: most terms would underflow here, and that is slow."""
    top = x.amax(dim, keepdim=True)
    # e^-60 beside one is nothing in float64.
    return (x - top).clamp_(min=-60).exp_().sum(dim).log_() + top.squeeze(dim)


def transport(cost: Tensor, *, entropy: float, iterations: int) -> tuple[Tensor, Tensor]:
    """The value and the plan of equation 7 between uniform weights, by Sinkhorn iterations on logarithms.

    The entropy is halved from the largest cost down and then held for `iterations`. By the envelope theorem
    the plan is the gradient of the value in the cost; nothing is differentiated through the iterations.
    """
    rows, columns = (math.log(size) for size in cost.shape)
    halvings = math.ceil(math.log2(max(cost.max().item() / entropy, 1)))
    g = cost.new_zeros(cost.shape[1])
    for e in [*(entropy * 2.0**power for power in range(halvings, 0, -1)), *[entropy] * iterations]:
        scaled = cost / -e
        f = columns - log_sum_exp(scaled + g / e, 1)
        g = e * (rows - log_sum_exp(scaled + f[:, None], 0))
    scaled = (g - cost) / entropy
    f = entropy * (columns - log_sum_exp(scaled, 1))
    return f.mean() + g.mean(), scaled.softmax(1) / cost.shape[0]


def semi_debiased(
    made: Tensor,
    made_labels: Tensor,
    real: Tensor,
    real_labels: Tensor,
    *,
    images: int,
    cost: Cost,
    entropy: float,
    iterations: int,
) -> tuple[Tensor, Tensor]:
    """Equation 6 on flat images, and its gradient in those made: 2 W(X[:n], Y) - W(X[:n], X[n':n + n']).

    The first term is the only one with real images; it is left out where there are none.
    """
    fresh = len(made) - images
    x, x_labels, other, other_labels = made[:images], made_labels[:images], made[fresh:], made_labels[fresh:]
    how = {"entropy": entropy, "iterations": iterations}
    inner, plan = transport(cost(x, other, x_labels, other_labels), **how)
    value, gradient = -inner, torch.zeros_like(made)
    gradient[:images] -= cost.pull(plan, x, other)
    gradient[fresh:] -= cost.pull(plan.T, other, x)
    if len(real):
        across, plan = transport(cost(x, real, x_labels, real_labels), **how)
        value = value + 2 * across
        gradient[:images] += 2 * cost.pull(plan, x, real)
    return value, gradient


class Frequencies:
    """Images as coefficients of the lowest cosines of both directions, an orthonormal and public basis."""

    def __init__(self, shape: Architecture, count: int, device: str) -> None:
        self.down, self.across = (
            cosines(side, min(count, side)).to(device) for side in (shape.height, shape.width)
        )
        self.size = shape.channels * len(self.down) * len(self.across)

    def of(self, images: Tensor) -> Tensor:
        """N, C, H, W to N, size."""
        return (self.down @ images.double() @ self.across.T).flatten(1)

    def images(self, coefficients: Tensor) -> Tensor:
        return self.down.T @ coefficients.unflatten(1, (-1, len(self.down), len(self.across))) @ self.across


def cosines(side: int, count: int) -> Tensor:
    places, waves = torch.arange(side, dtype=torch.float64), torch.arange(count, dtype=torch.float64)
    rows = torch.cos(math.pi / side * waves[:, None] * (places + 0.5)) * math.sqrt(2 / side)
    rows[0] /= math.sqrt(2)
    return rows


# What learns


def architecture(schema: ImageSchema, recipe: SinkhornRecipe) -> Architecture:
    if schema.kind != "image" or not trainable(schema.height, schema.width):
        raise Failure(Fault.SCHEMA_MISMATCH)
    network = {"dcgan": DCGAN, "residual": Residual}[recipe.network]
    return network(
        height=schema.height,
        width=schema.width,
        channels=schema.channels,
        classes=len(schema.classes),
        features=recipe.features,
        latent=recipe.latent,
    )


class Student:
    """The generator, its optimizer and its running average. It sees gradients and no records."""

    def __init__(self, shape: Architecture, recipe: SinkhornRecipe, rng: Rng, device: str) -> None:
        self.shape, self.recipe, self.rng, self.device, self.taken = shape, recipe, rng, device, 0
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(rng.words(1)[0]) >> 1)
            self.generator, self.average = shape.network().to(device), shape.network().to(device)
        self.average.load_state_dict(self.generator.state_dict())
        self.parameters = list(self.generator.parameters())
        if recipe.optimizer == "sgd":
            self.optimizer = torch.optim.SGD(
                self.parameters, lr=recipe.rate, weight_decay=recipe.weight_decay
            )
        else:
            self.optimizer = torch.optim.Adam(
                self.parameters, lr=recipe.rate, weight_decay=recipe.weight_decay, fused=True
            )
            start_state(self.optimizer)

    def made(self, labels: Tensor) -> Tensor:
        latents = self.rng.normals(len(labels) * self.shape.latent).view(len(labels), -1)
        return self.generator(latents.float().to(self.device), labels)

    def labels(self, count: int) -> Tensor:
        """Uniform, whatever the labels of the records are."""
        return torch.from_numpy(uniform(count, self.shape.classes, self.rng)).to(self.device)

    def follow(self, images: Tensor, gradient: Tensor) -> None:
        """One step of the optimizer down a gradient given at images it made."""
        moves = torch.autograd.grad(images, self.parameters, gradient.view_as(images).float())
        descend(self.optimizer, moves)
        self.taken += 1
        if self.recipe.average_decay is not None:
            remember(
                self.average.parameters(),
                self.parameters,
                steps=self.taken,
                decay=self.recipe.average_decay,
            )

    def descend(self, labels: Tensor, real: Tensor, real_labels: Tensor) -> None:
        """A step of the paper's algorithm towards images that are no secret: no clipping, no noise."""
        images = self.made(labels)
        flat = images.detach().flatten(1)
        _, gradient = self.loss(flat, labels, real, real_labels, images=len(real))
        self.follow(images, gradient)

    def loss(
        self, made: Tensor, labels: Tensor, real: Tensor, real_labels: Tensor, *, images: int
    ) -> tuple[Tensor, Tensor]:
        recipe = self.recipe
        cost = Cost(absolute_weight=recipe.absolute_weight, class_weight=recipe.class_weight)
        how = {"entropy": recipe.entropy, "iterations": recipe.iterations}
        return semi_debiased(made, labels, real, real_labels, images=images, cost=cost, **how)

    def result(self) -> ImageSynthesizer:
        network = self.average if self.recipe.average_decay is not None else self.generator
        # A function of noised releases, so that it may be known.
        if not all(parameter.isfinite().all() for parameter in network.parameters()):
            raise Failure(Fault.DIVERGED)
        copy = self.shape.network()
        copy.load_state_dict(network.state_dict())
        return ImageSynthesizer(self.shape, copy)

    def tensors(self) -> dict[str, Tensor]:
        found = {
            f"{name}.{key}": value
            for name in ("generator", "average")
            for key, value in getattr(self, name).named_parameters()
        }
        for index, parameter in enumerate(self.parameters):
            for key, value in self.optimizer.state.get(parameter, {}).items():
                found[f"optimizer.{index}.{key}"] = value
        return found


# What is released of a batch


class Gradients:
    """Algorithm 1: the gradient at the generated images, clipped as a whole or image by image.

    Guarantee: `total` has norm at most clip_norm * sqrt(rows), whatever the batch is. The rows that are not
    noised belong to images that are compared with generated ones alone.
    """

    def __init__(self, plan: SinkhornPlan, student: Student, basis: Frequencies) -> None:
        self.plan, self.student, self.basis = plan, student, basis
        self.size = plan.images * basis.size
        self.seen: dict[str, float] = {}

    def total(self, images: Tensor, labels: Tensor, *, clip_norm: float) -> Tensor:
        count, student = self.plan.images, self.student
        made_labels = student.labels(count + math.floor(count * student.recipe.debiasing))
        self.made = student.made(made_labels)
        flat = self.made.detach().flatten(1)
        value, gradient = student.loss(flat, made_labels, images.flatten(1), labels, images=count)
        rows = self.basis.of(gradient.view(self.made.shape))
        if self.plan.clipping is Clipping.JOINT:
            clipped, norms = clip_rows(rows[:count].reshape(1, -1), clip_norm)
            self.rest = rows[count:] * (clip_norm / max(rows[count:].norm().item(), clip_norm))
        else:
            clipped, norms = clip_rows(rows[:count], clip_norm)
            self.rest, _ = clip_rows(rows[count:], clip_norm)
        self.seen = {
            "loss": value.item(),
            "gradient_norm": norms.median().item(),
            "clipped": (norms > clip_norm).double().mean().item(),
        }
        return clipped.flatten()

    def learn(self, noisy: Tensor) -> None:
        gradient = torch.cat([noisy.view(self.plan.images, -1), self.rest])
        self.student.follow(self.made, self.basis.images(gradient))

    def fit(self) -> None:
        """Nothing is left to do after the last release."""

    def tensors(self) -> dict[str, Tensor]:
        return {}


class Points:
    """The semi-dual of entropic transport between points x with potentials f and records y:

        mean_i f_i - lambda * mean_j log mean_i exp((f_i - c(x_i, y_j)) / lambda)

    Its gradient in (x, f) is a sum over records: record j pulls point i with the share pi_ij that a softmax
    over points gives it, and takes so much of the point's mass. Points and potentials are functions of
    earlier releases, so each record's contribution, pulls and mass together, can be clipped by itself.

    Guarantee: one record moves `total` by at most clip_norm.

    Squares alone are the cost here. What lies outside the basis adds the same to the cost of every point and
    drops out of the softmax, so that the coefficients give the shares exactly.
    """

    def __init__(self, plan: SinkhornPlan, student: Student, basis: Frequencies) -> None:
        self.plan, self.student, self.basis = plan, student, basis
        shape, device = student.shape, student.device
        if plan.images < shape.classes:
            raise Failure(Fault.SCHEMA_MISMATCH)
        self.pixels = shape.height * shape.width * shape.channels
        self.unit = UNIT_DISTANCE * math.sqrt(self.pixels)
        self.size = plan.images * (basis.size + 1)
        self.labels = torch.arange(plan.images, device=device) % shape.classes
        start = student.rng.normals(plan.images * basis.size).view(plan.images, -1).to(device)
        self.points = start * (SPREAD * math.sqrt(self.pixels))
        self.potentials, self.masses = (torch.zeros_like(self.points[:, 0]) for _ in range(2))
        self.sums, self.released = torch.zeros_like(self.points), torch.zeros((), dtype=torch.int64)
        self.seen: dict[str, float] = {}

    @property
    def entropy(self) -> float:
        """lambda of the next release, on a public schedule: warm points spread over the classes first."""
        cold = self.student.recipe.points_entropy
        cooled = min(1.0, self.released.item() / (COOLED * self.plan.known_steps))
        return self.pixels * WARM * min(1.0, cold / WARM) ** cooled

    def total(self, images: Tensor, labels: Tensor, *, clip_norm: float) -> Tensor:
        entropy = self.entropy
        between_classes = Cost(
            absolute_weight=0, class_weight=self.student.recipe.class_weight
        ).between_classes
        pulls, masses = torch.zeros_like(self.points), torch.zeros_like(self.masses)
        norms = [masses[:0]]
        for some, their_labels in zip(images.split(CHUNK), labels.split(CHUNK), strict=True):
            rows = self.basis.of(some)
            squares = squared_distances(rows, self.points)
            cost = squares + between_classes * (their_labels[:, None] != self.labels)
            shares = ((self.potentials - cost) / entropy).softmax(1)
            norm = (shares.square() * (squares / self.unit**2 + MASS_WEIGHT**2)).sum(1).sqrt()
            shares *= (clip_norm * (1 - ROOM) / norm).clamp(max=1)[:, None]
            norms.append(norm)
            pulls += shares.T @ rows
            masses += shares.sum(0)
        pulls -= masses[:, None] * self.points
        found = torch.cat(norms)
        self.seen = {"records": float(len(found))}
        if len(found):
            self.seen["contribution_norm"] = found.median().item()
            self.seen["clipped"] = (found > clip_norm).double().mean().item()
        return torch.cat([(pulls / self.unit).flatten(), MASS_WEIGHT * masses])

    @property
    def least(self) -> float:
        """Twice the noise in the masses that points remember: less says little."""
        return 2 * self.plan.noise_stddev / MASS_WEIGHT / math.sqrt(1 - self.student.recipe.memory**2)

    @property
    def fair(self) -> Tensor:
        """What a point would have if its class were shared evenly, by the noised masses."""
        classes = self.student.shape.classes
        shares = torch.bincount(self.labels, self.masses, classes) / torch.bincount(self.labels)
        return shares[self.labels].clamp(min=self.least)

    def learn(self, noisy: Tensor) -> None:
        """Points go to the mean of what pulls them, potentials to where points of a class share it evenly.

        Both from what was released: pulls over masses, each with a fading memory of earlier releases.
        """
        entropy, memory = self.entropy, self.student.recipe.memory
        pulls, masses = (
            noisy[: -self.plan.images].view_as(self.points),
            noisy[-self.plan.images :] / MASS_WEIGHT,
        )
        self.masses = memory * self.masses + masses
        self.sums = memory * self.sums + pulls * self.unit + masses[:, None] * self.points
        # A point with next to no mass moves less: most of what pulls it is noise.
        sure = self.masses.clamp(min=self.least)
        moved = self.points + (self.sums - self.masses[:, None] * self.points) / sure[:, None]
        self.points = self.basis.of(self.basis.images(moved).clamp(-1, 1))
        self.potentials -= entropy / 2 * (sure / self.fair).log().clamp(-1, 1)
        self.released += 1

    def fit(self) -> None:
        """The generator learns the points: post-processing, as the points are functions of releases."""
        student, recipe = self.student, self.student.recipe
        images = self.basis.images(self.points).clamp(-1, 1).flatten(1).float()
        fresh = math.floor(recipe.fitting_images * recipe.debiasing)
        # Points that few records pull are mostly noise. A class that has no others has them all.
        heavy = self.masses >= self.fair * HEAVY
        without = torch.bincount(self.labels[heavy], minlength=student.shape.classes) == 0
        pool = (heavy | without[self.labels]).nonzero().flatten()
        for _ in range(recipe.fitting_steps):
            drawn = pool[uniform(recipe.fitting_images + fresh, len(pool), student.rng)]
            labels, chosen = self.labels[drawn], drawn[: recipe.fitting_images]
            student.descend(labels, images[chosen], self.labels[chosen])

    def tensors(self) -> dict[str, Tensor]:
        names = ("points", "potentials", "masses", "sums", "released")
        return {f"points.{name}": getattr(self, name) for name in names}


class SinkhornTraining:
    """Noised gradients of a Sinkhorn loss, or noised points of its semi-dual, and a generator that follows.

    Guarantee: each step is a Poisson-sampled Gaussian mechanism: on a function of the batch, of norm at most
    clip_norm * sqrt(rows), or on a sum over records with contributions of norm at most clip_norm. All else is
    computed from noised releases and from randomness; see docs/guarantees.md#sinkhorn.
    """

    def __init__(
        self,
        plan: SinkhornPlan,
        records: ImageRows,
        *,
        rng: Rng,
        recipe: SinkhornRecipe | None = None,
        device: str | None = None,
    ) -> None:
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.plan, self.records, self.rng = plan, records, rng
        recipe = recipe or plan.recipe or SinkhornRecipe.for_device(self.device)
        self.shape = architecture(records.schema, recipe)
        self.student = Student(self.shape, recipe, rng, self.device)
        kind = Points if plan.clipping is Clipping.SEMIDUAL else Gradients
        self.query = kind(plan, self.student, Frequencies(self.shape, recipe.frequencies, self.device))
        self.fitted = 0

        self.sampling = PoissonSampling(prob=plan.sampling_prob, steps=plan.known_steps)
        self.noise = GaussianNoise(stddev=plan.noise_stddev, size=self.query.size, steps=plan.known_steps)
        # Room for the grid in the joint norm, shared by the rows.
        self.clip_norm = self.noise.inner(plan.clip_norm * math.sqrt(plan.rows)) / math.sqrt(plan.rows)
        event = self.sampling.event(
            query=plan.query, bound=plan.clip_norm, rows=plan.rows, noise_stddev=self.noise.stddev
        )
        if event != plan.event():
            raise Failure(Fault.ACCOUNTING_MISMATCH)
        self.draws = self.sampling.batches(records, rng)
        self.releases = self.noise.releases(rng)

    def steps(self) -> Iterator[Progress]:
        for batch in self.draws:
            images, labels = self.readable(*self.records.take(batch))
            total = self.query.total(images, labels, clip_norm=self.clip_norm)
            self.query.learn(self.releases.release(total))
            yield self.progress()
        while self.progress().step < self.plan.progress_steps:
            self.query.fit()
            self.fitted += 1
            yield self.progress()

    def progress(self) -> Progress:
        return Progress(self.draws.drawn + self.fitted, self.plan.progress_steps)

    def readable(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Records within the declared bounds, each by itself; one with a pixel that is no number is left out.

        None of it may stop the training: stopping would tell of it.
        """
        finite = images.flatten(1).isfinite().all(1)
        images, labels = images[finite].to(self.device), labels[finite].to(self.device)
        return images.clamp(-1, 1), labels.clamp(0, self.shape.classes - 1)

    def checkpoint(self) -> dict[str, Tensor]:
        counts = {"step": self.draws.drawn, "fitted": self.fitted, "taken": self.student.taken}
        tensors = {name: torch.tensor(value) for name, value in counts.items()}
        return {
            name: value.detach().cpu().clone().contiguous()
            for name, value in (tensors | self._parts()).items()
        }

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Goes on where the checkpoint was taken, with fresh randomness under the same charge."""
        parts = self._parts()
        missing = set(parts) - set(tensors)
        if missing:
            raise ValueError(f"the checkpoint lacks {len(missing)} tensors")
        with torch.no_grad():
            for name, value in parts.items():
                value.copy_(tensors[name])
        step, self.fitted, self.student.taken = (int(tensors[name]) for name in ("step", "fitted", "taken"))
        self.draws = self.sampling.batches(self.records, self.rng, drawn=step)
        self.releases = self.noise.releases(self.rng, made=step)

    def _parts(self) -> dict[str, Tensor]:
        return self.student.tensors() | self.query.tensors()

    def diagnostics(self) -> dict[str, float]:
        return {name: value for name, value in self.query.seen.items() if math.isfinite(value)}

    def synthesizer(self) -> ImageSynthesizer:
        counted = self.draws.drawn == self.releases.made == self.plan.known_steps
        if not counted or self.progress().step != self.plan.progress_steps:
            raise Failure(Fault.ACCOUNTING_MISMATCH)
        return self.student.result()
