"""Special functions for the accountants. Rounding errors never lower a cost."""

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy import special

from sluice.privacy.problems import TooCostlyToAccount

Array = NDArray[np.float64]

# Above this argument the series has too many terms to sum within a request.
LARGEST_ARGUMENT = 2e5
# For a curve over all orders the limit is lower; an order beyond it is never the best one.
LARGEST_ON_A_CURVE = 2e4
# Probability of a longer projection than `projected_squares` covers; callers add it to delta.
BEYOND = 1e-20


@lru_cache(maxsize=65536)
def log_1f1(dim: int, x: float) -> float:
    """log 1F1(1/2; dim/2; x) = log E exp(x Y), Y the squared cosine of a uniform direction. From above.

    A sum of positive terms with ratio r_n = (1/2 + n) / (dim/2 + n) * x / (n + 1). The sum stops where
    r_n < 0.9 and falls; what follows is at most term * r / (1 - r), and that bound is added.
    """
    if x > LARGEST_ARGUMENT:
        raise TooCostlyToAccount(
            "The projections carry too little noise for this order; choose a lower order or more noise."
        )
    if x == 0:
        return 0.0
    count = 64
    while True:
        n = np.arange(count)
        terms = np.cumsum(np.log((0.5 + n) / (dim / 2 + n)) + math.log(x) - np.log1p(n))
        ratio = (0.5 + count) / (dim / 2 + count) * x / (count + 1)
        if ratio < 0.9 and terms[-1] < terms.max() - 45:
            break
        count *= 2
    tail = terms[-1] + math.log(ratio / (1 - ratio))
    return float(np.logaddexp(0.0, special.logsumexp(np.append(terms, tail))))


def log_expm1(x: Array) -> Array:
    """log(e^x - 1) for x >= 0, without overflow; -inf at zero."""
    with np.errstate(divide="ignore", over="ignore"):
        return np.where(x < 30, np.log(np.expm1(np.minimum(x, 30))), x + np.log1p(-np.exp(-np.maximum(x, 1))))


def log_comb(order: int, j: Array) -> Array:
    """log of the binomial coefficients C(order, j)."""
    result: Array = special.gammaln(order + 1) - special.gammaln(j + 1) - special.gammaln(order - j + 1)
    return result


def log_gaussian_delta(epsilon: Array, ratio: float | Array) -> Array:
    """log delta(epsilon) of one Gaussian mechanism, ratio = sensitivity / stddev (Balle and Wang 2018).

    delta = Phi(ratio/2 - epsilon/ratio) - e^epsilon Phi(-ratio/2 - epsilon/ratio), for epsilon >= 0.
    """
    upper = special.log_ndtr(ratio / 2 - epsilon / ratio)
    lower = epsilon + special.log_ndtr(-ratio / 2 - epsilon / ratio)
    with np.errstate(divide="ignore"):
        result: Array = upper + np.log(-np.expm1(np.minimum(lower - upper, 0.0)))
    return result


def beta_law(dim: int, grid: float, size: int) -> Array:
    """The distribution function of Beta(1/2, (dim - 1)/2) at multiples of `grid`, up to where it is one."""
    places = np.minimum(np.arange(size) * grid, 1.0)
    law, coarse = np.ones(size), special.betainc(0.5, (dim - 1) / 2, places[::1024])
    reach = 1024 * int(np.searchsorted(coarse, 1.0))
    law[:reach] = special.betainc(0.5, (dim - 1) / 2, places[:reach])
    return law


@lru_cache(maxsize=64)
def projected_squares(directions: int, dim: int, atoms: int = 400) -> tuple[Array, Array]:
    """Values and probabilities that bound H = |U^T z|^2 from above in law, for unit z and sphere directions.

    H is a sum of independent Beta(1/2, (dim - 1)/2). Each is rounded up to a fine grid, the sum is taken
    by Fourier transform, and the result is gathered into few atoms, again rounded up. What lies above the
    last atom has a probability below BEYOND, by Chernoff's bound.
    """
    if dim == 1:
        return np.array([float(directions)]), np.array([1.0])
    mean = directions / dim
    stddev = math.sqrt(directions * 2 * (dim - 1) / (dim * dim * (dim + 2)))
    tilts = dim / 2 * np.array([0.01, 0.03, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 2.0, 8.0])
    bounds = [(directions * log_1f1(dim, float(t)) - math.log(BEYOND)) / t for t in tilts]
    top = min(float(directions), *bounds)
    grid = max(mean / directions / 500, 2 * top / 2**20)
    top += directions * grid
    size = 1 << math.ceil(math.log2(top / grid + 2))
    law = beta_law(dim, grid, size)
    total = np.fft.irfft(np.fft.rfft(np.diff(law, prepend=0.0)) ** directions, size)
    low, high = max(mean - 9 * stddev, grid), min(mean + 9 * stddev, top)
    edges = np.unique([*np.linspace(low, high, atoms), *np.linspace(high, top, atoms // 4)])
    where = np.minimum(np.searchsorted(edges, np.arange(size) * grid), len(edges) - 1)
    weights: Array = np.bincount(where, weights=np.maximum(total, 0.0), minlength=len(edges)).astype(float)
    weights[-1] += max(0.0, 1.0 - weights.sum())
    return edges, weights
