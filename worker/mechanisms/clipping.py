"""Sums of per-record gradients, each clipped to a norm, without forming them one by one where that is dearer.

One forward pass and one backward pass give, for every layer, its input and the gradient at its output. From
these follow the norm of every record's gradient and, once the norms are known, the sum of the clipped
gradients in one weighted product per layer (Li et al. 2022; Bu et al. 2023). `record_gradients` and
`clip_rows` do the same the plain way: tests compare with them, and they look after the odd record whose
numbers do not fit.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sluice.generators.im2col import im2col

Loss = Callable[..., Tensor]  # (module, *rows) to one loss for each record
Shares = dict[Tensor, Tensor]  # of each parameter, in a total

# Contributions are clipped to so much less than the clip norm, which pays for the rounding of norms, of
# weights and of what is scaled: no contribution is longer than the clip norm itself.
ROOM = 2.0**-20
# A sum of n float32 products is off by less than n times these: relative to the sum of their absolute values,
# in whatever order it is added up (Higham 2002, section 3.1), and absolutely where products vanish. Norms are
# stated that much larger.
ROUNDING = 1.01 * 2.0**-24
VANISHED = 2.0**-149
# Longer gradients are scaled one by one in float64: a weight has to be a normal float32 number.
LONGEST, LIGHTEST = 2.0**60, 2.0**-100


class NotPerRecord(ValueError):
    """The network mixes records, remembers them, or has a layer whose gradients cannot be told apart."""


@dataclass(frozen=True)
class Clipped:
    """`total` may be noised and released, in the order of `module.parameters()`; the rest stays private."""

    total: Tensor
    norms: Tensor
    losses: Tensor


def clipped_sum(
    module: nn.Module, loss: Loss, rows: tuple[Tensor, ...], *, clip_norm: float, physical_batch: int = 32
) -> Clipped:
    """Sum over records of their gradients, each scaled down to norm `clip_norm` where it is longer.

    Guarantee: what a record contributes has norm at most clip_norm, with nothing on top. The sum itself is
    rounded to float32, which no clip pays for: docs/guarantees.md#floating-point. A record whose gradient is
    not finite contributes zero. No record's share depends on another record; `physical_batch` of them at a
    time only bounds the memory.
    """
    parameters = list(module.parameters())
    total = torch.zeros(sum(p.numel() for p in parameters), device=parameters[0].device)
    shares = dict(zip(parameters, like(parameters, total), strict=True))
    norms, losses = [total.new_zeros(0, dtype=torch.float64)], [total[:0]]
    for part in zip(*(column.split(physical_batch) for column in rows), strict=True):
        if len(part[0]):  # an empty batch is split into one empty part
            for kept, found in zip((norms, losses), _add(module, loss, part, clip_norm, shares), strict=True):
                kept.append(found)
    return Clipped(total, torch.cat(norms), torch.cat(losses))


def _add(
    module: nn.Module, loss: Loss, rows: tuple[Tensor, ...], clip_norm: float, shares: Shares
) -> tuple[Tensor, Tensor]:
    layers, losses = layer_gradients(module, loss, rows)
    squares = torch.stack([layer.squares() for layer in layers]).sum(0)
    fits = squares < min(LONGEST, clip_norm / LIGHTEST) ** 2  # not so if it is no number
    if not fits.all():
        return _add_with_odd_ones(module, loss, rows, clip_norm, shares, fits), losses
    norms = squares.sqrt()
    weights = (clip_norm * (1 - ROOM) / norms).clamp(max=1).float()
    for layer in layers:
        layer.add(weights, shares)
    return norms, losses


def _add_with_odd_ones(
    module: nn.Module,
    loss: Loss,
    rows: tuple[Tensor, ...],
    clip_norm: float,
    shares: Shares,
    fits: Tensor,
) -> Tensor:
    norms = torch.zeros(len(fits), dtype=torch.float64, device=fits.device)
    if fits.any():
        norms[fits], _ = _add(module, loss, tuple(column[fits] for column in rows), clip_norm, shares)
    for odd in (~fits).nonzero().flatten().tolist():
        one = record_gradients(module, loss, tuple(column[odd : odd + 1] for column in rows))
        clipped, norms[odd : odd + 1] = clip_rows(one, clip_norm)
        for share, piece in zip(shares.values(), like(list(shares), clipped[0]), strict=True):
            share += piece
    return norms


# The plain way


def record_gradients(module: nn.Module, loss: Loss, rows: tuple[Tensor, ...]) -> Tensor:
    """Every record's gradient, from a backward pass of its own; one row for each record."""
    parameters = list(module.parameters())
    out = torch.zeros(len(rows[0]), sum(p.numel() for p in parameters), device=parameters[0].device)
    for record, row in enumerate(out):
        losses = loss(module, *(column[record : record + 1] for column in rows))
        gradients = torch.autograd.grad(losses.sum(), parameters)
        for piece, gradient in zip(like(parameters, row), gradients, strict=True):
            piece.copy_(gradient)
    return out


def clip_rows(rows: Tensor, clip_norm: float) -> tuple[Tensor, Tensor]:
    """Rows scaled down to `clip_norm` where they are longer, and the norms they had.

    Guarantee: every row of the result is finite and no longer than clip_norm, also if it is then rounded to
    float32, whatever came in. A row that is not finite becomes zero, and its norm is given as zero.
    """
    finite = rows.isfinite().all(1, keepdim=True)
    wide = torch.where(finite, rows, 0).double()
    # By the largest first: squares of 1e200 overflow, squares of 1e-200 vanish.
    largest = wide.abs().amax(1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    scaled = wide / largest
    length = torch.linalg.vector_norm(scaled, dim=1, keepdim=True)
    kept = scaled * torch.minimum(largest, clip_norm * (1 - ROOM) / length.clamp(min=1))
    return kept, (largest * length).flatten().clamp(max=torch.finfo(torch.float64).max)


def like(parameters: list[Tensor], flat: Tensor) -> list[Tensor]:
    """Views of a flat vector, with the shapes and the memory order of the parameters."""
    starts = [0]
    for parameter in parameters:
        starts.append(starts[-1] + parameter.numel())
    offset = flat.storage_offset()
    return [
        flat.as_strided(p.shape, p.stride(), offset + start)
        for p, start in zip(parameters, starts[:-1], strict=True)
    ]


# Layer by layer


class LayerGradients(Protocol):
    """The gradients of one layer's parameters, for every record of a physical batch."""

    def squares(self) -> Tensor:
        """Squared norms, one for each record, not rounded down."""
        ...

    def add(self, weights: Tensor, shares: Shares) -> None:
        """Adds the weighted sum over records of each parameter's gradients to its share of the total."""
        ...


class Rule(Protocol):
    def __call__(self, layer: nn.Module, given: Tensor, gradient: Tensor) -> LayerGradients: ...


RULES: dict[type[nn.Module], Rule] = {}


def rule(*kinds: type[nn.Module]) -> Callable[[Rule], Rule]:
    """How to tell apart the per-record gradients of layers of exactly these types."""

    def add(given: Rule) -> Rule:
        RULES.update(dict.fromkeys(kinds, given))
        return given

    return add


@contextmanager
def tapped(module: nn.Module) -> Iterator[list[tuple[nn.Module, Tensor, Tensor]]]:
    """Collects every layer with parameters, its input and its output, as the module is called."""
    calls: list[tuple[nn.Module, Tensor, Tensor]] = []
    handles = [
        layer.register_forward_hook(lambda layer, given, out: calls.append((layer, given[0], out)))
        for layer in module.modules()
        if type(layer) in RULES
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def layer_gradients(
    module: nn.Module, loss: Loss, rows: tuple[Tensor, ...]
) -> tuple[list[LayerGradients], Tensor]:
    with tapped(module) as calls:
        losses = loss(module, *rows)
    used = [parameter for layer, _, _ in calls for parameter in layer.parameters(recurse=False)]
    if len(used) != len(list(module.parameters())):
        raise NotPerRecord("every layer is to be used once, and every parameter to belong to a known layer")
    # The gradients at the outputs, and no others: autograd leaves out the parameters' own.
    gradients = torch.autograd.grad(losses.sum(), [out for _, _, out in calls])
    with torch.no_grad():
        layers = [
            RULES[type(layer)](layer, given.detach(), gradient)
            for (layer, given, _), gradient in zip(calls, gradients, strict=True)
        ]
        return layers, losses.detach()


class Products:
    """Matrices sum_t left[n, t] right[n, t]^T, one for each record n.

    Their norms come from the matrices themselves where these are small, and otherwise from the Gram matrices
    of both sides: |sum_t l_t r_t^T|^2 = sum_st (l_s . l_t) (r_s . r_t).
    """

    def __init__(self, left: Tensor, right: Tensor) -> None:
        self.left, self.right, self.matrices = left, right, None
        places, rows, columns = left.shape[1], left.shape[2], right.shape[2]
        if places * (rows + columns) > rows * columns:
            self.matrices = left.transpose(1, 2) @ right

    def squares(self) -> Tensor:
        if self.matrices is not None:
            return squared(self.matrices)
        if self.left.shape[1] == 1:
            return squared(self.left) * squared(self.right)
        lefts, rights = (side @ side.transpose(1, 2) for side in (self.left, self.right))
        sizes, others = (gram.diagonal(dim1=1, dim2=2).double() for gram in (lefts, rights))
        # What rounding and vanishing may have hidden; eight more for that of the products and of weights.
        places, terms = self.left.shape[1], sum(self.left.shape[1:]) + self.right.shape[2] + 8
        hidden = ROUNDING * terms * (sizes * others).sqrt().sum(1).square()
        hidden += VANISHED * terms * places * (sizes + others + places).sum(1)
        return (lefts * rights).sum(2).double().sum(1).clamp(min=0) + hidden

    def add(self, weights: Tensor, share: Tensor) -> None:
        if self.matrices is not None:
            share += (weights @ self.matrices.flatten(1)).view_as(share)
        else:
            left = self.left * weights[:, None, None]
            share.addmm_(left.flatten(0, 1).T, self.right.flatten(0, 1))


def squared(rows: Tensor) -> Tensor:
    """Squared norms of the rows, whatever their shape, not rounded down.

    As float32 adds them up, long rows of equal numbers would be short of a thousandth.
    """
    flat = rows.flatten(1)
    terms = flat.shape[1] + 4
    found = torch.linalg.vector_norm(flat, dim=1).double().square()
    return found * (1 + ROUNDING * terms) + VANISHED * terms


def patches_for(layer: nn.Conv2d | nn.ConvTranspose2d, images: Tensor) -> Tensor:
    return im2col(
        channels_last(images),
        layer.kernel_size,
        stride=layer.stride,
        padding=layer.padding,
        dilation=layer.dilation,
    )


def channels_last(images: Tensor) -> Tensor:
    return images.permute(0, 2, 3, 1)


@rule(nn.Conv2d)
class ConvGradients:
    """A convolution is a product at every place of the kernel."""

    def __init__(self, layer: nn.Conv2d, given: Tensor, gradient: Tensor) -> None:
        self.layer, out = layer, channels_last(gradient).flatten(1, 2)
        self.weight, self.bias = Products(out, patches_for(layer, given)), out.sum(1)

    def squares(self) -> Tensor:
        squares = self.weight.squares()
        return squares if self.layer.bias is None else squares + squared(self.bias)

    def add(self, weights: Tensor, shares: Shares) -> None:
        weight = shares[self.layer.weight]
        moved = torch.zeros_like(channels_last(weight), memory_format=torch.contiguous_format)
        self.weight.add(weights, moved.flatten(1))
        weight += moved.permute(0, 3, 1, 2)
        if self.layer.bias is not None:
            shares[self.layer.bias] += weights @ self.bias


@rule(nn.ConvTranspose2d)
class ConvTransposeGradients(ConvGradients):
    """The same with input and output changing places, but for the bias."""

    def __init__(self, layer: nn.ConvTranspose2d, given: Tensor, gradient: Tensor) -> None:
        self.layer = layer
        self.weight = Products(channels_last(given).flatten(1, 2), patches_for(layer, gradient))
        self.bias = gradient.sum((2, 3))


@rule(nn.Linear)
class LinearGradients:
    """A product for each record, or for each of its places."""

    def __init__(self, layer: nn.Linear, given: Tensor, gradient: Tensor) -> None:
        self.layer = layer
        left = gradient.reshape(len(gradient), -1, gradient.shape[-1])
        self.weight = Products(left, given.reshape(len(given), -1, given.shape[-1]))
        self.bias = left.sum(1)

    def squares(self) -> Tensor:
        squares = self.weight.squares()
        return squares if self.layer.bias is None else squares + squared(self.bias)

    def add(self, weights: Tensor, shares: Shares) -> None:
        self.weight.add(weights, shares[self.layer.weight])
        if self.layer.bias is not None:
            shares[self.layer.bias] += weights @ self.bias


@rule(nn.Embedding)
class EmbeddingGradients:
    """A record moves the rows it looked up; rows looked up twice are moved by the sum."""

    def __init__(self, layer: nn.Embedding, given: Tensor, gradient: Tensor) -> None:
        self.layer, self.index = layer, given.reshape(len(given), -1)
        self.out = gradient.reshape(*self.index.shape, -1)
        if layer.padding_idx is not None:
            self.out = self.out * (self.index != layer.padding_idx)[..., None]

    def squares(self) -> Tensor:
        # Row sums at the first place that looked up the row: nothing is lost in a Gram matrix.
        same = self.index[:, :, None] == self.index[:, None, :]
        first = ~same.tril(-1).any(2)
        out = self.out.double()
        # What the rounding of weighted rows may add where these cancel.
        hidden = 4 * ROUNDING * out.norm(dim=2).sum(1).square()
        return ((same.double() @ out) * first[..., None]).square().sum((1, 2)) + hidden

    def add(self, weights: Tensor, shares: Shares) -> None:
        moved = (self.out * weights[:, None, None]).flatten(0, 1)
        shares[self.layer.weight].index_add_(0, self.index.flatten(), moved)


@rule(nn.GroupNorm, nn.InstanceNorm2d, nn.LayerNorm)
class NormGradients:
    """Scale and shift: small enough to form for each record."""

    def __init__(self, layer: nn.Module, given: Tensor, gradient: Tensor) -> None:
        self.layer = layer
        if isinstance(layer, nn.LayerNorm):
            normal = F.layer_norm(given, layer.normalized_shape, eps=layer.eps)
            places = range(1, given.dim() - len(layer.normalized_shape))
        else:
            groups = layer.num_groups if isinstance(layer, nn.GroupNorm) else layer.num_features
            normal = F.group_norm(given, groups, eps=layer.eps)
            places = range(2, given.dim())
        self.weight, self.bias = gradient * normal, gradient
        if places:
            self.weight, self.bias = self.weight.sum(tuple(places)), self.bias.sum(tuple(places))

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        both = [(self.layer.weight, self.weight), (self.layer.bias, self.bias)]
        return [(parameter, rows) for parameter, rows in both if parameter is not None]

    def squares(self) -> Tensor:
        zero = torch.zeros(len(self.weight), dtype=torch.float64, device=self.weight.device)
        return sum((squared(rows) for _, rows in self.pairs()), start=zero)

    def add(self, weights: Tensor, shares: Shares) -> None:
        for parameter, rows in self.pairs():
            shares[parameter] += (weights @ rows.flatten(1)).view_as(parameter)


# What passes

PLAIN = (
    nn.Identity,
    nn.ReLU,
    nn.LeakyReLU,
    nn.ELU,
    nn.GELU,
    nn.SiLU,
    nn.Softplus,
    nn.Tanh,
    nn.Sigmoid,
    nn.Flatten,
)


def validate(module: nn.Module, rows: tuple[Tensor, ...]) -> None:
    """Refuses a network whose per-record gradients are not each one record's own.

    `rows` are made up, never records: the last step poisons one of them and looks for the poison in others.
    """
    from opacus.validators import ModuleValidator  # seconds to import, needed once a job

    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    if len(names) != len(list(module.parameters())):
        raise NotPerRecord("a parameter is used by two layers")
    for name, _ in module.named_buffers():
        raise NotPerRecord(f"{name} is a buffer: it could remember records")
    for name, layer in module.named_modules():
        known = type(layer) in RULES or type(layer) in PLAIN
        if not known and (not list(layer.children()) or list(layer.parameters(recurse=False))):
            raise NotPerRecord(
                f"{name or 'the network'} is a {type(layer).__name__}, for which there is no rule"
            )
        if trouble := unfit(layer):
            raise NotPerRecord(f"{name}: {trouble}")
    if errors := ModuleValidator.validate(module):
        raise NotPerRecord(str(errors[0]))
    refuse_mixing(module, rows)


def unfit(layer: nn.Module) -> str | None:
    if isinstance(layer, nn.Conv2d | nn.ConvTranspose2d) and (
        layer.groups != 1 or layer.padding_mode != "zeros" or isinstance(layer.padding, str)
    ):
        return "convolutions here have one group and padding by a number of zeros"
    if isinstance(layer, nn.Embedding) and (
        layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse
    ):
        return "embeddings here are plain tables"
    return None


@torch.no_grad()
def refuse_mixing(module: nn.Module, rows: tuple[Tensor, ...]) -> None:
    """Poisons one made-up record and sees whether another record's output changes."""
    before = module(*rows)
    for record in range(len(rows[0])):
        poisoned = tuple(column.clone() for column in rows)
        for column in poisoned:
            if column.is_floating_point():
                column[record] = torch.nan
        others = torch.arange(len(before), device=before.device) != record
        if not torch.equal(module(*poisoned)[others], before[others]):
            raise NotPerRecord("one record changes what the network says of another")
