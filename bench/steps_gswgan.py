"""Time and memory of a step of GS-WGAN at the paper's setting.

    python -m bench.steps_gswgan --json

1000 parts, 32 images, 60,000 digits; one thread, CPU seconds. A step uses one part: its discriminator is read
from disk, takes five training steps and answers. In the first turn of a part its discriminator takes 2,000
training steps; this time is printed separately. Peak memory is that of the whole process with the records.
"""

import argparse
import json
import statistics
import time
from dataclasses import replace

import torch

from bench.steps import peak
from bench.steps_swd import Digits
from sluice.methods.gswgan import GSWGANPlan, GSWGANRecipe
from worker.mechanisms.noise import SecureRng
from worker.trainers.gswgan import Trainer as GSWGANTrainer


def step_seconds(recipe: GSWGANRecipe, asked: argparse.Namespace) -> float:
    plan = GSWGANPlan(
        steps=20_000, noise_multiplier=2.24, parts=asked.parts, images=asked.images, recipe=recipe
    )
    records = Digits.random(asked.records, (1, 28, 28), 10)
    steps = GSWGANTrainer(plan, records, rng=SecureRng(), device="cpu").steps()
    next(steps)
    found = []
    for _ in range(asked.rounds):
        start = time.process_time()
        next(steps)
        found.append(time.process_time() - start)
    return statistics.median(found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", type=int, default=1000)
    parser.add_argument("--images", type=int, default=32)
    parser.add_argument("--records", type=int, default=60_000)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    paper = GSWGANRecipe.preset("paper")
    # As if every part had had its first turn; then with twice the training steps, to get the time of one.
    once = step_seconds(replace(paper, first_steps=paper.discriminator_steps), asked)
    twice = step_seconds(replace(paper, first_steps=2 * paper.discriminator_steps), asked)
    first = once + max(0.0, twice - once) / paper.discriminator_steps * paper.first_steps
    result = {
        "method": "gswgan",
        "parts": asked.parts,
        "images": asked.images,
        "seconds": round(once, 5),
        "first_seconds": round(first, 3),
        "peak_bytes": peak(),
    }
    print(f"a step {1e3 * once:.1f} ms, first turn of a part {first:.2f} s, peak {peak() / 1e6:.0f} MB")
    if asked.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
