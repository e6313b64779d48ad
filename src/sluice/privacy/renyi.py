"""Rényi divergence of a dominating pair at one order, evaluated in two independent ways.

Every function here returns log(A - 1) for the moment A = E_Q[(P/Q)^order], as a sum or integral of terms
that are never negative: nothing cancels, so a rate of 1e-8 is as accurate as a rate of a half. The divergence
is log(A) / (order - 1).
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, cast

import mpmath
import numpy as np
from numpy.typing import NDArray
from scipy import special

from sluice.privacy import dominating_pairs as pairs
from sluice.privacy.dominating_pairs import Base, GaussianBase, OneSided, Pair, Plain, SlicedBase
from sluice.privacy.problems import InvalidTarget, TooCostlyToAccount
from sluice.privacy.special import Array, log_1f1, log_comb, log_expm1, log_gaussian_delta

LOWEST_ORDER, HIGHEST_ORDER = 1.25, 1024.0
# Most nodes of a quadrature. A pair that needs more has so little noise that it is refused.
MOST_NODES = 1_000_000
NODES, WEIGHTS = np.polynomial.legendre.leggauss(20)
LOG_ROOT_TAU = math.log(2 * math.pi) / 2


def check_order(order: float) -> None:
    if not (isinstance(order, int | float) and LOWEST_ORDER <= order <= HIGHEST_ORDER):
        raise InvalidTarget(f"order must be from {LOWEST_ORDER} to {HIGHEST_ORDER:.0f}.", given=order)


@lru_cache(maxsize=8192)
def divergence(pair: Pair, order: float) -> float:
    """First evaluation: closed forms where they exist, otherwise quadrature."""
    check_order(order)
    match pair:
        case Plain(base=GaussianBase()):
            return order * float(pair.base.square) / 2
        case Plain(base=SlicedBase() as base):
            return base.directions * log_1f1(base.dim, moment_argument(base, order)) / (order - 1)
        case OneSided(base=GaussianBase() as base):
            if order == int(order):
                return from_excess(
                    binomial_excess(pair.sampling_prob, int(order), gaussian_moments(base)), order
                )
            return from_excess(one_sided_excess(pair.sampling_prob, base.ratio, order), order)
        case pairs.Symmetric(base=GaussianBase() as base):
            return from_excess(symmetric_excess(pair.sampling_prob, base.ratio, order), order)
        case OneSided(base=SlicedBase() as base):
            powers = sliced_moments(base)
            return interpolated(lambda a: binomial_excess(pair.sampling_prob, a, powers), order)
        case pairs.Symmetric(base=SlicedBase() as base):
            powers = sliced_moments(base)
            return interpolated(lambda a: wbk_excess(pair.sampling_prob, a, powers), order)
        case pairs.Antipodal():
            return from_excess(antipodal_excess(pair.sampling_prob, pair.base.ratio, order), order)
    raise TypeError(pair)


@lru_cache(maxsize=8192)
def second_divergence(pair: Pair, order: float) -> float:
    """Second evaluation: another formula, another quadrature, or 30-digit arithmetic."""
    check_order(order)
    match pair:
        case Plain(base=GaussianBase() as base):
            return gaussian_quadrature(base.ratio, order)
        case OneSided(base=GaussianBase() as base):
            if order == int(order):
                return from_excess(one_sided_excess(pair.sampling_prob, base.ratio, order), order)
            return from_excess(profile_excess(pair.sampling_prob, base.ratio, order, mirrored=False), order)
        case pairs.Symmetric(base=GaussianBase() as base):
            return from_excess(profile_excess(pair.sampling_prob, base.ratio, order, mirrored=True), order)
        case pairs.Antipodal():
            return from_excess(antipodal_panels(pair.sampling_prob, pair.base.ratio, order), order)
        case _:
            return sliced_in_thirty_digits(pair, order)


def from_excess(log_excess: float, order: float) -> float:
    return float(np.logaddexp(0.0, log_excess)) / (order - 1)


def interpolated(excess: Callable[[int], float], order: float) -> float:
    """log A is convex in the order and zero at 1, so the chord between integer orders is an upper bound."""
    low, high = math.floor(order), math.ceil(order)
    upper = float(np.logaddexp(0.0, excess(high)))
    if low == high:
        return upper / (order - 1)
    lower = float(np.logaddexp(0.0, excess(low))) if low > 1 else 0.0
    return ((high - order) * lower + (order - low) * upper) / (order - 1)


def moment_argument(base: Base, order: float) -> float:
    return order * (order - 1) * float(base.square) / 2


def gaussian_moments(base: GaussianBase) -> Callable[[int], Array]:
    """log E_Q[(P/Q)^j] for j = 2 ... order."""
    return lambda order: np.arange(1.0, order) * np.arange(2.0, order + 1) * float(base.square) / 2


def sliced_moments(base: SlicedBase) -> Callable[[int], Array]:
    def moments(order: int) -> Array:
        log_1f1(base.dim, moment_argument(base, order))  # refuses here what the last of these would refuse
        logs = [log_1f1(base.dim, moment_argument(base, j)) for j in range(2, order + 1)]
        return base.directions * np.array(logs)

    return moments


def binomial_excess(rate: float, order: int, moments: Callable[[int], Array]) -> float:
    """A - 1 = sum over j >= 2 of C(order, j) (1 - q)^(order - j) q^j (m_j - 1): exact at whole orders.

    Mironov, Talwar and Zhang 2019, 3.3; the terms j = 0, 1 have m_j = 1 and the weights sum to one.
    """
    j = np.arange(2.0, order + 1)
    weights = log_comb(order, j) + j * math.log(rate) + (order - j) * math.log1p(-rate)
    return float(special.logsumexp(weights + log_expm1(moments(order))))


def wbk_excess(rate: float, order: int, moments: Callable[[int], Array]) -> float:
    """Wang, Balle and Kasiviswanathan 2019, Theorem 9, at whole orders, never above the unsampled moment."""
    log_m, j = moments(order), np.arange(2.0, order + 1)
    ternary = math.log(2) + log_m
    ternary[0] = min(ternary[0], math.log(4) + log_expm1(log_m[:1])[0])
    amplified = float(special.logsumexp(log_comb(order, j) + j * math.log(rate) + ternary))
    return min(amplified, float(log_expm1(log_m[-1:])[0]))


def log_ratio(rate: float, exponent: NDArray[np.floating[Any]]) -> Array:
    """log(1 + q (e^x - 1)): the log likelihood ratio after sampling, exact for small q and for large x."""
    near = np.log1p(rate * np.expm1(np.minimum(exponent, 600.0)))
    result: Array = np.where(exponent < 600, near, np.logaddexp(math.log1p(-rate), math.log(rate) + exponent))
    return result


def log_power_rest(order: float, log_r: Array) -> Array:
    """log(r^order - 1 - order (r - 1)): a moment without its first two terms."""
    u = np.expm1(np.minimum(log_r, 40.0))
    power = order * log_r
    small = np.abs(order * u) < 1e-2
    tiny = np.where(small, u, 0.0)
    series, term = np.zeros_like(u), order * tiny
    for j in range(2, 10):
        term = term * tiny * (order - j + 1) / j
        series = series + term
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        middle = np.log(np.expm1(np.minimum(power, 40.0)) - order * u)
        shrunk = (1 - order) * np.exp(-power) + order * np.exp((1 - order) * log_r)
        large = power + np.log1p(-shrunk)
        return np.where(small, np.log(series), np.where(power < 30, middle, large))


def log_double_rest(order: float, log_r: Array) -> Array:
    """log((r^order - 1)(1 - r^(1 - order))), r >= 1: both directions of a symmetric pair at once."""
    with np.errstate(divide="ignore"):
        return log_expm1(order * log_r) + np.log(-np.expm1((1 - order) * log_r))


def span(order: float, ratio: float, step: float) -> float:
    """Where the integrands are negligible: the largest term of a moment is at order * ratio."""
    if (order * ratio + 14) / step > MOST_NODES:
        raise TooCostlyToAccount(
            "The noise is too small for this order; choose a lower order or more noise.", order=order
        )
    return order * ratio + 14


def panels(start: float, stop: float, width: float) -> tuple[Array, Array]:
    """Nodes and log weights of Gauss-Legendre panels that cover an interval."""
    edges = np.linspace(start, stop, math.ceil((stop - start) / width) + 1)
    half = np.diff(edges) / 2
    nodes = (edges[:-1] + half)[:, None] + half[:, None] * NODES
    return nodes.ravel(), np.log(half[:, None] * WEIGHTS).ravel()


def integral(log_values: Array, log_weights: float | Array) -> float:
    return float(special.logsumexp(log_values + log_weights))


def gaussian_quadrature(ratio: float, order: float) -> float:
    """log E_Q[(P/Q)^order] / (order - 1) by the trapezoid rule around the peak at order * ratio."""
    g = order * ratio + np.arange(-56, 57) * 0.25
    log_values = order * (ratio * g - ratio**2 / 2) - g**2 / 2 - LOG_ROOT_TAU
    return integral(log_values, math.log(0.25)) / (order - 1)


def one_sided_excess(rate: float, ratio: float, order: float) -> float:
    """E_Q[r^order - 1 - order (r - 1)], r = 1 + q (P/Q - 1), by the trapezoid rule.

    The rule converges geometrically: the integrand is analytic within pi / ratio of the real line.
    """
    step = min(0.25, 0.55 / ratio)
    g = np.arange(-math.ceil(14 / step), math.ceil(span(order, ratio, step) / step) + 1) * step
    log_r = log_ratio(rate, ratio * g - ratio**2 / 2)
    return integral(log_power_rest(order, log_r) - g**2 / 2, math.log(step) - LOG_ROOT_TAU)


def symmetric_excess(rate: float, ratio: float, order: float) -> float:
    """E_Q[(r^order - 1)(1 - r^(1 - order)); P > Q], r = 1 + q (P/Q - 1) (docs/guarantees.md#symmetric)."""
    width = min(0.5, 1 / ratio)
    g, log_weights = panels(ratio / 2, span(order, ratio, width / len(NODES)), width)
    log_r = log_ratio(rate, ratio * g - ratio**2 / 2)
    return integral(log_double_rest(order, log_r) - g**2 / 2 - LOG_ROOT_TAU, log_weights)


def profile_excess(rate: float, ratio: float, order: float, *, mirrored: bool) -> float:
    """order (order - 1) q^2 times the integral of the base profile against the powers of r.

    Any f-divergence is an integral of hockey sticks (Sason and Verdu 2016, Proposition 3); with
    r = 1 + q (e^t - 1) the hockey stick of the sampled pair at r is q times that of the base at e^t.
    """
    width = min(0.5, 1 / ratio)
    g, log_weights = panels(ratio / 2, span(order, ratio, width / len(NODES)), width)
    if not mirrored:
        # Split at t = 0, where the profile minus its value for disjoint laws has a kink.
        below, log_weights_below = panels(-14.0, ratio / 2, width)
        g, log_weights = np.append(below, g), np.append(log_weights_below, log_weights)
    t = ratio * g - ratio**2 / 2
    log_r = log_ratio(rate, t)
    log_power = (order - 2) * log_r
    if mirrored:
        log_power = np.logaddexp(log_power, -(order + 1) * log_r)
    log_values = t + np.minimum(t, 0.0) + log_power + log_gaussian_delta(np.abs(t), ratio)
    constant = math.log(order * (order - 1) * ratio) + 2 * math.log(rate)
    return integral(log_values, log_weights) + constant


def antipodal_excess(rate: float, ratio: float, order: float) -> float:
    """The two mixtures are mirror images, so one half line covers both directions; trapezoid rule."""
    step = min(0.25, 0.45 / ratio)
    y = np.arange(1, math.ceil(span(2 * order, ratio, step) / step) + 1) * step
    log_lower = log_ratio(rate, -ratio * y - ratio**2 / 2)
    log_r = log_ratio(rate, ratio * y - ratio**2 / 2) - log_lower
    log_values = log_double_rest(order, log_r) + log_lower - y**2 / 2
    return integral(log_values, math.log(step) - LOG_ROOT_TAU)


def antipodal_panels(rate: float, ratio: float, order: float) -> float:
    """The same moment over the whole line and from its definition, by panels."""
    width = min(0.9, 1.3 / ratio)
    reach = span(2 * order, ratio, width / len(NODES))
    y, log_weights = panels(-14 - ratio, reach, width)
    log_lower = log_ratio(rate, -ratio * y - ratio**2 / 2)
    log_r = log_ratio(rate, ratio * y - ratio**2 / 2) - log_lower
    return integral(log_power_rest(order, log_r) + log_lower - y**2 / 2 - LOG_ROOT_TAU, log_weights)


def sliced_in_thirty_digits(pair: Pair, order: float) -> float:
    """The sliced formulas again, term by term in mpmath: no log space, no series of ours."""
    base = cast(SlicedBase, pair.base)
    with mpmath.workdps(30):
        square = mpmath.mpf(base.square.numerator) / base.square.denominator

        def moment(j: float) -> mpmath.mpf:
            argument = mpmath.mpf(j) * (j - 1) * square / 2
            return mpmath.hyp1f1(mpmath.mpf(1) / 2, mpmath.mpf(base.dim) / 2, argument) ** base.directions

        if isinstance(pair, Plain):
            return float(mpmath.log(moment(order)) / (order - 1))
        q = mpmath.mpf(pair.sampling_prob)

        def log_a(alpha: int) -> mpmath.mpf:
            if alpha == 1:
                return mpmath.mpf(0)
            weights = [mpmath.binomial(alpha, j) * q**j for j in range(2, alpha + 1)]
            moments = [moment(j) for j in range(2, alpha + 1)]
            if isinstance(pair, OneSided):
                terms = [
                    w * (1 - q) ** (alpha - j) * (m - 1)
                    for j, w, m in zip(range(2, alpha + 1), weights, moments, strict=True)
                ]
                return mpmath.log1p(mpmath.fsum(terms))
            bounds = [min(4 * (moments[0] - 1), 2 * moments[0]), *(2 * m for m in moments[1:])]
            amplified = mpmath.fsum(w * b for w, b in zip(weights, bounds, strict=True))
            return mpmath.log1p(min(amplified, moments[-1] - 1))

        low, high = math.floor(order), math.ceil(order)
        if low == high:
            return float(log_a(low) / (low - 1))
        return float(((high - order) * log_a(low) + (order - low) * log_a(high)) / (order - 1))
