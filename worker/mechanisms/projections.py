"""Records as rows, each clipped by itself; directions drawn without looking; transport along each of them."""

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sluice.privacy.events import Geometry
from worker.mechanisms.clipping import clip_rows
from worker.mechanisms.noise import GaussianNoise, Rng


class Pixels:
    """The numbers of an image that a row holds, from 0 to 1 by the declared bounds: a public, linear map.

    All of them, or the coefficients of the lowest `frequencies` x `frequencies` cosines of every channel. The
    basis is orthonormal, so a row is never longer than its image.
    """

    def __init__(self, channels: int, height: int, width: int, frequencies: int | None = None) -> None:
        self.bases = frequencies and tuple(cosines(side, min(side, frequencies)) for side in (height, width))
        self.size = channels * math.prod(map(len, self.bases) if self.bases else (height, width))

    def of(self, images: Tensor) -> Tensor:
        """N, C, H, W from -1 to 1 as N, size; linear, so that gradients pass."""
        images = (images + 1) / 2
        if self.bases:
            down, across = (basis.to(images.device) for basis in self.bases)
            images = down @ images @ across.T
        return images.flatten(1)


def cosines(side: int, count: int) -> Tensor:
    """The `count` slowest rows of the orthonormal cosine basis."""
    places, waves = torch.arange(side, dtype=torch.float64), torch.arange(count, dtype=torch.float64)
    rows = torch.cos(math.pi / side * waves[:, None] * (places + 0.5)) * math.sqrt(2 / side)
    rows[0] /= math.sqrt(2)
    return rows.float()


def labelled(values: Tensor, labels: Tensor, *, classes: int, weight: float) -> Tensor:
    """Labels ride inside the rows: matching class by class would tell how many of each a batch has."""
    return torch.cat([values, weight * F.one_hot(labels, classes)], 1)


def clipped(rows: Tensor, bound: float) -> Tensor:
    """What clip_rows does, for rows that were made: gradients pass."""
    length = rows.norm(dim=1, keepdim=True).clamp(min=1e-12)
    return rows * (bound / length).clamp(max=1)


def private_rows(rows: Tensor, there: np.ndarray, *, bound: float) -> Tensor:
    """Rows of records at the places of a batch where there are any, blank ones elsewhere.

    Guarantee: a row depends on its record alone, has norm at most bound, and is zero where the record is not
    finite or there is none.
    """
    placed = torch.zeros(len(there), rows.shape[1], device=rows.device)
    placed[torch.from_numpy(there)] = clip_rows(rows, bound)[0].float()
    return placed


def inner_bound(row_bound: float, *, dim: int, noise: GaussianNoise) -> float:
    """The norm to clip rows to, so that rounding projections to the grid of the noise stays within the cost.

    Rounding moves the difference of two rows by less than the grid in each of k projections, at most
    grid * sqrt(k) together. Rows shorter by grid * sqrt(dim) / 2 each give that back, as k projections have
    sqrt(k / dim) of a row's length: surely on orthonormal directions, and on independent ones in the means
    that the cost is made of. docs/guarantees.md#swd
    """
    inner = row_bound - noise.grid * math.sqrt(dim) / 2
    if inner <= row_bound / 2:
        raise ValueError("the noise is too coarse for rows of this length: raise the row bound")
    return inner


def directions(geometry: Geometry, count: int, dim: int, rng: Rng) -> Tensor:
    """`count` unit rows of length `dim`: independent and uniform, or in orthonormal blocks of `dim`."""
    if geometry is Geometry.ORTHONORMAL:
        normals = rng.normals(count * dim).view(-1, dim, dim)
        return torch.linalg.qr(normals).Q.flatten(0, 1).float()
    rows = torch.empty(count, dim)
    for some in rows.split(max(1, 2**15 // dim)):  # as many as stay in the cache until they are done
        normals = short_normals(some.numel(), rng).view_as(some)
        torch.mul(normals, torch.linalg.vector_norm(normals, dim=1, keepdim=True).reciprocal_(), out=some)
    return rows


def short_normals(count: int, rng: Rng) -> Tensor:
    """Standard normals in float32, for directions: half the words of noise, and tails to 6.6."""
    half = count // 2 + count % 2
    first, second = torch.from_numpy(rng.words(half).view(np.int32)).float().chunk(2)
    radius = first.abs_().mul_(2.0**-31).add_(2.0**-32).log_().mul_(-2).sqrt_()
    angle = second.mul_(math.pi * 2.0**-31)
    return torch.cat([radius * angle.cos(), radius * angle.sin_()])[:count]


# Sorting is most of the work. Numpy sorts short rows of float32 many times quicker than torch does.


def ordered(values: Tensor) -> Tensor:
    """Each row in ascending order."""
    return torch.from_numpy(np.sort(values.cpu().numpy(), axis=1)).to(values.device)


def matched(values: Tensor, quantiles: Tensor) -> Tensor:
    """For each value of a row, the quantile of that row's distribution that has the same rank."""
    order = torch.from_numpy(np.argsort(values.detach().cpu().numpy(), axis=1)).to(values.device)
    return torch.empty_like(values).scatter_(1, order, quantiles)


def spread(quantiles: Tensor, times: int) -> Tensor:
    """So many times as many quantiles of the same distributions, on straight lines between the given ones."""
    if times == 1:
        return quantiles
    count = quantiles.shape[1]
    places = ((torch.arange(times * count) + 0.5) / times - 0.5).clamp(0, count - 1).to(quantiles.device)
    below = places.long().clamp(max=max(count - 2, 0))
    above = (below + 1).clamp(max=count - 1)
    return torch.lerp(quantiles[:, below], quantiles[:, above], (places - below).expand(len(quantiles), -1))


def sliced(values: Tensor, quantiles: Tensor) -> tuple[float, Tensor]:
    """The mean over rows of W2^2 between values and quantiles, and its gradient in the values.

    The best map between two sets of points on a line keeps their order; it does not change for small moves,
    so that the gradient is that of the squares and nothing is differentiated through sorting.
    """
    apart = values - matched(values, quantiles)
    return apart.square().mean().item(), apart.mul_(2 / apart.numel())


def smoothed(
    rows: Tensor,
    along: Tensor,
    quantiles: Tensor,
    *,
    noise_stddev: float,
    noises: int,
    source: torch.Generator,
) -> tuple[float, Tensor]:
    """The distance of public rows from noisy quantiles, and its gradient at the rows: post-processing.

    The rows get the same noise before they are compared, `noises` times over: a distance between smoothed
    distributions is zero where those are equal, whatever the noise.
    """
    values = (along @ rows.T).repeat(1, noises)
    values += noise_stddev * torch.randn(*values.shape, generator=source).to(values.device)
    distance, gradient = sliced(values, spread(quantiles, noises))
    return distance, gradient.view(len(along), noises, -1).sum(1).T @ along


class Moments:
    """What noisy projections tell, all releases together, of the mean and of M = E[x x^T] of rows.

    Projections y of one row on k directions, put back as z = sum_j y_j u_j, keep what they tell together:
    E[z z^T] less the noise's part is a M + b tr(M) I. On uniform directions a = 2k / (d (d + 2)) +
    k (k - 1) / d^2 and b = k / (d (d + 2)); on m orthonormal blocks a = m^2 and b = 0. Solved for M, without
    bias; squares of single projections would be off by d times as much on as many directions.
    """

    def __init__(self, dim: int, geometry: Geometry, device: str) -> None:
        self.dim, self.geometry = dim, geometry
        self.first = torch.zeros(dim, dtype=torch.float64, device=device)
        self.second = torch.zeros(dim, dim, dtype=torch.float64, device=device)
        self.along = torch.zeros_like(self.second)
        self.count = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, along: Tensor, noisy: Tensor) -> None:
        """Takes in directions and noisy projections on them, directions by rows."""
        back = along.T @ noisy
        self.first += back.mean(1)
        self.second += back @ back.T / noisy.shape[1]
        self.along += along.T @ along
        self.count += 1

    def told(self, noise_stddev: float) -> tuple[Tensor, Tensor]:
        dim, count = self.dim, self.count.clamp(min=1)
        each = self.along.trace() / count  # directions of a release, each of length one
        a, b = each**2 / dim**2, torch.zeros_like(each)
        if self.geometry is Geometry.SPHERE:
            b = each / (dim * (dim + 2))
            a = 2 * b + each * (each - 1) / dim**2
        seen = (self.second - noise_stddev**2 * self.along) / count
        trace = seen.trace() / (a + b * dim)
        square = (seen - b * trace * torch.eye(dim, device=seen.device)) / a
        return dim * self.first / (count * each), square

    def tensors(self) -> dict[str, Tensor]:
        return {f"moments.{name}": getattr(self, name) for name in ("first", "second", "along", "count")}
