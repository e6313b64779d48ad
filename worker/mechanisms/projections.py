"""Records as rows clipped one by one, random directions, and optimal transport along each direction."""

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sluice.methods.sliced import SlicedPlan
from sluice.privacy.events import Geometry
from worker.mechanisms.clipping import clip_rows
from worker.mechanisms.mechanism import Mechanism
from worker.mechanisms.noise import GaussianNoise, Rng
from worker.mechanisms.sampling import WithoutReplacement


class ProjectionMechanism(Mechanism):
    """Noisy projections of the rows of a batch of fixed size on fresh random directions."""

    def __init__(self, plan: SlicedPlan, rng: Rng) -> None:
        super().__init__(
            WithoutReplacement(batch=plan.batch, population=plan.records, steps=plan.known_steps),
            GaussianNoise(stddev=plan.noise_stddev, size=plan.directions * plan.batch),
            rng,
            geometry=plan.geometry,
            directions=plan.directions,
            dim=plan.dim,
            row_bound=plan.row_bound,
        )
        self.plan = plan

    def project(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Directions, and the released projections of rows clipped to `clip_norm`: directions by rows."""
        plan = self.plan
        drawn = directions(plan.geometry, plan.directions, plan.dim, self.rng).to(rows.device)
        noisy = self.release((drawn @ rows.T).flatten())
        return drawn, noisy.view(plan.directions, plan.batch).float()


def append_labels(values: Tensor, labels: Tensor, *, classes: int, weight: float) -> Tensor:
    """Labels are part of the rows: matching class by class would reveal how many of each a batch has."""
    return torch.cat([values, weight * F.one_hot(labels, classes)], 1)


def clip_differentiably(rows: Tensor, bound: float) -> Tensor:
    """The same as `clip_rows`, for generated rows: gradients flow through it."""
    length = rows.norm(dim=1, keepdim=True).clamp(min=1e-12)
    return rows * (bound / length).clamp(max=1)


def private_rows(rows: Tensor, present: np.ndarray, *, bound: float) -> Tensor:
    """Clipped rows of records at the positions of a batch where `present`, zeros at its blank positions.

    Guarantee: a row depends on its record alone, has norm at most bound, and is zero where the record is not
    finite or there is none.
    """
    out = torch.zeros(len(present), rows.shape[1], device=rows.device)
    out[torch.from_numpy(present)] = clip_rows(rows, bound)[0].float()
    return out


def directions(geometry: Geometry, count: int, dim: int, rng: Rng) -> Tensor:
    """`count` unit rows of length `dim`: independent and uniform, or in orthonormal blocks of `dim`."""
    if geometry is Geometry.ORTHONORMAL:
        normals = rng.normals(count * dim).view(-1, dim, dim)
        return torch.linalg.qr(normals).Q.flatten(0, 1).float()
    rows = torch.empty(count, dim)
    for chunk in rows.split(max(1, 2**15 // dim)):  # as many as fit the cache
        normals = float32_normals(chunk.numel(), rng).view_as(chunk)
        torch.mul(normals, torch.linalg.vector_norm(normals, dim=1, keepdim=True).reciprocal_(), out=chunk)
    return rows


def float32_normals(count: int, rng: Rng) -> Tensor:
    """Standard normals for directions: half the random words that noise needs, and tails to 6.6."""
    half = count // 2 + count % 2
    first, second = torch.from_numpy(rng.words(half).view(np.int32)).float().chunk(2)
    radius = first.abs_().mul_(2.0**-31).add_(2.0**-32).log_().mul_(-2).sqrt_()
    angle = second.mul_(math.pi * 2.0**-31)
    return torch.cat([radius * angle.cos(), radius * angle.sin_()])[:count]


# Sorting dominates the cost. Numpy sorts short rows of float32 many times faster than torch.


def sort_rows(values: Tensor) -> Tensor:
    """Each row in ascending order."""
    return torch.from_numpy(np.sort(values.cpu().numpy(), axis=1)).to(values.device)


def match_ranks(values: Tensor, quantiles: Tensor) -> Tensor:
    """For each value of a row, the quantile of that row's distribution that has the same rank."""
    order = torch.from_numpy(np.argsort(values.detach().cpu().numpy(), axis=1)).to(values.device)
    return torch.empty_like(values).scatter_(1, order, quantiles)


def interpolate_quantiles(quantiles: Tensor, times: int) -> Tensor:
    """`times` as many quantiles of the same distributions, interpolated linearly."""
    if times == 1:
        return quantiles
    count = quantiles.shape[1]
    position = ((torch.arange(times * count) + 0.5) / times - 0.5).clamp(0, count - 1).to(quantiles.device)
    below = position.long().clamp(max=max(count - 2, 0))
    above = (below + 1).clamp(max=count - 1)
    return torch.lerp(quantiles[:, below], quantiles[:, above], (position - below).expand(len(quantiles), -1))


def sliced_distance(values: Tensor, quantiles: Tensor) -> tuple[float, Tensor]:
    """The mean over rows of W2^2 between values and quantiles, and its gradient in the values.

    The optimal map between two sets of points on a line preserves their order and does not change for small
    moves, so the gradient is that of the squares, and nothing is differentiated through sorting.
    """
    gaps = values - match_ranks(values, quantiles)
    return gaps.square().mean().item(), gaps.mul_(2 / gaps.numel())


def smoothed_distance(
    rows: Tensor,
    directions: Tensor,
    quantiles: Tensor,
    *,
    noise_stddev: float,
    noises: int,
    source: torch.Generator,
) -> tuple[float, Tensor]:
    """The distance of public rows from noisy quantiles, and its gradient at the rows: post-processing.

    The rows get noise of the same strength before they are compared, `noises` times: the distance between the
    smoothed distributions is zero where the distributions are equal, for any noise.
    """
    values = (directions @ rows.T).repeat(1, noises)
    values += noise_stddev * torch.randn(*values.shape, generator=source).to(values.device)
    distance, gradient = sliced_distance(values, interpolate_quantiles(quantiles, noises))
    return distance, gradient.view(len(directions), noises, -1).sum(1).T @ directions


class Moments:
    """Estimates the mean and M = E[x x^T] of rows from the noisy projections of all releases.

    Projections y of a row on k directions u_j, put back as z = sum_j y_j u_j, are used jointly: E[z z^T] less
    the noise's part is a M + b tr(M) I. On uniform directions a = 2k / (d (d + 2)) + k (k - 1) / d^2 and
    b = k / (d (d + 2)); on m orthonormal blocks a = m^2 and b = 0. Solving for M gives an unbiased estimate;
    squares of single projections would have d times its error.
    """

    def __init__(self, dim: int, geometry: Geometry, device: str) -> None:
        self.dim, self.geometry = dim, geometry
        self.first = torch.zeros(dim, dtype=torch.float64, device=device)
        self.second = torch.zeros(dim, dim, dtype=torch.float64, device=device)
        self.along = torch.zeros_like(self.second)
        self.count = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, directions: Tensor, noisy: Tensor) -> None:
        """Adds a release: directions, and noisy projections on them as directions by rows."""
        back = directions.T @ noisy
        self.first += back.mean(1)
        self.second += back @ back.T / noisy.shape[1]
        self.along += directions.T @ directions
        self.count += 1

    def estimate(self, noise_stddev: float) -> tuple[Tensor, Tensor]:
        dim, count = self.dim, self.count.clamp(min=1)
        k = self.along.trace() / count  # directions per release, each of length one
        a, b = k**2 / dim**2, torch.zeros_like(k)
        if self.geometry is Geometry.SPHERE:
            b = k / (dim * (dim + 2))
            a = 2 * b + k * (k - 1) / dim**2
        second = (self.second - noise_stddev**2 * self.along) / count
        trace = second.trace() / (a + b * dim)
        square = (second - b * trace * torch.eye(dim, device=second.device)) / a
        return dim * self.first / (count * k), square

    def state(self) -> dict[str, Tensor]:
        return {f"moments.{name}": getattr(self, name) for name in ("first", "second", "along", "count")}
