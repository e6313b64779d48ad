"""Noise is Gaussian, as strong as planned, nobody's to repeat, and its low bits tell nothing."""

import copy
import math
import os
import pickle

import numpy as np
import pytest
import torch
from scipy import stats

from tests.fakes import SeededRng
from worker.mechanisms.noise import GaussianNoise, SecureRng

DRAWS = 100_000


def noise_of(stddev: float, size: int = DRAWS, steps: int = 1) -> torch.Tensor:
    """Noise as a trainer gets it: on a total of zeros."""
    noise, rng = GaussianNoise(stddev=stddev, size=size), SecureRng()
    return torch.cat([noise.add(torch.zeros(size), rng) for _ in range(steps)])


@pytest.mark.parametrize("stddev", [1e-3, 1.0, 14.7])
def test_noise_is_as_strong_as_planned(stddev):
    noise = noise_of(stddev)
    assert 0.989 <= noise.std().item() / stddev <= 1.011
    assert abs(noise.mean().item()) < 5 * stddev / math.sqrt(DRAWS)


def test_noise_is_gaussian():
    assert stats.kstest(noise_of(2.0).numpy() / 2.0, "norm").pvalue > 1e-6


def test_tails_are_there():
    beyond = (SecureRng().normals(10 * DRAWS).abs() > 4).sum().item()
    expected = 10 * DRAWS * 2 * stats.norm.sf(4)
    assert abs(beyond - expected) < 6 * math.sqrt(expected)


def test_no_draw_tells_of_another():
    noise = noise_of(1.0).numpy()
    half = len(noise) // 2
    pairs = [(noise[lag:], noise[:-lag]) for lag in (1, 2, 3, 2**14, 2**15)] + [(noise[:half], noise[half:])]
    for one, other in pairs:
        assert abs(np.corrcoef(one, other)[0, 1]) < 5 / math.sqrt(len(one))
        assert abs(np.corrcoef(one**2, other**2)[0, 1]) < 5 / math.sqrt(len(one))


def test_every_step_has_noise_of_its_own():
    first, second = noise_of(1.0, size=1000, steps=2).split(1000)
    assert not (first == second).any()


def test_the_strength_does_not_depend_on_the_number_of_records_or_of_parts():
    noise = GaussianNoise(stddev=3.0, size=DRAWS)
    for total in (torch.zeros(DRAWS), torch.full((DRAWS,), 512.0)):
        assert 0.989 <= (noise.add(total, SecureRng()) - total).std().item() / 3.0 <= 1.011


@pytest.mark.parametrize("stddev", [0.37, 1.0, 5.6])
def test_a_release_lies_on_a_grid_that_the_total_only_shifts(stddev):
    """With the same normals, totals in the same cells give the same release, bit for bit."""
    noise = GaussianNoise(stddev=stddev, size=1000)
    total = torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 50
    nudged = ((total / noise.grid).round() + 0.49) * noise.grid
    plain, shifted = (noise.add(given, SeededRng(1)) for given in (total, nudged))
    assert torch.equal(plain, shifted)
    cells = plain / noise.grid
    assert torch.equal(cells, cells.round())
    zero = noise.add(torch.zeros(1000), SeededRng(1)) / noise.grid
    assert torch.equal(cells - zero, (total / noise.grid).round())


def test_clipping_leaves_room_for_the_grid():
    noise = GaussianNoise(stddev=1.3, size=10_000)
    inner = noise.inner(1.0)
    assert 0.9999 < inner < 1.0
    assert inner + noise.grid * math.sqrt(noise.size) <= 1.0
    with pytest.raises(ValueError, match="too coarse"):
        GaussianNoise(stddev=1e6, size=10_000).inner(1e-3)


def first_bytes_of_child(rng: SecureRng) -> bytes:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, rng.words(8).tobytes())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        told = answer.read()
    os.waitpid(child, 0)
    return told


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_forked_children_all_start_differently():
    """With a stream the parent has used, with one it has not, and again in the parent."""
    used, fresh = SecureRng(), SecureRng()
    used.words(8)
    starts = [first_bytes_of_child(rng) for rng in (used, fresh) for _ in range(12)]
    starts += [used.words(8).tobytes(), fresh.words(8).tobytes()]
    assert all(len(start) == 64 for start in starts)
    assert len(set(starts)) == 26


def test_two_of_them_never_agree():
    assert not torch.equal(SecureRng().normals(10), SecureRng().normals(10))


def test_it_cannot_be_seeded_copied_or_stored():
    with pytest.raises(TypeError):
        SecureRng(42)
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError):
            attempt(SecureRng())


def test_the_global_seed_of_torch_and_numpy_is_nothing_to_it():
    starts = set()
    for _ in range(2):
        torch.manual_seed(0)
        np.random.seed(0)
        starts.add(SecureRng().words(4).tobytes())
        starts.add(noise_of(1.0, size=4).numpy().tobytes())
    assert len(starts) == 4


@pytest.mark.parametrize("count", [0, 1, 2, 7, 2**15, 2**15 + 1])
def test_any_number_of_draws(count):
    rng = SecureRng()
    assert rng.words(count).shape == (count,)
    normals = rng.normals(count)
    assert normals.shape == (count,)
    assert normals.isfinite().all()


def test_a_key_is_left_before_it_is_worn_out(monkeypatch):
    monkeypatch.setattr("worker.mechanisms.noise.KEY_LIFETIME", 64)
    rng = SecureRng()
    assert len({rng.words(8).tobytes() for _ in range(50)}) == 50


def test_words_are_even():
    bits = np.unpackbits(SecureRng().words(20_000).view(np.uint8)).reshape(-1, 64)
    assert (abs(bits.mean(0) - 0.5) < 6 * 0.5 / math.sqrt(20_000)).all()
