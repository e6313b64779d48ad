"""What every trainer promises, whatever it learns: the steps that were paid for, and no word on the way."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
from safetensors.torch import load, save

from core.faults import Failure, Fault
from core.schema import ImageSchema
from sluice.generators.classifier import Classifier
from sluice.generators.image import ImageSynthesizer
from sluice.methods.adapt import AdaptPlan, AdaptRecipe
from sluice.methods.atlas import AtlasPlan, AtlasRecipe
from sluice.methods.base import Clipping, Plan
from sluice.methods.dpgan import DPGANPlan, DPGANRecipe
from sluice.methods.gswgan import GSWGANPlan, GSWGANRecipe
from sluice.methods.sinkhorn import SinkhornPlan, SinkhornRecipe
from sluice.methods.swd import SWDPlan, SWDRecipe
from sluice.methods.swd_one_shot import Features, OneShotRecipe, SWDOneShotPlan
from tests.fakes import ImageRows, SeededRng
from worker.mechanisms.mechanism import Sampler
from worker.mechanisms.noise import SecureRng
from worker.trainers import TRAINERS
from worker.trainers.base import BaseTrainer, Progress


class CountedRows(ImageRows):
    """Records that count how often they were asked."""

    schema = ImageSchema(height=8, width=8, channels=1, classes=("a", "b", "c"))

    def take(self, indices: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        self.asked = getattr(self, "asked", 0) + 1
        return super().take(indices)


# A plan that shows so many steps, all of them paid for or not, with its recipe inside.
PLANS: dict[str, Callable[[int], Plan]] = {
    "adapt": lambda steps: AdaptPlan(
        steps=steps - 2,
        noise_multiplier=1.0,
        records=50,
        batch=10,
        directions=7,
        dim=6,
        recipe=AdaptRecipe(features=4, source_steps=2, noises=2),
    ),
    "atlas": lambda steps: AtlasPlan(
        steps=max(steps, 5),
        noise_multiplier=1.0,
        rounds=max(steps, 5) - 4,
        charts=2,
        recipe=AtlasRecipe(frequencies=4, axes=3),
    ),
    "dpgan": lambda steps: DPGANPlan(
        steps=steps,
        noise_multiplier=1.0,
        sampling_prob=0.1,
        expected_batch=5.0,
        recipe=DPGANRecipe(discriminator_features=16, generator_features=16, latent=4),
    ),
    "gswgan": lambda steps: GSWGANPlan(
        steps=steps,
        noise_multiplier=1.0,
        parts=8,
        panel=8,
        images=5,
        recipe=GSWGANRecipe(
            frequencies=4,
            discriminator_features=4,
            generator_features=8,
            latent=4,
            first_steps=2,
            part_batch=4,
        ),
    ),
    "sinkhorn": lambda steps: SinkhornPlan(
        steps=steps // 2,
        noise_multiplier=1.0,
        sampling_prob=0.1,
        images=9,
        clipping=Clipping.SEMIDUAL,
        recipe=SinkhornRecipe(features=16, latent=4, fitting_steps=2, fitting_images=9),
    ),
    "swd": lambda steps: SWDPlan(
        steps=steps - 1,
        noise_multiplier=1.0,
        records=50,
        batch=10,
        directions=7,
        dim=8 * 8 + 3,
        recipe=SWDRecipe(features=16, latent=4, moment_steps=1, moment_images=6),
    ),
    "swd_one_shot": lambda steps: SWDOneShotPlan(
        noise_multiplier=1.0,
        directions=9,
        recipe=OneShotRecipe(features=16, latent=4, generator_steps=steps - 1, images=5, compared=4),
    ),
}


def training(kind: str, plan: Plan | None = None, *, steps: int = 6, records: int = 50) -> BaseTrainer:
    more = {"source": CountedRows.random(80)} if kind == "adapt" else {}
    rows = CountedRows.random(records)
    return TRAINERS[kind](plan or PLANS[kind](steps), rows, rng=SecureRng(), device="cpu", **more)


pytestmark = pytest.mark.parametrize("kind", TRAINERS)


def test_trainer_draws_exactly_what_it_planned(kind):
    run = training(kind)
    said = list(run.steps())
    assert said == [Progress(step, 6) for step in range(1, 7)]
    assert run.plan.progress_steps == 6
    assert run.mechanism.drawn == run.mechanism.released == run.plan.known_steps
    assert run.records.asked == run.mechanism.drawn
    assert isinstance(run.synthesizer(), Classifier if kind == "adapt" else ImageSynthesizer)
    assert list(run.steps()) == []
    with pytest.raises(Failure) as failure:
        run.mechanism.draw(run.records)
    assert failure.value.fault is Fault.ACCOUNTING_MISMATCH


def test_an_unfinished_training_has_no_synthesizer(kind):
    run = training(kind)
    next(run.steps())
    with pytest.raises(Failure) as failure:
        run.synthesizer()
    assert failure.value.fault is Fault.ACCOUNTING_MISMATCH


def test_what_it_does_is_what_its_plan_costs(kind, monkeypatch):
    run = training(kind)
    assert run.mechanism.steps == run.plan.known_steps
    assert run.mechanism.event == run.plan.event()
    cheaper = dataclasses.replace(run.plan, noise_multiplier=2.0).event()
    monkeypatch.setattr(type(run.plan), "event", lambda self: cheaper)
    with pytest.raises(Failure) as failure:
        training(kind)
    assert failure.value.fault is Fault.ACCOUNTING_MISMATCH


def test_a_checkpoint_is_continued_to_the_same_number_of_steps(kind):
    first = training(kind)
    steps = first.steps()
    for _ in range(4):
        next(steps)
    kept = save(first.checkpoint())
    second = training(kind)
    second.restore(load(kept))
    assert [progress.step for progress in second.steps()] == [5, 6]
    assert second.mechanism.drawn == second.mechanism.released == second.plan.known_steps
    second.synthesizer()


def test_a_checkpoint_is_all_there_is_to_know(kind):
    first, second = training(kind), training(kind)
    next(first.steps())
    second.restore(first.checkpoint())
    one, other = first.checkpoint(), second.checkpoint()
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) or one[name].isnan().all() for name in one)


def test_a_checkpoint_has_no_randomness(kind):
    """Two that go on from the same place part at once: their noise is their own."""
    kept = training(kind).checkpoint()
    assert not [name for name in kept if "rng" in name or "seed" in name.split(".")[-1]]
    ends = []
    for _ in range(2):
        run = training(kind)
        run.restore(kept)
        next(run.steps())
        ends.append(run.checkpoint())
    before, one, other = (torch.cat([end[name].double().flatten() for name in kept]) for end in (kept, *ends))
    moved = (one != before) | (other != before)
    assert (one != other)[moved].double().mean() > 0.3  # Adam's first step is a sign, equal half of the time


def test_a_checkpoint_that_lacks_something_is_refused(kind):
    kept = training(kind).checkpoint()
    kept.pop(next(name for name in kept if name.startswith(("generator.", "centres", "network."))))
    with pytest.raises(ValueError, match="lacks"):
        training(kind).restore(kept)


def test_progress_is_step_counts_and_nothing_else(kind):
    progress = next(training(kind).steps())
    assert [field.name for field in dataclasses.fields(progress)] == ["step", "steps"]
    assert {type(value) for value in dataclasses.astuple(progress)} == {int}


@pytest.mark.parametrize("records", [0, 1])
def test_training_on_almost_nobody_is_ordinary(kind, records):
    run = training(kind, records=records)
    assert len(list(run.steps())) == 6
    assert all(isinstance(value, float) for value in run.diagnostics().values())
    run.synthesizer()


def test_records_that_are_not_finite_or_not_of_a_class_do_not_stop_it(kind):
    run = training(kind)
    run.records.images[::2] = torch.nan
    run.records.images[1::4] = torch.inf
    run.records.labels[:10] = 99
    run.records.labels[10:20] = -5
    assert len(list(run.steps())) == 6
    synthesizer = run.synthesizer()
    assert all(weight.isfinite().all() for weight in synthesizer.network.parameters())


def test_a_plan_that_is_not_calibrated_is_refused(kind):
    with pytest.raises(Exception, match=r"noise|steps"):
        training(kind, dataclasses.replace(PLANS[kind](3), noise_multiplier=None))


# What follows a release follows from it alone

# Other ways to learn, where a kind has several. All with so little noise that releases show what was noised.
WAYS: dict[str, list[dict[str, object]]] = {
    "adapt": [{}],
    "atlas": [{}, {"charts": 1}],
    "dpgan": [
        {},
        {
            "recipe": DPGANRecipe(
                network="dense",
                discriminator_features=16,
                generator_features=16,
                latent=4,
                label_weight=1.0,
                discriminator_steps=1,
                accuracy_floor=0.9,
                accuracy_decay=0.5,
            )
        },
    ],
    "gswgan": [{}, {"parts": 24, "panel": 12, "clipping": Clipping.PER_IMAGE}],
    "sinkhorn": [
        {"clipping": clipping, "recipe": recipe}
        for recipe in [
            SinkhornRecipe(features=16, latent=4, fitting_steps=2, fitting_images=9, debiasing=0.4)
        ]
        for clipping in Clipping
    ],
    "swd": [{}, {"recipe": SWDRecipe(features=16, latent=4, moment_steps=0)}],
    "swd_one_shot": [{}, {"features": Features.WAVES}],
}


def framed(*, edge: float, middle: float, count: int = 60) -> CountedRows:
    """Images with an edge and a middle of a brightness each, all but a little."""
    rows = CountedRows.random(count)
    shade = torch.full((8, 8), edge)
    shade[2:6, 2:6] = middle
    rows.images = shade + 0.05 * rows.images
    return rows


def of_one_class(label: int) -> CountedRows:
    rows = CountedRows.random(50)
    rows.labels[:] = label
    return rows


def of_no_numbers() -> CountedRows:
    rows = CountedRows.random(50)
    rows.images[:] = torch.nan
    return rows


# As unlike as datasets can be: what is decided by looking at one is decided otherwise for another.
DATASETS: dict[str, Callable[[], CountedRows]] = {
    "free of the edge": lambda: framed(edge=-0.95, middle=0.9),
    "bright at the edge": lambda: framed(edge=0.9, middle=-0.95),
    "nobody": lambda: CountedRows.random(0),
    "one": lambda: CountedRows.random(1),
    "a crowd": lambda: CountedRows.random(500),
    "all the same": lambda: framed(edge=0.0, middle=0.0, count=1000),
    "one class": lambda: of_one_class(0),
    "another class": lambda: of_one_class(2),
    "no numbers": of_no_numbers,
}


class Watched(SeededRng):
    """Repeats itself, and remembers what it was asked for."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.asked: list[tuple[str, int]] = []

    def words(self, count: int) -> np.ndarray:
        self.asked.append(("words", count))
        return super().words(count)

    def normals(self, count: int) -> torch.Tensor:
        self.asked.append(("normals", count))
        return super().normals(count)


class OwnRandomness:
    """A sampler that draws from a generator of its own."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler, self.steps, self.rng = sampler, sampler.steps, SeededRng(2)

    def draw(self, population: int, rng: object, step: int = 0) -> np.ndarray:
        del rng
        return self.sampler.draw(population, self.rng, step)


def followed(
    plan: Plan, rows: CountedRows, replay: list[torch.Tensor] | None = None
) -> tuple[dict[str, object], list[torch.Tensor]]:
    """All of a training that is or may become known, and its releases: its own, or those of another."""
    more = {"source": CountedRows.random(80)} if plan.kind == "adapt" else {}
    rng, secret = Watched(1), "discriminator.weights" if plan.kind == "gswgan" else None
    run = TRAINERS[plan.kind](plan, rows, rng=rng, device="cpu", **more)
    if plan.kind != "atlas":  # drawing takes a random number for each record
        run.mechanism.sampler = OwnRandomness(run.mechanism.sampler)
    release, released = run.mechanism.release, []

    def frozen(total: torch.Tensor) -> torch.Tensor:
        own = release(total)  # counts, and takes its noise
        released.append(own if replay is None else replay[len(released)])
        return released[-1].clone()

    run.mechanism.release = frozen
    # After each step, as it is what the next release is chosen by. What parts taught stays with the parts.
    known = [
        (
            progress,
            {name: value.numpy().tobytes() for name, value in run.checkpoint().items() if name != secret},
        )
        for progress in run.steps()
    ]
    sizes = [len(total) for total in released]
    return {
        "known": known,
        "sizes": sizes,
        "asked": rng.asked,
        "made": run.synthesizer().to_files(),
    }, released


@pytest.mark.parametrize("base", ["free of the edge", "bright at the edge", "nobody"])
def test_what_is_known_follows_from_what_was_released(kind, base):
    """With the releases of one dataset, training on any other gives the same, byte for byte.

    So nothing is decided, divided, counted or left out by looking at records: not how images are set upright,
    not how many parts have records, not whether a batch is empty or a class is missing.
    """
    for way in WAYS[kind]:
        plan = dataclasses.replace(PLANS[kind](6), **{"noise_multiplier": 0.02} | way)
        expected, released = followed(plan, DATASETS[base]())
        for name, rows in DATASETS.items():
            found, _ = followed(plan, rows(), released)
            assert [key for key in expected if found[key] != expected[key]] == [], (way, name)
