"""DP-Sinkhorn computes the loss of its paper exactly, and records reach it through noised releases alone."""

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from core.faults import Failure, Fault
from core.schema import ImageSchema
from sluice.generators.architecture import UnfitSynthesizer
from sluice.generators.dct import LowFrequencies
from sluice.generators.image import ImageSynthesizer
from sluice.generators.residual import Residual
from sluice.methods import plan_from_dict
from sluice.methods.base import Clipping
from sluice.methods.gswgan import GSWGANPlan
from sluice.methods.sinkhorn import SinkhornPlan, SinkhornRecipe
from sluice.privacy.events import Query
from sluice.privacy.problems import InvalidPlan
from tests.fakes import ImageRows, SeededRng
from worker.mechanisms.clipping import clip_rows
from worker.mechanisms.noise import SecureRng
from worker.mechanisms.transport import (
    Cost,
    absolute_distances,
    log_sum_exp,
    semi_debiased,
    transport,
)
from worker.trainers.sinkhorn import MASS_WEIGHT, UNIT_DISTANCE
from worker.trainers.sinkhorn import Trainer as SinkhornTrainer

SMALL = SinkhornRecipe(
    features=16, latent=4, rate=1e-3, entropy=1.0, frequencies=6, fitting_steps=2, fitting_images=10
)
every_clipping = pytest.mark.parametrize("clipping", [*Clipping])


class Rows(ImageRows):
    schema = ImageSchema(height=8, width=8, channels=1, classes=("a", "b", "c"))


def plan(clipping: Clipping, **changes: object) -> SinkhornPlan:
    given = {"steps": 4, "noise_multiplier": 1.0, "sampling_prob": 0.5, "images": 10, "clip_norm": 0.5}
    return SinkhornPlan(**given | {"clipping": clipping} | changes)


def training(
    clipping: Clipping, records: Rows | None = None, *, recipe: SinkhornRecipe = SMALL, **changes: object
) -> SinkhornTrainer:
    rows = Rows.random(50) if records is None else records
    rng = changes.pop("rng", None) or SeededRng(0)
    return SinkhornTrainer(plan(clipping, **changes), rows, rng=rng, recipe=recipe, device="cpu")


# The loss of the paper


def problem(made: int, real: int, dim: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed)
    x, y = (torch.rand(n, dim, generator=source, dtype=torch.float64) * 2 - 1 for n in (made, real))
    return x, torch.randint(3, (made,), generator=source), y, torch.randint(3, (real,), generator=source)


def geomloss_value(x: Tensor, y: Tensor, *, m: float, entropy: float) -> Tensor:
    from geomloss import SamplesLoss

    def cost(a: Tensor, b: Tensor) -> Tensor:
        gaps = a[:, :, None] - b[:, None]
        return gaps.square().sum(3) + m * gaps.abs().sum(3)

    # So many steps so near to the entropy asked for that its potentials have settled.
    how = {"diameter": 1.002 * entropy, "scaling": 0.999999, "debias": False, "backend": "tensorized"}
    return SamplesLoss("sinkhorn", p=1, blur=entropy, cost=cost, **how)(x, y)


@pytest.mark.parametrize(
    ("debiasing", "m", "entropy", "dim"),
    [(0.0, 0.0, 1.0, 10), (0.2, 1.0, 5.0, 20), (1.0, 3.0, 2.0, 5), (0.5, 0.3, 6.0, 50)],
)
def test_value_and_gradient_are_those_of_geomloss(debiasing, m, entropy, dim):
    n, alpha = 10, 1.5
    x, x_labels, y, y_labels = problem(n + math.floor(n * debiasing), 13, dim, seed=dim)
    how = {"images": n, "cost": Cost(absolute_weight=m, class_weight=alpha)}
    value, gradient = semi_debiased(x, x_labels, y, y_labels, **how, entropy=entropy, iterations=1000)

    x.requires_grad_()
    joined = [
        torch.cat([images, alpha * F.one_hot(labels, 3)], 1)
        for images, labels in ((x, x_labels), (y, y_labels))
    ]
    w = partial(geomloss_value, m=m, entropy=entropy)
    theirs = 2 * w(joined[0][:n], joined[1]) - w(joined[0][:n], joined[0][len(x) - n :])
    assert value.item() == pytest.approx(theirs.item(), rel=1e-4)
    found = torch.autograd.grad(theirs, x)[0]
    assert torch.allclose(gradient, found, atol=1e-4 * found.abs().max().item())


def test_without_entropy_it_is_the_best_assignment():
    x, x_labels, y, y_labels = problem(20, 20, 6)
    cost = Cost(absolute_weight=1.0, class_weight=0.5)(x, y, x_labels, y_labels)
    best = cost[linear_sum_assignment(cost.numpy())].mean().item()
    gaps = []
    for entropy in (0.1, 0.01, 0.001):
        value, matrix = transport(cost, entropy=entropy, iterations=5000)
        gaps.append(abs(value.item() - best))
        assert matrix.sum().item() == pytest.approx(1)
    assert gaps[0] > gaps[1] > gaps[2]
    assert gaps[2] < 4e-3 * best  # entropy log n, for n = 20
    rows, columns = linear_sum_assignment(cost.numpy())
    assert torch.allclose(matrix[rows, columns], torch.full((20,), 1 / 20, dtype=torch.float64), atol=1e-3)


def test_the_limits_are_equations_four_and_five():
    """Without debiasing the inner term is W(X, X); with all of it W(X, X') for other images X'."""
    how = {"entropy": 0.5, "iterations": 500}
    cost = Cost(absolute_weight=0.3, class_weight=1.0)
    x, x_labels, y, y_labels = problem(8, 6, 5)
    fresh, fresh_labels, *_ = problem(8, 6, 5, seed=1)

    def w(a: Tensor, b: Tensor, a_labels: Tensor, b_labels: Tensor) -> Tensor:
        return transport(cost(a, b, a_labels, b_labels), **how)[0]

    value, _ = semi_debiased(x, x_labels, y, y_labels, images=8, cost=cost, **how)
    assert value.item() == pytest.approx(
        (2 * w(x, y, x_labels, y_labels) - w(x, x, x_labels, x_labels)).item()
    )
    both, labels = torch.cat([x, fresh]), torch.cat([x_labels, fresh_labels])
    value, _ = semi_debiased(both, labels, y, y_labels, images=8, cost=cost, **how)
    expected = 2 * w(x, y, x_labels, y_labels) - w(x, fresh, x_labels, fresh_labels)
    assert value.item() == pytest.approx(expected.item())


def test_the_gradient_is_that_of_the_value():
    """The envelope theorem against differences, through every image, compared with itself or not."""
    x, x_labels, y, y_labels = problem(6, 5, 3)
    how = {
        "images": 5,
        "cost": Cost(absolute_weight=0.5, class_weight=1.0),
        "entropy": 0.5,
        "iterations": 800,
    }
    _, gradient = semi_debiased(x, x_labels, y, y_labels, **how)
    for place in ((0, 0), (2, 1), (5, 2)):
        ends = []
        for step in (1e-4, -1e-4):
            moved = x.clone()
            moved[place] += step
            ends.append(semi_debiased(moved, x_labels, y, y_labels, **how)[0].item())
        assert gradient[place].item() == pytest.approx((ends[0] - ends[1]) / 2e-4, rel=1e-4)


def test_images_for_debiasing_know_nothing_of_the_real_ones():
    x, x_labels, y, y_labels = problem(12, 7, 4)
    how = {
        "images": 10,
        "cost": Cost(absolute_weight=1.0, class_weight=1.0),
        "entropy": 0.5,
        "iterations": 20,
    }
    _, one = semi_debiased(x, x_labels, y, y_labels, **how)
    _, other = semi_debiased(x, x_labels, -y[:3], y_labels[:3], **how)
    _, none = semi_debiased(x, x_labels, y[:0], y_labels[:0], **how)
    assert torch.equal(one[10:], other[10:])
    assert torch.equal(one[10:], none[10:])
    assert not torch.equal(one[:10], other[:10])


@pytest.mark.parametrize("real", [1, 40, 1000])
def test_absolute_distances_are_those_of_torch(real):
    x, _, y, _ = problem(11, real, 784)
    assert torch.allclose(absolute_distances(x, y), torch.cdist(x, y, p=1))


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e5])
@pytest.mark.parametrize("dim", [0, 1])
def test_sums_of_exponentials_are_those_of_torch(scale, dim):
    x = scale * torch.randn(30, 40, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    assert torch.allclose(log_sum_exp(x, dim), x.logsumexp(dim), rtol=1e-14)


@pytest.mark.parametrize("entropy", [1e-4, 1e6])
def test_transport_stays_finite(entropy):
    x, x_labels, y, y_labels = problem(5, 3, 784)
    cost = Cost(absolute_weight=3.0, class_weight=1e3)(x, y, x_labels, y_labels)
    value, matrix = transport(cost, entropy=entropy, iterations=3)
    assert value.isfinite()
    assert torch.allclose(matrix.sum(1), torch.full((5,), 0.2, dtype=torch.float64))


@pytest.mark.parametrize("size", [(8, 8, 1), (9, 14, 3)])
def test_the_basis_is_orthonormal_and_all_of_it_is_the_image(size):
    height, width, channels = size
    images = torch.rand(4, channels, height, width, dtype=torch.float64)
    whole, some = (LowFrequencies(channels, height, width, count, dtype=torch.float64) for count in (64, 5))
    assert torch.allclose(whole.images(whole.coefficients(images)), images)
    assert torch.allclose(whole.coefficients(images).norm(dim=1), images.flatten(1).norm(dim=1))
    coefficients = torch.rand(4, some.size, dtype=torch.float64)
    assert some.size == 25 * channels
    assert torch.allclose(some.coefficients(some.images(coefficients)), coefficients)


# What is released


def plain_semidual(run: SinkhornTrainer, images: Tensor, labels: Tensor) -> Tensor:
    """Each record's gradient of the semi-dual, differentiated by itself in pixels and then clipped."""
    points = run.query.points.clone().requires_grad_()
    potentials = run.query.potentials.clone().requires_grad_()
    unlike = 2 * run.recipe.class_weight**2
    rows = []
    for image, label in zip(images.double(), labels, strict=True):
        squares = (run.query.basis.images(points) - image).flatten(1).square().sum(1)
        cost = squares + unlike * (run.query.labels != label)
        entropy = run.query.entropy
        value = -entropy * ((potentials - cost) / entropy).logsumexp(0)
        in_points, in_potentials = torch.autograd.grad(value, (points, potentials))
        pulls = -in_points / 2 / (UNIT_DISTANCE * math.sqrt(images[0].numel()))
        rows.append(torch.cat([pulls.flatten(), -MASS_WEIGHT * in_potentials]))
    return clip_rows(torch.stack(rows), run.mechanism.clip_norm)[0].sum(0)


@pytest.mark.parametrize("drawn", [1, 7, 40])
def test_semidual_releases_the_sum_of_clipped_gradients(drawn):
    """Summed, not averaged over the drawn; each clipped by itself, whatever the others are."""
    run = training(Clipping.SEMIDUAL, clip_norm=0.4)
    list(zip(run.steps(), range(3), strict=False))  # points and potentials that have moved
    images, labels = run.records.take(np.arange(drawn))
    found = run.query.total(images, labels, clip_norm=run.mechanism.clip_norm)
    expected = plain_semidual(run, images, labels)
    assert torch.allclose(found, expected, atol=1e-9)
    assert run.diagnostics()["clipped"] > 0 or drawn == 1


def test_joint_and_per_image_release_the_clipped_gradient():
    """The gradient of the loss in the public basis, as a whole or row by row no longer than the norm."""
    totals = {}
    for clipping, norm in ((Clipping.JOINT, 0.5), (Clipping.PER_IMAGE, 0.5), (Clipping.JOINT, 1e6)):
        run = training(clipping, clip_norm=norm)
        images, labels = run.records.take(np.arange(20))
        totals[clipping, norm] = run.query.total(images, labels, clip_norm=run.mechanism.clip_norm)
    whole = totals[Clipping.JOINT, 1e6]
    assert torch.allclose(totals[Clipping.JOINT, 0.5], whole * 0.5 / whole.norm(), rtol=1e-4)
    rows = whole.view(10, -1)
    assert torch.allclose(
        totals[Clipping.PER_IMAGE, 0.5].view(10, -1),
        rows * (0.5 / rows.norm(dim=1, keepdim=True)).clamp(max=1),
        rtol=1e-4,
    )


@every_clipping
def test_no_contribution_is_longer_than_the_clip_norm(clipping):
    """Measured in float64, not by a hair: of one record, of many, and of extremes."""
    run = training(clipping, clip_norm=1e-3)
    list(zip(run.steps(), range(3), strict=False))
    images = torch.cat([Rows.random(9).images, *(torch.full((1, 1, 8, 8), n) for n in (-1.0, 1 / 3, 1.0))])
    labels = torch.arange(12) % 3
    for some in (slice(None), *(slice(record, record + 1) for record in range(12))):
        total = run.query.total(images[some], labels[some], clip_norm=run.mechanism.clip_norm)
        if clipping is Clipping.SEMIDUAL and some.start is None:
            continue  # a sum of twelve
        rows = total.view(10, -1) if clipping is Clipping.PER_IMAGE else total[None]
        assert 0 < rows.norm(dim=1).max() <= run.mechanism.clip_norm
        noise = run.mechanism.noise
        assert total.norm() + noise.grid * math.sqrt(noise.size) <= 1e-3 * math.sqrt(run.plan.rows)


def test_the_images_not_noised_are_clipped_too():
    run = training(Clipping.PER_IMAGE, clip_norm=1e-3)
    run.query.total(*run.records.take(np.arange(20)), clip_norm=run.mechanism.clip_norm)
    assert run.query.public_rows.shape == (2, 36)
    assert run.query.public_rows.norm(dim=1).tolist() == pytest.approx([1e-3] * 2, rel=1e-3)


@every_clipping
@pytest.mark.parametrize("records", [0, 200])
def test_every_release_has_noise_of_the_planned_strength(clipping, records):
    """After the clipping and whoever was drawn: a step with nobody in it is noise and nothing else."""
    run = training(clipping, Rows.random(records), rng=SecureRng(), noise_multiplier=200.0, images=60)
    given: list[Tensor] = []
    learn = run.query.learn
    run.query.learn = lambda noisy: (given.append(noisy), learn(noisy))
    for _ in zip(range(4), run.steps(), strict=False):
        pass
    unit = {"joint": 2 * 0.5, "per_image": 2 * 0.5 * math.sqrt(60), "semidual": 0.5}[clipping]
    strength = torch.cat(given).std().item() / (200.0 * unit)
    assert abs(strength - 1) < 6 / math.sqrt(2 * 4 * run.mechanism.noise.size)
    assert run.mechanism.released == len(given) == 4


# Neighbours


class PerRecordRng(SeededRng):
    """Words of a draw are the same for the records both have: one more at the end changes nothing else."""

    def words(self, count: int) -> np.ndarray:
        return super().words(64)[:count] if count in (49, 50, 51) else super().words(count)


def replaced(image: float, label: int) -> Rows:
    base = Rows.random(50)
    base.images[-1], base.labels[-1] = image, label
    return base


NEIGHBOURS: dict[str, Callable[[], Rows]] = {
    "added": lambda: Rows(
        torch.cat([Rows.random(50).images, torch.ones(1, 1, 8, 8)]),
        torch.cat([Rows.random(50).labels, torch.tensor([2])]),
    ),
    "removed": lambda: Rows(Rows.random(50).images[:-1], Rows.random(50).labels[:-1]),
    "outlier": lambda: replaced(1.0, 0),
    "other class": lambda: replaced(0.3, 2),
    "no class": lambda: replaced(0.3, -7),
    "nan": lambda: replaced(math.nan, 0),
    "infinite": lambda: replaced(-math.inf, 99),
    "huge": lambda: replaced(1e30, 1),
}


def laid_side_by_side(
    clipping: Clipping, one: Rows, other: Rows, **changes: object
) -> tuple[SinkhornTrainer, list[float]]:
    """Both with the same randomness and the same releases; how far apart the totals were before noise."""
    totals: list[list[Tensor]] = [[], []]
    released: list[Tensor] = []
    runs, said = [], []
    for side, rows in enumerate((one, other)):
        run = training(clipping, rows, rng=PerRecordRng(3), **changes)
        release = run.mechanism.release

        def recorded(total: Tensor, side: int = side, release: Callable = release) -> Tensor:
            totals[side].append(total.clone())
            out = release(total)
            if side == 0:
                released.append(out.clone())
            return released[len(totals[side]) - 1].clone()

        run.mechanism.release = recorded
        said.append(list(run.steps()))
        runs.append(run)
    assert said[0] == said[1]
    kept, kept_too = (run.checkpoint() for run in runs)
    assert all(torch.equal(kept[name], kept_too[name]) for name in kept)
    assert runs[0].synthesizer().to_files() == runs[1].synthesizer().to_files()
    assert all(total.isfinite().all() for side in totals for total in side)
    return runs[0], [(a - b).norm().item() for a, b in zip(*totals, strict=True)]


def bound(clipping: Clipping, *, replaced: bool) -> float:
    return {
        Clipping.JOINT: 2 * 0.5,
        Clipping.PER_IMAGE: 2 * 0.5 * math.sqrt(10),
        Clipping.SEMIDUAL: 0.5 * (2 if replaced else 1),
    }[clipping]


@every_clipping
@pytest.mark.parametrize("name", NEIGHBOURS)
def test_records_reach_it_through_noised_releases_alone(clipping, name):
    """With the releases held the same, a neighbour changes nothing else, and totals by at most the bound."""
    run, gaps = laid_side_by_side(clipping, Rows.random(50), NEIGHBOURS[name]())
    most = bound(clipping, replaced=name not in ("added", "removed"))
    assert 0 < max(gaps) <= most
    sensitivity = run.plan.unit_noise * (2 if most > run.plan.unit_noise else 1)
    assert most == pytest.approx(sensitivity)


@every_clipping
def test_nobody_beside_somebody(clipping):
    """The only record of a dataset, in every batch of it, beside no record at all."""
    one = Rows(torch.ones(1, 1, 8, 8), torch.tensor([1]))
    _, gaps = laid_side_by_side(clipping, one, Rows(one.images[:0], one.labels[:0]), sampling_prob=1.0)
    assert 0 < max(gaps) <= bound(clipping, replaced=False)


def test_a_far_record_moves_a_semidual_release_by_the_norm_and_no_further():
    """So the norm that is paid for is the norm that is used, whoever else is there."""
    moved = []
    for others in (0, 30):
        run = training(Clipping.SEMIDUAL, clip_norm=0.05)
        images, labels = Rows.random(31).images, Rows.random(31).labels
        images, labels, norm = images[: others + 1], labels[: others + 1], run.mechanism.clip_norm
        with_it = run.query.total(images, labels, clip_norm=norm)
        without = run.query.total(images[1:], labels[1:], clip_norm=norm)
        moved.append((with_it - without).norm().item())
    assert moved == pytest.approx([0.05, 0.05], rel=1e-5)
    assert max(moved) <= 0.05


@every_clipping
def test_a_record_that_is_no_number_is_nobody(clipping):
    base = Rows.random(50)
    base.images[7, 0, 3, 3] = math.nan
    totals = []
    for rows in (base, Rows(base.images[np.arange(50) != 7], base.labels[np.arange(50) != 7])):
        run = training(clipping, rows)
        images, labels = run.take_finite(np.arange(len(rows)))
        totals.append(run.query.total(images, labels, clip_norm=run.mechanism.clip_norm))
    assert torch.equal(*totals)


def test_records_are_brought_within_what_was_declared_each_by_itself():
    """A pixel or a label outside is the nearest inside; a record that is no number is left out."""
    images = torch.zeros(4, 1, 8, 8)
    images[0], images[1, 0, 0, 0], images[2] = 1e30, math.nan, -7.0
    run = training(Clipping.SEMIDUAL, Rows(images, torch.tensor([99, 1, -5, 1])))
    found, labels = run.take_finite(np.arange(4))
    assert found[:, 0, 0, 0].tolist() == [1.0, -1.0, 0.0]
    assert labels.tolist() == [2, 0, 1]


@every_clipping
def test_labels_of_what_is_made_do_not_follow_the_records(clipping):
    rows = Rows.random(50)
    rows.labels[:] = 1
    run = training(clipping, rows)
    list(run.steps())
    assert torch.bincount(run.uniform_labels(900), minlength=3).min() > 240
    if clipping is Clipping.SEMIDUAL:
        assert torch.bincount(run.query.labels).tolist() == [4, 3, 3]


def test_too_few_points_for_the_classes_are_refused():
    with pytest.raises(Failure) as failure:
        training(Clipping.SEMIDUAL, images=2)
    assert failure.value.fault is Fault.SCHEMA_MISMATCH


# The plan


def test_semidual_is_a_sum_and_the_others_are_functions_of_the_batch():
    events = {clipping: plan(clipping).event() for clipping in Clipping}
    assert {clipping: event.query for clipping, event in events.items()} == {
        Clipping.JOINT: Query.FUNCTION,
        Clipping.PER_IMAGE: Query.FUNCTION,
        Clipping.SEMIDUAL: Query.SUM,
    }
    assert [event.noise_stddev for event in events.values()] == pytest.approx([1.0, math.sqrt(10), 0.5])
    assert [event.rows for event in events.values()] == [1, 10, 1]
    assert {event.bound for event in events.values()} == {0.5}
    shown = [plan(clipping).published_reading(1e-5) is not None for clipping in Clipping]
    assert shown == [False, True, False]


@every_clipping
def test_plans_with_a_recipe_read_back(clipping):
    given = plan(clipping, recipe=SMALL)
    assert plan_from_dict(given.to_dict()) == given


def test_other_plans_know_no_semidual_clipping():
    with pytest.raises(InvalidPlan, match="clipping"):
        GSWGANPlan(clipping=Clipping.SEMIDUAL)


def test_presets_read_back_and_the_paper_is_one_of_them():
    for name in SinkhornRecipe.presets:
        recipe = SinkhornRecipe.preset(name)
        assert SinkhornRecipe.from_dict(recipe.to_dict()) == recipe
    paper = SinkhornRecipe.preset("paper")
    assert (paper.debiasing, paper.absolute_weight, paper.class_weight, paper.entropy) == (
        0.2,
        1.0,
        15.0,
        0.05,
    )
    assert (paper.rate, paper.weight_decay, paper.latent, paper.frequencies) == (1e-5, 2e-5, 12, 64)


@pytest.mark.parametrize(
    "odd",
    [
        {"seed": 1},
        {"network": "vae"},
        {"optimizer": "lbfgs"},
        {"features": 12},
        {"latent": 0},
        {"rate": 0.0},
        {"debiasing": 1.1},
        {"absolute_weight": -1.0},
        {"class_weight": math.nan},
        {"entropy": 0.0},
        {"iterations": 0},
        {"frequencies": 65},
        {"memory": 1.0},
        {"fitting_steps": 1.5},
        {"average_decay": 1.0},
        {"entropy": "low"},
        {"network": ["dcgan"]},
    ],
)
def test_odd_recipes_are_refused(odd):
    with pytest.raises(InvalidPlan, match=r"only the fields|out of range|not a number"):
        SinkhornRecipe.from_dict(odd)


# What learns


def two_patterns(count: int) -> Rows:
    """Classes that are stripes, squares and a slope, with a little noise."""
    source = torch.Generator().manual_seed(9)
    line = torch.linspace(-1, 1, 8)
    patterns = torch.stack(
        [line.sign()[:, None].expand(8, 8), (line[:, None] * line).sign(), line[None].expand(8, 8)]
    )
    labels = torch.randint(3, (count,), generator=source)
    images = patterns[labels] * 0.8 + 0.1 * torch.randn(count, 8, 8, generator=source)
    rows = Rows(images[:, None], labels)
    rows.patterns = patterns * 0.8
    return rows


@every_clipping
def test_the_classes_come_out_as_they_went_in(clipping):
    recipe = SinkhornRecipe(
        features=16, latent=4, rate=3e-3, weight_decay=0.0, absolute_weight=0.0, entropy=0.5, iterations=3,
        fitting_steps=10, fitting_images=30, average_decay=0.9,
    )  # fmt: skip
    rows = two_patterns(2000)
    steps, noise = (30, 0.5) if clipping is Clipping.SEMIDUAL else (300, 1e-3)
    run = training(
        clipping, rows, rng=SecureRng(), recipe=recipe, steps=steps, noise_multiplier=noise,
        images=30, sampling_prob=0.05 if noise < 0.1 else 0.5,
    )  # fmt: skip
    list(run.steps())
    sample = run.synthesizer().sample(300, seed=1)
    images = torch.from_numpy(sample.images[..., 0]) / 127.5 - 1
    for label in range(3):
        mean = images[torch.from_numpy(sample.labels) == label].mean(0)
        errors = [(mean - other).square().mean().item() for other in rows.patterns]
        assert np.argmin(errors) == label
        assert errors[label] < 0.1


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_the_generator_goes_down_the_gradient_it_is_given(optimizer):
    run = training(Clipping.JOINT, recipe=SinkhornRecipe(**{**SMALL.to_dict(), "optimizer": optimizer}))
    images = run.generate(torch.tensor([0, 1, 2]))
    before = run.generator.network.body[0].weight.detach().clone()
    expected = torch.autograd.grad(
        images, run.generator.network.body[0].weight, torch.ones_like(images), True
    )[0]
    run.follow(images, torch.ones_like(images))
    moved = before - run.generator.network.body[0].weight.detach()
    if optimizer == "sgd":
        assert torch.allclose(moved, 1e-3 * (expected + 2e-5 * before), atol=1e-6)
    else:
        assert (moved.sign() == expected.sign()).double().mean() > 0.99


def test_the_average_is_what_leaves_if_asked_for():
    run = training(Clipping.JOINT, recipe=SinkhornRecipe(**{**SMALL.to_dict(), "average_decay": 0.5}))
    weight = run.generator.network.seed.weight
    expected = weight.detach().clone()
    for step, _ in enumerate(run.steps(), start=1):
        expected = expected.lerp(weight.detach(), 1 - min(0.5, (1 + step) / (10 + step)))
    assert torch.allclose(run.synthesizer().network.seed.weight, expected, atol=1e-6)
    assert not torch.equal(expected, weight)


def test_weights_that_are_no_numbers_are_a_fault():
    run = training(Clipping.JOINT)
    list(run.steps())
    with torch.no_grad():
        run.generator.network.seed.weight[0] = math.nan
    with pytest.raises(Failure) as failure:
        run.synthesizer()
    assert failure.value.fault is Fault.DIVERGED


@every_clipping
@pytest.mark.parametrize("network", ["dcgan", "residual"])
@pytest.mark.parametrize("size", [(8, 8, 1), (9, 14, 3), (64, 64, 3)])
def test_images_of_any_size_grey_or_coloured(clipping, network, size):
    height, width, channels = size
    rows = Rows.random(30, (channels, height, width))
    rows.schema = ImageSchema(height=height, width=width, channels=channels, classes=("a", "b", "c"))
    run = training(
        clipping, rows, recipe=SinkhornRecipe(**{**SMALL.to_dict(), "network": network}), steps=1, images=4
    )
    list(run.steps())
    made = run.synthesizer()
    assert made.sample(3, seed=1).images.shape == (3, height, width, channels)
    assert ImageSynthesizer.from_files(made.to_files()).to_files() == made.to_files()


def test_records_of_other_sizes_are_refused():
    rows = Rows.random(5)
    rows.schema = ImageSchema(height=100, width=8, classes=("a",))
    with pytest.raises(Failure) as failure:
        training(Clipping.JOINT, rows)
    assert failure.value.fault is Fault.SCHEMA_MISMATCH


@pytest.mark.parametrize("size", [(28, 28, 1), (9, 14, 3), (8, 64, 1)])
def test_a_residual_image_is_made_from_its_own_latent_and_label(size):
    height, width, channels = size
    shape = Residual(height=height, width=width, channels=channels, classes=3, features=16, latent=5)
    network, latents, labels = shape.network(), torch.randn(4, 5), torch.tensor([0, 2, 1, 1])
    images = network(latents, labels)
    assert images.shape == (4, channels, height, width)
    assert images.abs().max() <= 1
    latents[1], labels[1] = math.nan, 0
    again = network(latents, labels)
    assert torch.allclose(again[[0, 2, 3]], images[[0, 2, 3]], atol=1e-5)
    assert not torch.allclose(images[2], network(latents, torch.tensor([0, 0, 2, 1]))[2])
    assert not list(network.buffers())
    with pytest.raises(UnfitSynthesizer):
        Residual(height=8, width=8, channels=1, classes=2, features=12)
