"""Steps down gradients that come from elsewhere than `backward`, and slow averages of where they lead."""

from collections.abc import Iterable

import torch
from torch import Tensor


def descend(optimizer: torch.optim.Optimizer, gradients: Iterable[Tensor]) -> None:
    """One step of an optimizer with one group of parameters, along these gradients of them."""
    [group] = optimizer.param_groups
    for parameter, gradient in zip(group["params"], gradients, strict=True):
        # Laid out in memory as the parameter is: fused optimizers go through both as they lie there, and a
        # gradient that is, say, a transposed view would reach the wrong weights.
        parameter.grad = torch.empty_like(parameter).copy_(gradient)
    optimizer.step()


@torch.no_grad()
def remember(means: Iterable[Tensor], values: Iterable[Tensor], *, steps: int, decay: float | None) -> None:
    """Moves running averages; slow ones start quick, since the first networks are not worth remembering."""
    share = 1 - min(decay or 0.0, (1 + steps) / (10 + steps))
    for mean, value in zip(means, values, strict=True):
        mean.lerp_(value, share)
