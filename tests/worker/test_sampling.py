"""Batches are drawn as the accountant believes, as often as was paid for, and never fail to be drawn."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from scipy import stats

from sluice.privacy.events import Geometry, PoissonGaussian, Query, SlicedProjection
from worker.mechanisms.mechanism import Sampler
from worker.mechanisms.noise import SecureRng
from worker.mechanisms.sampling import BLANK, PoissonSampling, WithoutReplacement, uniform


def batches(sampler: Sampler, population: int) -> list[np.ndarray]:
    rng = SecureRng()
    return [sampler.draw(population, rng, step) for step in range(sampler.steps)]


def memberships(count: int, prob: float, steps: int) -> np.ndarray:
    """steps x count: who was in."""
    member = np.zeros((steps, count), dtype=bool)
    for step, batch in enumerate(batches(PoissonSampling(prob=prob, steps=steps), count)):
        assert (np.diff(batch) > 0).all()
        member[step, batch] = True
    return member


def test_poisson_batches_vary_as_they_should():
    """Shuffled epochs of fixed batches would give 0 here; N = 1000, q = 0.1, T = 1000."""
    member = memberships(1000, 0.1, 1000)
    sizes = member.sum(1)
    assert 802 <= ((sizes - 100.0) ** 2).sum() / 90 <= 1227
    assert abs(sizes.mean() - 100) < 5 * math.sqrt(90 / 1000)


def test_each_record_is_in_by_itself():
    member = memberships(1000, 0.1, 1000)
    counts = member.sum(0)
    assert (
        stats.chisquare(
            [(counts < 95).sum(), ((counts >= 95) & (counts <= 105)).sum(), (counts > 105).sum()],
            1000 * np.diff([0, *stats.binom.cdf([94, 105], 1000, 0.1), 1]),
        ).pvalue
        > 1e-6
    )
    # In two steps running: q squared, where shuffling without return gives none or nearly none.
    twice = (member[1:] & member[:-1]).mean()
    assert abs(twice - 0.01) < 6 * math.sqrt(0.01 / member[1:].size)
    # Two records together: q squared as well.
    pairs = (member[:, 1:] & member[:, :-1]).mean()
    assert abs(pairs - 0.01) < 6 * math.sqrt(0.01 / member[:, 1:].size)


def test_empty_batches_are_ordinary():
    """N = 50, q = 0.05: 0.95^50 is 7.7 %."""
    drawn = batches(PoissonSampling(prob=0.05, steps=1000), 50)
    assert len(drawn) == 1000
    assert abs(sum(len(batch) == 0 for batch in drawn) - 77) < 6 * math.sqrt(77)


def test_no_records_is_no_failure():
    assert [len(batch) for batch in batches(PoissonSampling(prob=0.5, steps=3), 0)] == [0] * 3


def test_all_of_them_at_rate_one():
    assert PoissonSampling(prob=1.0, steps=1).draw(5, SecureRng()).tolist() == [0, 1, 2, 3, 4]


class Edge:
    """Words just below and at a threshold."""

    def __init__(self, *words: int) -> None:
        self.given = np.array(words, dtype=np.uint64)

    def words(self, count: int) -> np.ndarray:
        return self.given[:count]


@pytest.mark.parametrize("prob", [0.5, 0.1, 1 / 469, 2.0**-12, 1e-6, 1e-12])
def test_the_rate_is_exact_and_never_above_what_was_charged(prob):
    from fractions import Fraction

    threshold = int(Fraction(prob) * 2**64)
    assert PoissonSampling(prob=prob, steps=1).draw(2, Edge(threshold - 1, threshold)).tolist() == [0]
    charged, used = Fraction(prob), Fraction(threshold, 2**64)
    assert used == charged if prob >= 2.0**-12 else charged - Fraction(1, 2**64) < used <= charged


def test_many_records_are_drawn_in_parts():
    sampling = PoissonSampling(prob=0.01, steps=1)
    batch = sampling.draw(3_000_001, SecureRng())
    assert abs(len(batch) - 30_000) < 6 * math.sqrt(30_000)
    assert batch.max() > 2_900_000
    assert (np.diff(batch) > 0).all()


def test_sampling_states_its_own_cost():
    event = PoissonSampling(prob=0.01, steps=100).event(query=Query.SUM, bound=1.0, noise_stddev=2.0)
    assert event == PoissonGaussian(
        query=Query.SUM, bound=1.0, noise_stddev=2.0, steps=100, sampling_prob=0.01
    )
    event = WithoutReplacement(batch=10, population=500, steps=7).event(
        geometry=Geometry.SPHERE, directions=20, dim=30, row_bound=0.5, noise_stddev=3.0
    )
    assert event == SlicedProjection(
        geometry=Geometry.SPHERE, directions=20, dim=30, records=500, batch=10, noise_stddev=3.0, steps=7
    )


@pytest.mark.parametrize(("batch", "steps"), [(1, 4000), (2, 4000), (3, 8000), (4, 30_000)])
def test_every_sequence_of_rows_is_equally_likely_without_replacement(batch, steps):
    """Also the order: a record that shifts the numbers of others must not shift their places in a batch."""
    sampling = WithoutReplacement(batch=batch, population=4, steps=steps)
    seen = Counter(tuple(drawn.tolist()) for drawn in batches(sampling, 4))
    assert set(seen) == set(itertools.permutations(range(4), batch))
    assert stats.chisquare(list(seen.values())).pvalue > 1e-6


def test_blank_rows_stand_in_for_missing_records():
    sampling = WithoutReplacement(batch=50, population=100, steps=200)
    drawn = batches(sampling, 80)
    assert {len(batch) for batch in drawn} == {50}
    blanks = [int((batch == BLANK).sum()) for batch in drawn]
    assert abs(np.mean(blanks) - 10) < 1
    assert max(batch.max() for batch in drawn) == 79


@pytest.mark.parametrize("count", [1, 2, 9, 10, 15])
@pytest.mark.parametrize("batch", [3, 8, 10])
def test_no_record_is_drawn_more_often_than_declared(count, batch):
    """Ten are declared. However many there are, each is drawn at the rate of the cost or below it."""
    sampling = WithoutReplacement(batch=batch, population=10, steps=5000)
    drawn = np.concatenate(batches(sampling, count))
    counts = np.bincount(drawn[drawn != BLANK], minlength=count)
    rate = batch / max(count, 10)
    assert len(counts) == count
    assert (abs(counts / 5000 - rate) <= 5.5 * math.sqrt(rate * (1 - rate) / 5000)).all()


def test_more_records_than_declared_are_all_drawn_from():
    sampling = WithoutReplacement(batch=5, population=10, steps=500)
    seen = {int(index) for batch in batches(sampling, 20) for index in batch}
    assert seen == set(range(20))


def test_whole_numbers_are_even():
    counts = np.bincount(uniform(60_000, 6, SecureRng()), minlength=6)
    assert stats.chisquare(counts).pvalue > 1e-6
    assert set(uniform(100, 1, SecureRng())) == {0}
    assert len(uniform(0, 5, SecureRng())) == 0


def test_words_that_would_favour_small_numbers_are_drawn_again():
    below = 3 * 2**61  # a quarter of all words is turned away
    counts = np.bincount(uniform(30_000, below, SecureRng()) // 2**61, minlength=3)
    assert stats.chisquare(counts).pvalue > 1e-6
