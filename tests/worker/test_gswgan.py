"""GS-WGAN: every record in one part, every part in its turn, and records leave through noised sums alone."""

import math
import os
import resource
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import save
from scipy import stats
from torch import Tensor

from core.faults import Failure, Fault
from core.schema import ImageSchema
from sluice.generators.dct import LowFrequencies
from sluice.methods import plan_from_dict
from sluice.methods.base import Clipping, Target
from sluice.methods.gswgan import GSWGANPlan, GSWGANRecipe
from sluice.privacy.accountant import Accountant
from sluice.privacy.events import Query, Rotation
from sluice.privacy.problems import InvalidPlan
from sluice.privacy.relation import Relation
from tests.fakes import FixedSampler, ImageRows, SeededRng
from worker.mechanisms.clipping import clip_rows
from worker.mechanisms.noise import SecureRng
from worker.mechanisms.sampling import PartRotation
from worker.trainers.gswgan import Discriminators
from worker.trainers.gswgan import Trainer as GSWGANTrainer
from worker.trainers.networks import diversity

SMALL = GSWGANRecipe(
    frequencies=4,
    discriminator_features=4,
    generator_features=8,
    latent=3,
    discriminator_steps=2,
    first_steps=3,
    part_batch=4,
    abreast=3,
)
KEY = bytes(range(32))


class Rows(ImageRows):
    schema = ImageSchema(height=8, width=8, channels=1, classes=("a", "b", "c"))


def plan(**changes: object) -> GSWGANPlan:
    given = {"steps": 6, "noise_multiplier": 1.0, "parts": 8, "panel": 4, "images": 5, "recipe": SMALL}
    return GSWGANPlan(**given | changes)


def training(records: Rows | None = None, *, seed: int = 0, **changes: object) -> GSWGANTrainer:
    rows = records if records is not None else Rows.random(50)
    return GSWGANTrainer(plan(**changes), rows, rng=SeededRng(seed), device="cpu")


def rotation(**changes: object) -> PartRotation:
    given = {"parts": 8, "panel": 4, "batch": 5, "steps": 6, "key": KEY}
    return PartRotation(**given | changes)


# The parts


def test_every_record_is_in_exactly_one_part_and_parts_are_about_even():
    found = rotation(parts=10, panel=1).part_of(20_000)
    assert found.shape == (20_000,)
    assert set(found) == set(range(10))
    spread = np.square(np.bincount(found) - 2000).sum() / 2000  # chi square with 9 degrees of freedom
    assert spread < 40


def test_the_part_of_a_record_does_not_depend_on_who_else_is_there():
    few, many = rotation().part_of(100), rotation().part_of(1000)
    assert np.array_equal(few, many[:100])
    assert not np.array_equal(many, rotation(key=bytes(32)).part_of(1000))


def test_parts_of_more_records_than_are_looked_at_in_one_go(monkeypatch):
    whole = rotation().part_of(1000)
    monkeypatch.setattr("worker.mechanisms.sampling.CHUNK", 64)
    assert np.array_equal(rotation().part_of(1000), whole)


def test_a_key_is_fresh_for_each_training_and_owes_nothing_to_the_records():
    """Drawn from the training's randomness alone: not from records, their number, or the plan."""
    fresh = {
        GSWGANTrainer(plan(), Rows.random(5), rng=SecureRng(), device="cpu").rotation.key for _ in range(5)
    }
    assert len(fresh) == 5
    assert all(len(key) == 32 for key in fresh)
    keys = [training(Rows.random(count), seed=7).rotation.key for count in (50, 51, 0)]
    keys.append(training(seed=7, steps=2, noise_multiplier=3.0).rotation.key)
    assert set(keys) == {training(seed=7).rotation.key}
    assert training(seed=8).rotation.key not in keys


def test_parts_of_records_are_independent_of_each_other():
    """Over many keys, every way to put four neighbouring records into three parts comes up as often."""
    keys = SecureRng().words(4 * 8100).reshape(-1, 4)
    ways = Counter(tuple(rotation(parts=3, panel=1, key=key.tobytes()).part_of(4)) for key in keys)
    assert len(ways) == 81
    assert stats.chisquare(list(ways.values())).pvalue > 1e-6


class Said:
    """Says the words it was given, in turn."""

    def __init__(self, *words: list[int]) -> None:
        self.left = [np.array(some, dtype=np.uint64) for some in words]

    def words(self, count: int) -> np.ndarray:
        assert len(self.left[0]) == count
        return self.left.pop(0)


def test_records_of_a_part_are_drawn_evenly_wherever_they_stand():
    """2^64 is one more than a multiple of three: one of all words would favour the first of three records."""
    sampler = rotation(parts=1, panel=1, batch=4, steps=1)
    said = Said([0, 1, 2**64 - 1, 0], [2, 0], [3])
    assert sampler.draw(3, said).tolist() == [[2, 1, 0, 0]]
    assert not said.left


# The rotation


@pytest.mark.parametrize(("parts", "panel", "steps"), [(8, 1, 24), (8, 4, 6), (8, 8, 5), (6, 2, 9)])
def test_every_part_has_exactly_its_turns(parts, panel, steps):
    sampler = rotation(parts=parts, panel=panel, steps=steps)
    turns = np.bincount(np.concatenate([sampler.turn(step) for step in range(steps)]), minlength=parts)
    assert set(turns) == {steps * panel // parts}
    assert [sampler.turn(step) for step in range(parts // panel)] == [
        range(first, first + panel) for first in range(0, parts, panel)
    ]


def test_a_step_has_rows_of_its_own_parts_alone():
    rows, sampler = Rows.random(300), rotation(steps=8, batch=50)
    part_of = sampler.part_of(300)
    for step in range(sampler.steps):
        batch = sampler.draw(len(rows), SeededRng(step), step)
        assert batch.shape == (4, 50)
        for part, drawn in zip(sampler.turn(step), batch, strict=True):
            assert set(part_of[drawn]) == {part}
            assert len(set(drawn)) > 20  # of about 38, drawn 50 times


def test_a_part_without_records_gives_blank_rows():
    batches = [rotation(parts=8, panel=8, steps=2).draw(3, SeededRng(0), step) for step in range(2)]
    taken = set(rotation(parts=8).part_of(3))
    for batch in batches:
        assert {part for part, drawn in enumerate(batch) if (drawn >= 0).all()} == taken
        assert {part for part, drawn in enumerate(batch) if (drawn == -1).all()} == set(range(8)) - taken


def test_what_a_panel_costs_is_a_rotation_of_panels():
    event = plan(clipping=Clipping.PER_IMAGE).event()
    assert event == Rotation(
        query=Query.FUNCTION, bound=1.0, rows=5, noise_stddev=2 * math.sqrt(5), steps=6, parts=2
    )
    assert plan(panel=1).event().parts == 8


def test_a_plan_whose_panels_do_not_come_out_even_is_refused():
    for panel in (3, 0, 9, 1.0):
        with pytest.raises(InvalidPlan, match="panel"):
            plan(panel=panel)


def test_a_plan_reads_back_as_it_was_written():
    given = plan(clipping=Clipping.PER_IMAGE)
    assert plan_from_dict(given.to_dict()) == given
    assert plan_from_dict({"kind": "gswgan", "steps": 3, "recipe": "paper"}).recipe.first_steps == 2000


# Recipes


@pytest.mark.parametrize(
    "odd",
    [
        {"frequencies": 0},
        {"frequencies": 65},
        {"part_batch": 1},
        {"latent": 0},
        {"abreast": 0},
        {"first_steps": 0},
        {"penalty": 0.0},
        {"variety": -1.0},
        {"generator_rate": 2.0},
        {"average_decay": 1.0},
        {"seed": 3},
        {"penalty": "much"},
    ],
)
def test_odd_recipes_are_refused(odd):
    with pytest.raises(InvalidPlan, match=r"only the fields|out of range|not a number"):
        GSWGANRecipe.from_dict(odd)


def test_recipes_read_back_as_they_were_written():
    for name in GSWGANRecipe.presets:
        recipe = GSWGANRecipe.preset(name)
        assert GSWGANRecipe.from_dict(recipe.to_dict()) == recipe


# The networks


def test_frequencies_are_orthonormal_and_all_of_them_lose_nothing():
    images = torch.rand(4, 3, 9, 8) * 2 - 1
    whole, low = (LowFrequencies(3, 9, 8, count, dtype=torch.float32) for count in (9, 3))
    assert whole.size == 3 * 9 * 8
    assert low.size == 3 * 3 * 3
    lengths = whole.coefficients(images).norm(dim=1)
    assert torch.allclose(lengths, images.flatten(1).norm(dim=1), atol=1e-5)
    kept = whole.coefficients(images).view(4, 3, 9, 8)[:, :, :3, :3].flatten(1)
    assert torch.allclose(low.coefficients(images), kept, atol=1e-6)


def several(count: int = 3) -> Discriminators:
    torch.manual_seed(1)
    return Discriminators(torch.randn(count, (6 + 3 + 2) * 5), inputs=6, classes=3)


def test_gradients_are_those_of_the_scores():
    made = several()
    x, labels = torch.randn(3, 7, 6, requires_grad=True), torch.randint(3, (3, 7))
    (expected,) = torch.autograd.grad(made.scores(x, labels).sum(), x)
    assert torch.allclose(made.gradients(x, labels), expected, atol=1e-6)


def test_the_penalty_moves_weights_as_double_backward_does():
    made = several()
    x, labels = torch.randn(3, 7, 6, requires_grad=True), torch.randint(3, (3, 7))
    (through,) = torch.autograd.grad(made.scores(x, labels).sum(), x, create_graph=True)
    weights = (made.body, made.score, made.label)
    ways = [
        torch.autograd.grad((steep.norm(dim=2) - 1).square().sum(), weights)
        for steep in (through, made.gradients(x, labels))
    ]
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(*ways, strict=True))


def test_discriminators_side_by_side_share_nothing():
    """Not a bit of the second changes when the first is given numbers that are none."""
    made, poisoned = several(), several()
    with torch.no_grad():
        poisoned.body[0] = math.nan
    x, labels = torch.randn(3, 7, 6), torch.randint(3, (3, 7))
    for of in ("scores", "gradients"):
        one, other = getattr(made, of)(x, labels), getattr(poisoned, of)(x, labels)
        assert torch.equal(one[1:], other[1:])
        assert not other[0].isfinite().any()


def test_a_discriminator_learns_to_tell_its_part_from_fakes():
    rows = Rows.random(200)
    rows.images[:] = 0.9
    run = training(rows, recipe=replace(SMALL, first_steps=60, discriminator_rate=0.01), panel=8)
    next(run.steps())
    assert run.diagnostics()["score_gap"] > 0.3


# A step


@pytest.mark.parametrize("clipping", [*Clipping][:2])
@pytest.mark.parametrize("records", [50, 3])
def test_what_is_noised_is_the_sum_of_clipped_answers(clipping, records):
    """Each discriminator's answer clipped by itself, all of the panel summed, noised once.

    The plain sum, also where most parts have no records.
    """
    run = training(Rows.random(records), clipping=clipping, clip_norm=0.01)
    totals: list[Tensor] = []
    seen: list[tuple[Tensor, Tensor]] = []
    release, answers = run.mechanism.release, run.answers
    run.mechanism.release = lambda total: totals.append(total.clone()) or release(total)
    run.answers = lambda batch, x, labels: seen.append((x, labels)) or answers(batch, x, labels)
    for step, _ in enumerate(run.steps()):
        turn = run.rotation.turn(step)
        mine = Discriminators(run.discriminators[turn[0] : turn[-1] + 1].clone(), inputs=16, classes=3)
        (x, labels), expected = seen[step], torch.zeros(5 * 16, dtype=torch.float64)
        uphill = mine.gradients(x.expand(4, -1, -1), labels.expand(4, -1)).detach()
        for answer in -uphill:
            rows = answer if clipping is Clipping.PER_IMAGE else answer.flatten()[None]
            clipped, norms = clip_rows(rows, run.mechanism.clip_norm)
            assert norms.max() > 0.01
            assert clipped.norm(dim=1).max() <= run.mechanism.clip_norm < 0.01
            expected += clipped.flatten()
        assert torch.allclose(totals[step], expected, atol=1e-9)
    assert run.mechanism.released == 6


def test_the_generator_follows_the_noised_answers_uphill():
    """One step along a gradient without noise raises the score that it came from."""
    run = training(recipe=replace(SMALL, generator_rate=1e-3))
    latents, labels = run.latents(30)
    torch.manual_seed(2)
    made = Discriminators(torch.randn(1, run.discriminators.shape[1]), inputs=16, classes=3)

    def score() -> tuple[Tensor, Tensor, Tensor]:
        images = run.generator(latents, labels)
        x = run.inputs(images)
        return images, x, made.scores(x[None], labels[None]).mean()

    images, x, before = score()
    (uphill,) = torch.autograd.grad(before, x, retain_graph=True)
    run.follow(images, x, -uphill)
    assert score()[2] > before


def test_images_shown_are_pairs_of_a_label_and_all_labels_come_up():
    run = training()
    assert run.generated == 6
    met: set[int] = set()
    for _ in range(30):
        labels = run.latents(6)[1]
        assert torch.equal(labels[:3], labels[3:])
        met |= set(run.latents(2)[1].tolist())
    assert met == {0, 1, 2}


def test_variety_is_rewarded():
    """Without any word of the discriminators, images of one label move apart."""
    apart = []
    for variety in (0.0, 1.0):
        run = training(recipe=replace(SMALL, variety=variety, generator_rate=1e-2))
        for _ in range(20):
            images = run.generator(*run.latents(30))
            run.follow(images, run.inputs(images), torch.zeros(30, 16))
        apart.append(diversity(images).item())
    assert apart[1] > 2 * apart[0]


def test_the_first_turn_of_each_discriminator_is_longer():
    run = training()
    counts: list[int] = []
    learn = run.learn
    run.learn = lambda several, real, kinds, present, fakes: (
        counts.append(len(fakes)) or learn(several, real, kinds, present, fakes)
    )
    list(run.steps())
    assert counts == [3, 3] * 2 + [2, 2] * 4  # two lots of discriminators a step, abreast


def test_only_those_whose_turn_it_is_learn():
    run = training()
    before = run.discriminators.clone()
    for step, _ in zip(range(2), run.steps(), strict=False):
        moved = (run.discriminators != before).any(1).nonzero().flatten().tolist()
        assert moved == list(run.rotation.turn(step))
        before = run.discriminators.clone()


def test_how_many_are_abreast_changes_nothing():
    ends = []
    for abreast in (1, 3, 100):
        run = training(recipe=replace(SMALL, abreast=abreast))
        with torch.no_grad():
            run.discriminators.copy_(training().discriminators)
        totals: list[Tensor] = []
        run.shares = lambda *shape: torch.full(shape, 0.5)
        release = run.mechanism.release
        run.mechanism.release = lambda total, release=release, totals=totals: (
            totals.append(total.clone()) or release(total)
        )
        next(run.steps())
        ends.append(totals[0])
    assert torch.allclose(ends[0], ends[2], atol=1e-5)
    assert torch.allclose(ends[1], ends[2], atol=1e-5)


# Neighbours


class Recorded:
    """Keeps what was about to be noised, and says again what was released before."""

    def __init__(self, run: GSWGANTrainer, replay: list[Tensor] | None = None) -> None:
        self.totals: list[Tensor] = []
        self.released: list[Tensor] = []
        release = run.mechanism.release

        def recorded(total: Tensor) -> Tensor:
            self.totals.append(total.clone())
            out = release(total)
            if replay is not None:
                out = replay[len(self.released)].clone()
            self.released.append(out.clone())
            return out

        run.mechanism.release = recorded


def neighbours() -> list[tuple[str, Rows]]:
    base = Rows.random(50)
    added = Rows(
        torch.cat([base.images, torch.ones(1, 1, 8, 8)]), torch.cat([base.labels, torch.tensor([2])])
    )
    found = [("added", added), ("removed", Rows(base.images[:-1], base.labels[:-1]))]
    for name, image, label in (
        ("outlier", 1.0, 0),
        ("class", 0.3, 99),
        ("nan", math.nan, 0),
        ("huge", 1e30, -7),
    ):
        images, labels = base.images.clone(), base.labels.clone()
        images[-1], labels[-1] = image, label
        found.append((name, Rows(images, labels)))
    return found


@pytest.mark.parametrize("clipping", [*Clipping][:2])
@pytest.mark.parametrize(("name", "rows"), neighbours(), ids=[name for name, _ in neighbours()])
def test_records_reach_the_generator_through_noised_sums_alone(name, rows, clipping):
    """With the releases held the same nothing public moves, and sums by at most what was declared."""

    def run_on(records: Rows, replay: list[Tensor] | None) -> tuple[GSWGANTrainer, Recorded, list[object]]:
        run = training(records, steps=8, clipping=clipping, clip_norm=0.05, seed=3)
        watched = Recorded(run, replay)
        said = list(run.steps())
        return run, watched, said

    one, first, said = run_on(Rows.random(50), None)
    other, second, said_too = run_on(rows, first.released)
    assert said == said_too
    assert one.synthesizer().to_files() == other.synthesizer().to_files()
    handed, handed_too = one.handed_on(), other.handed_on()
    assert all(torch.equal(handed[key], handed_too[key]) for key in handed)
    index = {"added": 50}.get(name, 49)
    part = one.rotation.part_of(51)[index]
    kept, kept_too = one.checkpoint(), other.checkpoint()
    for key in kept:
        if key == "discriminator.weights":
            changed = (kept[key] != kept_too[key]).any(1).nonzero().flatten().tolist()
            assert changed == [part]
        else:
            assert torch.equal(kept[key], kept_too[key])
    bound = 2 * one.plan.clip_norm * math.sqrt(one.plan.rows)
    gaps = [(a - b).norm().item() for a, b in zip(first.totals, second.totals, strict=True)]
    assert max(gaps) <= bound
    assert max(gaps) > 0
    # The record's own panel answers in every second step; in the others it has no say.
    assert all(gap == 0 for step, gap in enumerate(gaps) if part not in one.rotation.turn(step))


@pytest.mark.parametrize("clipping", [*Clipping][:2])
def test_a_record_in_a_part_without_others_changes_that_part_alone(clipping):
    """Three records in eight parts, and a fourth: how many parts have records is nothing to the others."""
    four = Rows.random(4)
    ends: list[tuple[GSWGANTrainer, Recorded]] = []
    for rows in (Rows(four.images[:3], four.labels[:3]), four):
        run = training(rows, steps=8, clipping=clipping, clip_norm=0.05, seed=8)
        watched = Recorded(run, ends[0][1].released if ends else None)
        list(run.steps())
        ends.append((run, watched))
    (one, first), (other, second) = ends
    part = one.rotation.part_of(4)[3]
    assert part not in one.rotation.part_of(3)
    weights = [run.checkpoint()["discriminator.weights"] for run in (one, other)]
    assert (weights[0] != weights[1]).any(1).nonzero().flatten().tolist() == [part]
    gaps = [(a - b).norm().item() for a, b in zip(first.totals, second.totals, strict=True)]
    assert 0 < max(gaps) <= 2 * one.plan.clip_norm * math.sqrt(one.plan.rows)
    assert all(gap == 0 for step, gap in enumerate(gaps) if part not in one.rotation.turn(step))


def test_an_answer_depends_on_the_records_drawn_and_not_on_where_they_stand():
    """The same records are drawn from a dataset in another order, with others in between: nothing differs."""
    base, others = Rows.random(40), Rows.random(33)
    order = torch.randperm(73, generator=torch.Generator().manual_seed(1))
    mixed = Rows(
        torch.cat([base.images, others.images])[order], torch.cat([base.labels, others.labels])[order]
    )
    where = np.append(order.argsort()[:40].numpy(), -1)  # the last one is for blank rows
    sampler, rng = rotation(batch=4, steps=6, parts=8), SeededRng(5)
    batches = [sampler.draw(40, rng, step) for step in range(6)]
    batches[1][2] = batches[4][0] = -1
    ends = []
    for rows, drawn in ((base, batches), (mixed, [where[batch] for batch in batches])):
        run = training(rows, seed=3)
        run.mechanism.sampler = FixedSampler(*drawn, steps=6)
        watched = Recorded(run)
        said = list(run.steps())
        ends.append((watched.totals, said, run.checkpoint(), run.synthesizer().to_files()))
    (totals, *_), (totals_too, *_) = ends
    assert all(torch.equal(one, other) for one, other in zip(totals, totals_too, strict=True))
    assert all(torch.equal(ends[0][2][key], ends[1][2][key]) for key in ends[0][2])
    assert (ends[0][1], ends[0][3]) == (ends[1][1], ends[1][3])


def test_what_is_handed_on_is_the_generator_and_nothing_of_a_part():
    first, second = training(seed=1), training(seed=2)
    list(first.steps())
    handed = first.handed_on()
    assert {name.split(".")[0] for name in handed} == {"generator", "average", "generator_optimizer"}
    kept = second.discriminators.clone()
    second.take_over(handed)
    again = second.handed_on()
    assert all(torch.equal(handed[name], again[name]) for name in handed)
    assert torch.equal(second.discriminators, kept)
    assert second.rotation.key != first.rotation.key
    list(second.steps())
    assert second.synthesizer().to_files() != first.synthesizer().to_files()


@pytest.mark.parametrize("change", ["less", "more", "another shape"])
def test_what_does_not_fit_is_not_taken_over(change):
    handed = training().handed_on()
    name = next(name for name in handed if handed[name].ndim == 2)
    if change == "less":
        del handed[name]
    else:
        handed |= {"more": torch.zeros(1)} if change == "more" else {name: handed[name].T[:1]}
    with pytest.raises(Failure) as failure:
        training().take_over(handed)
    assert failure.value.fault is Fault.SCHEMA_MISMATCH


def test_one_record_can_move_a_sum_about_as_far_as_is_paid_for():
    """The factor two is no courtesy: a part of one record and the opposite record."""
    totals = []
    for shade in (-1.0, 1.0):
        rows = Rows(torch.full((1, 1, 8, 8), shade), torch.tensor([0]))
        run = GSWGANTrainer(
            plan(
                parts=1,
                panel=1,
                steps=1,
                images=2,
                clip_norm=1e-3,
                recipe=replace(SMALL, first_steps=50, discriminator_rate=0.001),
            ),
            rows,
            rng=SeededRng(5),
            device="cpu",
        )
        watched = Recorded(run)
        list(run.steps())
        totals.append(watched.totals[0])
    assert (totals[0] - totals[1]).norm() > 1.2e-3


def test_parts_without_anybody_answer_too():
    run = training(Rows.random(0))
    assert len(list(run.steps())) == 6
    run = training(Rows.random(1), parts=8, panel=8)
    next(run.steps())
    assert run.diagnostics()["answer_norm"] > 0


def test_a_plan_whose_event_says_otherwise_is_refused(monkeypatch):
    cheaper = plan(panel=1).event()
    monkeypatch.setattr(GSWGANPlan, "event", lambda self: cheaper)
    with pytest.raises(Failure) as failure:
        training()
    assert failure.value.fault is Fault.ACCOUNTING_MISMATCH


def test_a_checkpoint_keeps_the_parts():
    """Another partition would spread what discriminators know over more records than were paid for."""
    first, second = training(seed=1), training(seed=2)
    assert first.rotation.key != second.rotation.key
    next(first.steps())
    second.restore(first.checkpoint())
    assert second.rotation.key == first.rotation.key
    assert torch.equal(second.discriminators, first.discriminators)
    part_of = first.rotation.part_of(50)
    assert set(part_of[second.mechanism.draw(second.records).flatten()]) <= set(first.rotation.turn(1))


def test_weights_that_are_no_numbers_are_a_fault():
    run = training()
    list(run.steps())
    with torch.no_grad():
        run.generator.average.norms[0].weight[0] = math.nan
    with pytest.raises(Failure) as failure:
        run.synthesizer()
    assert failure.value.fault is Fault.DIVERGED


def test_only_the_generator_leaves():
    run = training()
    list(run.steps())
    names = set(run.synthesizer().network.state_dict())
    assert names == {f"{layer}.{of}" for layer in ("body.0", "body.1", "pixels") for of in ("weight", "bias")}


# The cost


def test_a_thousand_parts_in_turn_cost_what_twenty_answers_do():
    target = Target(epsilon=10, delta=1e-5, relation=Relation.ADD_REMOVE, accountant=Accountant.RENYI)
    alone = GSWGANPlan(steps=20_000).calibrated(target)
    together = GSWGANPlan(steps=20, panel=1000).calibrated(target)
    assert alone.noise_multiplier == together.noise_multiplier
    assert alone.noise_multiplier == pytest.approx(2.24, rel=0.06)


def test_a_thousand_discriminators_of_the_paper_stay_within_two_gigabytes():
    """On disk but for those whose turn it is, checkpoint and all; a child has its peak to itself."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            rows = ImageRows.random(2000, (1, 28, 28), classes=10)
            rows.schema = ImageSchema(height=28, width=28, channels=1, classes=tuple("0123456789"))
            recipe = replace(GSWGANRecipe.preset("paper"), first_steps=1)
            run = training(rows, parts=1000, panel=1, steps=3, recipe=recipe)
            list(run.steps())
            kept = save(run.checkpoint())
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
            os.write(writing, f"{grown * 1024} {len(kept)}".encode())
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading) as answer:
        grown, size = map(int, answer.read().split())
    os.waitpid(child, 0)
    assert size > 200e6
    assert grown < 1.5e9
