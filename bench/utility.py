"""Utility of a release: accuracy on real images of classifiers trained on synthetic images only.

    python -m bench.utility --data mnist,fashion --method atlas --preset fast-cpu --epsilon 10,1 \
        --delta 1e-5 --seeds 0,1,2 --budget 30m --jobs 2 --threads 1 --distances --out DIR

Each run builds the plan of the method's preset, calibrates it by our accountant (Rényi, add-or-remove),
trains with the production trainer and its production randomness, samples 60,000 labelled images and trains
the three classifiers of bench.classifiers on them. Each run has its own process, so that peak memory is
measured per run. Noise cannot be seeded: a seed fixes the sample and the classifiers. If the steps do not
fit the time budget, their number is reduced before the plan is calibrated, and the table says so.
Concurrent runs (`--jobs`) share the machine. Distances are computed for the first seed.
"""

import argparse
import gzip
import json
import multiprocessing
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, fields, replace
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from bench import classifiers, distance
from core.schema import ImageSchema
from sluice.generators.image import ImageSynthesizer, Sample
from sluice.methods import METHODS, Output, Plan, PublicFacts, Target, plan_from_options
from sluice.privacy.accountant import Accountant
from sluice.privacy.relation import Relation
from worker.mechanisms.noise import SecureRng
from worker.trainers import TRAINERS

FOLDERS = {"mnist": "mnist", "fashion": "fashion-mnist"}
SAMPLES = 60_000
# Steps of a trial before the training, to measure the time of a step.
TRIAL_STEPS = 5

Body = dict[str, Any]
MNIST_SCHEMA = {"kind": "image", "height": 28, "width": 28, "channels": 1, "classes": range(10)}


@dataclass(frozen=True, repr=False)
class Images:
    """Benchmark records in memory, with the read interface of `worker.records.Records`."""

    pixels: np.ndarray  # uint8, N, H, W, C
    labels: np.ndarray

    @property
    def schema(self) -> ImageSchema:
        _, height, width, channels = self.pixels.shape
        return ImageSchema(height=height, width=width, channels=channels, classes=tuple("0123456789"))

    def __len__(self) -> int:
        return len(self.pixels)

    def take(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        pixels = torch.from_numpy(self.pixels[indices]).permute(0, 3, 1, 2).contiguous()
        return pixels.float().div_(127.5).sub_(1), torch.from_numpy(self.labels[indices])


def read(folder: Path, part: str) -> Images:
    """Reads a file in the IDX format of MNIST: magic number, big-endian sizes, bytes."""

    def idx(name: str, dims: int) -> np.ndarray:
        body = gzip.decompress((folder / name).read_bytes())
        sizes = np.frombuffer(body, ">u4", count=dims, offset=4)
        return np.frombuffer(body, np.uint8, offset=4 + 4 * dims).reshape(sizes.astype(int)).copy()

    images = idx(f"{part}-images-idx3-ubyte.gz", 3)
    return Images(images[..., None], idx(f"{part}-labels-idx1-ubyte.gz", 1).astype(np.int64))


@dataclass(frozen=True, kw_only=True)
class Asked:
    data: str
    data_dir: Path
    method: str
    preset: str
    epsilon: float
    delta: float
    steps: int | None
    records: int | None
    samples: int
    budget: float
    patience: int
    cnn_epochs: int
    threads: int
    distances: bool
    out: Path


def plan_for(asked: Asked, records: int, steps: int | None = None) -> Plan:
    """The preset's plan with the least noise that meets the target."""
    method, facts = METHODS[asked.method], PublicFacts.of(MNIST_SCHEMA, records)
    target = Target(
        epsilon=asked.epsilon,
        delta=asked.delta,
        relation=Relation.ADD_REMOVE,
        accountant=Accountant.RENYI,
    )
    names = {field.name for field in fields(method.plan)}
    sampled: Body = {"records": records} if {"sampling_prob", "records"} & names else {}
    body = sampled | (method.paper if asked.preset == "paper" else method.defaults(facts, target))
    if method.plan.recipes is not None:
        body["recipe"] = asked.preset
    if steps is not None:
        body["steps"] = steps
    return plan_from_options(asked.method, body).calibrated(target)


def fitting_steps(asked: Asked, train: Images, device: str) -> int | None:
    """Number of steps that fit into nine tenths of the time budget, if fewer than planned."""
    plan = plan_for(asked, len(train), asked.steps)
    if plan.known_steps <= 20 * TRIAL_STEPS:  # few long steps are configured to fit
        return asked.steps
    trial = replace(plan, steps=TRIAL_STEPS)
    run = TRAINERS[plan.kind](trial, train, rng=SecureRng(), device=device).steps()
    next(run)
    start = time.perf_counter()
    taken = sum(1 for _ in islice(run, TRIAL_STEPS - 1))
    most = int(0.9 * asked.budget * taken / (time.perf_counter() - start))
    return most if most < plan.known_steps else asked.steps


def once(asked: Asked, seed: int) -> dict[str, Any]:
    """Does one run, from records to accuracies."""
    torch.set_num_threads(asked.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    folder = asked.data_dir / FOLDERS[asked.data]
    train, test = read(folder, "train"), read(folder, "t10k")
    if asked.records is not None:
        train = Images(train.pixels[: asked.records], train.labels[: asked.records])
    steps = fitting_steps(asked, train, device)
    plan = plan_for(asked, len(train), steps)
    reading = plan.reading(delta=asked.delta, relation=Relation.ADD_REMOVE, accountant=Accountant.RENYI)
    result: dict[str, Any] = {
        "data": asked.data,
        "method": asked.method,
        "preset": asked.preset,
        "records": len(train),
        "epsilon": reading.epsilon,
        "delta": asked.delta,
        "accountant": "renyi",
        "relation": "add_remove",
        "seed": seed,
        "commit": commit(),
        "device": device,
        "threads": asked.threads,
        "steps_cut_to_budget": steps != asked.steps,
        "plan": plan.to_dict(),
    }
    with Clock() as clock:
        run = TRAINERS[plan.kind](plan, train, rng=SecureRng(), device=device)
        for _ in run.steps():
            pass
        synthesizer = run.synthesizer()
    result["train_seconds"], result["train_cpu_seconds"] = clock.wall, clock.cpu
    tell(f"trained in {clock.wall} s, {clock.cpu} s of CPU")
    with Clock() as clock:
        sample = synthesizer.sample(asked.samples, seed=seed)
    result["sample_seconds"], result["sample_cpu_seconds"] = clock.wall, clock.cpu
    result["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    result["within_budget"] = result["train_seconds"] + result["sample_seconds"] <= asked.budget
    result["parameters"] = sum(p.numel() for p in synthesizer.network.parameters())
    name = f"{asked.data}-{asked.method}-{asked.preset}-eps{asked.epsilon:g}-seed{seed}"
    grid(synthesizer, seed).save(asked.out / f"{name}.png")
    for part, body in synthesizer.to_files().items():
        (asked.out / f"{name}-{part}").write_bytes(body)
    if asked.distances:
        more = train.pixels[: len(test)]
        result |= distance.measured(
            test.pixels, test.labels, sample.images, sample.labels, more, device=device
        )
    result |= scores(sample, test, asked, seed=seed, device=device)
    (asked.out / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")
    return result


def scores(sample: Sample, test: Images, asked: Asked, *, seed: int, device: str) -> dict[str, Any]:
    """Accuracy on real images of classifiers trained on synthetic ones only."""
    torch.manual_seed(seed)
    shape, kinds = test.pixels.shape[1:], len(test.schema.classes)
    found: dict[str, Any] = {"patience": asked.patience}
    most = {"mlp": classifiers.MOST_EPOCHS, "cnn": asked.cnn_epochs}
    with Clock() as clock:
        linear = classifiers.logistic(sample.images, sample.labels, kinds, device=device)
        found["logistic"] = classifiers.accuracy(linear, test.pixels, test.labels, device=device)
        tell(f"logistic: {found['logistic']:.4f}")
        for name, make in (("mlp", classifiers.mlp), ("cnn", classifiers.cnn)):
            network, epochs = classifiers.fit(
                make(shape, kinds),
                sample.images,
                sample.labels,
                patience=asked.patience,
                seed=seed,
                device=device,
                most=most[name],
            )
            guessed = classifiers.predictions(network, test.pixels, device=device)
            found[name], found[f"{name}_epochs"] = float((guessed == test.labels).mean()), epochs
            tell(f"{name}: {found[name]:.4f} after {epochs} epochs")
    by_class = [float((guessed == test.labels)[test.labels == label].mean()) for label in range(kinds)]
    return found | {"cnn_by_class": by_class, "classifier_seconds": clock.wall}


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class Clock:
    def __enter__(self) -> "Clock":
        self._wall, self._cpu = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.wall = round(time.perf_counter() - self._wall, 2)
        self.cpu = round(time.process_time() - self._cpu, 2)


def grid(synthesizer: ImageSynthesizer, seed: int, *, each: int = 16) -> Image.Image:
    """Draws a grid of images with one row per class."""
    shape = synthesizer.architecture
    rows = []
    for label in range(shape.classes):
        made = synthesizer.sample(each, seed=seed, label=label).images
        rows.append(np.concatenate(list(made), axis=1))
    picture = np.concatenate(rows)
    return Image.fromarray(picture[..., 0] if shape.channels == 1 else picture)


def commit() -> str:
    here = Path(__file__).resolve().parents[1]
    asked = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def table(results: list[dict[str, Any]]) -> str:
    head = "run | eps | seed | logistic | MLP | CNN | train s (CPU s) | sample s | peak MB | steps"
    lines = [f"| {head} |", "|" + "---|" * (head.count("|") + 1)]
    for r in results:
        cut = " (cut)" if r["steps_cut_to_budget"] else ""
        late = "" if r["within_budget"] else " over budget"
        lines.append(
            f"| {r['data']}, {r['method']}, {r['preset']} | {r['epsilon']:.3f} | {r['seed']} "
            f"| {r['logistic']:.4f} | {r['mlp']:.4f} | {r['cnn']:.4f} "
            f"| {r['train_seconds']:.0f} ({r['train_cpu_seconds']:.0f}){late} | {r['sample_seconds']:.0f} "
            f"| {r['peak_bytes'] / 1e6:.0f} | {r['plan']['steps']}{cut} |"
        )
    return "\n".join(lines)


def means(results: list[dict[str, Any]]) -> str:
    """One row per setting: the mean over its seeds, and half their range."""
    head = "run | eps | seeds | logistic | MLP | CNN | FD-EffNetLite0 (floor) | worst coverage of a class"
    lines = [f"| {head} |", "|" + "---|" * (head.count("|") + 1)]
    same: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for r in results:
        same.setdefault((r["data"], r["method"], r["preset"], round(r["epsilon"], 2)), []).append(r)
    for (data, method, preset, epsilon), runs in same.items():
        found = []
        for name in ("logistic", "mlp", "cnn"):
            values = [100 * r[name] for r in runs]
            found.append(f"{np.mean(values):.1f} % ± {(max(values) - min(values)) / 2:.1f}")
        far = next((r for r in runs if "fd_effnetlite0" in r), None)
        found += (
            [f"{far['fd_effnetlite0']:.1f} ({far['fd_floor']:.1f})", f"{min(far['coverage_by_class']):.2f}"]
            if far
            else ["", ""]
        )
        lines.append(f"| {data}, {method}, {preset} | {epsilon:g} | {len(runs)} | {' | '.join(found)} |")
    return "\n".join(lines)


def listed(among: Collection[str] = (), of: Callable[[str], Any] = str) -> Callable[[str], list[Any]]:
    """Parser of comma-separated values, each of which must be among the allowed ones."""

    def read(text: str) -> list[Any]:
        found = [of(one) for one in text.split(",")]
        if among and not set(found) <= set(among):
            raise argparse.ArgumentTypeError(f"choose from {', '.join(among)}")
        return found

    return read


def seconds(text: str) -> float:
    units = {"s": 1, "m": 60, "h": 3600}
    return float(text[:-1]) * units[text[-1]] if text[-1] in units else float(text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    parser.add_argument("--data", type=listed(FOLDERS), required=True, help=f"some of {', '.join(FOLDERS)}")
    parser.add_argument("--data-dir", type=Path, default=beside, help="has mnist/ and fashion-mnist/")
    names = [name for name, method in METHODS.items() if method.makes is Output.SAMPLES]
    parser.add_argument("--method", type=listed(names), required=True, help=f"some of {', '.join(names)}")
    parser.add_argument("--preset", default="fast-cpu")
    parser.add_argument("--epsilon", type=listed(of=float), default="10")
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--seeds", type=listed(of=int), default="0", help="for example 0,1,2: one run each")
    parser.add_argument("--steps", type=int, help="number of steps instead of the preset's")
    parser.add_argument("--records", type=int, help="use only the first N records")
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--budget", type=seconds, default="30m", help="time for training and sampling")
    parser.add_argument("--patience", type=int, default=30, help="epochs without improvement; the paper: 30")
    parser.add_argument("--cnn-epochs", type=int, default=classifiers.MOST_EPOCHS, help="maximum")
    parser.add_argument("--threads", type=int, default=int(os.environ.get("OMP_NUM_THREADS", "2")))
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument(
        "--distances", action="store_true", help="FD-EffNetLite0 and others; needs the extra `bench`"
    )
    parser.add_argument("--out", type=Path, default=Path("bench-out"))
    given = vars(parser.parse_args())
    seeds, jobs = given.pop("seeds"), given.pop("jobs")
    several = [given.pop(name) for name in ("data", "method", "epsilon")]
    given["out"].mkdir(parents=True, exist_ok=True)
    runs = [
        (Asked(**given | {"data": data, "method": method, "epsilon": epsilon}), seed)
        for data, method, epsilon in product(*several)
        for seed in seeds
    ]
    # One process per run, so that peak memory is measured per run.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=spawn, max_tasks_per_child=1) as processes:
        waiting = [
            processes.submit(once, replace(asked, distances=asked.distances and seed == seeds[0]), seed)
            for asked, seed in runs
        ]
        for each in as_completed(waiting):
            tell(f"{sum(one.done() for one in waiting)} of {len(runs)}\n{table([each.result()])}")
    results = [each.result() for each in waiting]
    told = f"{means(results)}\n\n{table(results)}\n"
    (given["out"] / "table.md").write_text(told)
    (given["out"] / "table.json").write_text(json.dumps(results, indent=2) + "\n")
    print(told)


if __name__ == "__main__":
    main()
