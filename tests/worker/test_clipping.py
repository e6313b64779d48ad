"""Clipped sums equal the plain way, stay within the norm whatever comes in, and keep records apart."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tests.fakes  # noqa: F401  one thread
from sluice.generators.dcgan import DCGAN
from worker.mechanisms import clipping
from worker.mechanisms.clipping import (
    ROOM,
    NotPerRecord,
    Products,
    clip_rows,
    clipped_sum,
    layer_gradients,
    record_gradients,
    validate,
)
from worker.trainers.networks import DenseDiscriminator, Discriminator

RECORDS = 13
Case = tuple[nn.Module, tuple[Tensor, ...]]


def loss(module: nn.Module, *rows: Tensor) -> Tensor:
    """Any loss will do that is each record's own and has gradients of many sizes."""
    out = module(*rows)
    return F.softplus(out.reshape(len(out), -1).sum(1) * 3)


def images(channels: int = 3, size: int = 8) -> tuple[Tensor, ...]:
    # Records of many sizes, so that some are clipped and some are not.
    return (torch.randn(RECORDS, channels, size, size) * torch.logspace(-2, 1, RECORDS)[:, None, None, None],)


def flat(width: int = 6) -> tuple[Tensor, ...]:
    return (torch.randn(RECORDS, width) * torch.logspace(-2, 1, RECORDS)[:, None],)


def discriminator(height: int, width: int, channels: int, features: int = 16, *, dense: bool = False) -> Case:
    shape = DCGAN(height=height, width=width, channels=channels, classes=3)
    rows = (torch.rand(RECORDS, channels, height, width) * 2 - 1, torch.randint(3, (RECORDS,)))
    return (DenseDiscriminator if dense else Discriminator)(shape, features), rows


class Bounded(nn.Sequential):
    """Layers with a hyperbolic tangent between them."""

    def forward(self, x: Tensor) -> Tensor:
        first, last = self
        return last(torch.tanh(first(x)))


CASES: dict[str, Callable[[], Case]] = {
    "linear": lambda: (Bounded(nn.Linear(6, 5), nn.Linear(5, 1)), flat()),
    "linear without bias": lambda: (nn.Sequential(nn.Linear(6, 5, bias=False)), flat()),
    "linear at places, few": lambda: (nn.Sequential(nn.Linear(40, 30)), (torch.randn(RECORDS, 3, 40),)),
    "linear at places, many": lambda: (nn.Sequential(nn.Linear(4, 3)), (torch.randn(RECORDS, 30, 4),)),
    "dense discriminator": lambda: discriminator(8, 8, 3, dense=True),
    "discriminator 28": lambda: discriminator(28, 28, 1),
    "discriminator 32 in colour": lambda: discriminator(32, 32, 3),
    "discriminator, odd sizes": lambda: discriminator(9, 14, 1),
}


@pytest.fixture(params=CASES)
def case(request) -> Case:
    torch.manual_seed(7)
    return CASES[request.param]()


def plain(module: nn.Module, rows: tuple[Tensor, ...]) -> Tensor:
    """Every record's gradient by itself, in double precision: nothing of the quick way is in here."""
    module = module.double()
    wide = tuple(row.double() if row.is_floating_point() else row for row in rows)
    gradients = []
    for record in range(len(rows[0])):
        module.zero_grad()
        loss(module, *(row[record : record + 1] for row in wide)).sum().backward()
        gradients.append(torch.cat([memory_order(p.grad, p) for p in module.parameters()]))
    module.float()
    return torch.stack(gradients)


def memory_order(values: Tensor, like: Tensor) -> Tensor:
    out = torch.empty_like(like)
    out.copy_(values)
    return out.as_strided((out.numel(),), (1,))


@pytest.mark.parametrize("clip_norm", [0.1, 1.0, 1e3])
def test_clipped_sum_is_that_of_the_plain_way(case, clip_norm):
    """However it is cut. Norms are overstated by up to half a percent, where products are not formed."""
    module, rows = case
    gradients = plain(module, rows)
    norms = gradients.norm(dim=1)
    for physical_batch in (1, 7, 32):
        found = clipped_sum(module, loss, rows, clip_norm=clip_norm, physical_batch=physical_batch)
        assert (found.norms >= norms * (1 - 1e-5)).all()
        assert (found.norms <= norms * 1.005 + 1e-12).all()
        expected = (gradients * (clip_norm / found.norms[:, None]).clamp(max=1)).sum(0)
        assert (found.total - expected).norm() <= 1e-5 * expected.norm()


def test_both_plain_ways_agree(case):
    module, rows = case
    found, expected = record_gradients(module, loss, rows), plain(module, rows)
    assert (found - expected).norm() <= 1e-5 * expected.norm()


# Sums of equal numbers are what float32 gets most wrong: all rounding goes the same way.
EQUAL = [1.0, 1 / 3, 1.1, 1e-6, -7e4]


def test_no_contribution_is_longer_than_the_norm(case):
    """Not by a hair: measured in float64, of one record at a time, plain and hostile."""
    module, rows = case
    equal = torch.tensor(EQUAL).view(-1, *[1] * (rows[0].dim() - 1)).expand(-1, *rows[0].shape[1:])
    rows = (torch.cat([rows[0], equal]), *(torch.cat([row, row[: len(EQUAL)]]) for row in rows[1:]))
    for record in range(len(rows[0])):
        one = tuple(row[record : record + 1] for row in rows)
        for clip_norm in (1e-3, 0.1, 1.0):
            assert clipped_sum(module, loss, one, clip_norm=clip_norm).total.double().norm() <= clip_norm


@pytest.mark.parametrize("number", [*EQUAL, None])
@pytest.mark.parametrize("scales", [(1.0, 1.0), (1e-23, 1e18), (1e18, 1e-23)])
@pytest.mark.parametrize(
    "sizes", [(1, 512, 4096), (49, 128, 1024), (196, 32, 400), (16, 64, 256), (1, 1, 300_000)]
)
def test_layers_of_many_equal_numbers_are_clipped_within_the_norm(sizes, scales, number):
    """Computed in float64 from what a layer was given, and as it is added.

    Also where places cancel, and where the squares of one side vanish and the products do not.
    """
    places, *widths = sizes
    source = torch.Generator().manual_seed(3)
    lefts, rights = (
        (torch.randn(4, places, width, generator=source) if number is None else torch.tensor(number)) * scale
        + torch.zeros(4, places, width)
        for width, scale in zip(widths, scales, strict=True)
    )
    # Of the third and fourth record places cancel, all but a little.
    lefts[2:] *= torch.where(torch.arange(places) % 2 == 0, 1.0, -1.0)[:, None]
    lefts[3] *= 1 + 1e-3 * torch.randn(places, 1, generator=source)
    products = Products(lefts, rights)
    norms = products.squares().sqrt()
    weights = (1e-4 * (1 - ROOM) / norms).clamp(max=1).float()
    for record in norms.isfinite().nonzero().flatten().tolist():  # others are looked at by themselves
        alone = torch.where(torch.arange(4) == record, weights, 0)
        share = torch.zeros(widths)
        products.add(alone, share)
        exact = (lefts[record] * weights[record]).double().T @ rights[record].double()
        assert share.double().norm() <= 1e-4
        assert exact.norm() <= 1e-4 or products.matrices is not None


@pytest.mark.parametrize("clip_norm", [1e-7, 1e-5, 1e-3])
def test_gradients_too_long_for_a_weight_in_float32_are_clipped_within_the_norm(clip_norm):
    """A weight of 1e-42 has three digits."""
    module = nn.Sequential(nn.Linear(4, 3))
    given = torch.tensor([[0.1, 0.7, -0.3, 0.9]]) * 1e18 * torch.linspace(0.1, 1, 20)[:, None]
    for record in range(20):
        one = given[record : record + 1]
        found = clipped_sum(
            module, lambda module, rows: module(rows).sum(1) * 1e18, (one,), clip_norm=clip_norm
        )
        assert 0.99 * clip_norm < found.total.double().norm() <= clip_norm


def test_the_rounding_of_a_sum_is_a_small_share_of_the_norm():
    """What no clip pays for: two thousand records that all pull the same way, added up in float32."""
    torch.manual_seed(5)
    module = Bounded(nn.Linear(200, 100), nn.Linear(100, 1))
    rows = (torch.rand(1, 200).expand(2000, 200) + 1e-3 * torch.rand(2000, 200),)
    found = clipped_sum(module, loss, rows, clip_norm=1e-2)
    gradients = plain(module, rows)
    exact = (gradients * (1e-2 * (1 - ROOM) / found.norms[:, None]).clamp(max=1)).sum(0)
    assert exact.norm() > 0.9 * 2000 * 1e-2
    assert (found.total - exact).norm() <= 2000 * 1e-2 * 2**-21


def test_an_empty_batch_has_a_sum_of_nothing(case):
    module, rows = case
    empty = clipped_sum(module, loss, tuple(row[:0] for row in rows), clip_norm=1.0)
    assert not empty.total.any()
    assert len(empty.norms) == len(empty.losses) == 0


def test_a_record_changes_its_own_row_and_no_other(case):
    """Of the per-record norms and losses, and of the scores."""
    module, rows = case
    validate(module, rows)
    before = clipped_sum(module, loss, rows, clip_norm=1.0)
    changed = tuple(row.clone() for row in rows)
    for row in changed:
        row[4] = (row[4] + 1) * 1.5 if row.is_floating_point() else (row[4] + 1) % 3
    after = clipped_sum(module, loss, changed, clip_norm=1.0)
    others = torch.arange(RECORDS) != 4
    assert torch.equal(before.norms[others], after.norms[others])
    assert torch.equal(before.losses[others], after.losses[others])
    assert before.norms[4] != after.norms[4]
    assert not list(module.buffers())


@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_opacus_finds_the_same_gradients(case):
    from opacus import GradSampleModule

    module, rows = case
    if isinstance(module, Discriminator):
        pytest.skip("it has no rule for labels looked up; test_dpgan compares with labels convolved")
    ours = clipped_sum(module, loss, rows, clip_norm=1.0)
    wrapped = GradSampleModule(module, loss_reduction="sum", strict=True)
    loss(wrapped, *rows).sum().backward()
    theirs = torch.cat([p.grad_sample.flatten(1) for p in module.parameters()], 1)
    wrapped.remove_hooks()
    assert torch.allclose(ours.norms.float(), theirs.norm(dim=1), rtol=1e-4, atol=1e-6)


# Hostile numbers

HOSTILE = [1e30, -1e30, 3e38, torch.nan, torch.inf, -torch.inf, 1e-42, -1e-45, 0.0, 1.0, 1e-20, 1e19]


@pytest.mark.parametrize("clip_norm", [1e-3, 1.0, 50.0])
def test_ten_thousand_hostile_gradients_stay_finite_and_within_the_norm(clip_norm):
    source = torch.Generator().manual_seed(3)
    kinds = torch.tensor(HOSTILE)
    rows = kinds[torch.randint(len(HOSTILE), (10_000, 8), generator=source)]
    rows[:2000] = kinds[torch.randint(len(HOSTILE), (2000, 1), generator=source)]  # all of one kind
    rows[2000:4000, 1:] = 0  # one hostile number among zeros
    clipped, norms = clip_rows(rows, clip_norm)
    assert clipped.isfinite().all()
    assert norms.isfinite().all()
    assert (clipped.norm(dim=1) <= clip_norm).all()
    assert (clipped.float().double().norm(dim=1) <= clip_norm).all()
    finite = rows.isfinite().all(1)
    assert not clipped[~finite].any()
    small = finite & (rows.double().norm(dim=1) <= clip_norm * (1 - ROOM))
    assert torch.equal(clipped[small], rows[small].double())
    long = finite & ~small
    assert torch.allclose(clipped[long].norm(dim=1), torch.tensor(clip_norm, dtype=torch.float64))


def test_numbers_at_the_ends_of_double_precision():
    rows = torch.tensor([[1e308, 1e308], [1e-320, 0], [-1e200, 1e-200]], dtype=torch.float64)
    clipped, norms = clip_rows(rows, 1.0)
    assert torch.allclose(clipped.norm(dim=1)[[0, 2]], torch.ones(2, dtype=torch.float64))
    assert torch.equal(clipped[1], rows[1])
    assert norms.isfinite().all()


def test_hostile_records_through_every_layer(case):
    """Whatever a record holds, the sum is that of the plain way."""
    module, rows = case
    source = torch.Generator().manual_seed(5)
    for _ in range(2):
        hostile = tuple(row.clone() for row in rows)
        for record in range(0, RECORDS, 2):
            flat_row = hostile[0][record].view(-1)
            places = torch.randint(len(flat_row), (6,), generator=source)
            flat_row[places] = torch.tensor(HOSTILE)[torch.randint(len(HOSTILE), (6,), generator=source)]
        found = clipped_sum(module, loss, hostile, clip_norm=1.0, physical_batch=7)
        assert found.total.isfinite().all()
        assert found.norms.isfinite().all()
        expected, _ = clip_rows(record_gradients(module, loss, hostile), 1.0)
        assert (found.total - expected.sum(0)).norm() <= 5e-3 * expected.sum(0).norm() + 1e-6


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_record_that_is_not_finite_contributes_nothing(bad):
    torch.manual_seed(1)
    module, rows = CASES["discriminator 28"]()
    poisoned = rows[0].clone()
    poisoned[3] = bad
    kept = torch.arange(RECORDS) != 3
    without = clipped_sum(module, loss, tuple(row[kept] for row in rows), clip_norm=1.0).total
    total = clipped_sum(module, loss, (poisoned, rows[1]), clip_norm=1.0).total
    assert (total - without).norm() <= 1e-6 * without.norm()


@pytest.mark.parametrize(
    ("left", "right"), [(1.0, 1.0), (1e18, 1e-21), (1e-22, 1e18), (1e-25, 1e12), (3e-20, 3e18)]
)
def test_gram_norms_are_never_too_small(left, right):
    """Also where terms cancel, and where squares vanish on one side while the product does not."""
    source = torch.Generator().manual_seed(2)
    lefts = torch.randn(50, 12, 40, generator=source)
    rights = torch.randn(50, 12, 60, generator=source)
    rights[10:20, 6:] = rights[10:20, :6]
    lefts[10:20, 6:] = -lefts[10:20, :6] * (1 + 1e-3)  # nearly cancelling
    lefts, rights = lefts * left, rights * right
    products = Products(lefts, rights)
    assert products.matrices is None
    exact = (lefts.double().transpose(1, 2) @ rights.double()).square().sum((1, 2))
    made = (lefts.transpose(1, 2) @ rights).double().square().sum((1, 2))
    found = products.squares()
    # Not finite is all right too: such a record is looked at by itself.
    assert ((found >= torch.maximum(exact, made) * (1 - 1e-9)) | ~found.isfinite()).all()


# What passes


class Doubly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x))


class Mixing(nn.Module):
    """Looks innocent layer by layer, and subtracts the batch mean."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x - x.mean(0))


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale


def tied() -> nn.Module:
    one, other = nn.Linear(6, 6), nn.Linear(6, 6)
    other.weight = one.weight
    return nn.Sequential(one, other)


UNFIT: dict[str, Callable[[], Case]] = {
    "batch norm": lambda: (nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)), flat()),
    "batch norm without memory": lambda: (
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, track_running_stats=False)),
        images(),
    ),
    "batch norm without parameters": lambda: (
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, affine=False, track_running_stats=False)),
        images(),
    ),
    "instance norm with memory": lambda: (
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, affine=True, track_running_stats=True)),
        images(),
    ),
    "a buffer": lambda: (Remembering(), flat()),
    "a mixing forward": lambda: (Mixing(), flat()),
    "an unknown layer": lambda: (nn.Sequential(nn.Bilinear(6, 6, 2)), flat()),
    "a parameter of no layer": lambda: (Bare(), flat()),
    "dropout": lambda: (nn.Sequential(nn.Linear(6, 6), nn.Dropout()), flat()),
    "a convolution": lambda: (nn.Sequential(nn.Conv2d(3, 4, 3)), images()),
    "a convolution of groups": lambda: (nn.Sequential(nn.Conv2d(4, 4, 3, groups=2)), images(4)),
    "an embedding": lambda: (nn.Sequential(nn.Embedding(4, 6)), (torch.randint(4, (RECORDS, 5)),)),
    "group norm": lambda: (nn.Sequential(nn.Linear(6, 6), nn.GroupNorm(2, 6)), flat()),
    "layer norm": lambda: (nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6)), flat()),
    "an activation as a layer": lambda: (nn.Sequential(nn.Linear(6, 6), nn.ReLU()), flat()),
    "a shared weight": lambda: (tied(), flat()),
}


@pytest.mark.parametrize("name", UNFIT)
def test_networks_that_mix_or_remember_records_are_refused(name):
    module, rows = UNFIT[name]()
    with pytest.raises(NotPerRecord):
        validate(module, rows)


def test_a_layer_used_twice_is_refused_where_it_is_used():
    with pytest.raises(NotPerRecord):
        clipped_sum(Doubly(), loss, flat(), clip_norm=1.0)


def test_the_dearer_way_is_not_taken():
    """Places times both widths, against the product of the widths."""
    few = Products(torch.randn(2, 3, 50), torch.randn(2, 3, 70))
    many = Products(torch.randn(2, 90, 5), torch.randn(2, 90, 7))
    assert few.matrices is None
    assert many.matrices is not None
    module, rows = CASES["discriminator 28"]()
    gradients = layer_gradients(module, loss, rows)[0]
    assert [type(g).__name__ for g in gradients] == [
        "LinearGradients", "LabelPlanesGradients", "LinearGradients", "LinearGradients", "LinearGradients"
    ]  # fmt: skip


def test_no_hook_stays_behind():
    module, rows = CASES["linear"]()
    clipped_sum(module, loss, rows, clip_norm=1.0)
    assert not any(layer._forward_hooks for layer in module.modules())


def test_every_rule_is_tested():
    used = {type(layer) for make in CASES.values() for layer in make()[0].modules()}
    assert set(clipping.RULES) <= used
