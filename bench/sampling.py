"""Synthetic images per CPU second: sampled by a generator, and written as a whole bundle.

    python -m bench.sampling [--count 4096] [--json]

Two sizes of the generator of "Private GANs, Revisited", 28 x 28 and 32 x 32 x 3, on one thread, in CPU
seconds. Speed does not depend on the weights, so they are untrained. "bundled" counts all files of a release.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch

from core.schema import ImageSchema
from sluice.generators.dcgan import DCGAN
from sluice.generators.image import ImageSynthesizer
from sluice.privacy.events import Gaussian, Query
from worker.bundle import Facts, build

SIZES = {"28x28": (28, 28, 1), "32x32x3": (32, 32, 3)}


def schema_of(height: int, width: int, channels: int) -> ImageSchema:
    return ImageSchema(
        height=height, width=width, channels=channels, classes=tuple(f"class {i}" for i in range(10))
    )


def facts_of(schema: ImageSchema, count: int, formats: tuple[str, ...]) -> Facts:
    read, row = {"renyi": 1.0, "pld": 1.0}, {"number": 1, "digest": ""}
    privacy = {
        "unit": "one record", "relation": "add_remove", "delta": 1e-5, "cost": 1, "epsilon": read,
        "event": Gaussian(query=Query.SUM, bound=1.0, noise_stddev=5.0).to_dict(),
        "total": {"cost": 1, "epsilon": 1.0}, "entry": row, "head": row, "others": [], "sources": [],
        "account": {"id": "", "epsilon": 1.0, "delta": 1e-5, "order": 8},
    }  # fmt: skip
    return Facts(
        release="bench", name="bench", note="", licence="CC0-1.0", created_at="2026-01-01", reviewers=2,
        count=count, seed=1, formats=formats, schema=schema, privacy=privacy,
    )  # fmt: skip


def measured(schema: ImageSchema, count: int) -> dict[str, float]:
    """Measures images per CPU second: sampled, and as a bundle of parquet and npz."""
    synthesizer = ImageSynthesizer(
        DCGAN(height=schema.height, width=schema.width, channels=schema.channels, classes=10)
    )
    next(synthesizer.draws(1, seed=1))  # warm-up
    start = time.process_time()
    for _ in synthesizer.draws(count, seed=1, balanced=True):
        pass
    drawn = time.process_time() - start
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as directory:
        start = time.process_time()
        facts = facts_of(schema, count, ("npz", "parquet"))
        build(Path(directory), facts, synthesizer.to_files(), drawn=lambda _: None)
        built = time.process_time() - start
    return {"drawn_per_second": round(count / drawn, 1), "bundled_per_second": round(count / built, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=4096)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    result = {name: measured(schema_of(*size), asked.count) for name, size in SIZES.items()}
    print(f"{'images per CPU second':24} {'drawn':>10} {'bundled':>10}")
    for name, row in result.items():
        print(f"{name:24} {row['drawn_per_second']:10.0f} {row['bundled_per_second']:10.0f}")
    if asked.json:
        print(json.dumps({"count": asked.count, **result}))


if __name__ == "__main__":
    main()
