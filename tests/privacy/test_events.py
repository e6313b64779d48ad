"""Events: a closed set, read back exactly, monotone in everything that ought to matter."""

import json
import math
from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.privacy.accountant import Accountant, cost, epsilon
from sluice.privacy.events import (
    KINDS,
    Composition,
    Gaussian,
    Geometry,
    PoissonGaussian,
    Query,
    Rotation,
    SlicedProjection,
    from_dict,
    from_json,
)
from sluice.privacy.problems import InvalidEvent, Problem, TooCostlyToAccount, UnknownEvent
from sluice.privacy.relation import Relation

bounds = st.floats(0.1, 10)
step_counts = st.integers(1, 10**7)
rates = st.floats(-8, 0).map(lambda x: 10**x)
multipliers = st.floats(-0.5, 3).map(lambda x: 10**x)
relations = st.sampled_from([*Relation])
orders = st.sampled_from([1.25, 1.7, 2, 2.5, 3, 4, 5, 8, 12, 16.5, 32])


@st.composite
def gaussians(draw, kind=Gaussian, **more):
    bound, rows = draw(bounds), draw(st.integers(1, 100))
    return kind(
        query=draw(st.sampled_from([Query.SUM, Query.FUNCTION] if kind is PoissonGaussian else [*Query])),
        bound=bound,
        rows=rows,
        noise_stddev=2 * bound * math.sqrt(rows) * draw(multipliers),
        steps=draw(step_counts),
        **{name: draw(value) for name, value in more.items()},
    )


@st.composite
def slices(draw):
    geometry, dim = draw(st.sampled_from([*Geometry])), draw(st.integers(1, 200))
    blocks = draw(st.integers(1, 3))
    directions = dim * blocks if geometry is Geometry.ORTHONORMAL else draw(st.integers(1, 500))
    batch = draw(st.integers(1, 100))
    return SlicedProjection(
        geometry=geometry,
        directions=directions,
        dim=dim,
        records=batch + draw(st.integers(0, 10**6)),
        batch=batch,
        noise_stddev=draw(multipliers) * max(1, math.sqrt(directions / dim)),
        steps=draw(step_counts),
    )


poissons = gaussians(PoissonGaussian, sampling_prob=rates)
singles = st.one_of(gaussians(), poissons, gaussians(Rotation, parts=st.integers(1, 1000)), slices())
anything = st.one_of(
    singles, st.lists(singles, min_size=1, max_size=3).map(lambda e: Composition(events=tuple(e)))
)


def priced(event, order, relation):
    try:
        return cost(event, order=order, relation=relation)
    except TooCostlyToAccount:
        return math.inf


def read(event, relation, delta=1e-5):
    try:
        return epsilon(event, delta=delta, accountant=Accountant.RENYI, relation=relation).epsilon
    except TooCostlyToAccount:
        return math.inf


@settings(max_examples=300, deadline=None)
@given(anything)
def test_json_reads_back_as_the_same_event(event):
    text = event.to_json()
    assert from_json(text) == event
    assert json.loads(text)["version"] == 1


@settings(max_examples=200, deadline=None)
@given(singles, st.integers(1, 10**6), orders, relations)
def test_more_steps_never_cost_less(event, more, order, relation):
    assert priced(replace(event, steps=event.steps + more), order, relation) >= priced(event, order, relation)


@settings(max_examples=200, deadline=None)
@given(poissons, rates, orders, relations)
def test_a_higher_rate_never_costs_less(event, other, order, relation):
    low, high = sorted([event.sampling_prob, other])
    one, two = (replace(event, sampling_prob=each) for each in (low, high))
    assert priced(one, order, relation) <= priced(two, order, relation) * (1 + 1e-8) + 1


@settings(max_examples=200, deadline=None)
@given(singles, st.floats(1.0, 10.0), orders, relations)
def test_more_noise_never_costs_more(event, factor, order, relation):
    noisier = replace(event, noise_stddev=event.noise_stddev * factor)
    assert priced(noisier, order, relation) <= priced(event, order, relation) * (1 + 1e-8) + 1


@settings(max_examples=100, deadline=None)
@given(singles, st.sampled_from([2, 3, 4, 8, 16]), relations)
def test_divergence_grows_with_the_order(event, order, relation):
    assert priced(event, order, relation) <= priced(event, order + 1, relation) * (1 + 1e-8) + 1


@settings(max_examples=60, deadline=None)
@given(singles, st.floats(-10, -1).map(lambda x: 10**x), st.floats(1.0, 100.0), relations)
def test_epsilon_falls_with_delta(event, delta, factor, relation):
    wider = min(0.5, delta * factor)
    assert read(event, relation, wider) <= read(event, relation, delta) + 1e-9


@settings(max_examples=60, deadline=None)
@given(st.lists(singles, min_size=2, max_size=3), orders, relations)
def test_composition_costs_the_sum_and_reads_at_least_the_largest(events, order, relation):
    whole = Composition(events=tuple(events))
    assert priced(whole, order, relation) == pytest.approx(sum(priced(e, order, relation) for e in events))
    assert max(read(event, relation) for event in events) <= read(whole, relation) + 1e-9


@settings(max_examples=60, deadline=None)
@given(poissons, orders)
def test_replacing_a_record_never_costs_less_than_removing_it(event, order):
    removed, replaced = (priced(event, order, relation) for relation in Relation)
    assert replaced >= removed * (1 - 1e-8) - 1


GOOD = PoissonGaussian(query=Query.SUM, bound=1.0, noise_stddev=1.0, steps=10, sampling_prob=0.1).to_dict()


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"version": True},
        {"version": None},
        {"kind": "laplace"},
        {"kind": None},
        {"kind": ["gaussian"]},
        {"extra": 1},
        {"sensitivity": 0.5},
        {"relation": "add_remove"},
    ],
)
def test_unknown_versions_kinds_and_fields_are_refused(change):
    with pytest.raises(UnknownEvent):
        from_dict({**GOOD, **change})


@pytest.mark.parametrize("missing", [*GOOD])
def test_missing_fields_are_refused(missing):
    with pytest.raises(UnknownEvent):
        from_dict({name: value for name, value in GOOD.items() if name != missing})


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("steps", [0, -1, 1.5, 10.0, True, "10", None, 10**13]),
        ("rows", [0, -3, 2.0, False]),
        ("noise_stddev", [0, -1.0, math.nan, math.inf, "1", None, True, 1e-300]),
        ("bound", [0.0, -1.0, math.nan, [1.0]]),
        ("sampling_prob", [0.0, -0.1, 1.0001, math.nan, 1e-13, 2, True]),
        ("query", ["mean", 1, None, "counts"]),
    ],
)
def test_numbers_out_of_range_are_refused(name, values):
    for value in values:
        with pytest.raises(InvalidEvent):
            from_dict({**GOOD, name: value})


@pytest.mark.parametrize(
    "text",
    ["", "[]", "null", "{", json.dumps(GOOD).replace("0.1", "NaN"), json.dumps(GOOD).replace("0.1", "1e999")],
)
def test_text_that_is_no_event_is_refused(text):
    with pytest.raises(Problem):
        from_json(text)


def test_a_field_given_twice_is_refused():
    with pytest.raises(UnknownEvent):
        from_json(json.dumps(GOOD).replace('"steps": 10', '"steps": 10, "steps": 1'))


def test_slices_must_make_sense():
    good = SlicedProjection(
        geometry=Geometry.ORTHONORMAL, directions=20, dim=10, records=100, batch=10, noise_stddev=1.0, steps=5
    )
    for change in ({"batch": 101}, {"directions": 25}, {"dim": 0}, {"geometry": "cube"}):
        with pytest.raises(InvalidEvent):
            replace(good, **change)


def test_compositions_do_not_nest_and_are_not_empty():
    one = from_dict(GOOD)
    for events in ((), (Composition(events=(one,)),), ("event",), [one]):
        with pytest.raises(InvalidEvent):
            Composition(events=events)


def test_no_event_states_its_sensitivity_or_relation():
    names = {field.name for cls in KINDS.values() for field in fields(cls)}
    assert not {name for name in names if "sensitiv" in name or "relation" in name}


def test_rows_of_one_batch_are_one_release():
    """T * n separately sampled mechanisms would be far cheaper; `rows` makes them one joint release."""
    joint = from_dict({**GOOD, "query": "function", "rows": 50, "noise_stddev": 20.0})
    single = replace(joint, rows=1, steps=joint.steps * 50)
    wide = replace(joint, rows=1, bound=math.sqrt(50))
    assert priced(joint, 4, Relation.ADD_REMOVE) == pytest.approx(
        priced(wide, 4, Relation.ADD_REMOVE), rel=1e-8
    )
    assert priced(joint, 4, Relation.ADD_REMOVE) > priced(single, 4, Relation.ADD_REMOVE)
