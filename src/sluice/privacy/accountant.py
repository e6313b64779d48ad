"""Costs of events at an order, and their epsilon.

The ledger adds costs: integers in units of 1e-9, rounded up. People are shown readings: an epsilon at a
delta, under a relation, by a named accountant.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from functools import lru_cache

import numpy as np

from sluice.privacy import renyi
from sluice.privacy.dominating_pairs import GaussianBase, Pair, Plain, SlicedBase, dominating
from sluice.privacy.events import Composition, Event
from sluice.privacy.problems import EvaluationsDisagree, InvalidTarget, TooCostlyToAccount
from sluice.privacy.relation import Relation
from sluice.privacy.special import LARGEST_ON_A_CURVE, Array

UNITS = 10**9
LARGEST_COST = 2**63 - 1
SMALLEST_DELTA = 1e-10
AGREEMENT = 1e-6
# Added before rounding up. Both evaluations are accurate to 1e-11; the rest allows for a less accurate libm.
MARGIN = 1e-9
# Larger epsilons are not computed. The largest correct epsilon of a published setting is 6860.
LARGEST_EPSILON = 1e4

ORDERS: tuple[float, ...] = (
    1.25,
    *(round(1.3 + i / 10, 1) for i in range(97)),
    *range(11, 64),
    *(64, 72, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024),
)


class Accountant(StrEnum):
    RENYI = "renyi"
    PLD = "pld"


@dataclass(frozen=True, kw_only=True)
class Reading:
    """An epsilon with everything it depends on. Composed as if all events were chosen in advance.

    `order` is the Rényi order it was read at; `at_grid_end` warns that a better one may lie outside
    1.25 ... 1024.
    """

    epsilon: float
    delta: float
    relation: Relation
    accountant: Accountant
    order: float | None = None
    at_grid_end: bool = False


@lru_cache(maxsize=4096)
def cost(event: Event, *, order: float, relation: Relation) -> int:
    """Rényi divergence of an event at an order, in 1e-9 units, never below the true value.

    Guarantee: the larger of two independent evaluations, which must agree to 1e-6, with a margin above
    their rounding, rounded up. Costs of events chosen one after another, each after seeing the last, add.
    """
    relation = Relation(relation)
    total = sum(pair_cost(pair, count, order) for pair, count in dominating(event, relation))
    if total > LARGEST_COST:
        raise TooCostlyToAccount(
            "The event costs more than any account can hold; add noise or take fewer steps."
        )
    return total


def pair_cost(pair: Pair, count: int, order: float) -> int:
    first, second = renyi.divergence(pair, order), renyi.second_divergence(pair, order)
    if not (math.isfinite(first) and math.isfinite(second) and first >= 0 and second >= 0):
        raise EvaluationsDisagree(
            f"Evaluations gave {first} and {second}; the event is beyond the arithmetic."
        )
    if abs(first - second) > AGREEMENT * max(first, second):
        raise EvaluationsDisagree(f"Evaluations gave {first} and {second}; report this event.", order=order)
    if isinstance(pair, Plain) and isinstance(pair.base, GaussianBase):
        return math.ceil(count * Fraction(order) * pair.base.square / 2 * UNITS)
    return max(1, math.ceil(count * Fraction(max(first, second)) * Fraction(1 + MARGIN) * UNITS))


@lru_cache(maxsize=512)
def curve(event: Event, relation: Relation) -> Array:
    """Rényi divergence at each of ORDERS; infinite where an order is out of reach of the arithmetic."""
    total = np.zeros(len(ORDERS))
    for pair, count in dominating(event, relation):
        # The divergence grows with the order, so the lowest order is enough to refuse.
        if count * renyi.divergence(pair, ORDERS[0]) > LARGEST_EPSILON:
            raise TooCostlyToAccount(
                f"Epsilon is beyond {LARGEST_EPSILON:.0f}, no protection; add noise or take fewer steps."
            )
        total += count * pair_curve(pair, count)
    total.setflags(write=False)
    return total


@lru_cache(maxsize=2048)
def pair_curve(pair: Pair, count: int) -> Array:
    """Divergence at each order, up to where `count` times it alone exceeds the best epsilon so far.

    The divergence does not fall as the order grows, so no higher order can be the best one.
    """
    values, best = np.full(len(ORDERS), math.inf), math.inf
    for i, order in enumerate(ORDERS):
        sliced = getattr(pair, "base", None)
        if isinstance(sliced, SlicedBase) and renyi.moment_argument(sliced, order) > LARGEST_ON_A_CURVE:
            break
        try:
            values[i] = renyi.divergence(pair, order) * (1 + MARGIN)
        except TooCostlyToAccount:
            break
        if count * values[i] > best + 1:
            break
        best = min(best, float(to_epsilon(count * values[i], delta=SMALLEST_DELTA, orders=order)))
    if not (values >= 0).all():
        raise EvaluationsDisagree("A divergence came out negative; report this event.")
    return values


def to_epsilon(divergence: Array | float, *, delta: float, orders: Array | float) -> Array:
    """From Rényi to (epsilon, delta): Canonne, Kamath and Steinke 2020, Proposition 12."""
    orders = np.asarray(orders, dtype=float)
    result: Array = divergence + np.log1p(-1 / orders) - np.log(delta * orders) / (orders - 1)
    return result


def check_delta(delta: float) -> None:
    if not (isinstance(delta, int | float) and SMALLEST_DELTA <= delta < 1):
        raise InvalidTarget(f"delta must be from {SMALLEST_DELTA} to below 1.", given=delta)


def renyi_reading(events: Iterable[Event], *, delta: float, relation: Relation) -> Reading:
    total = np.zeros(len(ORDERS))
    for event in events:
        total = total + curve(event, relation)
    orders = np.array(ORDERS)
    epsilons = to_epsilon(total, delta=delta, orders=orders)
    best = int(np.argmin(epsilons))
    return Reading(
        epsilon=max(0.0, float(epsilons[best]) * (1 + 1e-12)),
        delta=delta,
        relation=relation,
        accountant=Accountant.RENYI,
        order=ORDERS[best],
        at_grid_end=best in (0, len(ORDERS) - 1) and bool(epsilons[best] > 0),
    )


def epsilon(
    events: Event | Iterable[Event], *, delta: float, accountant: Accountant, relation: Relation
) -> Reading:
    """An upper bound on the epsilon of the composition of events."""
    check_delta(delta)
    relation, accountant = Relation(relation), Accountant(accountant)
    listed = flat(events)
    if not listed:
        return Reading(epsilon=0.0, delta=delta, relation=relation, accountant=accountant)
    if accountant is Accountant.RENYI:
        return renyi_reading(listed, delta=delta, relation=relation)
    from sluice.privacy import pld  # dp-accounting is slow to import and not needed for Rényi

    return Reading(
        epsilon=pld.epsilon(listed, delta=delta, relation=relation),
        delta=delta,
        relation=relation,
        accountant=accountant,
    )


def flat(events: Event | Iterable[Event]) -> tuple[Event, ...]:
    """The events, with compositions replaced by their parts."""
    if isinstance(events, Composition):
        return events.events
    if isinstance(events, Event):
        return (events,)
    return tuple(part for event in events for part in flat(event))
