"""Time and memory of one discriminator step, compared with Opacus and with a step without privacy.

    python -m bench.steps --method dpgan --batch 128 [--json]

Four implementations of the same step on the 1.72M-parameter discriminator of "Private GANs, Revisited": (a)
without privacy, (b) Opacus with hooks, (c) Opacus with ghost clipping, (d) ours. They alternate in one
process on one thread, in CPU seconds; a ratio is the median over rounds of the ratio within a round, so
that a busy machine slows both sides. Peak memory of each is measured in its own forked child, above the
memory of the parent.
"""

import argparse
import json
import os
import resource
import statistics
import time
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sluice.generators.dcgan import DCGAN
from sluice.privacy.events import Query
from worker.mechanisms.clipping import clipped_sum, views_like
from worker.mechanisms.mechanism import Mechanism
from worker.mechanisms.noise import GaussianNoise, SecureRng
from worker.mechanisms.sampling import PoissonSampling
from worker.trainers.dpgan import adversarial_loss
from worker.trainers.networks import Discriminator

CLIP_NORM, NOISE_MULTIPLIER = 1.0, 1.0
SHAPE = DCGAN(height=28, width=28, channels=1, classes=10)
WAYS = ("nonprivate", "opacus_hooks", "opacus_ghost", "ours")

Step = Callable[[], None]


class PaperDiscriminator(nn.Module):
    """The discriminator of the paper's authors: plain convolutions, labels as one-hot planes."""

    def __init__(self, features: int = 128) -> None:
        super().__init__()
        self.image = nn.Conv2d(1, features // 2, 4, 2, 1)
        self.label = nn.Conv2d(10, features // 2, 4, 2, 1)
        self.body = nn.Sequential(
            nn.LeakyReLU(0.2),
            nn.Conv2d(features, features * 2, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(features * 2, features * 4, 3, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(features * 4, 1, 4, 1, 0),
        )

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        planes = F.one_hot(labels, 10).float()[:, :, None, None].expand(-1, -1, 28, 28)
        return self.body(torch.cat([self.image(images), self.label(planes)], 1)).flatten()


def batch_of(size: int) -> tuple[Tensor, Tensor, Tensor]:
    source = torch.Generator().manual_seed(1)
    images = torch.rand(size, 1, 28, 28, generator=source) * 2 - 1
    labels = torch.randint(10, (size,), generator=source)
    return images, labels, torch.arange(size) < size // 2


def nonprivate(rows: tuple[Tensor, ...]) -> Step:
    module = PaperDiscriminator()
    optimizer = torch.optim.Adam(module.parameters(), lr=2e-4, betas=(0.5, 0.999), fused=True)

    def step() -> None:
        optimizer.zero_grad()
        adversarial_loss(module, *rows).mean().backward()
        optimizer.step()

    return step


def opacus_hooks(rows: tuple[Tensor, ...]) -> Step:
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    module = GradSampleModule(PaperDiscriminator())
    optimizer = DPOptimizer(
        torch.optim.Adam(module.parameters(), lr=2e-4, betas=(0.5, 0.999), fused=True),
        noise_multiplier=NOISE_MULTIPLIER,
        max_grad_norm=CLIP_NORM,
        expected_batch_size=len(rows[0]),
    )

    def step() -> None:
        optimizer.zero_grad()
        adversarial_loss(module, *rows).mean().backward()
        optimizer.step()

    return step


def opacus_ghost(rows: tuple[Tensor, ...]) -> Step:
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping

    module = GradSampleModuleFastGradientClipping(PaperDiscriminator(), max_grad_norm=CLIP_NORM)
    optimizer = DPOptimizerFastGradientClipping(
        torch.optim.Adam(module.parameters(), lr=2e-4, betas=(0.5, 0.999), fused=True),
        noise_multiplier=NOISE_MULTIPLIER,
        max_grad_norm=CLIP_NORM,
        expected_batch_size=len(rows[0]),
    )

    def step() -> None:
        optimizer.zero_grad()
        losses = adversarial_loss(module, *rows)
        DPTensorFastGradientClipping(module, optimizer, losses, loss_reduction="mean").backward()
        optimizer.step()

    return step


def ours(rows: tuple[Tensor, ...]) -> Step:
    module = Discriminator(SHAPE, 128)
    parameters = list(module.parameters())
    optimizer = torch.optim.Adam(parameters, lr=2e-4, betas=(0.5, 0.999), fused=True)
    size = sum(parameter.numel() for parameter in parameters)
    noise = GaussianNoise(stddev=NOISE_MULTIPLIER * CLIP_NORM, size=size)
    sampler = PoissonSampling(prob=1.0, steps=10**6)
    mechanism = Mechanism(sampler, noise, SecureRng(), query=Query.SUM, bound=CLIP_NORM)

    def step() -> None:
        clipped = clipped_sum(module, adversarial_loss, rows, clip_norm=mechanism.clip_norm)
        noisy = mechanism.release(clipped.total).div_(len(rows[0])).float()
        for parameter, piece in zip(parameters, views_like(parameters, noisy), strict=True):
            parameter.grad = piece
        optimizer.step()

    return step


MAKERS = {"nonprivate": nonprivate, "opacus_hooks": opacus_hooks, "opacus_ghost": opacus_ghost, "ours": ours}


def seconds(steps: dict[str, Step], rounds: int) -> list[dict[str, float]]:
    """CPU seconds of each implementation, round by round; the first round is a warm-up and is not counted."""
    found = []
    for _ in range(rounds + 1):
        times = {}
        for name, step in steps.items():
            start = time.process_time()
            step()
            times[name] = time.process_time() - start
        found.append(times)
    return found[1:]


def peak_bytes(make: Callable[[tuple[Tensor, ...]], Step], size: int) -> int:
    """Increase of the resident memory of a new child process by two steps."""
    torch.set_num_threads(1)  # a forked child has only one thread
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            before = peak()
            step = make(batch_of(size))
            step()
            step()
            os.write(writing, str(peak() - before).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading) as answer:
        grown = answer.read()
    os.waitpid(child, 0)
    if not grown:
        raise RuntimeError("a way did not get through its steps; is there enough memory?")
    return int(grown)


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--method", choices=["dpgan"], default="dpgan")
    parser.add_argument("--batch", type=int, default=128, help="images in a step, half of them generated")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    asked = parser.parse_args()
    warnings.filterwarnings("ignore", module="opacus")
    warnings.filterwarnings("ignore", message="Full backward hook")
    torch.set_num_threads(1)

    import opacus  # noqa: F401  before forking, so that no child imports it

    # Children first, while the parent still uses little memory.
    memory = {name: peak_bytes(MAKERS[name], asked.batch) for name in WAYS}
    rows = batch_of(asked.batch)
    rounds = seconds({name: MAKERS[name](rows) for name in WAYS}, asked.rounds)

    def ratio(name: str, other: str) -> float:
        return round(statistics.median(times[name] / times[other] for times in rounds), 3)

    print(f"{'':14} {'CPU s':>8} {'of (b)':>8} {'of (a)':>8} {'peak MB':>9}")
    for name in WAYS:
        typical = statistics.median(times[name] for times in rounds)
        beside = f"{ratio(name, 'opacus_hooks'):8.3f} {ratio(name, 'nonprivate'):8.3f}"
        print(f"{name:14} {typical:8.3f} {beside} {memory[name] / 1e6:9.0f}")
    result = {
        "method": asked.method,
        "batch": asked.batch,
        "rounds": asked.rounds,
        "vs_opacus_hooks": ratio("ours", "opacus_hooks"),
        "vs_opacus_ghost": ratio("ours", "opacus_ghost"),
        "vs_nonprivate": ratio("ours", "nonprivate"),
        "memory_vs_opacus_hooks": round(memory["ours"] / memory["opacus_hooks"], 3),
        "seconds": {name: round(statistics.median(t[name] for t in rounds), 4) for name in WAYS},
        "peak_bytes": memory,
    }
    if asked.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
