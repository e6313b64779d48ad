"""An atlas sees records through noised sums alone, and its sums are what it says they are."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from core.faults import Failure, Fault
from core.schema import ImageSchema
from sluice.generators.architecture import UnfitSynthesizer
from sluice.generators.atlas import UNIT, Atlas, AtlasNetwork, Cosines, Poses, elementwise, on_grid
from sluice.generators.image import ImageSynthesizer
from sluice.methods.atlas import AtlasPlan, AtlasRecipe
from sluice.privacy.accountant import Accountant
from sluice.privacy.events import Gaussian, Query
from sluice.privacy.problems import InvalidPlan
from sluice.privacy.relation import Relation
from tests.fakes import ImageRows, SeededRng
from worker.mechanisms.clipping import ROOM
from worker.mechanisms.noise import SecureRng
from worker.trainers import atlas
from worker.trainers.atlas import STEP, clip_exactly, packed, packing_weights, shrink, unpacked
from worker.trainers.atlas import Trainer as AtlasTrainer

# With edges that are never too bright, so that random images are set upright too.
SMALL = AtlasRecipe(frequencies=5, axes=4, edge=10.0)


class Rows(ImageRows):
    schema = ImageSchema(height=8, width=8, channels=1, classes=("a", "b", "c"))


def plan(**changes: object) -> AtlasPlan:
    rounds = changes.get("rounds", 2)
    return AtlasPlan(**{"steps": rounds + 4, "rounds": 2, "charts": 2, "noise_multiplier": 1.0} | changes)


def training(records: Rows | None = None, *, rng=None, recipe: AtlasRecipe = SMALL, **changes: object):
    rows = records if records is not None else Rows.random(50)
    return AtlasTrainer(plan(**changes), rows, rng=rng or SeededRng(0), recipe=recipe, device="cpu")


# What it costs


def test_all_sums_together_cost_one_gaussian():
    """Squares of the bounds add to one: the adaptive composition is one release with this multiplier."""
    for given in (plan(noise_multiplier=2.0), AtlasPlan(noise_multiplier=2.0)):
        assert sum(given.bound(name) ** 2 * steps for name, steps in given.stages.items()) == pytest.approx(1)
        whole = Gaussian(query=Query.SUM, bound=1.0, noise_stddev=2.0, steps=1)
        parts = given.event().events
        assert [part.steps for part in parts] == list(given.stages.values())
        assert sum(part.steps for part in parts) == given.steps
        reading = given.reading(delta=1e-5, relation=Relation.ADD_REMOVE, accountant=Accountant.RENYI)
        from sluice.privacy.accountant import epsilon

        alone = epsilon(whole, delta=1e-5, relation=Relation.ADD_REMOVE, accountant=Accountant.RENYI)
        assert reading.epsilon == pytest.approx(alone.epsilon, rel=1e-6)


@pytest.mark.parametrize(
    "odd",
    [{"steps": 5}, {"steps": 7}, {"rounds": 0}, {"charts": 0}, {"charts": 1001}, {"rounds": 2, "steps": 8}],
)
def test_plans_whose_steps_are_not_their_stages_are_refused(odd):
    with pytest.raises(InvalidPlan):
        plan(**odd)


@pytest.mark.parametrize(
    "odd",
    [
        {"axes": 0},
        {"axes": 2000},
        {"frequencies": 65},
        {"whitening": 2.0},
        {"reach": 0.0},
        {"edge": "dark"},
        {"edge": -1.0},
        {"seed": 1},
    ],
)
def test_odd_recipes_are_refused(odd):
    with pytest.raises(InvalidPlan, match=r"only the fields|out of range|not a number"):
        AtlasRecipe.from_dict(odd)


def test_recipes_read_back_as_they_were_written():
    for name in ("fast-cpu", "paper", "demo"):
        recipe = AtlasRecipe.preset(name)
        assert AtlasRecipe.from_dict(recipe.to_dict()) == recipe


# The sums


def hostile() -> Rows:
    """Plain records, flat ones, extremes, and labels of all classes."""
    rows = Rows.random(40)
    rows.images[:8] = torch.tensor([-1.0, 1.0]).repeat(4)[:, None, None, None]
    rows.images[8:16] = rows.images[8:16].sign()
    rows.images[16:20] *= 1e30
    rows.images[20, 0, 0, 0] = -1e-30
    return rows


@pytest.mark.parametrize("step", range(1, 7))
def test_one_record_adds_no_more_than_one(step):
    """Before it is scaled to its bound, whatever was released before and however unlike the others it is."""
    run = training(rng=SeededRng(step), noise_multiplier=0.3)
    steps = run.steps()
    for _ in range(step - 1):
        next(steps)
    stage = run.mechanism.stage
    run.records = hostile()
    for record in range(40):
        total = run.total(stage, np.array([record])) * run.weights[stage]
        assert total.norm() <= 1 + 1e-14
        assert total.norm() > 0
        # As it is noised: with room for the grid within what is paid for, and nothing beyond.
        clip_norm = run.mechanism.stages[stage].clip_norm
        assert (total * clip_norm * (1 - ROOM)).norm() <= clip_norm < run.plan.bound(stage)


class Recorded:
    """Keeps what was summed and released; replays what was released before."""

    def __init__(self, run: AtlasTrainer, replay: list[Tensor] | None = None) -> None:
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


def neighbours() -> dict[str, Rows]:
    base = Rows.random(50)
    found = {
        "added": Rows(
            torch.cat([base.images, torch.ones(1, 1, 8, 8)]), torch.cat([base.labels, torch.tensor([2])])
        ),
        "removed": Rows(base.images[:-1], base.labels[:-1]),
    }
    for name, image, label in (
        ("outlier", 1.0, 0),
        ("class", 0.3, 2),
        ("stranger", 0.3, 99),
        ("nan", math.nan, 0),
        ("huge", 1e30, 1),
    ):
        images, labels = base.images.clone(), base.labels.clone()
        images[-1], labels[-1] = image, label
        found[name] = Rows(images, labels)
    return found


@pytest.mark.parametrize("name", neighbours())
def test_records_reach_it_through_noised_sums_alone(name):
    """With the releases held the same, a neighbour changes nothing else, and sums by at most their bounds."""

    def run_on(records: Rows, replay: list[Tensor] | None):
        run = training(records, rng=SeededRng(3), noise_multiplier=0.5)
        watched = Recorded(run, replay)
        return run, watched, list(run.steps())

    one, first, said = run_on(Rows.random(50), None)
    other, second, said_too = run_on(neighbours()[name], first.released)
    assert said == said_too
    kept, kept_too = one.checkpoint(), other.checkpoint()
    assert all(torch.equal(kept[key], kept_too[key]) for key in kept)
    assert one.synthesizer().to_files() == other.synthesizer().to_files()
    # One that is no number counts as absent.
    times = 1 if name in ("added", "removed", "nan") else 2
    stages = [stage for stage, steps in one.plan.stages.items() for _ in range(steps)]
    gaps = [(a - b).norm().item() for a, b in zip(first.totals, second.totals, strict=True)]
    assert all(gap <= times * one.plan.bound(stage) for gap, stage in zip(gaps, stages, strict=True))
    assert all(gap > 0 for gap in gaps)


# Nobody beside it changes what a record adds, not in the last bit


class Digits(Rows):
    schema = ImageSchema(height=28, width=28, channels=1, classes=("a", "b", "c"))


def awkward(kind: type[Rows]) -> Rows:
    """Plain records, flat ones, extremes, dots, one that is no number, and one that is there often."""
    shape = (kind.schema.channels, kind.schema.height, kind.schema.width)
    random = Rows.random(70, shape)
    images, labels = random.images, random.labels
    images[1:7] = torch.tensor([-1.0, 1.0, 0.0, 1e-7, 1e30, -1e-30])[:, None, None, None]
    images[7:12] = images[7:12].sign()
    images[12:17] = -1.0
    images[12:17, :, 3, [0, 2, 4, 6, 7]] = 1.0
    images[17] *= 1e30
    images[18, 0, 0, 0] = math.nan
    images[19], labels[19] = images[20], 99
    # As good as the same, so that all of them lie between two charts if one does.
    images[40:], labels[40:] = images[40], labels[40]
    images[45:, 0, 2, 2] += torch.linspace(-1e-4, 1e-4, 25)
    return kind(images, labels)


def lay_between(run: AtlasTrainer, record: int) -> None:
    """Moves the first two charts of a record's class to either side of it, equally far."""
    [part] = run.batches(np.array([record]), upright=True)
    [place], label = run.chart_coordinates(part) * run.chart_reach, part.labels
    aside = 0.3 * run.chart_reach * torch.linspace(-1, 1, run.axes).double()
    run.learned["centres"][label, :2] = torch.stack([place + aside, place - aside])


def before(step: int, kind: type[Rows], **changes: object) -> tuple[AtlasTrainer, str]:
    """A training on awkward records that is about to take a step, and the stage of it."""
    recipe = SMALL if kind is Rows else AtlasRecipe(edge=10.0)
    run = training(awkward(kind), rng=SeededRng(step), recipe=recipe, **changes)
    steps = run.steps()
    for _ in range(step - 1):
        next(steps)
    return run, run.mechanism.stage


@pytest.mark.parametrize("kind", [Rows, Digits])
@pytest.mark.parametrize("noise", [0.1, 1e4])
@pytest.mark.parametrize("step", range(1, 7))
def test_what_a_record_adds_is_its_own_to_the_last_bit(step, noise, kind, monkeypatch):
    """In parts of any size, at any place of them, and whoever is missing."""
    run, stage = before(step, kind, noise_multiplier=noise, charts=3)
    laid = stage in ("centres", "shapes")
    if laid:
        lay_between(run, 40)

    def seen(order: np.ndarray) -> list[Tensor]:
        """All that is made of records on the way to what they add."""
        found = []
        for part in run.batches(order, upright=stage != "poses"):
            rows = [part.vectors, part.labels]
            if stage == "spread":
                rows.append(clip_exactly(run.deviations(part) / run.learned["reach"]))
            if laid:
                places = run.chart_coordinates(part)
                rows += [places, run.nearest_chart(places, part.labels), clip_exactly(places)]
            found.append(rows)
        return [torch.cat(rows) for rows in zip(*found, strict=True)]

    everyone = np.delete(np.arange(70), 18)
    monkeypatch.setattr(atlas, "CHUNK", 1)
    alone, made = torch.stack([run.total(stage, np.array([one])) for one in range(70)]), seen(everyone)
    assert (alone[18] == 0).all()
    assert all((alone[one] != 0).any() for one in everyone)
    whole = (alone / STEP**2).long()
    assert torch.equal(whole.double() * STEP**2, alone)
    shuffled = np.random.default_rng(1).permutation(70)
    for many in (2, 17, 70):
        monkeypatch.setattr(atlas, "CHUNK", many)
        for order in (
            np.arange(70),
            np.arange(1, 70),
            np.arange(33, 70),
            np.arange(70)[::-1].copy(),
            shuffled,
        ):
            # Whole numbers of 64 bits: no rounding that could hide a difference.
            assert torch.equal((run.total(stage, order) / STEP**2).long(), whole[order].sum(0))
            kept = torch.from_numpy(np.searchsorted(everyone, order[order != 18]))
            assert all(torch.equal(new, old[kept]) for new, old in zip(seen(order), made, strict=True))


@pytest.mark.parametrize("kind", [Rows, Digits])
def test_a_record_between_two_charts_is_counted_on_the_first(kind):
    run, _ = before(4, kind, noise_multiplier=0.1, charts=3)
    lay_between(run, 40)
    [part] = run.batches(np.arange(70), upright=True)
    places = run.chart_coordinates(part)[39:44]  # one is no number
    label = int(part.labels[39])
    nearest = (places[:, None] - run.chart_centres[label]).square().sum(2)
    assert (nearest[:, 0] == nearest[:, 1]).all()
    assert (nearest[:, 2] > nearest[:, 1]).all()
    assert (run.nearest_chart(places, part.labels[39:44]) == label * 3).all()


@pytest.mark.parametrize("kind", [Rows, Digits])
def test_without_its_first_record_every_sum_is_smaller_by_what_that_one_adds(kind, monkeypatch):
    """All others move up by one, into other parts; what was released is held the same."""
    monkeypatch.setattr(atlas, "CHUNK", 16)
    totals: list[Tensor] = []
    plain = AtlasTrainer.total

    def watched(self: AtlasTrainer, stage: str, everyone: np.ndarray) -> Tensor:
        total = plain(self, stage, everyone)
        # The other training has released the same, so that the first record would add the same there.
        totals.extend([total, plain(self, stage, np.array([0]))])
        return total

    monkeypatch.setattr(AtlasTrainer, "total", watched)
    rows = awkward(kind)
    recipe = SMALL if kind is Rows else AtlasRecipe(edge=10.0)
    one = training(rows, rng=SeededRng(3), recipe=recipe, noise_multiplier=0.5)
    first = Recorded(one)
    list(one.steps())
    whole, alone, totals = totals[::2], totals[1::2], []
    other = training(
        kind(rows.images[1:], rows.labels[1:]), rng=SeededRng(3), recipe=recipe, noise_multiplier=0.5
    )
    Recorded(other, first.released)
    list(other.steps())
    assert len(whole) == 6
    for total, part, less in zip(whole, alone, totals[::2], strict=True):
        assert torch.equal(total - part, less)


def test_coordinates_of_the_largest_images_are_exact():
    """Compared with sums of whole numbers of 64 bits, of images that make sums as large as they get."""
    slow, poses = Cosines(3, 64, 64, 64), Poses(3, 64, 64)
    hardest = (slow.rows[::100] > 0).float().view(-1, 1, 64, 64).expand(-1, 3, 64, 64)
    images = torch.cat([hardest, torch.ones(1, 3, 64, 64), torch.rand(5, 3, 64, 64)])
    pixels, rows = ((on_grid(numbers) / UNIT).long() for numbers in (images, slow.rows))
    exact = (pixels.flatten(2)[:, :, None] * rows[::50]).sum(3)
    assert torch.equal(slow.of(images).unflatten(1, (3, -1))[..., ::50] / UNIT**2, exact.double())
    assert exact.abs().max() < 2**53
    down = 2 * torch.arange(64)[:, None] - 63
    squares = (pixels.sum(1) * down * down).sum((1, 2))
    assert torch.equal(poses.moments(images)[:, 5] * 64**2 / UNIT, squares.double())


@pytest.mark.parametrize("noise", [0.1, 1e4])
def test_places_are_exact_whatever_was_released(noise):
    """Compared with sums of whole numbers, as above."""
    run, _ = before(4, Digits, noise_multiplier=noise)
    [part] = run.batches(np.arange(70), upright=True)
    for numbers in (part.vectors, run.deviations(part)):
        assert torch.equal(on_grid(numbers), numbers)
    apart, directions = (
        (on_grid(numbers) / UNIT).long()
        for numbers in (run.deviations(part), run.learned["directions"][:, : run.axes])
    )
    exact = (apart[:, :, None] * directions).sum(1)
    assert torch.equal(run.axis_coordinates(part) / UNIT**2, exact.double())
    assert run.deviations(part).norm(dim=1).max() < 2**10
    assert exact.abs().max() < 2**53


def test_functions_are_taken_of_one_number_at_a_time():
    """PyTorch's own differ from these in the last bit, for some numbers."""
    numbers = torch.rand(20_000, generator=torch.Generator().manual_seed(1)).double()
    for function in (math.sqrt, math.log, math.exp):
        expected = torch.tensor([function(number) for number in numbers.tolist()], dtype=torch.float64)
        assert torch.equal(elementwise(function, numbers), expected)


def test_clipped_rows_are_what_plain_arithmetic_makes_of_each():
    source = torch.Generator().manual_seed(2)
    sizes = 10.0 ** torch.randint(-9, 9, (300, 1), generator=source)
    rows = torch.randn(300, 137, generator=source).double() * sizes
    rows[:5] = torch.tensor([0.0, math.nan, math.inf, 1e300, 1e-300], dtype=torch.float64)[:, None]
    rows[5, 7] = -math.inf
    found = clip_exactly(rows)
    assert found.norm(dim=1).max() <= 1 + 1e-14
    assert (found[[0, 1, 2, 4, 5]] == 0).all()
    for row, given in zip(found.tolist()[6:], rows.tolist()[6:], strict=True):
        largest = max(abs(number) for number in given)
        scaled = [round(number / largest / STEP) for number in given]
        length = math.sqrt(sum(number * number for number in scaled)) * STEP
        longest = 1 - STEP / 2 * math.sqrt(137)
        assert row == [round(number * min(largest, longest / length)) * STEP for number in scaled]
        assert math.dist(row, [number / max(1, math.hypot(*given)) for number in given]) < 2 * STEP * 137**0.5


def test_every_sum_gets_the_noise_that_was_planned():
    """Nobody is there: what is released is noise of the planned strength, in every stage."""
    run = training(Rows.random(0), rng=SecureRng(), noise_multiplier=7.0)
    watched = Recorded(run)
    list(run.steps())
    together = torch.cat(watched.released)
    assert abs(together.std().item() / 7.0 - 1) < 6 / math.sqrt(2 * len(together))
    assert [len(noise) for noise in watched.released] == [
        stage.noise.size for stage in run.mechanism.stages.values() for _ in range(stage.steps)
    ]
    assert not torch.equal(watched.released[3], watched.released[4])


def test_a_continued_training_draws_only_what_is_left_of_each_stage():
    first = training()
    steps = first.steps()
    for _ in range(3):
        next(steps)
    second = training(rng=SeededRng(9))
    second.restore(first.checkpoint())
    watched = Recorded(second)
    assert [progress.step for progress in second.steps()] == [4, 5, 6]
    assert {name: stage.released for name, stage in second.mechanism.stages.items()} == second.plan.stages
    assert [len(noise) for noise in watched.released] == [
        second.mechanism.stages[stage].noise.size for stage in ("centres", "centres", "shapes")
    ]
    with pytest.raises(Failure) as failure:
        second.mechanism.release(torch.zeros(3))
    assert failure.value.fault is Fault.ACCOUNTING_MISMATCH


def test_records_that_are_no_images_of_these_sizes_are_refused():
    rows = Rows.random(5)
    rows.schema = ImageSchema(height=100, width=8, classes=("a",))
    with pytest.raises(Failure) as failure:
        training(rows)
    assert failure.value.fault is Fault.SCHEMA_MISMATCH


def test_weights_that_are_no_numbers_are_a_fault():
    run = training()
    list(run.steps())
    run.learned["centres"][0, 0, 0] = math.nan
    with pytest.raises(Failure) as failure:
        run.synthesizer()
    assert failure.value.fault is Fault.DIVERGED


# What is made of them, where noise is next to nothing


def clear(count: int = 3000) -> Rows:
    """Classes with means and spreads of their own, and no pixel near black or white."""
    source = torch.Generator().manual_seed(5)
    labels = torch.randint(3, (count,), generator=source)
    patterns = torch.randn(3, 64, generator=source) * 0.15
    along = torch.randn(3, 64, generator=source) * 0.1
    strength = torch.randn(count, 1, generator=source)
    images = patterns[labels] + strength * along[labels] + 0.02 * torch.randn(count, 64, generator=source)
    return Rows(images.view(-1, 1, 8, 8).clamp(-1, 1), labels)


def clear_training(records: Rows | None = None, *, edge: float = 0.0, **changes: object) -> AtlasTrainer:
    recipe = AtlasRecipe(axes=10, reach=10.0, edge=edge)
    given = {"noise_multiplier": 1e-3, "charts": 1} | changes
    run = training(records if records is not None else clear(), recipe=recipe, **given)
    list(run.steps())
    return run


def test_means_and_directions_are_those_of_the_records():
    run, rows = clear_training(), clear()
    vectors = run.coordinates((rows.images + 1) / 2, rows.labels, upright=True).double()
    means = torch.stack([vectors[rows.labels == label].mean(0) for label in range(3)])
    assert torch.allclose(run.learned["means"], means, atol=2e-3)
    assert torch.allclose(run.learned["counts"], torch.bincount(rows.labels).double(), atol=0.5)
    apart = vectors - means[rows.labels]
    squares = torch.linalg.eigvalsh(apart.T @ apart / len(apart)).flip(0)
    assert torch.allclose(run.learned["spreads"][:3], squares[:3].sqrt(), rtol=0.01)


def test_samples_have_the_moments_of_their_class():
    run, rows = clear_training(), clear()
    synthesizer = run.synthesizer()
    for label in range(3):
        made = torch.from_numpy(synthesizer.sample(3000, seed=1, label=label).images).double().view(-1, 64)
        real = ((rows.images[rows.labels == label].view(-1, 64).double() + 1) * 127.5).round()
        assert (made.mean(0) - real.mean(0)).abs().max() < 2.5
        assert (made.T.cov() - real.T.cov()).norm() < 0.15 * real.T.cov().norm()


def bars(count: int = 3000) -> Rows:
    """A bright bar on black for each class, 16 pixels a side, nowhere near the edge, moved and slanted."""
    source = torch.Generator().manual_seed(8)
    labels = torch.randint(3, (count,), generator=source)
    poses = Poses(1, 16, 16)
    usual = torch.tensor(
        [[0.0, 0.0, -0.5, 0.0, 0.3], [0.1, 0.0, 0.2, 0.1, -0.3], [0.0, -0.1, -0.2, -0.2, 0.1]]
    )
    spread = torch.tensor([0.12, 0.12, 0.05, 0.3, 0.05])
    turned = usual[labels] + spread * torch.randn(count, 5, generator=source)
    across, down = poses.coordinates(torch.device("cpu"))
    x, y, wide, slant, high = (number[:, None, None] for number in turned.unbind(1))
    y = (down - y) / high.exp()
    x = (across - x - slant * y) / wide.exp()
    images = torch.exp(-((x / 0.4) ** 4) - (y / 0.4) ** 4)[:, None] * 2 - 1
    return Bars(images, labels)


class Bars(Rows):
    schema = ImageSchema(height=16, width=16, channels=1, classes=("a", "b", "c"))


def test_images_that_stand_free_are_set_upright_and_made_as_sharp_as_they_were():
    """One chart of plain pixels would smear bars that are moved; upright ones are nearly all the same."""
    rows = bars()
    real = (rows.images + 1) / 2

    def made_with(edge: float) -> Tensor:
        run = clear_training(rows, edge=edge)
        assert run.learned["posed"] == (edge > 0)
        found = run.synthesizer().sample(600, seed=1, label=0).images
        return torch.from_numpy(found).permute(0, 3, 1, 2).float() / 255

    def off(made: Tensor) -> float:
        nearest = torch.cdist(made.flatten(1), real[rows.labels == 0].flatten(1)).amin(1)
        return (nearest / real[rows.labels == 0].flatten(1).norm(dim=1).mean()).mean().item()

    made = made_with(edge=0.06)
    assert off(made) < 0.2
    assert off(made) < 0.7 * off(made_with(edge=0.0))
    poses = Poses(1, 16, 16)
    # Where and how slanted; that small ones come out wider is the price of moving pixels.
    there, wanted = (poses.of(some)[:, [0, 1, 3]] for some in (made, real[rows.labels == 0]))
    assert torch.allclose(there.mean(0), wanted.mean(0), atol=0.03)
    assert torch.allclose(there.std(0), wanted.std(0), rtol=0.25)


def test_images_that_fill_their_frame_are_left_as_they_are():
    rows = bars()
    rows.images = -rows.images  # a bright frame around a dark bar
    run = clear_training(rows, edge=0.06)
    assert run.learned["posed"] == 0
    shown = (rows.images + 1) / 2
    left = run.coordinates(shown, rows.labels, upright=True)
    assert torch.allclose(left[:, : run.cosines.size], run.cosines.of(shown), atol=1e-3)
    assert (left[:, run.cosines.size :] == 0).all()
    network = run.synthesizer().network
    assert (network.directions[run.cosines.size :] == 0).all()
    assert (network.means[:, run.cosines.size :] == 0).all()


def test_a_pose_is_what_brightness_says_and_moving_changes_it_as_told():
    rows, poses = bars(200), Poses(1, 16, 16)
    shown = (rows.images + 1) / 2
    found = poses.of(shown).float()
    moved = poses.moved(shown, found, found + torch.tensor([0.1, -0.05, 0.1, 0.1, -0.1]))
    apart = poses.of(moved).float() - found
    assert torch.allclose(apart.mean(0), torch.tensor([0.1, -0.05, 0.1, 0.1, -0.1]), atol=0.03)
    assert torch.allclose(poses.moved(shown, found, found), shown, atol=1e-4)
    again = poses.moved(moved, poses.of(moved), found)
    assert (again - shown).abs().mean() < 0.02
    odd = torch.stack([torch.zeros(1, 16, 16), torch.ones(1, 16, 16), torch.zeros(1, 16, 16)])
    odd[2, 0, 3, 3] = 1.0
    assert poses.of(odd).isfinite().all()


def test_charts_divide_a_class_of_two_kinds():
    source = torch.Generator().manual_seed(1)
    kinds = torch.randint(2, (2000,), generator=source)
    patterns = torch.randn(2, 64, generator=source) * 0.3
    images = patterns[kinds] + 0.02 * torch.randn(2000, 64, generator=source)
    rows = Rows(images.view(-1, 1, 8, 8).clamp(-1, 1), torch.zeros(2000, dtype=torch.long))
    recipe = AtlasRecipe(axes=5, reach=3.0, edge=0.0)
    run = training(rows, recipe=recipe, noise_multiplier=1e-3, charts=2, rounds=5)
    list(run.steps())
    weights = run.learned["weights"][0]
    assert weights.sort().values.tolist() == pytest.approx(
        sorted([kinds.double().mean().item(), 1 - kinds.double().mean().item()]), abs=0.01
    )
    made = run.synthesizer().sample(500, seed=3, label=0).images.reshape(500, 64) / 127.5 - 1
    nearest = np.linalg.norm(made[:, None] - patterns.clamp(-1, 1).numpy()[None], axis=2).min(1)
    assert np.quantile(nearest, 0.9) < 0.5 * np.linalg.norm(patterns[0] - patterns[1]) * 0.5


def test_squares_keep_their_length_when_packed():
    square = torch.randn(5, 5, dtype=torch.float64)
    square = square + square.T
    vector = packed(square) * packing_weights(5)
    assert vector.norm() == pytest.approx(square.norm().item())
    assert torch.allclose(unpacked(vector, 5), square)


def test_what_is_no_more_than_noise_is_shrunk_away():
    found, towards = torch.tensor([[3.0, 4.0], [0.3, 0.4]]), torch.zeros(2, 2)
    kept = shrink(found, towards, torch.tensor([5.0, 5.0]), dims=1)
    assert torch.allclose(kept, torch.tensor([[2.4, 3.2], [0.0, 0.0]]))


# What leaves


def network(**changes: object) -> AtlasNetwork:
    sizes = {"height": 9, "width": 8, "channels": 3, "classes": 3, "frequencies": 4, "axes": 5, "charts": 2}
    shape = Atlas.fitting(**sizes | changes)
    made = shape.network()
    source = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=source) * 0.3)
            if name == "weights":
                parameter.abs_()
            if name == "directions":
                parameter.copy_(torch.eye(len(parameter)))
    return made


def latents(made: AtlasNetwork, count: int = 30) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(6)
    return torch.randn(count, made.shape.latent, generator=source), torch.arange(count) % 3


def test_every_image_is_made_from_its_own_latent_and_label():
    made = network()
    given, labels = latents(made)
    whole = made(given, labels)
    assert whole.shape == (30, 3, 9, 8)
    assert whole.min() >= -1
    assert whole.max() <= 1
    poisoned, wrong = given.clone(), labels.clone()
    poisoned[::2], wrong[::2] = torch.nan, 0
    assert torch.allclose(made(poisoned, wrong)[1::2], whole[1::2], atol=1e-5)


def test_files_read_back_and_sample_the_same():
    made = network()
    synthesizer = ImageSynthesizer(made.shape, made)
    again = ImageSynthesizer.from_files(synthesizer.to_files())
    assert np.array_equal(again.sample(300, seed=3).images, synthesizer.sample(300, seed=3).images)


@pytest.mark.parametrize("odd", [{"latent": 7}, {"axes": 500}, {"frequencies": 0}, {"charts": 0}])
def test_atlases_that_do_not_fit_together_are_refused(odd):
    with pytest.raises(UnfitSynthesizer):
        replace(network().shape, **odd)


def test_cosines_keep_lengths_and_give_slow_images_back():
    slow = Cosines(3, 9, 8, 4)
    assert torch.allclose(slow.rows @ slow.rows.T, torch.eye(len(slow.rows)), atol=1e-5)
    vectors = torch.randn(5, slow.size) * 0.2
    assert torch.allclose(slow.of(slow.pixels(vectors)).float(), vectors, atol=1e-4)
    every = Cosines(1, 8, 8, 64)
    images = torch.rand(4, 1, 8, 8)
    assert torch.allclose(every.pixels(every.of(images).float()), images, atol=1e-5)
