"""Time and memory of a step of DP-SWD at the paper's setting: batch 100, 1000 directions, labelled digits.

    python -m bench.steps_swd --json

It is compared with a plain implementation, which sorts columns by torch on both sides and differentiates
through the sort. Both draw directions and noise and clip the same records in the same way; only what
follows differs. One thread, in CPU seconds, alternating; the ratio is the median over rounds of the ratio
within a round. `step` is a whole step of the trainer with the generator. Peak memory of each is measured in
a forked child.
"""

import argparse
import json
import statistics

import torch
from torch import Tensor

from bench.steps import Step, peak_bytes, seconds
from core.schema import ImageSchema
from sluice.methods.swd import SWDPlan, SWDRecipe
from tests.fakes import ImageRows
from worker.mechanisms.noise import SecureRng
from worker.mechanisms.projections import directions, sort_rows
from worker.trainers.swd import Trainer as SWDTrainer

WAYS = ("plain", "ours", "step")


class Digits(ImageRows):
    schema = ImageSchema(height=28, width=28, channels=1, classes=tuple("0123456789"))


def training(batch: int, count: int) -> SWDTrainer:
    plan = SWDPlan(
        steps=10**6, noise_multiplier=0.66, records=1000, batch=batch, directions=count, dim=28 * 28 + 10,
        recipe=SWDRecipe.preset("paper"),
    )  # fmt: skip
    return SWDTrainer(plan, Digits.random(1000, (1, 28, 28), 10), rng=SecureRng(), device="cpu")


def made_rows(run: SWDTrainer) -> Tensor:
    return torch.nn.functional.normalize(torch.rand(run.plan.batch, run.plan.dim), dim=1) / 2


def plain(run: SWDTrainer) -> Step:
    made, plan = made_rows(run).requires_grad_(), run.plan

    def step() -> None:
        along = directions(plan.geometry, plan.directions, plan.dim, run.rng)
        projected = run.private_rows(run.mechanism.draw(run.records)) @ along.T
        noisy = run.mechanism.release(projected.flatten()).view_as(projected).float()
        values = made @ along.T
        values = values + plan.noise_stddev * torch.randn(*values.shape, generator=run.random)
        loss = (values.sort(0).values - noisy.sort(0).values).square().mean()
        torch.autograd.grad(loss, made)

    return step


def ours(run: SWDTrainer) -> Step:
    made = made_rows(run)

    def step() -> None:
        along, noisy = run.mechanism.project(run.private_rows(run.mechanism.draw(run.records)))
        run.gradient(made, along, sort_rows(noisy))

    return step


def whole(run: SWDTrainer) -> Step:
    steps = run.steps()
    return lambda: next(steps) and None


MAKERS = {"plain": plain, "ours": ours, "step": whole}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--directions", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    asked = parser.parse_args()
    torch.set_num_threads(1)

    # Children first, while the parent still uses little memory.
    memory = {
        name: peak_bytes(lambda _, name=name: MAKERS[name](training(asked.batch, asked.directions)), 1)
        for name in WAYS
    }
    rounds = seconds(
        {name: MAKERS[name](training(asked.batch, asked.directions)) for name in WAYS}, asked.rounds
    )
    typical = {name: statistics.median(times[name] for times in rounds) for name in WAYS}
    ratio = statistics.median(times["ours"] / times["plain"] for times in rounds)
    print(f"{'':8} {'CPU ms':>8} {'peak MB':>9}")
    for name in WAYS:
        print(f"{name:8} {1e3 * typical[name]:8.2f} {memory[name] / 1e6:9.0f}")
    print(f"ours takes {ratio:.2f} of the time of the plain implementation")
    if asked.json:
        result = {
            "method": "swd",
            "batch": asked.batch,
            "directions": asked.directions,
            "rounds": asked.rounds,
            "vs_plain": round(ratio, 3),
            "seconds": {name: round(value, 5) for name, value in typical.items()},
            "peak_bytes": memory,
        }
        print(json.dumps(result))


if __name__ == "__main__":
    main()
