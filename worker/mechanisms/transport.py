"""Entropic optimal transport between sets of images: equations 6 and 7 of DP-Sinkhorn."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# Numbers that stay in the cache between one pass over them and the next.
CACHED = 2**18


@dataclass(frozen=True, kw_only=True)
class Cost:
    """c(x, y) = |x - y|^2 + m |x - y|_1, of flat images with their labels, one-hot times alpha_c."""

    absolute_weight: float
    class_weight: float

    @property
    def between_classes(self) -> float:
        return 2 * self.class_weight**2 + 2 * self.absolute_weight * self.class_weight

    def __call__(self, x: Tensor, y: Tensor, x_labels: Tensor, y_labels: Tensor) -> Tensor:
        cost = squared_distances(x, y)
        if self.absolute_weight:
            cost += self.absolute_weight * absolute_distances(x, y)
        return cost + self.between_classes * (x_labels[:, None] != y_labels)

    def gradient(self, plan: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """sum_j plan_ij times the gradient of c(x_i, y_j) in x_i."""
        plan = plan.to(x.dtype)
        gradient = 2 * (plan.sum(1, keepdim=True) * x - plan @ y)
        if self.absolute_weight:
            # With little entropy few pairs are left in a plan; the others would round to nothing.
            i, j = (plan > plan.amax() * 1e-12).nonzero(as_tuple=True)
            for chunk in torch.arange(len(i), device=i.device).split(1024):
                gaps = x.index_select(0, i[chunk]).sub_(y.index_select(0, j[chunk]))
                signs = gaps.sign_().mul_(plan[i[chunk], j[chunk], None])
                gradient.index_add_(0, i[chunk], signs, alpha=self.absolute_weight)
        return gradient


def squared_distances(x: Tensor, y: Tensor) -> Tensor:
    x, y = x.double(), y.double()  # small differences of large numbers
    lengths = x.square().sum(1)[:, None] + y.square().sum(1)
    return lengths.addmm_(x, y.T, alpha=-2).clamp_min_(0)


def absolute_distances(x: Tensor, y: Tensor) -> Tensor:
    """A few rows at a time, so that gaps stay in the cache: faster and more accurate than torch.cdist."""
    rows = max(1, CACHED // y.numel())
    distances, gaps = x.new_empty(len(x), len(y)), x.new_empty(rows, *y.shape)
    for chunk, sums in zip(x.split(rows), distances.split(rows), strict=True):
        torch.sum(torch.sub(chunk[:, None], y, out=gaps[: len(chunk)]).abs_(), 2, out=sums)
    return distances


def log_sum_exp(x: Tensor, dim: int) -> Tensor:
    """As torch's, in a quarter of its time: most terms would underflow here, and that is slow."""
    top = x.amax(dim, keepdim=True)
    # e^-60 beside one is nothing in float64.
    return (x - top).clamp_(min=-60).exp_().sum(dim).log_() + top.squeeze(dim)


def transport(cost: Tensor, *, entropy: float, iterations: int) -> tuple[Tensor, Tensor]:
    """The value and the plan of equation 7 between uniform weights, by Sinkhorn iterations on logarithms.

    The entropy is halved from the largest cost down and then held for `iterations`. By the envelope theorem
    the plan is the gradient of the value in the cost; nothing is differentiated through the iterations.
    """
    rows, columns = (math.log(size) for size in cost.shape)
    halvings = math.ceil(math.log2(max(cost.max().item() / entropy, 1)))
    g = cost.new_zeros(cost.shape[1])
    for e in [*(entropy * 2.0**power for power in range(halvings, 0, -1)), *[entropy] * iterations]:
        scaled = cost / -e
        f = columns - log_sum_exp(scaled + g / e, 1)
        g = e * (rows - log_sum_exp(scaled + f[:, None], 0))
    scaled = (g - cost) / entropy
    f = entropy * (columns - log_sum_exp(scaled, 1))
    return f.mean() + g.mean(), scaled.softmax(1) / cost.shape[0]


def semi_debiased(
    generated: Tensor,
    labels: Tensor,
    real: Tensor,
    real_labels: Tensor,
    *,
    images: int,
    cost: Cost,
    entropy: float,
    iterations: int,
) -> tuple[Tensor, Tensor]:
    """Equation 6 on flat images, and its gradient at generated ones: 2 W(X[:n], Y) - W(X[:n], X[n':n + n']).

    The first term is the only one with real images; it is left out where there are none.
    """
    fresh = len(generated) - images
    x, x_labels, other, other_labels = generated[:images], labels[:images], generated[fresh:], labels[fresh:]
    inner, plan = transport(cost(x, other, x_labels, other_labels), entropy=entropy, iterations=iterations)
    value, gradient = -inner, torch.zeros_like(generated)
    gradient[:images] -= cost.gradient(plan, x, other)
    gradient[fresh:] -= cost.gradient(plan.T, other, x)
    if len(real):
        across, plan = transport(cost(x, real, x_labels, real_labels), entropy=entropy, iterations=iterations)
        value = value + 2 * across
        gradient[:images] += 2 * cost.gradient(plan, x, real)
    return value, gradient
