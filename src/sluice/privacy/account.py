"""An account: a budget (epsilon, delta) as one integer capacity that costs are subtracted from.

Adaptive and concurrent composition is sound for a Rényi filter at one fixed order (Feldman and Zrnic 2021;
Haney et al. 2023). So an account fixes its order when it is opened, and its balance is an integer.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np

from sluice.privacy.accountant import ORDERS, UNITS, check_delta, curve, flat, to_epsilon
from sluice.privacy.events import Event
from sluice.privacy.problems import EvaluationsDisagree, InvalidAccount, InvalidTarget
from sluice.privacy.relation import Relation
from sluice.privacy.renyi import check_order

WHOLE_ORDERS = range(2, 1025)


def check_epsilon(epsilon: float) -> None:
    if not (isinstance(epsilon, int | float) and 1e-6 <= epsilon <= 1e6):
        raise InvalidTarget("epsilon must be from 1e-6 to 1e6.", given=epsilon)


def capacity(epsilon: float, delta: float, order: float) -> int:
    """The largest cost whose conversion at `order` stays within (epsilon, delta), rounded down.

    Zero where the conversion alone uses up the epsilon: such an account admits nothing.
    """
    check_epsilon(epsilon)
    check_delta(delta)
    check_order(order)
    overhead = float(to_epsilon(0.0, delta=delta, orders=order))
    units = max(0, math.floor((epsilon - overhead) * UNITS))
    # A rounding error can be worth one unit: subtract until the conversion back is within the budget.
    for _ in range(64):
        if not units or cost_as_epsilon(units, delta=delta, order=order) <= epsilon:
            return units
        units -= max(1, units >> 50)
    raise EvaluationsDisagree("The capacity does not convert back to the budget; report this account.")


def cost_as_epsilon(cost: int, *, delta: float, order: float) -> float:
    """The epsilon that a total cost at one order guarantees: the inverse of `capacity`."""
    return max(0.0, float(to_epsilon(cost / UNITS, delta=delta, orders=order)))


def exceeds(cost: int, *, epsilon: float, delta: float, order: float) -> bool:
    """Whether a total cost is more than a budget of (epsilon, delta) holds at `order`.

    Two machines may differ in the last digit of a logarithm, so one unit of cost is tolerated.
    """
    check_epsilon(epsilon)
    check_delta(delta)
    check_order(order)
    return cost > 0 and cost_as_epsilon(cost, delta=delta, order=order) > epsilon + max(1.0, epsilon) / UNITS


def default_order(epsilon: float, delta: float) -> int:
    """The whole order with the most room for Gaussian-like events, whose cost is linear in the order."""
    check_epsilon(epsilon)
    check_delta(delta)
    orders = np.array(WHOLE_ORDERS, dtype=float)
    room = (epsilon - to_epsilon(0.0, delta=delta, orders=orders)) / orders
    if room.max() <= 0:
        raise InvalidAccount(
            f"No order up to 1024 leaves room at ({epsilon}, {delta}); raise epsilon or delta.",
            epsilon=epsilon,
            delta=delta,
        )
    return int(orders[np.argmax(room)])


def left_as_epsilon(left: int, *, delta: float, order: float) -> float:
    """The epsilon of the one Gaussian release that would use up what is left.

    Zero if nothing is left, and at most the account's epsilon if nothing is spent.
    """
    check_delta(delta)
    check_order(order)
    if left <= 0:
        return 0.0
    orders = np.array([*WHOLE_ORDERS, float(order)], dtype=float)
    readings = to_epsilon(left / UNITS / order * orders, delta=delta, orders=orders)
    return max(0.0, float(readings.min()))


def best_order(events: Iterable[Event], *, epsilon: float, delta: float, relation: Relation) -> float:
    """The whole order at which an account of (epsilon, delta) holds most of these events."""
    check_epsilon(max(epsilon, 1e-6))
    total = np.sum([curve(event, relation) for event in flat(events)], axis=0)
    orders = np.array(ORDERS)
    whole = (orders == np.floor(orders)) & np.isfinite(total)
    if not whole.any():
        return ORDERS[0]  # so little noise that the cost is infinite at every whole order
    room = epsilon - to_epsilon(0.0, delta=delta, orders=orders[whole])
    # If nothing fits at any order, take the order with the least excess.
    score = room / total[whole] if room.max() > 0 else room - total[whole]
    return int(orders[whole][np.argmax(score)])


def admits(costs: Sequence[int], capacity: int) -> int:
    """How many of these events fit if they are charged in turn; the last round may be partial."""
    rounds, left = divmod(capacity, sum(costs))
    count = rounds * len(costs)
    for cost in costs:
        if cost <= left:
            count, left = count + 1, left - cost
    return count
