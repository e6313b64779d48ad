"""Time and memory of one DP-Sinkhorn step, compared with differentiating geomloss from end to end.

    python -m bench.steps_sinkhorn [--json]

The paper's setting: 50 images of 28 x 28 against 50 records, p = 0.2, L2^2 + L1, alpha_c = 15, lambda =
0.05, all else as geomloss has it; the convolutional generator of our recipe "paper". The step clips the
gradient at the images jointly, adds noise, propagates it into the generator and applies Adam.
Implementations:

- geomloss_autograd: geomloss on images with their labels, costs from the differences of all pixels as in the
  code of the paper's authors, differentiated by autograd, and the generator's layers as torch computes them;
- same_generator: the same, with our implementation of the generator;
- same_and_cdist: that, with costs from a matrix product and torch.cdist, the fastest we found for geomloss;
- ours: the step of the trainer.

They alternate in one process on one thread, in CPU seconds; a ratio is the median over rounds of the ratio
within a round. The gradient at the images is also timed alone, for geomloss and ours. Peak memory of each is
measured in its own forked child, above the memory of the parent.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.steps import Step, peak_bytes, seconds
from core.schema import ImageSchema
from sluice.generators.dcgan import SLOPE, Generator
from sluice.methods.base import Clipping
from sluice.methods.sinkhorn import SinkhornPlan, SinkhornRecipe
from worker.mechanisms.noise import SecureRng
from worker.trainers.sinkhorn import Trainer as SinkhornTrainer

IMAGES, FRESH = 50, 10
PLAN = SinkhornPlan(
    steps=10**6,
    noise_multiplier=0.5,
    sampling_prob=1.0,
    images=IMAGES,
    clipping=Clipping.JOINT,
    clip_norm=0.5,
)
PAPER = SinkhornRecipe.preset("paper")
Rows = tuple[Tensor, ...]
Cost = Callable[[Tensor, Tensor], Tensor]


class Records:
    """Generated records; every batch contains all of them."""

    schema = ImageSchema(height=28, width=28, channels=1, classes=tuple("0123456789"))

    def __init__(self, rows: Rows) -> None:
        self.images, self.labels = rows[:2]

    def __len__(self) -> int:
        return len(self.images)

    def take(self, indices: object) -> tuple[Tensor, Tensor]:
        del indices
        return self.images, self.labels


def training(rows: Rows) -> SinkhornTrainer:
    return SinkhornTrainer(PLAN, Records(rows), rng=SecureRng(), recipe=PAPER, device="cpu")


def ours(rows: Rows) -> Step:
    steps = training(rows).steps()
    return lambda: next(steps) and None


def our_gradient(rows: Rows) -> Step:
    run, (real, real_labels, made, labels) = training(rows), rows
    made, real = made.flatten(1), real.flatten(1)
    return lambda: run.loss(made, labels, real, real_labels, images=IMAGES) and None


def cost_by_gaps(x: Tensor, y: Tensor) -> Tensor:
    gaps = x[:, :, None] - y[:, None]
    return gaps.square().sum(3) + PAPER.absolute_weight * gaps.abs().sum(3)


def cost_by_cdist(x: Tensor, y: Tensor) -> Tensor:
    lengths = x.square().sum(2)[:, :, None] + y.square().sum(2)[:, None]
    return lengths - 2 * x @ y.mT + PAPER.absolute_weight * torch.cdist(x, y, p=1)


def geomloss_gradient(rows: Rows, cost: Cost = cost_by_gaps) -> Callable[..., Tensor]:
    """Gradient of equation 6 at images generated with these labels."""
    from geomloss import SamplesLoss

    w = SamplesLoss("sinkhorn", p=1, blur=PAPER.entropy, cost=cost, debias=False, backend="tensorized")

    def joined(images: Tensor, labels: Tensor) -> Tensor:
        return torch.cat([images.flatten(1), PAPER.class_weight * F.one_hot(labels, 10)], 1)

    def gradient(images: Tensor, labels: Tensor) -> Tensor:
        leaf = images.detach().requires_grad_()
        made = joined(leaf, labels)
        loss = 2 * w(made[:IMAGES], joined(*rows[:2])) - w(made[:IMAGES], made[FRESH:])
        return torch.autograd.grad(loss, leaf)[0]

    return gradient


def their_gradient(rows: Rows) -> Step:
    gradient = geomloss_gradient(rows)
    return lambda: gradient(*rows[2:]).sum() and None


def by_layers(generator: Generator, latents: Tensor, labels: Tensor) -> Tensor:
    """Output of the generator, computed by its torch layers."""
    marks = F.one_hot(labels, 10).float()
    x = torch.cat([generator.seed(latents[..., None, None]), generator.label(marks[..., None, None])], 1)
    for layer in generator.body:
        x = layer(F.leaky_relu(x, SLOPE))
    return torch.tanh(x)


def geomloss_autograd(
    rows: Rows, *, made: Callable[..., Tensor] = by_layers, cost: Cost = cost_by_gaps
) -> Step:
    generator, gradient_at = training(rows).generator.network, geomloss_gradient(rows, cost)
    optimizer = torch.optim.Adam(
        generator.parameters(), lr=PAPER.rate, weight_decay=PAPER.weight_decay, fused=True
    )

    def step() -> None:
        labels = torch.randint(10, (IMAGES + FRESH,))
        images = made(generator, torch.randn(IMAGES + FRESH, PAPER.latent), labels)
        gradient = gradient_at(images, labels)
        private, rest = (
            part * (PLAN.clip_norm / part.norm()).clamp(max=1) for part in gradient.split([IMAGES, FRESH])
        )
        private += PLAN.noise_stddev * torch.randn_like(private)
        optimizer.zero_grad()
        images.backward(torch.cat([private, rest]))
        optimizer.step()

    return step


WAYS: dict[str, Callable[[Rows], Step]] = {
    "geomloss_autograd": geomloss_autograd,
    "same_generator": partial(geomloss_autograd, made=Generator.__call__),
    "same_and_cdist": partial(geomloss_autograd, made=Generator.__call__, cost=cost_by_cdist),
    "ours": ours,
}
GRADIENTS = {"their gradient": their_gradient, "our gradient": our_gradient}


def batch(size: int) -> Rows:
    """Returns records with labels, and generated images with theirs."""
    source = torch.Generator().manual_seed(1)
    found: list[Tensor] = []
    for count in (size, size + FRESH):
        found.append(torch.rand(count, 1, 28, 28, generator=source) * 2 - 1)
        found.append(torch.randint(10, (count,), generator=source))
    return tuple(found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    asked = parser.parse_args()
    torch.set_num_threads(1)

    import geomloss  # noqa: F401  before forking, so that no child imports it

    # Children first, while the parent still uses little memory.
    memory = {name: peak_bytes(lambda _, make=make: make(batch(IMAGES)), 1) for name, make in WAYS.items()}
    rows = batch(IMAGES)
    rounds = seconds({name: make(rows) for name, make in (WAYS | GRADIENTS).items()}, asked.rounds)

    def ratio(name: str, other: str) -> float:
        return round(statistics.median(times[name] / times[other] for times in rounds), 3)

    typical = {name: statistics.median(times[name] for times in rounds) for name in rounds[0]}
    print(f"{'':18} {'CPU s':>8} {'ours / it':>11} {'peak MB':>9}")
    for name in WAYS:
        print(f"{name:18} {typical[name]:8.4f} {ratio('ours', name):11.3f} {memory[name] / 1e6:9.0f}")
    for name in GRADIENTS:
        print(f"{name:18} {typical[name]:8.4f}")
    if asked.json:
        result = {
            "images": IMAGES,
            "rounds": asked.rounds,
            **{f"vs_{name}": ratio("ours", name) for name in WAYS if name != "ours"},
            "gradient_vs_geomloss_autograd": ratio("our gradient", "their gradient"),
            "memory_vs_geomloss_autograd": round(memory["ours"] / memory["geomloss_autograd"], 3),
            "seconds": {name: round(value, 5) for name, value in typical.items()},
            "peak_bytes": memory,
        }
        print(json.dumps(result))


if __name__ == "__main__":
    main()
