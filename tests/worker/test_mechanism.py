"""A mechanism's event is what it does: its sampler's rate, its noise, its counts."""

import math

import numpy as np
import pytest
import torch

from core.faults import Failure, Fault
from sluice.privacy.events import Composition, Geometry, Query
from tests.fakes import ImageRows, SeededRng
from worker.mechanisms.mechanism import Mechanism, Sampler, StagedMechanism
from worker.mechanisms.noise import GaussianNoise, SecureRng
from worker.mechanisms.sampling import EveryRecord, PartRotation, PoissonSampling, WithoutReplacement

SIZE, STDDEV = 20_000, 3.0
ROTATION = PartRotation(parts=6, panel=2, batch=5, steps=3, key=bytes(32))
SUM = {"query": Query.SUM, "bound": 1.0}
ROWS = {"geometry": Geometry.SPHERE, "directions": 20, "dim": 64, "row_bound": 0.5}
CASES: list[tuple[Sampler, dict[str, object]]] = [
    (PoissonSampling(prob=0.25, steps=3), SUM),
    (WithoutReplacement(batch=2, population=10, steps=3), ROWS),
    (EveryRecord(steps=3), {"query": Query.FUNCTION, "bound": 1.0, "rows": 4}),
    (ROTATION, {"query": Query.FUNCTION, "bound": 1.0}),
]
every_case = pytest.mark.parametrize(
    ("sampler", "query"), CASES, ids=[type(case[0]).__name__ for case in CASES]
)


def mechanism(
    sampler: Sampler, query: dict[str, object], *, size: int = 3, stddev: float = STDDEV
) -> Mechanism:
    return Mechanism(sampler, GaussianNoise(stddev=stddev, size=size), SecureRng(), **query)


class Refusing(ImageRows):
    def take(self, indices: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        raise AssertionError("drawing reads no record")


@every_case
def test_the_event_has_the_noise_and_the_steps_that_are_used(sampler, query):
    event = mechanism(sampler, query).event
    assert (event.noise_stddev, event.steps) == (STDDEV, 3)
    other = mechanism(sampler, query, stddev=2 * STDDEV).event
    assert other == sampler.event(noise_stddev=2 * STDDEV, **query) != event


def test_the_event_has_the_rate_at_which_records_are_drawn():
    """Measured on the batches of the mechanism itself, so that an event of another rate fails."""
    charged = mechanism(PoissonSampling(prob=0.25, steps=200), SUM)
    drawn = sum(len(batch) for batch in charged.batches(Refusing.random(500)))
    assert drawn / (200 * 500) == pytest.approx(charged.event.sampling_prob, abs=6 * math.sqrt(0.1875 / 1e5))


def test_a_release_has_the_noise_of_the_event():
    charged = mechanism(PoissonSampling(prob=0.25, steps=3), SUM, size=SIZE)
    total = torch.full((SIZE,), 7.0)
    noise = charged.release(total) - total
    assert noise.std().item() / charged.event.noise_stddev == pytest.approx(1, abs=6 / math.sqrt(2 * SIZE))
    assert abs(noise.mean().item()) < 6 * STDDEV / math.sqrt(SIZE)
    assert not torch.equal(charged.release(total) - total, noise)


@every_case
def test_one_draw_more_than_planned_is_a_fault(sampler, query):
    charged, records = mechanism(sampler, query), Refusing.random(10)
    assert len(list(charged.batches(records))) == charged.drawn == 3
    assert list(charged.batches(records)) == []
    with pytest.raises(Failure) as failure:
        charged.draw(records)
    assert failure.value.fault is Fault.ACCOUNTING_MISMATCH


def test_one_release_more_than_planned_is_a_fault():
    charged = mechanism(PoissonSampling(prob=0.5, steps=2), SUM)
    for count in (1, 2):
        charged.release(torch.zeros(3))
        assert charged.released == count
    with pytest.raises(Failure) as failure:
        charged.release(torch.zeros(3))
    assert failure.value.fault is Fault.ACCOUNTING_MISMATCH
    assert charged.released == 2


def test_a_vector_of_another_size_is_a_fault():
    charged = mechanism(PoissonSampling(prob=0.5, steps=2), SUM)
    with pytest.raises(Failure):
        charged.release(torch.zeros(4))
    assert charged.released == 0


def test_it_is_finished_when_every_step_was_drawn_and_released():
    charged, records = mechanism(EveryRecord(steps=2), SUM), Refusing.random(3)
    for _ in charged.batches(records):
        assert not charged.finished
        charged.release(torch.zeros(3))
    assert charged.finished


@every_case
def test_restored_counts_are_counted_on(sampler, query):
    first, second = mechanism(sampler, query), mechanism(sampler, query)
    first.draw(Refusing.random(10))
    first.draw(Refusing.random(10))
    first.release(torch.zeros(3))
    second.state()["mechanism.counts"].copy_(first.state()["mechanism.counts"])
    assert (second.drawn, second.released) == (2, 1)
    assert len(list(second.batches(Refusing.random(10)))) == 1


def test_a_rotation_goes_on_with_the_next_turn():
    charged = mechanism(ROTATION, {"query": Query.FUNCTION, "bound": 1.0})
    part_of = ROTATION.part_of(300)
    for step, batch in enumerate(charged.batches(Refusing.random(300))):
        assert set(part_of[batch.flatten()]) == set(ROTATION.turn(step))


def test_clipping_leaves_room_for_the_grid_of_the_noise():
    noise = GaussianNoise(stddev=STDDEV, size=10_000)
    for query in (SUM, {"query": Query.FUNCTION, "bound": 1.0, "rows": 25}):
        rows = query.get("rows", 1)
        clip_norm = Mechanism(EveryRecord(steps=1), noise, SeededRng(), **query).clip_norm
        assert 0.99 < clip_norm < 1
        assert clip_norm * math.sqrt(rows) + noise.grid * 100 <= math.sqrt(rows)
    sampler = WithoutReplacement(batch=2, population=10, steps=3)
    assert Mechanism(sampler, noise, SeededRng(), **ROWS).clip_norm == 0.5 - noise.grid * 4
    counts = {"query": Query.COUNTS, "bound": 1.0, "rows": 25}
    assert Mechanism(EveryRecord(steps=1), noise, SeededRng(), **counts).clip_norm == 1.0


@pytest.mark.parametrize("query", [SUM, ROWS, {"query": Query.COUNTS, "bound": 1.0}])
def test_noise_that_is_too_coarse_is_refused(query):
    sampler = WithoutReplacement(batch=2, population=10, steps=3) if query is ROWS else EveryRecord(steps=1)
    with pytest.raises(ValueError, match="too coarse"):
        mechanism(sampler, query, stddev=1e9)


def staged() -> StagedMechanism:
    return StagedMechanism(
        {
            name: mechanism(EveryRecord(steps=steps), SUM, size=size, stddev=stddev)
            for name, steps, size, stddev in (("first", 1, 3, 1.0), ("second", 2, 5000, 9.0))
        }
    )


def test_stages_compose_and_each_gets_its_own_noise_as_often_as_planned():
    charged, records = staged(), Refusing.random(4)
    assert charged.event == Composition(events=tuple(stage.event for stage in charged.stages.values()))
    stages = []
    for batch in charged.batches(records):
        assert batch.tolist() == [0, 1, 2, 3]
        stages.append(charged.stage)
        noisy = charged.release(torch.zeros(charged.stages[charged.stage].noise.size))
    assert stages == ["first", "second", "second"]
    assert noisy.std().item() / 9.0 == pytest.approx(1, abs=6 / math.sqrt(2 * 5000))
    assert charged.finished
    assert charged.drawn == charged.released == charged.steps == 3
    for attempt in (lambda: charged.draw(records), lambda: charged.release(torch.zeros(5000))):
        with pytest.raises(Failure) as failure:
            attempt()
        assert failure.value.fault is Fault.ACCOUNTING_MISMATCH
