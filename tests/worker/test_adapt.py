"""Adaptation: private latents are clipped one by one, and what is learned follows from their noise alone."""

import math

import numpy as np
import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

from core.faults import Failure, Fault
from core.schema import ImageSchema
from sluice.generators.architecture import UnfitSynthesizer
from sluice.generators.classifier import ARCHITECTURE, WEIGHTS, Classifier, ClassifierShape
from sluice.methods.adapt import AdaptPlan, AdaptRecipe
from sluice.privacy.events import Geometry, SlicedProjection
from sluice.privacy.problems import InvalidPlan
from tests.fakes import ImageRows, SeededRng
from worker.mechanisms.noise import SecureRng
from worker.trainers.adapt import Lens
from worker.trainers.adapt import Trainer as AdaptTrainer
from worker.trainers.base import Progress

SMALL = AdaptRecipe(features=4, source_steps=3, noises=2)


class Rows(ImageRows):
    schema = ImageSchema(height=8, width=8, channels=1, classes=("a", "b", "c"))


def plan(**changes: object) -> AdaptPlan:
    given = {"steps": 4, "noise_multiplier": 1.0, "records": 60, "batch": 20, "directions": 12, "dim": 6}
    return AdaptPlan(**given | {"recipe": SMALL} | changes)


def training(records: Rows | None = None, *, seed: int = 0, **changes: object) -> AdaptTrainer:
    rows = records if records is not None else Rows.random(50)
    return AdaptTrainer(plan(**changes), rows, source=Rows.random(200), rng=SeededRng(seed), device="cpu")


def test_it_takes_the_steps_that_were_paid_for_after_those_that_cost_nothing():
    run = training()
    assert list(run.steps()) == [Progress(step, 7) for step in range(1, 8)]
    assert run.plan.progress_steps == 7
    assert run.mechanism.drawn == run.mechanism.released == 4
    assert isinstance(run.synthesizer(), Classifier)


def test_it_costs_what_swd_costs():
    event = plan().event()
    assert isinstance(event, SlicedProjection)
    assert (event.records, event.batch, event.directions, event.dim) == (60, 20, 12, 6)
    assert (event.noise_stddev, event.row_bound, event.steps) == (1.0, 0.5, 4)


def test_a_plan_whose_event_says_otherwise_is_refused(monkeypatch):
    cheaper = plan(noise_multiplier=2.0).event()
    monkeypatch.setattr(AdaptPlan, "event", lambda self: cheaper)
    with pytest.raises(Failure) as failure:
        training()
    assert failure.value.fault is Fault.ACCOUNTING_MISMATCH


def test_no_record_is_looked_at_before_the_source_is_learned():
    run = training()

    def refused(indices: np.ndarray) -> tuple[Tensor, Tensor]:
        raise AssertionError("a record was looked at")

    run.records.take = refused
    going = run.steps()
    for _ in range(3):
        next(going)
    with pytest.raises(AssertionError):
        next(going)


# Latents


def fixed_run(**changes: object) -> AdaptTrainer:
    run = training(**changes)
    going = run.steps()
    for _ in range(3):
        next(going)
    return run


def test_latents_are_clipped_one_by_one():
    run = fixed_run()
    run.scale /= 100  # so that all are too long
    batch = np.array([4, 9, -1, 11])
    rows = run.private_rows(batch)
    assert torch.allclose(rows.norm(dim=1), torch.tensor([0.5, 0.5, 0.0, 0.5]), atol=1e-5)
    run.records.images[9] = 1e4
    other = run.private_rows(batch)
    assert torch.equal(rows[[0, 2, 3]], other[[0, 2, 3]])
    assert not torch.equal(rows[1], other[1])
    assert other.double().norm(dim=1).max() <= run.mechanism.clip_norm < 0.5
    run.records.images[9] = math.nan
    assert not run.private_rows(batch)[1].any()


def test_centre_and_scale_are_those_of_public_images():
    one, other = fixed_run(seed=4), fixed_run(records=Rows.random(31), seed=4)
    assert torch.equal(one.centre, other.centre)
    assert torch.equal(one.scale, other.scale)
    latents = (one.fixed(one.source.images) - one.centre) / one.scale
    assert latents.norm(dim=1).mean().item() == pytest.approx(0.5, rel=0.1)


def test_private_latents_have_no_gradient():
    run = fixed_run()
    _, projections = run.mechanism.project(run.private_rows(run.mechanism.draw(run.records)))
    assert not run.private_rows(np.arange(5)).requires_grad
    assert not projections.requires_grad


# Neighbours


def neighbours() -> dict[str, Rows]:
    base = Rows.random(50)
    found = {
        "added": Rows(torch.cat([base.images, torch.ones(1, 1, 8, 8)]), torch.zeros(51).long()),
        "removed": Rows(base.images[:-1], base.labels[:-1]),
    }
    for name, image in (("outlier", 1.0), ("nan", math.nan), ("huge", 1e30)):
        images = base.images.clone()
        images[-1] = image
        found[name] = Rows(images, base.labels)
    return found


@pytest.mark.parametrize("name", neighbours())
def test_what_is_learned_is_a_function_of_the_noised_projections(name):
    """With the releases held the same, a neighbour changes no weight; before noise, one row and no other."""
    ends, totals, released = [], [], []
    for records in (Rows.random(50), neighbours()[name]):
        run = training(records, seed=3, geometry=Geometry.ORTHONORMAL, batch=55)
        release, seen = run.mechanism.release, []

        def recorded(total: Tensor, release=release, seen=seen, first=not totals) -> Tensor:
            out = release(total)
            released.append(out) if first else None
            seen.append(total.double())
            return released[len(seen) - 1].clone()

        run.mechanism.release = recorded
        said = list(run.steps())
        totals.append(seen)
        ends.append((said, run.checkpoint(), run.synthesizer().to_files(), run.diagnostics()))
    assert ends[0][0] == ends[1][0]
    assert all(torch.equal(ends[0][1][key], ends[1][1][key]) for key in ends[0][1])
    assert ends[0][2:] == ends[1][2:]
    moved = [(b - a).view(12, 55).norm(dim=0) for a, b in zip(*totals, strict=True) if not torch.equal(a, b)]
    assert moved
    for columns in moved:
        assert (columns > 0).sum() == 1
        assert columns.max().item() <= 2 * 0.5 * math.sqrt(2) * (1 + 1e-5)


def test_labels_of_private_images_are_not_looked_at():
    ends = []
    for label in (0, 99):
        rows = Rows.random(50)
        rows.labels[:] = label
        run = training(rows, seed=5)
        list(run.steps())
        ends.append(run.synthesizer().to_files())
    assert ends[0] == ends[1]


@pytest.mark.parametrize("count", [0, 3, 100])
def test_batches_have_one_size_and_their_noise(count):
    run = AdaptTrainer(
        plan(noise_multiplier=50.0, directions=300, batch=60),
        Rows.random(count),
        source=Rows.random(200),
        rng=SecureRng(),
        device="cpu",
    )
    run.fix_encoder()
    for batch in run.mechanism.batches(run.records):
        assert len(batch) == 60
        _, projections = run.mechanism.project(run.private_rows(batch))
        assert projections.std().item() / 50.0 == pytest.approx(1, abs=6 / math.sqrt(2 * 300 * 60))


# Going on


@pytest.mark.parametrize("taken", [2, 5])
def test_a_checkpoint_is_continued_to_the_same_number_of_steps(taken):
    first = training()
    going = first.steps()
    for _ in range(taken):
        next(going)
    kept = save(first.checkpoint())
    second = training(seed=8)
    second.restore(load(kept))
    assert [progress.step for progress in second.steps()] == list(range(taken + 1, 8))
    assert second.mechanism.drawn == second.mechanism.released == 4
    second.synthesizer()
    with pytest.raises(ValueError, match="lacks"):
        second.restore({name: value for name, value in load(kept).items() if name != "centre"})


def test_an_unfinished_adaptation_has_no_classifier():
    run = training()
    next(run.steps())
    with pytest.raises(Failure) as failure:
        run.synthesizer()
    assert failure.value.fault is Fault.ACCOUNTING_MISMATCH


def test_the_lens_finds_how_private_images_differ():
    """Public bars are upright or lie, in the middle; private ones are the same, further right and darker."""

    def bars(count: int, shift: int, light: float) -> Rows:
        rows = Rows.random(count, classes=2)
        bar = torch.zeros(8, 8)
        bar[1:6, 2:4] = 1
        both = torch.stack([bar, bar.T]).roll(shift, 2)
        rows.images = 2 * light * both[rows.labels][:, None] - 1 + 0.05 * rows.images
        rows.schema = ImageSchema(height=8, width=8, channels=1, classes=("upright", "lying"))
        return rows

    run = AdaptTrainer(
        plan(
            steps=200, noise_multiplier=0.1, records=300, batch=60,
            recipe=AdaptRecipe(features=4, source_steps=60, lens_rate=2e-2),
        ),
        bars(300, 2, 0.6), source=bars(300, 0, 1.0), rng=SeededRng(2), device="cpu",
    )  # fmt: skip
    distances = [run.diagnostics().get("distance", math.nan) for _ in run.steps()]
    assert np.mean(distances[-10:]) < np.mean(distances[60:65]) / 2
    images = ((run.records.images + 1) * 127.5).clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).numpy()
    assert np.mean(run.synthesizer().predict(images) == run.records.labels.numpy()) > 0.95


def test_a_new_lens_changes_nothing():
    images = torch.rand(5, 3, 9, 12) * 2 - 1
    assert torch.allclose(Lens(3)(images), images, atol=1e-5)


def test_images_of_another_size_are_refused():
    source = Rows.random(20, (1, 9, 8))
    source.schema = ImageSchema(height=9, width=8, channels=1, classes=("a", "b"))
    with pytest.raises(Failure) as failure:
        AdaptTrainer(plan(), Rows.random(5), source=source, rng=SeededRng(0))
    assert failure.value.fault is Fault.SCHEMA_MISMATCH


# Plans and recipes


@pytest.mark.parametrize(
    "odd",
    [
        {"batch": 61},
        {"dim": 0},
        {"row_bound": 0.0},
        {"geometry": "flat"},
        {"geometry": Geometry.ORTHONORMAL, "dim": 7},
    ],
)
def test_odd_plans_are_refused(odd):
    with pytest.raises(InvalidPlan):
        plan(**odd)


@pytest.mark.parametrize(
    "odd", [{"noises": 0}, {"rate": 0}, {"lens_rate": -1}, {"source_steps": 0}, {"seed": 1}]
)
def test_odd_recipes_are_refused(odd):
    with pytest.raises(InvalidPlan):
        AdaptRecipe.from_dict(odd)


def test_recipes_read_back_as_they_were_written():
    for name in ("paper", "fast-cpu"):
        assert AdaptRecipe.from_dict(AdaptRecipe.preset(name).to_dict()) == AdaptRecipe.preset(name)


# What leaves


def classifier() -> Classifier:
    torch.manual_seed(1)
    return Classifier(ClassifierShape(height=9, width=8, channels=3, classes=4, features=4, latent=5))


def test_a_classifier_reads_back_and_predicts_the_same():
    made = classifier()
    images = np.random.default_rng(1).integers(0, 256, (2000, 9, 8, 3), dtype=np.uint8)
    again = Classifier.from_files(made.to_files())
    assert again.to_files() == made.to_files()
    assert np.array_equal(again.predict(images), made.predict(images))
    assert np.array_equal(made.predict(images[:7]), made.predict(images)[:7])
    assert set(made.predict(images)) <= {0, 1, 2, 3}
    with pytest.raises(ValueError, match="uint8"):
        made.predict(images.astype(np.float32))


def test_files_that_hold_anything_else_are_refused():
    files = classifier().to_files()
    tensors = load(files[WEIGHTS])
    first = next(iter(tensors))
    for bad in (
        {**files, WEIGHTS: save({**tensors, "optimizer": torch.zeros(3)})},
        {**files, WEIGHTS: save({name: value for name, value in tensors.items() if name != first})},
        {**files, WEIGHTS: save({**tensors, first: tensors[first] * math.nan})},
        {**files, WEIGHTS: save({**tensors, first: tensors[first].double()})},
        {**files, WEIGHTS: b"\x80\x04pickle"},
        {**files, ARCHITECTURE: b"[]"},
        {**files, ARCHITECTURE: files[ARCHITECTURE].replace(b'"version": 1', b'"version": 2')},
        {**files, ARCHITECTURE: files[ARCHITECTURE].replace(b'"latent": 5', b'"latent": 6')},
        {WEIGHTS: files[WEIGHTS]},
    ):
        with pytest.raises(UnfitSynthesizer):
            Classifier.from_files(bad)


def test_a_classifier_holds_an_encoder_and_a_head_and_no_more():
    run = training()
    list(run.steps())
    left = load(run.synthesizer().to_files()[WEIGHTS])
    assert {name.split(".")[0] for name in left} == {"encoder", "head"}
    assert all(torch.equal(left[name], value) for name, value in run.network.state_dict().items())
