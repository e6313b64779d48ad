"""Accuracy with a generator that several owners trained in turns, and with one trained on all records.

    python -m bench.relay --owners 4 --rounds 2 --epsilon 10

Each owner has an equal share of MNIST and pays epsilon for all of its turns together. Trainer and total
number of steps are the same; classifiers are trained on synthetic images only and tested on real ones.
"""

import argparse
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from bench import classifiers
from bench.utility import Images, read
from sluice.methods import METHODS, PublicFacts, Target
from sluice.methods.gswgan import GSWGANPlan, GSWGANRecipe
from sluice.privacy.accountant import Accountant
from sluice.privacy.relation import Relation
from worker.mechanisms.noise import SecureRng
from worker.trainers.gswgan import Trainer as GSWGANTrainer

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


def trained(shares: list[Images], rounds: int, target: Target) -> GSWGANTrainer:
    """Trains turn by turn; the turns of an owner together cost the target."""
    facts = PublicFacts(kind="image", records=sum(map(len, shares)))
    usual = METHODS[GSWGANPlan.kind].defaults(facts, target) | {"recipe": GSWGANRecipe.preset("fast-cpu")}
    parts, steps = usual["parts"] // len(shares), usual["steps"] // len(shares)
    whole = GSWGANPlan(**usual | {"parts": parts, "panel": parts, "steps": steps}).calibrated(target)
    turn, run = replace(whole, steps=steps // rounds), None
    for _ in range(rounds):
        for share in shares:
            before, run = run, GSWGANTrainer(turn, share, rng=SecureRng(), device="cpu")
            if before is not None:
                run.take_over(before.handed_on())
            for _ in run.steps():
                pass
    assert run is not None
    return run


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", type=Path, default=DATA)
    parser.add_argument("--owners", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--epsilon", type=float, default=10.0)
    parser.add_argument("--delta", type=float, default=1e-5)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    train, test = (read(asked.data_dir / "mnist", part) for part in ("train", "t10k"))
    target = Target(
        epsilon=asked.epsilon, delta=asked.delta, relation=Relation.ADD_REMOVE, accountant=Accountant.RENYI
    )
    order = np.random.default_rng(0).permutation(len(train))
    for owners, rounds in ((1, 1), (asked.owners, asked.rounds)):
        shares = [Images(train.pixels[some], train.labels[some]) for some in np.array_split(order, owners)]
        start = time.process_time()
        made = trained(shares, rounds, target).synthesizer().sample(20_000, seed=0)
        took = time.process_time() - start
        torch.manual_seed(0)
        linear = classifiers.logistic(made.images, made.labels, 10, device="cpu")
        shape = test.pixels.shape[1:]
        network, _ = classifiers.fit(
            classifiers.mlp(shape, 10), made.images, made.labels, patience=3, seed=0, device="cpu", most=10
        )
        found = [
            classifiers.accuracy(linear, test.pixels, test.labels, device="cpu"),
            float((classifiers.predictions(network, test.pixels, device="cpu") == test.labels).mean()),
        ]
        print(
            f"{owners} owners, {rounds} rounds: logistic {found[0]:.4f}, MLP {found[1]:.4f}, {took:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
