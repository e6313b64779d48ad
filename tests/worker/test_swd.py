"""SWD agrees with closed forms, and records reach it through what is noised and through nothing else."""

import dataclasses
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from core.faults import Failure, Fault
from core.schema import ImageSchema
from sluice.generators.dct import LowFrequencies
from sluice.generators.image import ImageSynthesizer
from sluice.methods.swd import SWDPlan, SWDRecipe
from sluice.methods.swd_one_shot import Features, OneShotRecipe, Patterns, SWDOneShotPlan
from sluice.privacy.events import Geometry
from sluice.privacy.problems import InvalidPlan
from tests.fakes import ImageRows, SeededRng
from worker.mechanisms.noise import SecureRng
from worker.mechanisms.projections import (
    Moments,
    clip_differentiably,
    directions,
    interpolate_quantiles,
    match_ranks,
    private_rows,
    sliced_distance,
    sort_rows,
)
from worker.trainers.swd import Trainer as SWDTrainer
from worker.trainers.swd_one_shot import UNIT, Histograms, patterns, project_to_simplex
from worker.trainers.swd_one_shot import Trainer as SWDOneShotTrainer

SMALL = SWDRecipe(features=16, latent=4)
BRIEF = OneShotRecipe(features=16, latent=4, generator_steps=5, images=5, compared=6)


class Rows(ImageRows):
    schema = ImageSchema(height=8, width=8, channels=1, classes=("a", "b", "c"))


def plan(**changes: object) -> SWDPlan:
    given = {"steps": 6, "noise_multiplier": 1.0, "records": 60, "batch": 10, "directions": 7, "dim": 67}
    return SWDPlan(**given | {"recipe": SMALL} | changes)


def training(records: Rows | None = None, *, seed: int = 0, **changes: object) -> SWDTrainer:
    rows = records if records is not None else Rows.random(50)
    return SWDTrainer(plan(**changes), rows, rng=SeededRng(seed), device="cpu")


def one_shot_plan(**changes: object) -> SWDOneShotPlan:
    return SWDOneShotPlan(**{"noise_multiplier": 1.0, "directions": 12, "recipe": BRIEF} | changes)


def one_shot(records: Rows | None = None, *, seed: int = 0, **changes: object) -> SWDOneShotTrainer:
    rows = records if records is not None else Rows.random(50)
    return SWDOneShotTrainer(one_shot_plan(**changes), rows, rng=SeededRng(seed), device="cpu")


# The distance


@pytest.mark.parametrize("noise", [0.0, 0.7])
def test_the_distance_between_gaussians_is_the_closed_form(noise):
    """W2^2 along u between N(a, s^2) and N(b, t^2) is (u.(a - b))^2 + (s - t)^2, widened by noise or not."""
    source = torch.Generator().manual_seed(1)
    dim, count, apart, widths = 6, 20_000, 1.5, (0.5, 2.0)
    one, other = (width * torch.randn(count, dim, generator=source) for width in widths)
    one[:, 0] += apart
    along = directions(Geometry.ORTHONORMAL, 2 * dim, dim, SeededRng(2))
    values, real = (along @ rows.T for rows in (one, other))
    values, real = (v + noise * torch.randn(v.shape, generator=source) for v in (values, real))
    found, _ = sliced_distance(values, sort_rows(real))
    smooth = [math.hypot(width, noise) for width in widths]
    assert found == pytest.approx(apart**2 / dim + (smooth[0] - smooth[1]) ** 2, rel=0.02)


def test_the_gradient_is_that_of_differentiating_through_the_sort():
    source = torch.Generator().manual_seed(3)
    values = torch.randn(5, 40, generator=source, requires_grad=True)
    quantiles = torch.randn(5, 40, generator=source).sort(1).values
    loss = (values.sort(1).values - quantiles).square().mean()
    found, gradient = sliced_distance(values.detach().clone(), quantiles)
    assert found == pytest.approx(loss.item(), rel=1e-6)
    assert torch.allclose(gradient, torch.autograd.grad(loss, values)[0], atol=1e-7)


def test_values_meet_the_quantile_of_their_rank():
    values, quantiles = torch.tensor([[3.0, -1.0, 2.0]]), torch.tensor([[10.0, 20.0, 30.0]])
    assert match_ranks(values, quantiles).tolist() == [[30.0, 10.0, 20.0]]
    assert sort_rows(values).tolist() == [[-1.0, 2.0, 3.0]]


def test_spread_quantiles_are_those_of_the_same_distribution():
    quantiles = torch.tensor([[0.0, 1.0, 3.0]])
    assert interpolate_quantiles(quantiles, 1) is quantiles
    assert interpolate_quantiles(quantiles, 2).tolist() == [[0.0, 0.25, 0.75, 1.5, 2.5, 3.0]]
    assert interpolate_quantiles(torch.tensor([[4.0]]), 3).tolist() == [[4.0] * 3]


def test_directions_are_uniform_units_or_orthonormal_blocks():
    free = directions(Geometry.SPHERE, 20_000, 5, SecureRng()).double()
    assert torch.allclose(free.norm(dim=1), torch.ones(20_000).double(), atol=1e-6)
    # A squared projection is Beta(1/2, (d - 1)/2): mean 1/d, variance 2(d - 1)/(d^2 (d + 2)).
    squares = free[:, 0].square()
    assert squares.mean().item() == pytest.approx(0.2, abs=0.006)
    assert squares.var().item() == pytest.approx(8 / (25 * 7), rel=0.08)
    blocks = directions(Geometry.ORTHONORMAL, 15, 5, SecureRng()).double()
    rows = torch.randn(4, 5, dtype=torch.float64)
    assert torch.allclose((blocks @ rows.T).square().sum(0), 3 * rows.square().sum(1), rtol=1e-5)


@pytest.mark.parametrize(("geometry", "count"), [(Geometry.SPHERE, 10), (Geometry.ORTHONORMAL, 12)])
def test_moments_are_told_without_bias(geometry, count):
    """From noise six times as wide as the rows: within six errors of each entry of noisy rows."""
    source = torch.Generator().manual_seed(4)
    rows = torch.randn(200, 6, generator=source) * torch.linspace(0.2, 1, 6) + torch.tensor(
        [1.0, 0, 0, 0, 0, -1]
    )
    rows /= rows.norm(dim=1, keepdim=True) * 2
    moments, noise, steps = Moments(6, geometry, "cpu"), 3.0, 4000
    for along in directions(geometry, count * steps, 6, SeededRng(1)).split(count):
        moments.add(along, along @ rows.T + noise * torch.randn(count, 200, generator=source))
    mean, square = moments.estimate(noise)
    # Noise of one row, once its projections are put back together, and how many rows were seen.
    width, seen = noise * math.sqrt(6 / count), math.sqrt(steps * 200)
    assert (mean - rows.mean(0)).abs().max() < 6 * width / seen
    assert (square - rows.T.double() @ rows.double() / 200).abs().max() < 6 * 1.5 * width**2 / seen


def test_moments_of_few_directions_are_told_without_bias():
    """Where every term of the law of directions counts: three of them, hardly any noise."""
    rows = torch.diag(torch.linspace(0.5, 1.5, 6))[:2].repeat(10, 1)
    moments = Moments(6, Geometry.SPHERE, "cpu")
    for along in directions(Geometry.SPHERE, 3 * 20_000, 6, SeededRng(1)).split(3):
        moments.add(along, along @ rows.T)
    _, square = moments.estimate(0.0)
    assert torch.allclose(square, (rows.T @ rows / 20).double(), atol=0.02)


# Rows


def test_rows_are_clipped_one_by_one_whatever_they_are():
    rows = torch.cat(
        [torch.randn(5, 5), torch.full((1, 5), 1 / 3), torch.full((1, 5), 1e30), torch.zeros(1, 5)]
    )
    rows[1, 2], rows[2, 0] = math.nan, math.inf
    there = np.array([True] * 4 + [False, True, True, True, True, False])
    placed = private_rows(rows, there, bound=0.5)
    assert placed.shape == (10, 5)
    assert placed.double().norm(dim=1).max() <= 0.5
    assert not placed[[1, 2, 4, 8, 9]].any()
    alone = torch.cat([private_rows(row[None], np.array([True]), bound=0.5) for row in rows])
    assert torch.equal(placed[torch.from_numpy(there)], alone)


@pytest.mark.parametrize(("count", "dim"), [(1000, 794), (220, 110)])
def test_the_rounding_of_projections_is_a_small_share_of_them(count, dim):
    """What no bound pays for: dot products in float32, of rows that make them go wrong the most."""
    along = directions(Geometry.SPHERE, count, dim, SeededRng(1))
    rows = torch.cat([torch.randn(20, dim), torch.full((1, dim), 1 / 3), along[:20].sign()])
    rows = private_rows(rows, np.ones(41, dtype=bool), bound=0.5)
    off = (along @ rows.T).double() - along.double() @ rows.double().T
    assert off.norm(dim=0).max() <= 2**-19 * 0.5 * math.sqrt(count / dim)


def test_made_rows_are_clipped_as_records_are():
    rows = torch.randn(20, 5)
    there = np.ones(20, dtype=bool)
    assert torch.allclose(clip_differentiably(rows, 0.5), private_rows(rows, there, bound=0.5), atol=1e-6)


def test_a_row_is_pixels_and_label_by_declared_bounds():
    run = training(label_weight=3.0, row_bound=100.0, noise_multiplier=1.0)
    images, labels = run.records.take(np.array([4, 8]))
    rows = run.private_rows(np.array([4, -1, 8]))
    expected = torch.cat([(images.flatten(1) + 1) / 2, 3.0 * torch.eye(3)[labels]], 1)
    assert torch.allclose(rows[[0, 2]], expected, atol=1e-6)
    assert not rows[1].any()


def test_cosines_keep_lengths_and_the_slowest_come_first():
    images = torch.rand(3, 2, 9, 12) * 2 - 1
    images, smooth = (images + 1) / 2, torch.ones(1, 2, 9, 12)
    everything, few = (LowFrequencies(2, 9, 12, count, dtype=torch.float32) for count in (12, 3))
    assert (everything.size, few.size) == (2 * 9 * 12, 2 * 9)
    assert torch.allclose(everything.coefficients(images).norm(dim=1), images.flatten(1).norm(dim=1))
    assert few.coefficients(smooth).norm() == pytest.approx(math.sqrt(2 * 9 * 12), rel=1e-5)


# A step


def test_a_step_releases_projections_of_clipped_rows_with_their_noise():
    run = training()
    batch = np.array([3, 7, -1, 20, 1, 2, 40, 49, -1, 5])
    run.rng = run.mechanism.rng = SeededRng(5)
    along, released = run.mechanism.project(run.private_rows(batch))
    again = SeededRng(5)
    expected_along = directions(Geometry.SPHERE, 7, 67, again)
    noisy = (expected_along @ run.private_rows(batch).T).double().flatten() + again.normals(70)
    assert torch.equal(along, expected_along)
    assert torch.allclose(released, noisy.view(7, 10).float(), atol=1e-5)


def test_every_step_has_noise_of_the_planned_strength():
    """With nobody there a release is noise and nothing else."""
    run = SWDTrainer(
        plan(steps=3, directions=400, batch=50, noise_multiplier=30.0),
        Rows.random(0),
        rng=SecureRng(),
        device="cpu",
    )
    for batch in run.mechanism.batches(run.records):
        _, released = run.mechanism.project(run.private_rows(batch))
        assert released.std().item() / 30.0 == pytest.approx(1, abs=6 / math.sqrt(2 * 400 * 50))
    assert run.mechanism.released == 3


def test_made_images_get_the_same_noise():
    """Two equal distributions, one noised and one not, are the square of the noise apart; these are not."""
    run = training(batch=60, noise_multiplier=20.0, directions=200)
    assert max(run.measured["distance"] / 20.0**2 for _ in run.steps()) < 0.2


@pytest.mark.parametrize("count", [0, 5, 59, 60, 61, 90])
def test_batches_have_one_size_however_many_records_there_are(count):
    run = training(Rows.random(count), batch=25)
    sizes = [
        (len(batch), len(run.private_rows(batch)), len(set(batch[batch >= 0])))
        for batch in run.mechanism.batches(run.records)
    ]
    assert {size[:2] for size in sizes} == {(25, 25)}
    assert all(distinct == 25 for *_, distinct in sizes) == (count >= 60)


def test_batches_are_drawn_afresh_and_are_no_epochs():
    """Two halves of a shuffled epoch share nobody; two draws of half of all share a quarter on average."""
    run = training(Rows.random(60), batch=30, steps=200)
    batches = [set(batch) for batch in run.mechanism.batches(run.records)]
    shared = [len(one & other) for one, other in pairwise(batches)]
    assert min(shared) > 0
    assert np.mean(shared) == pytest.approx(15, abs=1.0)


@pytest.mark.parametrize("changes", [{"geometry": Geometry.ORTHONORMAL, "directions": 134}, {"noises": 3}])
def test_other_ways_train_too(changes):
    recipe = dataclasses.replace(SMALL, noises=changes.pop("noises", 1), network="dense")
    run = training(recipe=recipe, **changes)
    before = [value.clone() for value in run.generator.parameters]
    assert [progress.step for progress in run.steps()] == [1, 2, 3, 4, 5, 6]
    assert any(not torch.equal(a, b) for a, b in zip(before, run.generator.parameters, strict=True))
    assert isinstance(ImageSynthesizer.from_files(run.synthesizer().to_files()), ImageSynthesizer)


@pytest.mark.parametrize("size", [(8, 8, 1), (9, 14, 3), (64, 64, 3)])
def test_images_of_all_sizes(size):
    height, width, channels = size
    rows = Rows.random(12, (channels, height, width))
    rows.schema = ImageSchema(height=height, width=width, channels=channels, classes=("a", "b", "c"))
    run = training(rows, dim=16 * channels + 3, frequencies=4, steps=2)
    list(run.steps())
    assert run.synthesizer().sample(3, seed=1).images.shape == (3, height, width, channels)
    brief = one_shot(rows)
    list(brief.steps())
    assert brief.synthesizer().sample(3, seed=1).images.shape == (3, height, width, channels)


def test_rows_of_another_length_are_refused():
    with pytest.raises(Failure) as failure:
        training(dim=784)
    assert failure.value.fault is Fault.SCHEMA_MISMATCH


def test_it_learns_what_classes_look_like():
    """Left half bright for one class, right half for the other; enough records to see through the noise."""
    rows = Rows.random(400, classes=2)
    rows.schema = ImageSchema(height=8, width=8, channels=1, classes=("left", "right"))
    sides = torch.where(torch.arange(8) < 4, 1.0, -1.0)
    rows.images = (1 - 2 * rows.labels.float())[:, None, None, None] * sides.expand(400, 1, 8, 8)
    runs = [
        SWDTrainer(
            plan(
                steps=300, noise_multiplier=0.05, records=400, batch=50, directions=30, dim=18, frequencies=4,
                label_weight=4.0, recipe=SWDRecipe(features=32, latent=2, rate=5e-3),
            ),
            rows, rng=SeededRng(1), device="cpu",
        ),
        SWDTrainer(
            plan(
                steps=300, noise_multiplier=0.3, records=400, batch=50, directions=30, dim=18, frequencies=4,
                label_weight=4.0,
                recipe=SWDRecipe(features=32, latent=2, rate=5e-3, moment_steps=100, moment_images=60),
            ),
            rows, rng=SeededRng(1), device="cpu",
        ),
        SWDOneShotTrainer(
            one_shot_plan(recipe=dataclasses.replace(BRIEF, generator_steps=100, rate=1e-2), directions=50),
            rows, rng=SeededRng(1), device="cpu",
        ),
        SWDOneShotTrainer(
            one_shot_plan(
                recipe=dataclasses.replace(BRIEF, generator_steps=150, rate=1e-2, images=20), directions=50,
                features=Features.WAVES,
            ),
            rows, rng=SeededRng(1), device="cpu",
        ),
    ]  # fmt: skip
    for run in runs:
        list(run.steps())
        made = run.synthesizer()
        for label, sign in ((0, 1), (1, -1)):
            image = made.sample(50, seed=1, label=label).images.mean(0)[..., 0] - 127.5
            assert sign * (image[:, :4].mean() - image[:, 4:].mean()) > 60, (run.plan, label)


# Neighbours


class Recorded:
    """Keeps what was noised and what came out, or puts out what another run did."""

    def __init__(self, run: SWDTrainer | SWDOneShotTrainer, replay: list[Tensor] | None = None) -> None:
        self.totals: list[Tensor] = []
        self.released: list[Tensor] = []
        release = run.mechanism.release

        def recorded(total: Tensor) -> Tensor:
            self.totals.append(total.clone())
            out = release(total) if replay is None else (release(total), replay[len(self.released)])[1]
            self.released.append(out.clone())
            return out

        run.mechanism.release = recorded


def neighbours() -> dict[str, Rows]:
    """One record more or less, or replaced: by an outlier, another class, a duplicate, what is no number."""
    base = Rows.random(50)
    found = {
        "added": Rows(
            torch.cat([base.images, torch.ones(1, 1, 8, 8)]), torch.cat([base.labels, base.labels[:1]])
        ),
        "removed": Rows(base.images[:-1], base.labels[:-1]),
    }
    for name, image, label in (
        ("outlier", 1.0, 0), ("class", 0.3, 2), ("stranger", 0.3, 99), ("nan", math.nan, 0),
        ("huge", 1e30, 1), ("duplicate", base.images[0], base.labels[0]),
    ):  # fmt: skip
        images, labels = base.images.clone(), base.labels.clone()
        images[-1], labels[-1] = image, label
        found[name] = Rows(images, labels)
    return found


def side_by_side(make, rows):
    """Two runs on neighbours, with the same randomness and the same releases, end in the same place."""
    ends, watched, replay = [], [], None
    for records in (Rows.random(50), rows):
        run = make(records)
        watched.append(Recorded(run, replay))
        said = list(run.steps())
        replay = watched[0].released
        ends.append((said, run.checkpoint(), run.synthesizer().to_files()))
    assert ends[0][0] == ends[1][0]
    assert all(torch.equal(ends[0][1][key], ends[1][1][key]) for key in ends[0][1])
    assert ends[0][2] == ends[1][2]
    return [b.double() - a.double() for a, b in zip(watched[0].totals, watched[1].totals, strict=True)]


@pytest.mark.parametrize("moment_steps", [0, 3])
@pytest.mark.parametrize("geometry", Geometry)
@pytest.mark.parametrize("name", neighbours())
def test_records_reach_it_through_noised_projections_alone(name, geometry, moment_steps):
    """A neighbour exchanges one drawn row for another at most 2 * row_bound away, and nothing else."""
    how = {"geometry": geometry, "directions": 134, "batch": 30, "row_bound": 0.5}
    how["recipe"] = dataclasses.replace(SMALL, moment_steps=moment_steps, moment_images=20)
    gaps = side_by_side(lambda records: training(records, seed=3, **how), neighbours()[name])
    moved = [gap.view(134, 30).norm(dim=0) for gap in gaps if gap.any()]
    assert moved
    assert all((columns > 0).sum() == 1 for columns in moved)
    if geometry is Geometry.ORTHONORMAL:  # two blocks: lengths grow by sqrt(2) exactly
        assert max(columns.max().item() for columns in moved) <= 2 * 0.5 * math.sqrt(2) * (1 + 1e-5)


def test_two_rows_as_far_apart_as_rows_can_be_move_it_so_far_and_no_further():
    rows = Rows.random(60)
    rows.images[:], rows.labels[:] = -1, 0  # black: the label alone fills the row
    other = Rows(rows.images.clone(), rows.labels.clone())
    other.labels[7] = 1
    how = {"geometry": Geometry.ORTHONORMAL, "directions": 67, "batch": 60}
    totals = []
    for records in (rows, other):
        run = training(records, seed=1, **how)
        watched = Recorded(run)
        next(run.steps())
        totals.append(watched.totals[0].double())
    assert (totals[0] - totals[1]).norm().item() == pytest.approx(math.sqrt(2) * 0.5, rel=1e-4)


@pytest.mark.parametrize("features", Features)
@pytest.mark.parametrize("name", neighbours())
def test_records_reach_the_one_shot_form_through_one_noised_sum(name, features):
    [gap] = side_by_side(lambda records: one_shot(records, seed=3, features=features), neighbours()[name])
    norm, unit = gap.norm().item(), math.sqrt(12)
    if name in ("added", "removed"):
        assert norm == pytest.approx(unit, rel=1e-5)
        assert norm <= unit
    else:
        assert 0 < norm <= unit * (math.sqrt(2) if features is Features.HISTOGRAMS else 2)


# At once


@pytest.mark.parametrize("steps", [1, 3])
def test_the_release_is_made_once_also_across_a_restore(steps):
    first = one_shot()
    going = first.steps()
    for _ in range(steps):
        next(going)
    kept = first.checkpoint()
    second = one_shot(seed=9)
    second.restore(kept)

    def refused(indices: np.ndarray) -> tuple[Tensor, Tensor]:
        raise AssertionError("records were looked at again")

    second.records.take = second.mechanism.release = refused
    assert [progress.step for progress in second.steps()] == list(range(steps + 1, 7))
    assert torch.equal(second.release, first.release)
    assert second.mechanism.released == second.mechanism.drawn == 1
    second.synthesizer()
    with pytest.raises(Failure) as failure:
        second.mechanism.draw(second.records)
    assert failure.value.fault is Fault.ACCOUNTING_MISMATCH


def test_the_release_has_its_noise():
    run = SWDOneShotTrainer(
        one_shot_plan(noise_multiplier=5.0, directions=100), Rows.random(0), rng=SecureRng(), device="cpu"
    )
    next(run.steps())
    size = 3 * 100 * 24
    assert run.release.std().item() / (5.0 * 10) == pytest.approx(1, abs=6 / math.sqrt(2 * size))


def test_counts_are_those_of_numpy():
    run = one_shot(directions=5, bins=7)
    run.records.labels[3], run.records.labels[4] = -9, 77
    counts = run.total(np.arange(50)).view(3, 5, 7)
    pixels = ((run.records.images + 1) * 127.5).round().flatten(1).double() / 255
    for label in range(3):
        mine = pixels[run.records.labels.clamp(0, 2) == label] @ run.directions.T.double()
        for place in range(5):
            low, high = run.query.low[place].item(), run.query.high[place].item()
            expected, _ = np.histogram(mine[:, place].clamp(low, high - 1e-6), bins=7, range=(low, high))
            assert counts[label, place].tolist() == expected.tolist()


def test_pieces_add_up_to_the_whole(monkeypatch):
    whole = one_shot().total(np.arange(50))
    monkeypatch.setattr("worker.trainers.swd_one_shot.CHUNK", 40)
    assert torch.equal(one_shot().total(np.arange(50)), whole)


def test_projections_of_records_are_exact_so_that_company_makes_no_difference():
    values: list[Tensor] = []
    run = one_shot()
    run.query.add = lambda total, given, labels, norm: values.append(given)
    run.total(np.arange(50))
    units = values[0] * 255 / UNIT
    assert (units - units.round()).abs().max() < 1e-5
    assert (
        values[0] - run.directions.double() @ ((run.records.images + 1) / 2).flatten(1).T.double()
    ).abs().max() < 0.02


def test_quantiles_are_those_of_the_histogram():
    shape = one_shot_plan(directions=1, bins=4)
    query = Histograms(shape, torch.tensor([[-2.0, 6.0]]), 1)
    assert (query.low.item(), query.high.item()) == (-1, 3)
    query.learn_from(torch.tensor([10.0, 0.0, 30.0, 0.0], dtype=torch.float64), 8, 1.0)
    expected = [-0.75, -0.25, 1 + 1 / 12, 1.25, 1 + 5 / 12, 1 + 7 / 12, 1.75, 1 + 11 / 12]
    assert torch.allclose(query.quantiles.flatten(), torch.tensor(expected), atol=1e-6)


def test_shares_are_the_nearest_that_are_some():
    source = torch.Generator().manual_seed(1)
    shares = project_to_simplex(torch.randn(200, 9, generator=source, dtype=torch.float64))
    assert torch.allclose(shares.sum(1), torch.ones(200).double())
    assert shares.min() >= 0
    nearest = project_to_simplex(torch.tensor([[0.5, 0.4, -0.2]]))
    assert torch.allclose(nearest, torch.tensor([[0.55, 0.45, 0.0]]))


@pytest.mark.parametrize("kind", Patterns)
def test_patterns_are_public_units(kind):
    schema = ImageSchema(height=16, width=12, channels=3, classes=("a",))
    found = patterns(one_shot_plan(patterns=kind, directions=40), schema)
    assert found.shape == (40, 16 * 12 * 3)
    assert torch.allclose(found.norm(dim=1), torch.ones(40), atol=1e-5)
    assert torch.equal(found, patterns(one_shot_plan(patterns=kind, directions=40), schema))
    assert not torch.equal(
        found, patterns(one_shot_plan(patterns=kind, directions=40, pattern_seed=2), schema)
    )


# Plans and recipes


def test_a_plan_shows_the_steps_that_cost_nothing():
    shown = SWDOneShotPlan(noise_multiplier=1.0)
    assert shown.known_steps == 1
    assert shown.progress_steps == 1 + OneShotRecipe.preset("fast-cpu").generator_steps
    assert one_shot_plan().progress_steps == 6
    assert plan().progress_steps == 6
    assert plan(recipe=dataclasses.replace(SMALL, moment_steps=4)).progress_steps == 10


@pytest.mark.parametrize("recipe", [SWDRecipe, OneShotRecipe])
def test_recipes_read_back_as_they_were_written(recipe):
    for name in ("paper", "fast-cpu"):
        assert recipe.from_dict(recipe.preset(name).to_dict()) == recipe.preset(name)


@pytest.mark.parametrize(
    ("recipe", "odd"),
    [
        (SWDRecipe, {"network": "magic"}),
        (SWDRecipe, {"features": 3}),
        (SWDRecipe, {"latent": 0}),
        (SWDRecipe, {"rate": 0.0}),
        (SWDRecipe, {"betas": [0.5]}),
        (SWDRecipe, {"average_decay": 1.0}),
        (SWDRecipe, {"noises": 0}),
        (SWDRecipe, {"moment_steps": -1}),
        (SWDRecipe, {"moment_images": 1}),
        (OneShotRecipe, {"noises": 1}),
        (OneShotRecipe, {"generator_steps": 0}),
        (OneShotRecipe, {"images": "many"}),
    ],
)
def test_odd_recipes_are_refused(recipe, odd):
    with pytest.raises(InvalidPlan):
        recipe.from_dict(odd)


@pytest.mark.parametrize(
    "odd",
    [{"frequencies": 0}, {"label_weight": 0.0}, {"row_bound": -1.0}],
)
def test_odd_plans_are_refused(odd):
    with pytest.raises(InvalidPlan):
        plan(**odd)
    with pytest.raises(InvalidPlan):
        one_shot_plan(bins=0)
