"""Tiny datasets, every neighbour, the exact law of the output: no claimed delta is ever exceeded.

Nothing here uses the package's dominating pairs: the law of a mechanism is written down as a mixture over
its batches, and the hockey stick between two neighbours is integrated on a grid.
"""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

from sluice.privacy import pld
from sluice.privacy.accountant import Accountant, epsilon
from sluice.privacy.dominating_pairs import OneSided, SlicedBase, Symmetric, covers_blank_rows, dominating
from sluice.privacy.events import Gaussian, Geometry, PoissonGaussian, Query, Rotation, SlicedProjection
from sluice.privacy.relation import Relation
from sluice.privacy.renyi import divergence

GRID = np.linspace(-14, 14, 2801)
STEP = GRID[1] - GRID[0]
DELTAS = [1e-1, 1e-2, 1e-4]
NOISES = [0.5, 1.0, 2.0]
RATES = [0.05, 0.5, 0.9]


def density(centres, weights, noise, grid=GRID):
    """Density of a mixture of one-dimensional Gaussians on the grid."""
    z = (grid[:, None] - np.asarray(centres)) / noise
    return np.exp(-(z**2) / 2) @ np.asarray(weights) / (noise * math.sqrt(2 * math.pi))


def hockey_stick(p, q, eps, step=STEP):
    return float(np.maximum(p - math.exp(eps) * q, 0).sum() * step)


def claims(event, relation):
    """Every (epsilon, delta) the accountants promise for an event."""
    for delta in DELTAS:
        yield epsilon(event, delta=delta, accountant=Accountant.RENYI, relation=relation).epsilon, delta
        yield pld.compute((event,), delta=delta, relation=relation), delta


def check(event, relation, pairs, step=STEP):
    """The promises hold for every pair of laws, in both directions, and are not idle."""
    pairs, tightest = list(pairs), 0.0
    for eps, delta in claims(event, relation):
        for p, q in pairs:
            worst = max(hockey_stick(p, q, eps, step), hockey_stick(q, p, eps, step))
            assert worst <= delta * (1 + 1e-3) + 1e-9, (event, relation, eps, delta, worst)
            tightest = max(tightest, worst / delta)
    return tightest


def neighbours(relation, values, size):
    """Datasets of up to `size` values and all their neighbours."""
    for rest in itertools.combinations_with_replacement(values, size - 1):
        if relation is Relation.ADD_REMOVE:
            yield from (((*rest, x), rest) for x in values)
        else:
            yield from (((*rest, x), (*rest, y)) for x, y in itertools.combinations(values, 2))


def poisson_sum(data, rate, noise):
    batches = [
        (sum(batch), rate ** len(batch) * (1 - rate) ** (len(data) - len(batch)))
        for k in range(len(data) + 1)
        for batch in itertools.combinations(data, k)
    ]
    return density(*zip(*batches, strict=True), noise)


@pytest.mark.parametrize("relation", [*Relation])
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("rate", RATES)
def test_sampled_sums(relation, noise, rate):
    event = PoissonGaussian(query=Query.SUM, bound=1.0, noise_stddev=noise, sampling_prob=rate)
    values = [-1.0, -0.4, 0.0, 1.0]
    laws = [
        [poisson_sum(side, rate, noise) for side in pair]
        for size in (1, 2, 3)
        for pair in neighbours(relation, values, size)
    ]
    # The worst case is among them, so the exact accountant is met and not merely obeyed.
    assert check(event, relation, laws) > 0.95


@pytest.mark.parametrize("relation", [*Relation])
@pytest.mark.parametrize("rate", RATES)
def test_profiles_are_exact_in_both_directions(relation, rate):
    """The worst pair of a sampled sum, at epsilons of both signs: adding a record is its own profile."""
    event = PoissonGaussian(query=Query.SUM, bound=1.0, noise_stddev=0.8, sampling_prob=rate)
    ((pair, _),) = dominating(event, relation)
    upper = density([0.0, 1.0], [1 - rate, rate], 0.8)
    lower = density([0.0], [1.0], 0.8)
    if relation is Relation.REPLACE_ONE:
        lower = density([0.0, -1.0], [1 - rate, rate], 0.8)
    for eps in (-1.0, -0.2, -0.01, 0.0, 0.03, 0.3, 1.5):
        for adding, (p, q) in {False: (upper, lower), True: (lower, upper)}.items():
            found = float(pld.profile(pair, adding=adding)(np.array([eps]))[0])
            assert found == pytest.approx(hockey_stick(p, q, eps), abs=2e-5)


@pytest.mark.parametrize("relation", [*Relation])
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("rate", RATES)
def test_sampled_functions_of_the_batch(relation, noise, rate):
    """Every function from batches of {a, b, c} to the ends and middle of the ball."""
    event = PoissonGaussian(query=Query.FUNCTION, bound=1.0, noise_stddev=2 * noise, sampling_prob=rate)
    left, right = ("ab", "a") if relation is Relation.ADD_REMOVE else ("ab", "ac")
    batches = sorted(
        {c for d in (left, right) for k in range(len(d) + 1) for c in itertools.combinations(d, k)}
    )

    def law(data, function):
        weights = [
            rate ** len(b) * (1 - rate) ** (len(data) - len(b)) if set(b) <= set(data) else 0.0
            for b in batches
        ]
        return density([function[b] for b in batches], weights, 2 * noise)

    functions = [
        dict(zip(batches, values, strict=True))
        for values in itertools.product((-1.0, 1.0), repeat=len(batches))
    ]
    check(event, relation, ([law(left, f), law(right, f)] for f in functions))


@pytest.mark.parametrize("relation", [*Relation])
@pytest.mark.parametrize("query", [*Query])
def test_sums_counts_and_functions_of_all_records(relation, query):
    """Without sampling only the distance counts, so the furthest neighbours decide; here in the plane."""
    noise = 1.5
    event = Gaussian(query=query, bound=1.0, noise_stddev=noise)
    angles = np.linspace(0, 2 * np.pi, 16, endpoint=False)
    ring = [(0.0, 0.0), *((math.cos(a), math.sin(a)) for a in angles)]
    counts = [(1.0, 0.0), (0.0, 1.0), (math.sqrt(0.5), math.sqrt(0.5))]
    if query is Query.FUNCTION:
        moves = [np.subtract(a, b) for a, b in itertools.combinations(ring, 2)]
    else:
        values = counts if query is Query.COUNTS else ring
        add = relation is Relation.ADD_REMOVE
        moves = values if add else [np.subtract(a, b) for a, b in itertools.combinations(values, 2)]
    distances = sorted({round(math.hypot(*move), 6) for move in moves})
    laws = [[density([d], [1.0], noise), density([0.0], [1.0], noise)] for d in distances]
    assert check(event, relation, laws) > 0.95


@pytest.mark.parametrize("relation", [*Relation])
def test_rotation_touches_a_record_once_per_round(relation):
    """Three turns over two parts: the first part answers twice, so its laws are products of two."""
    event = Rotation(query=Query.FUNCTION, bound=1.0, noise_stddev=2.0, steps=3, parts=2)
    line = np.linspace(-11, 11, 401)
    step = line[1] - line[0]

    def law(answers):
        one, two = (density([a], [1.0], 2.0, line) for a in answers)
        return np.outer(one, two).ravel()

    answers = list(itertools.product((-1.0, 1.0), repeat=2))
    laws = [[law(a), law(b)] for a, b in itertools.product(answers, repeat=2)]
    assert check(event, relation, laws, step**2) > 0.95


@pytest.mark.parametrize("relation", [*Relation])
def test_two_adaptive_steps_of_a_sampled_sum(relation):
    """The second query turns the records' sign after seeing the first answer; the claim still holds."""
    noise, rate = 1.0, 0.3
    event = PoissonGaussian(query=Query.SUM, bound=1.0, noise_stddev=noise, steps=2, sampling_prob=rate)
    line = np.linspace(-8, 9, 601)
    step = line[1] - line[0]

    def law(value):
        first = density([0.0, value], [1 - rate, rate], noise, line)
        same = density([0.0, value], [1 - rate, rate], noise, line)
        turned = density([0.0, -value], [1 - rate, rate], noise, line)
        second = np.where((line > 0)[:, None], turned, same)
        return (first[:, None] * second).ravel()

    other = 0.0 if relation is Relation.ADD_REMOVE else -1.0
    assert check(event, relation, [[law(1.0), law(other)]], step**2) > 0.9


@pytest.mark.parametrize("relation", [*Relation])
@pytest.mark.parametrize("dim", [2, 3])
@pytest.mark.parametrize(("batch", "size"), [(1, 1), (1, 3)])
def test_sliced_projections_without_replacement(relation, dim, batch, size):
    """One direction, batches of one row, rows in the ball of a half; the direction is part of the output."""
    noise = 0.7
    if relation is Relation.ADD_REMOVE:
        size = max(size, 2)  # a batch of one cannot be drawn from nothing
    event = SlicedProjection(
        geometry=Geometry.SPHERE,
        directions=1,
        dim=dim,
        records=size,
        batch=batch,
        noise_stddev=noise,
        steps=1,
    )
    # Rows on one axis see only the direction's cosine with it: an even angle in the plane, even in space.
    middles = (np.arange(100) + 0.5) / 100
    first = np.cos(np.pi * middles) if dim == 2 else 2 * middles - 1
    line = np.linspace(-6, 6, 1201)

    def law(rows):
        return np.concatenate(
            [density(u * np.array(rows), [1 / len(rows)] * len(rows), noise, line) for u in first]
        )

    step = (line[1] - line[0]) / len(first)
    values = [-0.5, 0.0, 0.5]
    laws = [[law(side) for side in pair] for pair in neighbours(relation, values, size)]
    check(event, relation, laws, step)


@pytest.mark.parametrize("relation", [*Relation])
def test_orthonormal_projections_of_batches_of_two(relation):
    """Dimension one: a block is the row itself up to sign; two ordered rows are released."""
    noise, size = 0.8, 3
    event = SlicedProjection(
        geometry=Geometry.ORTHONORMAL, directions=1, dim=1, records=size, batch=2, noise_stddev=noise, steps=1
    )
    line = np.linspace(-5, 5, 301)
    step = line[1] - line[0]

    def law(rows):
        draws = list(itertools.permutations(range(len(rows)), 2))
        total = sum(
            np.outer(density([rows[i]], [1.0], noise, line), density([rows[j]], [1.0], noise, line))
            for i, j in draws
        )
        return (total / len(draws)).ravel()

    laws = [[law(side) for side in pair] for pair in neighbours(relation, [-0.5, 0.0, 0.5], size)]
    check(event, relation, laws, step**2)


@pytest.mark.parametrize(
    ("directions", "dim", "noise", "order"),
    [(3, 2, 1.5, 2), (20, 10, 1.5, 3), (50, 20, 2.0, 4), (200, 784, 0.5, 2), (1000, 784, 1.0, 3)],
)
def test_sliced_divergence_agrees_with_monte_carlo(directions, dim, noise, order):
    """Directions, noise and likelihood ratios drawn for real: E_P[(P/Q)^(order - 1)], P and Q given U."""
    event = SlicedProjection(
        geometry=Geometry.SPHERE,
        directions=directions,
        dim=dim,
        records=1,
        batch=1,
        noise_stddev=noise,
        steps=1,
    )
    ((pair, _),) = dominating(event, Relation.REPLACE_ONE)
    assert isinstance(pair.base, SlicedBase)
    rng = np.random.default_rng(7)
    values = []
    for _ in range(40 if directions < 100 else 6):
        along = rng.normal(size=(5000, directions))
        across = rng.chisquare(dim - 1, size=(5000, directions))
        shift = np.sqrt((along**2 / (along**2 + across)).sum(axis=1)) / noise
        # Along the shift the released noise is one-dimensional; under P it is centred at the shift.
        seen = shift + rng.normal(size=5000)
        values.append(np.exp((order - 1) * (shift * seen - shift**2 / 2)))
    sample = np.concatenate(values)
    estimate = math.log(sample.mean()) / (order - 1)
    error = sample.std() / math.sqrt(sample.size) / sample.mean() / (order - 1)
    assert abs(divergence(pair, order) - estimate) < 4 * error
    assert error < 0.1 * divergence(pair, order)


# Fewer or more records than a plan declares


def filled(rows, records):
    """The rows drawn from: blank ones stand in for missing records."""
    return (*rows, *[0.0] * (records - len(rows)))


@pytest.mark.parametrize("relation", [*Relation])
@pytest.mark.parametrize("noise", [0.3, 0.8])
@pytest.mark.parametrize("steps", [1, 2])
def test_any_number_of_records_beside_the_declared_one(relation, noise, steps):
    """From none to one more than the three declared: batches of one row, in dimension one, all neighbours."""
    event = SlicedProjection(
        geometry=Geometry.ORTHONORMAL,
        directions=1,
        dim=1,
        records=3,
        batch=1,
        noise_stddev=noise,
        steps=steps,
    )
    line = np.linspace(-4, 4, 2001 if steps == 1 else 601)

    def law(rows):
        rows = filled(rows, 3)
        one = density(rows, [1 / len(rows)] * len(rows), noise, line)
        return one if steps == 1 else np.outer(one, one).ravel()

    laws = [
        [law(side) for side in pair]
        for size in (1, 2, 3, 4)
        for pair in neighbours(relation, [-0.5, 0.0, 0.5], size)
    ]
    check(event, relation, laws, (line[1] - line[0]) ** steps)


def log_moment(p, q, order, step):
    """log of the integral of p^order q^(1 - order), from logarithms."""
    values = order * p + (1 - order) * q
    return values.max() + math.log(np.exp(values - values.max()).sum() * step)


@pytest.mark.parametrize("geometry", [*Geometry])
@pytest.mark.parametrize("rate", [0.01, 0.3, 0.9])
@pytest.mark.parametrize("noise", [0.2, 0.4, 0.7, 2.0])
def test_a_record_in_place_of_a_blank_row_costs_no_more(geometry, rate, noise):
    """Rényi divergences of (1-q) N(y) + q N(x) and (1-q) N(y) + q N(0), both ways, rows x and y anywhere.

    Directions in the plane, one or a block of two, are part of the output: moments are means over them.
    """
    sphere = geometry is Geometry.SPHERE
    event = SlicedProjection(
        geometry=geometry, directions=1 if sphere else 2, dim=2, records=1000, batch=round(1000 * rate),
        noise_stddev=noise, steps=1,
    )  # fmt: skip
    ((pair, _),) = dominating(event, Relation.ADD_REMOVE)
    assert isinstance(pair, Symmetric if sphere and noise < 0.39 else OneSided)
    grid = np.linspace(-30, 30, 6001) * noise
    angles = np.pi * (np.arange(40) + 0.5) / 40 if sphere else [0.0]
    for turn, size in itertools.product((0.0, 1.0, 2.0, math.pi) if sphere else (0.0, math.pi), (0.5, 0.2)):
        x, y = (0.5, 0.0), (size * math.cos(turn), size * math.sin(turn))
        laws = []
        for angle in angles:
            along = np.array([math.cos(angle), math.sin(angle)])

            def row(centre):
                return -(((grid - centre) / noise) ** 2) / 2 - math.log(noise * math.sqrt(2 * math.pi))

            others, record, blank = row(along @ y), row(along @ x), row(0.0)
            laws.append(
                [
                    np.logaddexp(math.log1p(-rate) + others, math.log(rate) + drawn)
                    for drawn in (record, blank)
                ]
            )
        for order in (1.25, 2, 4, 8):
            for one, other in ((0, 1), (1, 0)):
                moments = [log_moment(law[one], law[other], order, grid[1] - grid[0]) for law in laws]
                found = (np.logaddexp.reduce(moments) - math.log(len(moments))) / (order - 1)
                assert found <= divergence(pair, order) + 1e-9


@pytest.mark.parametrize(("directions", "dim"), [(1, 2), (50, 20), (1000, 784)])
def test_blank_rows_are_covered_where_there_is_enough_noise(directions, dim):
    """E exp(x) - 1 <= 2 E x for x = |U^T z|^2 / 4, with directions drawn for real; on both sides of it."""
    rng = np.random.default_rng(3)
    squares = rng.beta(0.5, (dim - 1) / 2, size=(5000, directions)).sum(axis=1)
    for share in (0.3, 0.8, 0.9, 1.1, 1.3, 3.0):
        # Where x is next to certain the two sides meet at E x = 1.256.
        quarter = share * 1.256 * dim / directions
        base = SlicedBase(Fraction(4 * quarter), directions, dim)
        excess = np.expm1(quarter * squares) - 2 * quarter * squares
        if abs(excess.mean()) > 5 * excess.std() / math.sqrt(len(squares)):
            assert covers_blank_rows(base) == (excess.mean() < 0)
