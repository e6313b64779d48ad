"""`sluice.epsilon`: the epsilon of events, plans or plain numbers."""

from collections.abc import Mapping
from typing import Any

from sluice.methods import Plan, plan_from_dict
from sluice.privacy.accountant import Accountant
from sluice.privacy.accountant import epsilon as read_epsilon
from sluice.privacy.events import Event, PoissonGaussian, Query, from_dict
from sluice.privacy.problems import InvalidTarget
from sluice.privacy.relation import Relation


def epsilon(
    *costs: Event | Plan | Mapping[str, Any],
    delta: float,
    relation: str = "add_remove",
    accountant: str = "renyi",
    noise_multiplier: float | None = None,
    sampling_prob: float = 1.0,
    steps: int = 1,
) -> float:
    """The epsilon at `delta` of running all of `costs`: events, plans, or the JSON of either.

    Instead of `costs`, `noise_multiplier`, `sampling_prob` and `steps` describe a Poisson-sampled Gaussian
    mechanism, such as DP-SGD. `relation` is add_remove or replace_one, `accountant` is renyi or pld.
    """
    events = [_event(cost) for cost in costs]
    if noise_multiplier is not None:
        events.append(
            PoissonGaussian(
                query=Query.SUM,
                bound=1.0,
                noise_stddev=noise_multiplier,
                sampling_prob=sampling_prob,
                steps=steps,
            )
        )
    if not events:
        raise InvalidTarget("There is nothing to account for; give an event, a plan or noise_multiplier.")
    if relation not in [*Relation] or accountant not in [*Accountant]:
        raise InvalidTarget("relation is add_remove or replace_one, and accountant is renyi or pld.")
    return read_epsilon(
        events, delta=delta, relation=Relation(relation), accountant=Accountant(accountant)
    ).epsilon


def _event(cost: Event | Plan | Mapping[str, Any]) -> Event:
    if isinstance(cost, Mapping):
        # In JSON, both have a kind; events also have a version.
        if "version" in cost:
            return from_dict(dict(cost))
        cost = plan_from_dict(dict(cost))
    return cost.event() if isinstance(cost, Plan) else cost
