"""A generator while it learns: network, optimizer, running average. It sees no records."""

from collections.abc import Iterable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from sluice.generators.architecture import Architecture
from sluice.generators.image import ImageSynthesizer
from worker.trainers.base import counter, tensors_of
from worker.trainers.networks import BatchNormed


class LearningGenerator:
    """With `average_decay`, the synthesizer has the running average of the weights."""

    def __init__(
        self,
        shape: Architecture,
        network: nn.Module,
        *,
        rate: float,
        average_decay: float | None,
        device: str,
        sgd: bool = False,
        **options: Any,
    ) -> None:
        self.shape, self.average_decay, self.device = shape, average_decay, device
        self.network = network.to(device)
        self.average = deepcopy(self.network)
        self.parameters = list(self.network.parameters())
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.SGD(self.parameters, lr=rate, **options)
            if sgd
            else adam(self.parameters, lr=rate, **options)
        )
        self.taken = counter()

    def __call__(self, latents: Tensor, labels: Tensor) -> Tensor:
        images: Tensor = self.network(latents.to(self.device), labels.to(self.device))
        return images

    def minimize(self, loss: Tensor) -> None:
        self.apply(torch.autograd.grad(loss, self.parameters))

    def follow(self, outputs: Tensor, gradient: Tensor) -> None:
        """One step down a gradient that is given at something computed from generated images."""
        self.apply(torch.autograd.grad(outputs, self.parameters, gradient))

    def apply(self, gradients: Iterable[Tensor]) -> None:
        apply_gradients(self.optimizer, gradients)
        self.taken += 1
        floats = (float_state(self.average), float_state(self.network))
        update_ema(*floats, steps=int(self.taken), decay=self.average_decay)

    def synthesizer(self) -> ImageSynthesizer:
        network = self.network if self.average_decay is None else self.average
        return ImageSynthesizer(
            self.shape, network.folded() if isinstance(network, BatchNormed) else deepcopy(network).cpu()
        )

    def state(self) -> dict[str, Tensor]:
        return {"generator_steps": self.taken, **self.weights()}

    def weights(self) -> dict[str, Tensor]:
        """Network, running average and optimizer: what another training can continue from."""
        return tensors_of(generator=self.network, average=self.average, generator_optimizer=self.optimizer)


def adam(
    parameters: Iterable[nn.Parameter], *, weight_decay: float = 0.0, **options: Any
) -> torch.optim.Adam:
    """Adam with the state it would make at its first step, so that every checkpoint has the same tensors."""
    optimizer = torch.optim.Adam(parameters, weight_decay=weight_decay, fused=True, **options)
    start_state(optimizer)
    return optimizer


def start_state(optimizer: torch.optim.Optimizer) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }


def apply_gradients(optimizer: torch.optim.Optimizer, gradients: Iterable[Tensor]) -> None:
    """One optimizer step with gradients that do not come from `backward`, for one group of parameters."""
    [group] = optimizer.param_groups
    for parameter, gradient in zip(group["params"], gradients, strict=True):
        # Copied into the parameter's memory layout: fused optimizers read both in memory order, and a
        # gradient that is, say, a transposed view would reach the wrong weights.
        parameter.grad = torch.empty_like(parameter).copy_(gradient)
    optimizer.step()


@torch.no_grad()
def update_ema(means: Iterable[Tensor], values: Iterable[Tensor], *, steps: int, decay: float | None) -> None:
    """Moves running averages towards the values; the first steps move them faster than `decay` says."""
    share = 1 - min(decay or 0.0, (1 + steps) / (10 + steps))
    for mean, value in zip(means, values, strict=True):
        mean.lerp_(value, share)


def float_state(module: nn.Module) -> list[Tensor]:
    """Weights, and the running statistics of batch norms."""
    return [value for value in module.state_dict().values() if value.is_floating_point()]
