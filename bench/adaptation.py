"""Accuracy on private digits (USPS) before and after adapting a classifier of public ones (MNIST).

    python -m bench.adaptation --epsilon 10 --seeds 0,1,2

Each run trains with the production trainer and its production randomness, and tests the classifier on the
test digits of USPS before and after. Labels of USPS are not used in training. Noise cannot be seeded: a
seed only numbers the run.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from bench.utility import Images, read
from sluice.generators.classifier import Classifier
from sluice.methods import Target
from sluice.methods.adapt import AdaptPlan, AdaptRecipe
from sluice.privacy.accountant import Accountant
from sluice.privacy.relation import Relation
from worker.mechanisms.noise import SecureRng
from worker.trainers.adapt import Trainer as AdaptTrainer

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


def usps(folder: Path) -> tuple[Images, Images]:
    """Training and test part of USPS, in the size and value range of MNIST."""
    with np.load(folder / "usps.npz") as file:
        parts = [(file[f"x_{part}"], file[f"y_{part}"]) for part in ("train", "test")]
    found = []
    for small, labels in parts:
        images = torch.from_numpy(small).float().view(-1, 1, 16, 16)
        large = F.interpolate(images, size=28, mode="bilinear").clamp(0, 1)
        pixels = (255 * large).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
        found.append(Images(pixels, labels.astype(np.int64)))
    return found[0], found[1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", type=Path, default=DATA)
    parser.add_argument("--preset", choices=list(AdaptRecipe.presets), default="fast-cpu")
    parser.add_argument("--epsilon", type=float, default=10.0)
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    asked = parser.parse_args()
    torch.set_num_threads(1)

    source, (target, test) = read(asked.data_dir / "mnist", "train"), usps(asked.data_dir / "usps")
    # The training part has no labels, so that none can be used.
    target = Images(target.pixels, np.zeros_like(target.labels))
    aim = Target(
        epsilon=asked.epsilon, delta=asked.delta, relation=Relation.ADD_REMOVE, accountant=Accountant.RENYI
    )
    recipe = AdaptRecipe.preset(asked.preset)
    plan = AdaptPlan(steps=asked.steps, records=len(target), recipe=recipe).calibrated(aim)
    print(f"noise multiplier {plan.noise_multiplier}, {plan.progress_steps} steps")
    rows = []
    for seed in map(int, asked.seeds.split(",")):
        start = time.process_time()
        run = AdaptTrainer(plan, target, source=source, rng=SecureRng(), device="cpu")
        before = 0.0
        for progress in run.steps():
            if progress.step == recipe.source_steps:
                unadapted = Classifier(run.shape, run.network)
                before = np.mean(unadapted.predict(test.pixels) == test.labels)
        after = np.mean(run.synthesizer().predict(test.pixels) == test.labels)
        rows.append({"seed": seed, "before": round(float(before), 4), "after": round(float(after), 4)})
        print(f"{rows[-1]}  {time.process_time() - start:.0f} CPU s", flush=True)
    means = {name: statistics.mean(row[name] for row in rows) for name in ("before", "after")}
    print(f"mean {means['before']:.4f} before, {means['after']:.4f} after")
    if asked.json:
        print(json.dumps({"epsilon": asked.epsilon, "plan": plan.to_dict(), "runs": rows, **means}))


if __name__ == "__main__":
    main()
