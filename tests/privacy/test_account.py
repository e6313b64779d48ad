"""Accounts: integers, rounded so that a budget is never exceeded."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.methods import Clipping
from sluice.methods.base import largest_epsilon_that_fits
from sluice.methods.dpgan import DPGANPlan
from sluice.methods.gswgan import GSWGANPlan
from sluice.methods.sinkhorn import SinkhornPlan
from sluice.methods.swd import SWDPlan
from sluice.methods.swd_one_shot import SWDOneShotPlan
from sluice.privacy.account import (
    admits,
    best_order,
    capacity,
    cost_as_epsilon,
    default_order,
    left_as_epsilon,
)
from sluice.privacy.accountant import UNITS, Accountant, cost, epsilon
from sluice.privacy.events import Gaussian, Geometry, PoissonGaussian, Query, SlicedProjection
from sluice.privacy.problems import InvalidAccount, InvalidTarget
from sluice.privacy.relation import Relation

MIX = (
    PoissonGaussian(query=Query.SUM, bound=1.0, noise_stddev=4.4124, steps=50_000, sampling_prob=1 / 118),
    PoissonGaussian(query=Query.SUM, bound=1.0, noise_stddev=1.6986, steps=100_000, sampling_prob=1 / 469),
    PoissonGaussian(
        query=Query.FUNCTION, bound=0.5, noise_stddev=0.7968, steps=50_000, sampling_prob=1 / 1200
    ),
    SlicedProjection(
        geometry=Geometry.SPHERE,
        directions=1000,
        dim=784,
        records=60_000,
        batch=100,
        noise_stddev=1.3068,
        steps=60_100,
    ),
)


def test_four_jobs_of_epsilon_two_compose_to_less_than_half_their_sum():
    readings = {
        method: epsilon(MIX, delta=1e-5, accountant=method, relation=Relation.ADD_REMOVE).epsilon
        for method in Accountant
    }
    assert readings[Accountant.RENYI] == pytest.approx(3.87, abs=0.005)
    assert readings[Accountant.PLD] == pytest.approx(3.57, abs=0.01)
    replaced = epsilon(MIX, delta=1e-5, accountant=Accountant.PLD, relation=Relation.REPLACE_ONE).epsilon
    assert replaced == pytest.approx(6.4, abs=0.1)


def test_an_account_of_eight_admits_fourteen_of_them():
    order = default_order(8, 1e-5)
    assert order == 4
    costs = [cost(event, order=order, relation=Relation.ADD_REMOVE) for event in MIX]
    room = capacity(8, 1e-5, order)
    assert room / (sum(costs) / 4) == pytest.approx(14.04, abs=0.01)
    assert admits(costs, room) == 14
    at_five = [cost(event, order=5, relation=Relation.ADD_REMOVE) for event in MIX]
    assert capacity(8, 1e-5, 5) / (sum(at_five) / 4) == pytest.approx(13.1, abs=0.05)
    assert best_order(MIX, epsilon=8, delta=1e-5, relation=Relation.ADD_REMOVE) == 4


def test_a_full_account_still_reads_within_its_budget():
    order = default_order(8, 1e-5)
    left, events = capacity(8, 1e-5, order), []
    for event in MIX * 4:
        price = cost(event, order=order, relation=Relation.ADD_REMOVE)
        if price <= left:
            events, left = [*events, event], left - price
    assert len(events) == 14
    for method in Accountant:
        assert epsilon(events, delta=1e-5, accountant=method, relation=Relation.ADD_REMOVE).epsilon <= 8


budgets = st.floats(-1.5, 3).map(lambda x: 10**x)
deltas = st.floats(-10, -1).map(lambda x: 10**x)
orders = st.one_of(st.integers(2, 1024), st.floats(1.25, 64))


@settings(max_examples=1000, deadline=None)
@given(budgets, deltas, orders)
def test_capacity_converts_back_to_at_most_the_budget(budget, delta, order):
    room = capacity(budget, delta, order)
    assert room >= 0
    if room:
        assert cost_as_epsilon(room, delta=delta, order=order) <= budget
        assert cost_as_epsilon(room + 2 + room // 2**45, delta=delta, order=order) > budget - 1e-12 * budget
        assert left_as_epsilon(room, delta=delta, order=order) <= budget * (1 + 1e-12)


@settings(max_examples=300, deadline=None)
@given(budgets, deltas)
def test_the_default_order_has_the_most_room(budget, delta):
    try:
        order = default_order(budget, delta)
    except InvalidAccount:
        assert capacity(budget, delta, 1024) == 0
        return
    best = capacity(budget, delta, order) / order
    assert best > 0
    for other in {2, max(2, order - 1), min(1024, order + 1), 64, 1024}:
        assert capacity(budget, delta, other) / other <= best + 1


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**12), st.integers(0, 10**12), deltas, st.integers(2, 1024))
def test_more_left_is_worth_more(left, more, delta, order):
    one = left_as_epsilon(left, delta=delta, order=order)
    assert 0 <= one <= left_as_epsilon(left + more, delta=delta, order=order)
    assert left_as_epsilon(0, delta=delta, order=order) == 0


def test_what_is_left_is_the_epsilon_of_the_release_that_uses_it_up():
    room = capacity(8, 1e-5, 4)
    event = Gaussian(
        query=Query.SUM, bound=1.0, noise_stddev=math.sqrt(2 * UNITS / room) * (1 + 1e-12), steps=1
    )
    assert cost(event, order=4, relation=Relation.ADD_REMOVE) <= room
    read = epsilon(event, delta=1e-5, accountant=Accountant.RENYI, relation=Relation.ADD_REMOVE).epsilon
    assert left_as_epsilon(room, delta=1e-5, order=4) == pytest.approx(read, rel=0.01)


PLANS = [
    DPGANPlan(steps=50_000, sampling_prob=1 / 118),
    SinkhornPlan(steps=50_000, sampling_prob=1 / 1200, clipping=Clipping.JOINT),
    GSWGANPlan(steps=20_000, parts=1000, clipping=Clipping.PER_IMAGE),
    SWDPlan(steps=60_100, records=60_000, batch=100, dim=784),
    SWDOneShotPlan(),
]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.kind)
@pytest.mark.parametrize("relation", [*Relation])
def test_the_largest_epsilon_that_fits_does_fit_and_wastes_little(plan, relation):
    left = 10**9
    found, fitted = largest_epsilon_that_fits(plan, left, order=4, delta=1e-5, relation=relation)
    price = cost(fitted.event(), order=4, relation=relation)
    assert 0.99 * left <= price <= left
    reading = fitted.reading(delta=1e-5, relation=relation, accountant=Accountant.RENYI)
    assert reading.epsilon == found


def test_an_empty_account_fits_nothing():
    with pytest.raises(InvalidAccount):
        largest_epsilon_that_fits(PLANS[0], 0, order=4, delta=1e-5, relation=Relation.ADD_REMOVE)


@pytest.mark.parametrize("budget", [0, -1, math.nan, math.inf, "8"])
def test_budgets_out_of_range_are_refused(budget):
    with pytest.raises(InvalidTarget):
        capacity(budget, 1e-5, 4)


@pytest.mark.parametrize("delta", [0, -1e-5, 1, 1e-11, math.nan, None])
def test_deltas_out_of_range_are_refused(delta):
    with pytest.raises(InvalidTarget):
        capacity(8, delta, 4)


@pytest.mark.parametrize("order", [1, 1.2, 1025, 0, -4, math.nan, "4"])
def test_orders_out_of_range_are_refused(order):
    with pytest.raises(InvalidTarget):
        capacity(8, 1e-5, order)


def test_a_budget_no_order_can_serve_is_named():
    with pytest.raises(InvalidAccount):
        default_order(1e-3, 1e-10)
