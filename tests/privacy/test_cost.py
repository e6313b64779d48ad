"""A cost is never below the true value: checked against 50-digit arithmetic."""

import math
import random
from fractions import Fraction
from functools import cache

import mpmath
import numpy as np
import pytest

from sluice.privacy import accountant, renyi
from sluice.privacy.accountant import UNITS, cost
from sluice.privacy.dominating_pairs import Antipodal, GaussianBase, OneSided, Plain, SlicedBase, dominating
from sluice.privacy.events import (
    Composition,
    Gaussian,
    Geometry,
    PoissonGaussian,
    Query,
    Rotation,
    SlicedProjection,
)
from sluice.privacy.problems import EvaluationsDisagree, TooCostlyToAccount
from sluice.privacy.relation import Relation

DIGITS = 50
ORDERS = [*range(2, 17)] * 30 + [20, 24, 32, 48, 64] * 6 + [256, 256, 1024]
SMALL = [2, 2, 3, 3, 4, 5, 6, 8]


def logarithmic(rng, low, high):
    return 10 ** rng.uniform(math.log10(low), math.log10(high))


def noise(rng):
    return rng.choice([0.2, 1e3, *(logarithmic(rng, 0.2, 1e3) for _ in range(6))])


def rate(rng):
    return rng.choice([1e-8, *(logarithmic(rng, 1e-8, 1.0) for _ in range(6))])


def steps(rng):
    return rng.choice([1, 10**8, *(int(logarithmic(rng, 1, 1e8)) for _ in range(6))])


def poisson(rng, query):
    bound = rng.choice([1.0, logarithmic(rng, 0.1, 10)])
    return PoissonGaussian(
        query=query,
        bound=bound,
        noise_stddev=bound * noise(rng) * (2 if query is Query.FUNCTION else 1),
        steps=steps(rng),
        sampling_prob=rate(rng),
    )


def plain(rng):
    kind = rng.choice([Gaussian, Rotation])
    more = {"parts": rng.randint(1, 10**4)} if kind is Rotation else {}
    return kind(
        query=rng.choice([*Query]),
        bound=logarithmic(rng, 0.1, 10),
        rows=rng.randint(1, 1000),
        noise_stddev=noise(rng) * 10,
        steps=min(steps(rng), 10**6),
        **more,
    )


def sliced(rng):
    dim = rng.choice([1, 2, 3, 10, 100, 784, 8192])
    geometry = rng.choice([*Geometry, Geometry.SPHERE])
    directions = dim * rng.randint(1, 3) if geometry is Geometry.ORTHONORMAL else rng.randint(1, 1000)
    batch = rng.choice([1, 10, 100])
    return SlicedProjection(
        geometry=geometry,
        directions=directions,
        dim=dim,
        records=rng.choice([batch, 10**4, 10**8]),
        batch=batch,
        noise_stddev=logarithmic(rng, 0.5, 1e3) * max(1.0, (directions / dim) ** 0.5),
        steps=steps(rng),
    )


def precise(pair, order):
    """The pair's Rényi divergence at a whole order in DIGITS digits, from its definition."""
    square = mpmath.mpf(pair.base.square.numerator) / pair.base.square.denominator
    if isinstance(pair.base, SlicedBase):
        half, dim, power = mpmath.mpf(1) / 2, mpmath.mpf(pair.base.dim) / 2, pair.base.directions

        def moment(j):
            return mpmath.hyp1f1(half, dim, j * (j - 1) * square / 2) ** power
    else:

        def moment(j):
            return mpmath.exp(j * (j - 1) * square / 2)

    if isinstance(pair, Plain):
        return mpmath.log(moment(order)) / (order - 1)
    q = mpmath.mpf(pair.sampling_prob)
    if isinstance(pair, OneSided):
        weights = [mpmath.binomial(order, j) * q**j * (1 - q) ** (order - j) for j in range(order + 1)]
        return mpmath.log(mpmath.fsum(w * moment(j) for j, w in enumerate(weights))) / (order - 1)
    if isinstance(pair.base, SlicedBase):
        terms = [mpmath.binomial(order, j) * q**j * 2 * moment(j) for j in range(3, order + 1)]
        terms.append(mpmath.binomial(order, 2) * q**2 * min(4 * (moment(2) - 1), 2 * moment(2)))
        return mpmath.log(min(1 + mpmath.fsum(terms), moment(order))) / (order - 1)
    return mpmath.log1p(integrated(pair, q, mpmath.sqrt(square), order)) / (order - 1)


def integrated(pair, q, ratio, order):
    """A - 1 of the two symmetric pairs, as the integral of lower * (r^order - 1)(1 - r^(1 - order))."""

    def sampled(exponent):
        return 1 + q * mpmath.expm1(exponent)

    if isinstance(pair, Antipodal):
        start, stop = mpmath.mpf(0), 2 * order * ratio + 14

        def lower(y):
            return sampled(-ratio * y - ratio**2 / 2)

        def r(y):
            return sampled(ratio * y - ratio**2 / 2) / lower(y)
    else:
        start, stop = ratio / 2, order * ratio + 14

        def lower(y):
            return 1

        def r(y):
            return sampled(ratio * y - ratio**2 / 2)

    def value(y):
        return lower(y) * (r(y) ** order - 1) * (1 - r(y) ** (1 - order)) * mpmath.npdf(y)

    width = 1 / max(1, ratio)
    panels = int((stop - start) / width) + 1
    half = (stop - start) / panels / 2
    middles = (start + (2 * i + 1) * half for i in range(panels))
    return half * mpmath.fsum(w * value(m + half * x) for m in middles for x, w in legendre())


@cache
def legendre():
    """Nodes and weights of twenty points in DIGITS digits."""
    with mpmath.workdps(DIGITS):
        roots = [
            mpmath.findroot(lambda x: mpmath.legendre(20, x), x, tol=mpmath.mpf(10) ** -80)
            for x in np.polynomial.legendre.leggauss(20)[0]
        ]
        slopes = [20 * (x * mpmath.legendre(20, x) - mpmath.legendre(19, x)) / (x**2 - 1) for x in roots]
        return [(x, 2 / ((1 - x**2) * slope**2)) for x, slope in zip(roots, slopes, strict=True)]


def check(event, relation, order):
    try:
        found = cost(event, order=order, relation=relation)
    except TooCostlyToAccount:
        return False
    with mpmath.workdps(DIGITS):
        true = (
            mpmath.fsum(count * precise(pair, order) for pair, count in dominating(event, relation)) * UNITS
        )
        assert found >= true, (event, relation, order)
        assert found <= true * (1 + mpmath.mpf("1.1e-9")) + 2, (event, relation, order)
    return True


def either(rng):
    return rng.choice([Query.SUM, Query.FUNCTION])


def sliced_case(rng):
    event = sliced(rng)
    exact = event.geometry is Geometry.SPHERE or event.batch == event.records
    relation = rng.choice([*Relation]) if exact else Relation.ADD_REMOVE
    return event, relation, rng.choice(SMALL)


CASES = {
    77: lambda rng: (poisson(rng, either(rng)), Relation.ADD_REMOVE, rng.choice(ORDERS)),
    10: lambda rng: (plain(rng), rng.choice([*Relation]), rng.choice(ORDERS)),
    12: sliced_case,
    1: lambda rng: (poisson(rng, either(rng)), Relation.REPLACE_ONE, rng.choice(SMALL)),
}


def run(count, seed):
    """Checks that many events that have a cost; those refused for being absurd come on top."""
    rng = random.Random(seed)
    refused = 0
    for percent, draw in CASES.items():
        done = 0
        while done < count * percent // 100:
            good = check(*draw(rng))
            done, refused = done + good, refused + (not good)
    assert refused < count // 20
    return refused


@pytest.mark.parametrize(
    ("events", "seed"),
    [(1_000, 19), *(pytest.param(*more, marks=pytest.mark.long) for more in ((10_000, 20), (100_000, 21)))],
)
def test_cost_is_never_below_its_value_in_fifty_digits(events, seed, capsys):
    refused = run(events, seed=seed)
    with capsys.disabled():
        print(f"\n{events} costs, none below its 50-digit value; {refused} absurd events refused")  # noqa: T201


@pytest.mark.parametrize("order", [2, 4, 1.25, 3.7, 32, 64.5])
@pytest.mark.parametrize("sampling_prob", [1e-8, 1e-3, 0.3, 0.99])
@pytest.mark.parametrize("ratio", [1e-3, 0.5, 5.0])
@pytest.mark.parametrize("relation", [*Relation])
@pytest.mark.parametrize("query", [Query.SUM, Query.FUNCTION])
def test_two_evaluations_agree_far_better_than_they_must(query, relation, ratio, sampling_prob, order):
    event = PoissonGaussian(
        query=query, bound=1.0, noise_stddev=1 / ratio, steps=1, sampling_prob=sampling_prob
    )
    ((pair, _),) = dominating(event, relation)
    first, second = renyi.divergence(pair, order), renyi.second_divergence(pair, order)
    assert first == pytest.approx(second, rel=1e-8)


def test_evaluations_that_disagree_are_an_error(monkeypatch):
    monkeypatch.setattr(
        renyi, "second_divergence", lambda pair, order: 1.00001 * renyi.divergence(pair, order)
    )
    event = PoissonGaussian(query=Query.SUM, bound=1.0, noise_stddev=1.234, steps=7, sampling_prob=0.01)
    with pytest.raises(EvaluationsDisagree):
        cost(event, order=4, relation=Relation.ADD_REMOVE)


@pytest.mark.parametrize("bad", [math.nan, -1e-9, math.inf])
def test_nan_and_negative_divergences_are_an_error(monkeypatch, bad):
    monkeypatch.setattr(renyi, "divergence", lambda pair, order: bad)
    monkeypatch.setattr(renyi, "second_divergence", lambda pair, order: bad)
    with pytest.raises(EvaluationsDisagree):
        accountant.pair_cost(OneSided(0.01, GaussianBase(Fraction(1))), 1, 4)


def test_the_larger_evaluation_counts(monkeypatch):
    pair = OneSided(0.01, GaussianBase(Fraction(1)))
    before = accountant.pair_cost(pair, 10**6, 4)
    second = renyi.second_divergence(pair, 4)
    monkeypatch.setattr(renyi, "second_divergence", lambda pair, order: second * (1 + 5e-7))
    assert accountant.pair_cost(pair, 10**6, 4) > before * (1 + 4e-7)


def test_a_cost_no_account_can_hold_is_refused():
    event = Gaussian(query=Query.SUM, bound=1e6, noise_stddev=1e-3, steps=10**6)
    with pytest.raises(TooCostlyToAccount):
        cost(event, order=4, relation=Relation.ADD_REMOVE)


def test_gaussian_costs_are_exact():
    event = Gaussian(query=Query.SUM, bound=1.0, noise_stddev=4.0, steps=3)
    assert cost(event, order=2, relation=Relation.ADD_REMOVE) == 3 * UNITS // 16
    assert cost(event, order=2, relation=Relation.REPLACE_ONE) == 3 * UNITS // 4


def test_composition_costs_the_sum():
    one = PoissonGaussian(query=Query.SUM, bound=1.0, noise_stddev=1.1, steps=100, sampling_prob=0.01)
    two = Rotation(query=Query.FUNCTION, bound=1.0, noise_stddev=9.0, steps=101, parts=10)
    both = cost(Composition(events=(one, two)), order=5, relation=Relation.REPLACE_ONE)
    assert both == sum(cost(event, order=5, relation=Relation.REPLACE_ONE) for event in (one, two))
