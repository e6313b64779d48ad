"""Keyed fingerprints of records, by which copies of records are recognised in any file.

Guarantee: a fingerprint is a CBC-MAC (AES-256) under a key that only the private side has, so nobody else can
compute or test one; sets of them have no order. Which copies are recognised:
docs/guarantees.md#records-and-accounts

Each record has one exact fingerprint and several robust ones, some of which survive a change of the record:
- images: random projections of a 16 x 16 grey thumbnail, rounded to coarse steps;
- tables: the cells of all columns but a keyed choice of them, a different choice for each.
"""

import hashlib
import io
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from core.schema import ImageSchema, TableSchema
from worker.records import Records
from worker.records.layout import category_columns, number_columns, unscale

LAYERS, _TURNED_LAYERS = 8, 2
# Robust fingerprints that a record must share with another dataset to count as common.
_NEEDED = {"image": 1, "table": 3}
# Datasets overlap if they have more than this share of the smaller one in common, and not fewer than LEAST
# records, so that nobody can find out about one person by uploading a guess.
SHARE, LEAST = 0.02, 10
# The same for robust matches: rows of different people match more often than their images.
ALIKE = {"image": 0.02, "table": 0.05}
# Smaller datasets are always held for review, so that being held tells nothing about overlap.
FEW = 2 * LEAST

_BLOCK = 8192
_NOBODY = 0
_SIDE, _PROJECTIONS, _STEP = 16, 16, 20.0


@dataclass(frozen=True)
class Sketch:
    """What is stored of a dataset: sorted sets of fingerprints, the exact ones first."""

    kind: str
    layers: tuple[np.ndarray, ...]

    @property
    def size(self) -> int:
        """The number of different records."""
        return len(self.layers[0])

    def to_bytes(self, **facts: str) -> bytes:
        out = io.BytesIO()
        meta = json.dumps({"kind": self.kind, **facts}).encode()
        arrays = {f"layer{i}": layer for i, layer in enumerate(self.layers)}
        np.savez(out, meta=np.frombuffer(meta, np.uint8), **arrays)  # type: ignore[arg-type]
        return out.getvalue()

    @classmethod
    def from_bytes(cls, body: bytes) -> "Sketch":
        with np.load(io.BytesIO(body), allow_pickle=False) as arrays:
            layers = tuple(arrays[f"layer{i}"] for i in range(len(arrays.files) - 1))
        return cls(cls.facts_of(body)["kind"], layers)

    @staticmethod
    def facts_of(body: bytes) -> dict[str, str]:
        """The facts that were given to `to_bytes`."""
        with np.load(io.BytesIO(body), allow_pickle=False) as arrays:
            facts: dict[str, str] = json.loads(arrays["meta"].tobytes())
        return facts


@dataclass(frozen=True)
class Fingerprints:
    """Fingerprints of different records: one `exact` each, and robust ones for several `views`."""

    kind: str
    exact: np.ndarray
    views: tuple[np.ndarray, ...]

    def sketch(self) -> Sketch:
        robust = [np.unique(layer) for layer in self.views[0].T]
        return Sketch(self.kind, (self.exact, *(layer[layer != _NOBODY] for layer in robust)))

    @property
    def few(self) -> bool:
        return len(self.exact) < FEW

    def overlap(self, sketch: Sketch) -> float:
        """Common records as a share of the smaller dataset; 0 below the thresholds."""
        if sketch.kind != self.kind:
            return 0.0
        common = _is_in(self.exact, sketch.layers[0])
        smaller, same = min(len(common), sketch.size), int(common.sum())
        for view in self.views:
            layers = zip(view.T, sketch.layers[1:], strict=False)
            hits = sum(_is_in(layer, stored).astype(np.uint8) for layer, stored in layers)
            common |= hits >= _NEEDED[self.kind]
        alike = int(common.sum())
        enough = same > SHARE * smaller or alike > ALIKE[self.kind] * smaller
        return alike / smaller if enough and alike >= min(LEAST, sketch.size) else 0.0


def _is_in(values: np.ndarray, sorted_set: np.ndarray) -> np.ndarray:
    if not len(sorted_set):
        return np.zeros(len(values), bool)
    nearest = np.minimum(np.searchsorted(sorted_set, values), len(sorted_set) - 1)
    equal: np.ndarray = sorted_set[nearest] == values
    return equal


def fingerprints(records: Records, key: bytes) -> Fingerprints:
    """Computes the fingerprints of a dataset, a block of records at a time."""
    schema = records.schema
    read: Any = _Images(schema, key) if isinstance(schema, ImageSchema) else _Table(schema, key)
    blocks = [read(*records.raw(slice(at, at + _BLOCK))) for at in range(0, len(records), _BLOCK)]
    exact, first = np.unique(np.concatenate([block[0] for block in blocks]), return_index=True)
    views = [np.concatenate(parts)[first] for parts in zip(*(block[1] for block in blocks), strict=True)]
    if schema.kind == "table":  # robust fingerprints that several rows share identify nobody
        for layer in views[0].T:
            _, place, counts = np.unique(layer, return_inverse=True, return_counts=True)
            layer[counts[place] > 1] = _NOBODY
    return Fingerprints(schema.kind, exact, tuple(views))


class _Images:
    """Fingerprints of pixels, whatever the label."""

    def __init__(self, schema: ImageSchema, key: bytes) -> None:
        self._exact = _derived(key, "image exact", f"{schema.height}x{schema.width}x{schema.channels}")
        self._robust = [_derived(key, "image robust", str(layer)) for layer in range(LAYERS)]
        shape = _SIDE * _SIDE, LAYERS * _PROJECTIONS
        signs = np.unpackbits(_stream(_derived(key, "image projections"), shape[0] * shape[1] // 8)).reshape(
            shape
        )
        self._directions = (2.0 * signs - 1.0) / _SIDE
        self._offsets = _stream(_derived(key, "image offsets"), shape[1]) / 256
        self._rows, self._columns = _averages(schema.height), _averages(schema.width)

    def __call__(self, pixels: np.ndarray, _: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
        grey = pixels.mean(axis=3, dtype=np.float64)
        small = self._rows @ grey @ self._columns.T
        exact = _mac(self._exact, pixels.reshape(len(pixels), -1))
        # The original, then turned, mirrored and inverted copies, which are easy to make.
        turned = (
            np.rot90(mirrored, quarter, axes=(1, 2))
            for shades in (small, 255.0 - small)
            for mirrored in (shades, shades[:, :, ::-1])
            for quarter in range(4)
        )
        return exact, [self._layers(view, _TURNED_LAYERS if i else LAYERS) for i, view in enumerate(turned)]

    def _layers(self, small: np.ndarray, count: int) -> np.ndarray:
        wide = count * _PROJECTIONS
        raw = small.reshape(len(small), -1) @ self._directions[:, :wide]
        steps = np.floor(raw / _STEP + self._offsets[:wide]).astype("<i2")
        parts = np.split(steps, count, axis=1)
        return np.stack([_mac(key, part) for key, part in zip(self._robust, parts, strict=False)], axis=1)


def _averages(length: int) -> np.ndarray:
    """The matrix that averages a side of any length over sixteen equal parts."""
    edges = np.arange(_SIDE + 1) * length / _SIDE
    pixel = np.arange(length)
    covered = np.clip(np.minimum(edges[1:, None], pixel + 1) - np.maximum(edges[:-1, None], pixel), 0, None)
    averages: np.ndarray = covered / covered.sum(axis=1, keepdims=True)
    return averages


class _Table:
    """Fingerprints of cell values, which do not depend on declared bounds or the order of categories."""

    def __init__(self, schema: TableSchema, key: bytes) -> None:
        self._schema = schema
        self._offset = int.from_bytes(_derived(key, "table offset")[:4], "little") / 2**32
        self._texts = {
            column.name: np.array([_text(value) for value in column.domain], "<u8")
            for column in category_columns(schema)
        }
        names = sorted(column.name for column in schema.columns)
        # Each column is left out of half of the layers, which therefore survive a change of that column.
        left_out = {name: _choice(_derived(key, "table layers", name)) for name in names}
        chosen = [[name for name in names if layer not in left_out[name]] for layer in range(LAYERS)]
        self._exact = names, _derived(key, "table exact", *names)
        self._robust = [(some, _derived(key, f"table robust {i}", *some)) for i, some in enumerate(chosen)]

    def __call__(self, numbers: np.ndarray, codes: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
        cells = {
            column.name: self._rounded(unscale(column, numbers[:, place]))
            for place, column in enumerate(number_columns(self._schema))
        }
        for place, category in enumerate(category_columns(self._schema)):
            cells[category.name] = self._texts[category.name][codes[:, place]]

        def mac(names: list[str], key: bytes) -> np.ndarray:
            if not names:
                return np.zeros(len(codes), "<u8")
            return _mac(key, np.stack([cells[name] for name in names], axis=1))

        return mac(*self._exact), [np.stack([mac(*layer) for layer in self._robust], axis=1)]

    def _rounded(self, values: np.ndarray) -> np.ndarray:
        """Rounds to three digits, because records hold scaled float32 numbers."""
        size = np.abs(values)
        power = np.floor(np.log10(np.where(size > 1e-30, size, 1e-30))) - 2
        # The offset keeps common values, such as 12.5, away from the boundary between two roundings.
        digits = np.floor(values / 10.0**power + self._offset)
        return np.where(size > 1e-30, digits * 1024 + power, 0).astype("<i8").view("<u8")


def _text(value: str) -> int:
    return int.from_bytes(hashlib.blake2b(value.encode(), digest_size=8).digest(), "little")


def _choice(key: bytes) -> set[int]:
    """A keyed choice of half of the layers."""
    return set(np.argsort(_stream(key, LAYERS), kind="stable")[: LAYERS // 2].tolist())


def _stream(key: bytes, count: int) -> np.ndarray:
    """Pseudorandom bytes from a key, stable over versions, which no library's random generator promises."""
    return np.frombuffer(hashlib.shake_256(key).digest(count), np.uint8)


def _derived(key: bytes, purpose: str, *names: str) -> bytes:
    """Derives a key for each purpose, so that fingerprints of different kinds are never equal."""
    return hashlib.blake2b(json.dumps([purpose, *names]).encode(), key=key, digest_size=32).digest()


def _mac(key: bytes, rows: np.ndarray) -> np.ndarray:
    """CBC-MAC of each row, truncated to 64 bits; all rows under one key have the same length."""
    data = np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), -1)
    data = np.pad(data, ((0, 0), (0, -data.shape[1] % 16)))
    state = np.zeros((len(rows), 16), np.uint8)
    encrypt = Cipher(algorithms.AES256(key), modes.ECB()).encryptor()  # noqa: S305 (a building block of the MAC)
    for start in range(0, data.shape[1], 16):
        mixed = np.ascontiguousarray(state ^ data[:, start : start + 16])
        state = np.frombuffer(encrypt.update(mixed.data), np.uint8).reshape(-1, 16)
    return np.ascontiguousarray(state[:, :8]).view("<u8")[:, 0]
