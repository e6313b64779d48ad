"""Sums of per-record gradients, each clipped to a norm, mostly without forming the single gradients.

One forward and one backward pass give the input of every layer and the gradient at its output. From these
follow the norm of every record's gradient and then the sum of the clipped gradients, in one weighted product
per layer (Li et al. 2022; Bu et al. 2023). `record_gradients` and `clip_rows` compute the same record by
record: tests compare with them, and records whose numbers leave the range of float32 take that path.

Only the layers of our own networks have a rule here; `validate` refuses all others.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

Loss = Callable[..., Tensor]  # (module, *rows) to one loss per record
Sums = dict[Tensor, Tensor]  # each parameter's part of the total

# Contributions are clipped to this share less than the clip norm: room for the rounding of norms, weights and
# products, so that no contribution is longer than the clip norm itself.
ROOM = 2.0**-20
# A sum of n float32 products is off by less than n times these: relative to the sum of their absolute values,
# in any order of addition (Higham 2002, section 3.1), and absolutely where products underflow. Norms are
# overstated by that much.
ROUNDING = 1.01 * 2.0**-24
UNDERFLOW = 2.0**-149
# Longer gradients are scaled one by one in float64, since a weight has to be a normal float32 number.
LONGEST, LIGHTEST = 2.0**60, 2.0**-100


class NotPerRecord(ValueError):
    """The network mixes or stores records, or has a layer without a rule for per-record gradients."""


@dataclass(frozen=True)
class Clipped:
    """`total`, in the order of `module.parameters()`, may be noised and released; the rest is private."""

    total: Tensor
    norms: Tensor
    losses: Tensor


def clipped_sum(
    module: nn.Module, loss: Loss, rows: tuple[Tensor, ...], *, clip_norm: float, physical_batch: int = 32
) -> Clipped:
    """The sum over records of their gradients, each scaled down to norm `clip_norm` where it is longer.

    Guarantee: a record contributes a vector of norm at most clip_norm, or zero if it is not finite. The sum
    itself is rounded to float32, which clipping leaves no room for: docs/guarantees.md#floating-point. No
    contribution depends on another record; `physical_batch` only bounds the memory.
    """
    parameters: list[Tensor] = list(module.parameters())
    total = torch.zeros(sum(p.numel() for p in parameters), device=parameters[0].device)
    sums = dict(zip(parameters, views_like(parameters, total), strict=True))
    norms, losses = [total.new_zeros(0, dtype=torch.float64)], [total[:0]]
    for part in zip(*(column.split(physical_batch) for column in rows), strict=True):
        if len(part[0]):  # an empty batch is split into one empty part
            part_norms, part_losses = _add_clipped(module, loss, part, clip_norm, sums)
            norms.append(part_norms)
            losses.append(part_losses)
    return Clipped(total, torch.cat(norms), torch.cat(losses))


def _add_clipped(
    module: nn.Module, loss: Loss, rows: tuple[Tensor, ...], clip_norm: float, sums: Sums
) -> tuple[Tensor, Tensor]:
    """Adds the clipped gradients of a physical batch to the sums; returns norms and losses."""
    layers, losses = layer_gradients(module, loss, rows)
    squares = torch.stack([layer.squares() for layer in layers]).sum(0)
    in_range = squares < min(LONGEST, clip_norm / LIGHTEST) ** 2  # False for NaN
    if in_range.all():
        norms = squares.sqrt()
        weights = (clip_norm * (1 - ROOM) / norms).clamp(max=1).float()
        for layer in layers:
            layer.add(weights, sums)
        return norms, losses
    norms = torch.zeros_like(squares)
    if in_range.any():
        ordinary = tuple(column[in_range] for column in rows)
        norms[in_range], _ = _add_clipped(module, loss, ordinary, clip_norm, sums)
    for index in (~in_range).nonzero().flatten().tolist():
        gradient = record_gradients(module, loss, tuple(column[index : index + 1] for column in rows))
        clipped, norms[index : index + 1] = clip_rows(gradient, clip_norm)
        for part, piece in zip(sums.values(), views_like(list(sums), clipped[0]), strict=True):
            part += piece
    return norms, losses


# Record by record


def record_gradients(module: nn.Module, loss: Loss, rows: tuple[Tensor, ...]) -> Tensor:
    """Every record's gradient, from its own backward pass; one row per record."""
    parameters = list(module.parameters())
    out = torch.zeros(len(rows[0]), sum(p.numel() for p in parameters), device=parameters[0].device)
    for record, row in enumerate(out):
        losses = loss(module, *(column[record : record + 1] for column in rows))
        gradients = torch.autograd.grad(losses.sum(), parameters)
        for piece, gradient in zip(views_like(parameters, row), gradients, strict=True):
            piece.copy_(gradient)
    return out


def clip_rows(rows: Tensor, clip_norm: float) -> tuple[Tensor, Tensor]:
    """Rows scaled down to `clip_norm` where they are longer, and their norms before that.

    Guarantee: every row of the result is finite and no longer than clip_norm, also after rounding to float32,
    for any input. A row that is not finite becomes zero, with norm zero.
    """
    finite = rows.isfinite().all(1, keepdim=True)
    wide = torch.where(finite, rows, 0).double()
    # Divided by the largest entry first: squares of 1e200 overflow, squares of 1e-200 underflow.
    largest = wide.abs().amax(1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    scaled = wide / largest
    length = torch.linalg.vector_norm(scaled, dim=1, keepdim=True)
    clipped = scaled * torch.minimum(largest, clip_norm * (1 - ROOM) / length.clamp(min=1))
    return clipped, (largest * length).flatten().clamp(max=torch.finfo(torch.float64).max)


def views_like(parameters: Sequence[Tensor], flat: Tensor) -> list[Tensor]:
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
        """Squared norms, one per record, never understated."""
        ...

    def add(self, weights: Tensor, sums: Sums) -> None:
        """Adds the weighted sum over records of each parameter's gradients to that parameter's part."""
        ...


Rule = Callable[..., LayerGradients]  # (layer, its input, the gradient at its output)
RULES: dict[type[nn.Module], Rule] = {}


def rule(*kinds: type[nn.Module]) -> Callable[[Rule], Rule]:
    """Registers how to compute per-record gradients of layers of exactly these types."""

    def register(gradients: Rule) -> Rule:
        RULES.update(dict.fromkeys(kinds, gradients))
        return gradients

    return register


@contextmanager
def recorded_calls(module: nn.Module) -> Iterator[list[tuple[nn.Module, Tensor, Tensor]]]:
    """Collects every layer with a rule, its input and its output, while the module is called."""
    calls: list[tuple[nn.Module, Tensor, Tensor]] = []
    handles = [
        layer.register_forward_hook(lambda layer, inputs, out: calls.append((layer, inputs[0], out)))
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
    with recorded_calls(module) as calls:
        losses = loss(module, *rows)
    used = [parameter for layer, _, _ in calls for parameter in layer.parameters(recurse=False)]
    if len(used) != len(list(module.parameters())):
        raise NotPerRecord("a layer is used twice, or a parameter belongs to no layer with a rule")
    # Gradients at the outputs alone: autograd then skips those of the parameters.
    gradients = torch.autograd.grad(losses.sum(), [out for _, _, out in calls])
    with torch.no_grad():
        layers = [
            RULES[type(layer)](layer, inputs.detach(), gradient)
            for (layer, inputs, _), gradient in zip(calls, gradients, strict=True)
        ]
        return layers, losses.detach()


class Products:
    """Matrices sum_t left[n, t] right[n, t]^T, one per record n.

    Their norms come from the matrices themselves where these are small, and otherwise from the Gram matrices
    of both sides: |sum_t l_t r_t^T|^2 = sum_st (l_s . l_t) (r_s . r_t).
    """

    def __init__(self, left: Tensor, right: Tensor) -> None:
        self.left, self.right = left, right
        self.matrices: Tensor | None = None
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
        # What rounding and underflow may have hidden; eight more terms for the products and the weights.
        places, terms = self.left.shape[1], sum(self.left.shape[1:]) + self.right.shape[2] + 8
        hidden = ROUNDING * terms * (sizes * others).sqrt().sum(1).square()
        hidden += UNDERFLOW * terms * places * (sizes + others + places).sum(1)
        return (lefts * rights).sum(2).double().sum(1).clamp(min=0) + hidden

    def add(self, weights: Tensor, total: Tensor) -> None:
        if self.matrices is not None:
            total += (weights @ self.matrices.flatten(1)).view_as(total)
        else:
            left = self.left * weights[:, None, None]
            total.addmm_(left.flatten(0, 1).T, self.right.flatten(0, 1))


def squared(rows: Tensor) -> Tensor:
    """Squared norms of the rows, of any shape, never understated.

    A plain float32 sum of long rows of equal numbers would be a thousandth too small.
    """
    flat = rows.flatten(1)
    terms = flat.shape[1] + 4
    squares = torch.linalg.vector_norm(flat, dim=1).double().square()
    return squares * (1 + ROUNDING * terms) + UNDERFLOW * terms


@rule(nn.Linear)
class LinearGradients:
    """One product per record, or one for each position of a record."""

    def __init__(self, layer: nn.Linear, inputs: Tensor, gradient: Tensor) -> None:
        self.layer = layer
        left = gradient.reshape(len(gradient), -1, gradient.shape[-1])
        self.weight = Products(left, inputs.reshape(len(inputs), -1, inputs.shape[-1]))
        self.bias = left.sum(1)

    def squares(self) -> Tensor:
        squares = self.weight.squares()
        return squares if self.layer.bias is None else squares + squared(self.bias)

    def add(self, weights: Tensor, sums: Sums) -> None:
        self.weight.add(weights, sums[self.layer.weight])
        if self.layer.bias is not None:
            sums[self.layer.bias] += weights @ self.bias


# Which networks are accepted


def validate(module: nn.Module, rows: tuple[Tensor, ...]) -> None:
    """Refuses a network with a layer that has no rule, with buffers, or that mixes records.

    `rows` are synthetic: one of them is replaced by NaN to see whether the output of another changes.
    """
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    if len(names) != len(list(module.parameters())):
        raise NotPerRecord("two layers share a parameter")
    for name, _ in module.named_buffers():
        raise NotPerRecord(f"{name} is a buffer: it could store facts about records")
    for name, layer in module.named_modules():
        container = list(layer.children()) and not list(layer.parameters(recurse=False))
        if type(layer) not in RULES and not container:
            raise NotPerRecord(f"{name or 'the network'} is a {type(layer).__name__}: no rule for it")
    refuse_mixing(module, rows)


@torch.no_grad()
def refuse_mixing(module: nn.Module, rows: tuple[Tensor, ...]) -> None:
    """Replaces one synthetic record by NaN at a time and compares the outputs of the others."""
    before = module(*rows)
    for record in range(len(rows[0])):
        poisoned = tuple(column.clone() for column in rows)
        for column in poisoned:
            if column.is_floating_point():
                column[record] = torch.nan
        others = torch.arange(len(before), device=before.device) != record
        if not torch.equal(module(*poisoned)[others], before[others]):
            raise NotPerRecord("a record changes the network's output for another record")
