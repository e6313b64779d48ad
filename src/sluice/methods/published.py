"""The papers' own arithmetic, kept to show what they printed. Nothing here is a guarantee."""

import math
from fractions import Fraction

from scipy import special

from sluice.privacy.accountant import ORDERS
from sluice.privacy.dominating_pairs import GaussianBase, OneSided, Plain
from sluice.privacy.renyi import divergence, from_excess, gaussian_moments, wbk_excess

# The orders of TensorFlow Privacy, which the paper used.
TF_ORDERS = [1.25, 1.5, 1.75, 2.0, 2.25, 2.5, 3.0, 3.5, 4.0, 4.5, *map(float, range(5, 64))]


def classic_epsilon(divergences: list[float], orders: list[float], delta: float) -> float:
    """Mironov 2017, Proposition 3."""
    return min(d - math.log(delta) / (a - 1) for d, a in zip(divergences, orders, strict=True))


def poisson_claim(*, rate: float, ratio: float, compositions: int, delta: float) -> float:
    """So many Poisson-sampled Gaussians."""
    base = GaussianBase(Fraction(ratio) ** 2)
    pair = OneSided(rate, base) if rate < 1 else Plain(base)
    return classic_epsilon([compositions * divergence(pair, a) for a in TF_ORDERS], TF_ORDERS, delta)


def wbk_claim(*, rate: float, ratio: float, compositions: int, delta: float) -> float:
    """So many Gaussians on samples without replacement."""
    orders = [int(order) for order in ORDERS if order == int(order) and order <= 128]
    moments = gaussian_moments(GaussianBase(Fraction(ratio) ** 2))
    each = [compositions * from_excess(wbk_excess(rate, a, moments), a) for a in orders]
    return classic_epsilon(each, [float(a) for a in orders], delta)


def bernstein_square(directions: int, dim: int, delta: float) -> float:
    """Rakotomamonjy and Ralaivola 2021, Lemma 2: squared sensitivity with probability 1 - delta, once."""
    log = math.log(1 / delta)
    return directions / dim + 2 / 3 * log + 2 / dim * math.sqrt(directions * (dim - 1) / (dim + 2) * log)


def clt_square(directions: int, dim: int, delta: float) -> float:
    """The same by a normal approximation, which the tail of a sum of Betas does not obey."""
    spread = math.sqrt(2 * directions * (dim - 1) / (dim + 2)) / dim
    return float(directions / dim - special.ndtri(delta) * spread)
