"""Recognition rate of fingerprints of records, and their cost in time, memory and storage.

Run as `python -m bench.fingerprints [--data DIR] [--json]`. Time and storage are measured on 60,000
generated images of 28 x 28 and a generated table of a million rows with 15 columns, and compared with one
SHA-256 of their bytes. With the public data sets in DIR it prints which share of other people's records is
mistaken for known ones, and which share of changed copies is found. A dataset is held above 2 %, a table
whose rows match only approximately above 5 %.
"""

import argparse
import csv
import gzip
import hashlib
import io
import json
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from PIL import Image
from rich.console import Console
from rich.table import Table

from core.schema import CategoryColumn, ImageSchema, NumberColumn, TableSchema
from worker.records import fingerprints as module
from worker.records.fingerprints import Fingerprints, Sketch, fingerprints
from worker.records.layout import scale

KEY = bytes(range(32))


class Rows:
    """Records in memory, with the interface that fingerprints use."""

    def __init__(self, schema: ImageSchema | TableSchema, values: np.ndarray, codes: np.ndarray) -> None:
        self.schema, self.values, self.codes = schema, values, codes

    def __len__(self) -> int:
        return len(self.codes)

    def raw(self, rows: slice) -> tuple[np.ndarray, np.ndarray]:
        return self.values[rows], self.codes[rows]

    def fingerprints(self) -> Fingerprints:
        return fingerprints(self, KEY)  # type: ignore[arg-type]


def pictures(pixels: np.ndarray) -> Rows:
    pixels = pixels if pixels.ndim == 4 else pixels[..., None]
    height, width, channels = pixels.shape[1:]
    schema = ImageSchema(height=height, width=width, channels=channels, classes=("a",))
    return Rows(schema, pixels.astype(np.uint8), np.zeros((len(pixels), 1), "<u2"))


def made_rows(count: int) -> Rows:
    numbers = [NumberColumn(name=f"n{i}", low=0, high=1000) for i in range(7)]
    words = [CategoryColumn(name=f"c{i}", categories=tuple(f"v{k}" for k in range(12))) for i in range(8)]
    drawn = np.random.default_rng(0)
    values, codes = drawn.uniform(-1, 1, (count, 7)), drawn.integers(0, 12, (count, 8))
    return Rows(TableSchema(columns=(*numbers, *words)), values.astype("<f4"), codes.astype("<u2"))


# -- time and storage


def timed(do: Callable[[], Any]) -> tuple[Any, float]:
    began = time.process_time()
    return do(), time.process_time() - began


def measure(name: str, records: Rows) -> dict[str, Any]:
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    whole = records.values.tobytes() + records.codes.tobytes()
    _, hashing = timed(lambda: hashlib.sha256(whole).digest())
    found, making = timed(records.fingerprints)
    sketch, keeping = timed(found.sketch)
    _, comparing = timed(lambda: found.overlap(sketch))
    return {
        "records": name, "megabytes": len(whole) / 1e6, "sha256_s": hashing, "make_s": making + keeping,
        "compare_s": comparing, "kept_mb": len(sketch.to_bytes()) / 1e6,
        "memory_mb": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) / 1024,
    }  # fmt: skip


# -- recognition


def share(records: Rows, known: Sketch) -> float:
    """Share of recognised records, also where it is too small to hold a dataset."""
    with mock.patch.multiple(module, SHARE=-1.0, LEAST=0):
        return records.fingerprints().overlap(known)


def jpeg(pixels: np.ndarray, quality: int) -> np.ndarray:
    def again(one: np.ndarray) -> np.ndarray:
        out = io.BytesIO()
        Image.fromarray(one).save(out, "JPEG", quality=quality)
        return np.asarray(Image.open(out))

    return np.stack([again(one) for one in pixels])


def changes(x: np.ndarray) -> dict[str, np.ndarray]:
    drawn, inverted = np.random.default_rng(1), x.copy()
    inverted[:, 7, 7] = 255 - inverted[:, 7, 7]
    return {
        "one pixel inverted": inverted,
        "noise of 1 level": np.clip(x.astype(int) + drawn.integers(-1, 2, x.shape), 0, 255),
        "JPEG 90": jpeg(x, 90),
        "JPEG 75": jpeg(x, 75),
        "JPEG 50": jpeg(x, 50),
        "5 levels brighter": np.clip(x.astype(int) + 5, 0, 255),
        "mirrored": x[:, :, ::-1],
        "negative": 255 - x,
        "twice as large": np.kron(x, np.ones((1, 2, 2), np.uint8)),
        "shifted by a pixel": np.roll(x, 1, 2),
    }


def recognised_images(data: Path) -> dict[str, dict[str, float]]:
    def idx(name: str) -> np.ndarray:
        raw = gzip.decompress((data / name).read_bytes())
        return np.frombuffer(raw[16:], np.uint8).reshape(-1, 28, 28)

    usps = np.load(data / "usps/usps.npz")
    sets = {
        name: (idx(f"{folder}/train-images-idx3-ubyte.gz"), idx(f"{folder}/t10k-images-idx3-ubyte.gz"))
        for name, folder in (("MNIST", "mnist"), ("Fashion-MNIST", "fashion-mnist"))
    }
    sets["USPS"] = tuple((255 * usps[part]).astype(np.uint8) for part in ("x_train", "x_test"))
    found = {}
    for name, (mine, others) in sets.items():
        known = pictures(mine).fingerprints().sketch()
        tried = {"other people": others} | changes(mine[:1000])
        found[name] = {change: share(pictures(x), known) for change, x in tried.items()}
    return found


def declared(names: list[str], rows: list[list[str]]) -> Rows:
    columns: list[Any] = []
    numbers, codes = [], []
    for place, name in enumerate(names):
        cells = [row[place] for row in rows]
        try:
            values = np.array([float(cell) for cell in cells])
            low, high = values.min() - 1, values.max() + 1
            column = NumberColumn(name=name, low=low, high=high, integer=bool((values % 1 == 0).all()))
            numbers.append(scale(column, values))
            columns.append(column)
        except ValueError:
            words = sorted(set(cells))
            codes.append(np.array([words.index(cell) for cell in cells], "<u2"))
            # Category names may not contain every character, so digests replace the values.
            told = tuple(hashlib.sha256(word.encode()).hexdigest() for word in words)
            columns.append(CategoryColumn(name=name, categories=told))
    values = np.stack(numbers, 1) if numbers else np.zeros((len(rows), 0))
    return Rows(TableSchema(columns=tuple(columns)), values.astype("<f4"), np.stack(codes, 1))


def recognised_tables(data: Path) -> dict[str, dict[str, float]]:
    def read(name: str, **how: Any) -> list[list[str]]:
        with gzip.open(data / "tabular" / name, "rt") as file:
            rows = csv.reader(file, **how)
            return [[cell.strip().rstrip(".") for cell in row] for row in rows if len(row) > 1]

    sets = {"Adult": (read("adult.data.gz"), read("adult.test.gz"))}
    for name, file, mark in (
        ("Bank", "bank-additional-full.csv.gz", ";"),
        ("ACS", "nist_acs_national2019.csv.gz", ","),
    ):
        _, *rows = read(file, delimiter=mark)
        mixed = [rows[i] for i in np.random.default_rng(0).permutation(len(rows))]
        sets[name] = mixed[: len(mixed) // 2], mixed[len(mixed) // 2 :]
    found = {}
    for name, (mine, others) in sets.items():
        names = [f"c{i}" for i in range(len(mine[0]))]
        known = declared(names, mine).fingerprints().sketch()
        some, turned = mine[:2000], mine[1:2000] + mine[:1]
        one = []
        for place in range(len(names)):
            mixed = [
                [*row[:place], other[place], *row[place + 1 :]]
                for row, other in zip(some, turned, strict=True)
            ]
            one.append(share(declared(names, mixed), known))
        found[name] = {
            "other people": share(declared(names, others), known),
            "the same rows": share(declared(names, some), known),
            "one column changed, the worst": min(one),
            "one column changed, on average": float(np.mean(one)),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="folder with mnist, fashion-mnist, usps and tabular")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    drawn = np.random.default_rng(0).integers(0, 256, (60_000, 28, 28), np.uint8)
    cost = [measure("60,000 images", pictures(drawn)), measure("1,000,000 rows", made_rows(1_000_000))]
    found = [recognised_images(given.data), recognised_tables(given.data)] if given.data else []
    if given.json:
        print(json.dumps({"cost": cost, "recognised": found}))
        return
    console, table = Console(), Table(*cost[0])
    for one in cost:
        table.add_row(*(each if isinstance(each, str) else f"{each:.2f}" for each in one.values()))
    console.print(table)
    for sets in found:
        table = Table("share of records known", *sets)
        for change in next(iter(sets.values())):
            table.add_row(change, *(f"{100 * one[change]:.1f} %" for one in sets.values()))
        console.print(table)


if __name__ == "__main__":
    main()
