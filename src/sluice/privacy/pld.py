"""Epsilon by privacy loss distributions: exact hockey-stick profiles, composed by dp-accounting.

Each dominating pair gives delta(epsilon) in closed form. dp-accounting discretises it by connecting the dots
(Doroshenko et al. 2022), which never understates, and convolves. `epsilon` caches, and computes in a process
with limits (`pld_process`); `compute` is what runs there.
"""

import math
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np
from scipy import special

from sluice.privacy import pld_process
from sluice.privacy.accountant import renyi_reading
from sluice.privacy.dominating_pairs import (
    Antipodal,
    Base,
    GaussianBase,
    OneSided,
    Pair,
    Plain,
    SlicedBase,
    Symmetric,
    dominating,
)
from sluice.privacy.events import Event, from_dict
from sluice.privacy.problems import TooCostlyToAccount
from sluice.privacy.relation import Relation
from sluice.privacy.renyi import log_ratio
from sluice.privacy.special import BEYOND, Array, log_expm1, log_gaussian_delta, projected_squares

MOST_POINTS = 2**18
# Standard deviations of noise beyond which a tail is put at infinite loss: a mass of 1e-23.
REACH = 10.0
# The rounding error of one Fourier transform raised to a power T, per step, in total variation.
ROUNDING = 1e-15
# The mass that composition may cut off at its ends; it is put at infinite loss.
TAIL = 1e-15

Profile = Callable[[Array], Array]


def epsilon(events: tuple[Event, ...], *, delta: float, relation: Relation) -> float:
    """The smaller of the PLD and the Rényi reading, both of which are upper bounds. Cached."""
    ordered = tuple(sorted(events, key=lambda event: event.to_json()))
    return cached_epsilon(ordered, delta, relation)


@lru_cache(maxsize=4096)
def cached_epsilon(events: tuple[Event, ...], delta: float, relation: Relation) -> float:
    by_renyi = renyi_reading(events, delta=delta, relation=relation).epsilon
    releases = sum(merged([pair for event in events for pair in dominating(event, relation)]).values())
    if ROUNDING * releases > delta / 2:
        return by_renyi  # the rounding error of the transform could reach delta; Rényi has none
    request = {
        "events": [event.to_dict() for event in events],
        "delta": delta,
        "relation": relation.value,
        "widest": renyi_reading(events, delta=1e-10, relation=relation).epsilon,
    }
    return min(by_renyi, pld_process.ask(request))


def answer(request: dict[str, Any]) -> float:
    """Computes the answer to a request, in the limited process."""
    events = tuple(from_dict(body) for body in request["events"])
    relation, widest = Relation(request["relation"]), request.get("widest")
    return compute(events, delta=request["delta"], relation=relation, widest=widest)


def compute(
    events: tuple[Event, ...], *, delta: float, relation: Relation, widest: float | None = None
) -> float:
    """Epsilon of the composed pairs, the worse of the two directions.

    `widest` is the range of losses to resolve, the Rényi reading at a tiny delta; it affects only the grid.
    """
    pairs = merged([pair for event in events for pair in dominating(event, relation)])
    if widest is None:
        widest = renyi_reading(events, delta=1e-10, relation=relation).epsilon
    finest = max(2 * widest, *(4 * highest_loss(pair) for pair in pairs)) / MOST_POINTS
    grid = max(finest, min(step_width(pair) for pair in pairs))
    slack = ROUNDING * sum(pairs.values())
    directions = [False, True] if any(isinstance(pair, OneSided) for pair in pairs) else [False]
    if sum(pairs.values()) == 1:
        (pair,) = pairs
        return max(single_epsilon(profile(pair, adding=adding), delta) for adding in directions)
    return max(direction_epsilon(pairs, grid, delta - slack, adding=adding) for adding in directions)


def single_epsilon(deltas: Profile, delta: float) -> float:
    """Epsilon of one release, from its exact profile: no grid is needed."""
    return smallest_epsilon(lambda e: float(deltas(np.array([e]))[0]), delta)


def merged(pairs: list[tuple[Pair, int]]) -> dict[Pair, int]:
    """Equal pairs counted together; Gaussians joined into one, which composes them exactly."""
    counts: dict[Pair, int] = {}
    for pair, count in pairs:
        counts[pair] = counts.get(pair, 0) + count
    gaussians = [p for p in counts if isinstance(p, Plain) and isinstance(p.base, GaussianBase)]
    if gaussians:
        total = sum((counts.pop(pair) * pair.base.square for pair in gaussians), Fraction(0))
        counts[Plain(GaussianBase(total))] = 1
    return counts


def step_width(pair: Pair) -> float:
    """A grid with an error under 0.1 %, a twentieth of a step's spread of loss; coarser is pessimistic."""
    rate = 1.0 if isinstance(pair, Plain) else pair.sampling_prob
    ratio = pair.base.ratio
    if isinstance(pair.base, SlicedBase):
        ratio *= math.sqrt(pair.base.directions / pair.base.dim)
    spread = rate * math.sqrt(math.expm1(min(ratio**2, 100.0)))
    # With little noise the loss is so skewed that its spread is no guide; its range is.
    return min(0.05 * spread, highest_loss(pair) / (2000 if ratio > 2 else 100))


def strongest(base: Base) -> float:
    """The largest ratio of shift to noise of a base pair, as an atom of its distribution."""
    if isinstance(base, GaussianBase):
        return base.ratio
    return base.ratio * math.sqrt(projected_squares(base.directions, base.dim)[0][-1])


def highest_loss(pair: Pair) -> float:
    ratio = strongest(pair.base)
    far = np.array([ratio**2 / 2 + REACH * ratio])
    if isinstance(pair, Plain):
        return float(far[0])
    loss = log_ratio(pair.sampling_prob, far)
    if isinstance(pair, Antipodal):
        loss = loss - log_ratio(pair.sampling_prob, -far - ratio**2)
    return float(loss[0])


def direction_epsilon(pairs: dict[Pair, int], grid: float, delta: float, *, adding: bool) -> float:
    from dp_accounting.pld import pld_pmf

    composed: Any = None
    for pair, count in pairs.items():
        high = highest_loss(pair)
        low = high
        if isinstance(pair, OneSided):
            shortest = min(high, -math.log1p(-pair.sampling_prob))
            low, high = (high, shortest) if adding else (shortest, high)
        first, last = math.floor(-low / grid) - 1, math.ceil(high / grid) + 1
        if last - first > MOST_POINTS:
            raise TooCostlyToAccount(
                "The losses span too wide a range; add noise or compose fewer kinds of event."
            )
        deltas = profile(pair, adding=adding)(np.arange(float(first), last + 1) * np.float64(grid))
        deltas = np.minimum.accumulate(np.clip(deltas, 0.0, 1.0))
        with np.errstate(all="ignore"):
            one = pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(grid, first, last, deltas)
            many = one.to_dense_pmf().self_compose(count, TAIL)
            composed = many if composed is None else composed.compose(many)
    return smallest_epsilon(composed.get_delta_for_epsilon, delta)


def smallest_epsilon(delta_at: Callable[[float], float], delta: float) -> float:
    """Bisection; returns the upper end, where delta is at most the limit."""
    if delta_at(0.0) <= delta:
        return 0.0
    low, high = 0.0, 1.0
    while delta_at(high) > delta:
        low, high = high, 2 * high
        if high > 1e5:
            raise TooCostlyToAccount("No finite epsilon was found at this delta; raise delta or add noise.")
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if delta_at(middle) > delta else (low, middle)
    return high


def profile(pair: Pair, *, adding: bool) -> Profile:
    """delta as a function of any real epsilon, for one direction of the pair."""
    match pair:
        case Plain():
            base = base_profile(pair.base)
            return mirrored(base)
        case Symmetric():
            base, rate = base_profile(pair.base), pair.sampling_prob
            return mirrored(lambda e: rate * base(unsampled(rate, e)))
        case Antipodal():
            return mirrored(lambda e: antipodal_delta(pair, e))
        case OneSided():
            return one_sided(pair, adding=adding)


def mirrored(upper: Profile) -> Profile:
    """A symmetric pair's profile, continued below zero by delta(-e) = 1 - e^-e + e^-e delta(e)."""

    def both(e: Array) -> Array:
        below = np.minimum(e, 0.0)
        return -np.expm1(below) + np.exp(below) * upper(np.abs(e))

    return both


def unsampled(rate: float, e: Array) -> Array:
    """The base epsilon that sampling turns into e >= log(1 - q): log(1 + (e^e - 1)/q)."""
    with np.errstate(divide="ignore", over="ignore"):
        near = np.log1p(np.maximum(np.expm1(np.minimum(e, 500.0)) / rate, -1.0))
    return np.where(e < 500, near, e - math.log(rate))


def one_sided(pair: OneSided, *, adding: bool) -> Profile:
    """(1 - q) Q + q P against Q, or the reverse when `adding`, from the profile of (P, Q).

    Both are max(0, 1 - e^e) plus q times the base profile at the unsampled epsilon, so nothing cancels in the
    tails.
    """
    base, rate = base_profile(pair.base), pair.sampling_prob

    def shown(e: Array) -> Array:
        reachable = e > math.log1p(-rate)
        t = unsampled(rate, np.where(reachable, e, 0.0))
        return np.where(reachable, rate * np.exp(np.minimum(t, 0.0)) * base(np.abs(t)), 0.0)

    if adding:
        return lambda e: -np.expm1(np.minimum(e, 0.0)) + np.exp(e) * shown(-e)
    return lambda e: -np.expm1(np.minimum(e, 0.0)) + shown(e)


def antipodal_delta(pair: Antipodal, e: Array) -> Array:
    """delta(e), e >= 0: both mixtures beyond the point where their ratio is e^e.

    That point solves (c + z) = e^e (c + 1/z) for z = exp(ratio y), c = exp(ratio^2 / 2) (1 - q) / q.
    """
    rate, ratio = pair.sampling_prob, pair.base.ratio
    log_c = ratio**2 / 2 + math.log1p(-rate) - math.log(rate)
    with np.errstate(divide="ignore"):
        log_sinh = e / 2 + np.log(-np.expm1(-e)) - math.log(2)
    x = log_c + log_sinh
    asinh = np.where(x > 20, x + math.log(2), np.arcsinh(np.exp(np.minimum(x, 20.0))))
    y = (e / 2 + asinh) / ratio
    near = rate * (special.ndtr(ratio - y) - np.exp(e + special.log_ndtr(-y - ratio)))
    result: Array = near - (1 - rate) * np.exp(log_expm1(e) + special.log_ndtr(-y))
    return result


@lru_cache(maxsize=16)
def base_profile(base: Base) -> Profile:
    """delta(e) of the base pair for e >= 0."""
    if isinstance(base, GaussianBase):
        return lambda e: np.exp(log_gaussian_delta(e, base.ratio))
    squares, weights = projected_squares(base.directions, base.dim)
    ratios = base.ratio * np.sqrt(squares)
    nodes = np.linspace(0.0, strongest(base) ** 2 / 2 + REACH * strongest(base), 4000)
    values = np.full(len(nodes), BEYOND)
    for ratio, weight in zip(ratios, weights, strict=True):
        values += weight * np.exp(log_gaussian_delta(nodes, float(ratio)))
    gap = nodes[1]

    def interpolated(e: Array) -> Array:
        """delta is convex in e^e, so the chord between two nodes lies above it."""
        i = np.minimum((e / gap).astype(int), len(nodes) - 2)
        share = np.minimum(np.expm1(e - nodes[i]) / math.expm1(gap), 1.0)
        result: Array = values[i] + share * (values[i + 1] - values[i])
        return result

    return interpolated
