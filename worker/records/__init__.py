"""Private records in memory-mapped arrays; used on the private side only."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from core.faults import Failure, Fault
from core.schema import ImageSchema, TableSchema
from worker.records.layout import (
    CODE,
    category_columns,
    domain_sizes,
    label_place,
    layout,
    number_columns,
    spans,
)

if TYPE_CHECKING:
    from torch import Tensor

VALUES, CODES = "values", "codes"


@dataclass(frozen=True, kw_only=True)
class Report:
    """Counts of values that were changed while reading. For the curator only: they are facts about people."""

    clamped: int = 0
    mapped: int = 0


class Records:
    """Records in `directory`, as `worker.validate.convert` wrote them. Its repr shows the schema alone."""

    def __init__(self, schema: ImageSchema | TableSchema, directory: Path) -> None:
        self.schema = schema
        shape = layout(schema)
        values, codes = directory / VALUES, directory / CODES
        if shape.codes:
            self._count = codes.stat().st_size // shape.code_bytes
        else:
            self._count = values.stat().st_size // shape.value_bytes
        sizes = (values.stat().st_size, codes.stat().st_size)
        if not self._count or sizes != (self._count * shape.value_bytes, self._count * shape.code_bytes):
            raise Failure(Fault.SCHEMA_MISMATCH)
        self._values = _mapped(values, shape.dtype, (self._count, *shape.shape))
        self._codes = _mapped(codes, CODE, (self._count, shape.codes))
        # Checked again because the sandboxed process that wrote the arrays has parsed untrusted bytes.
        for start in range(0, self._count, 1 << 20):
            if (self._codes[start : start + (1 << 20)] >= np.array(domain_sizes(schema))).any():
                raise Failure(Fault.SCHEMA_MISMATCH)

    def __len__(self) -> int:
        """The number of records, which is private."""
        return self._count

    def __repr__(self) -> str:
        return f"Records({self.schema!r})"

    def take(self, indices: np.ndarray) -> "tuple[Tensor, Tensor]":
        """The chosen records as float32, and their classes as int64.

        Images in [-1, 1] as NCHW; tables as the matrix that `layout.spans` describes. Without a declared
        label every class is 0.
        """
        import torch  # here, because the process that reads uploads has no use for it

        _require_valid(indices, self._count)
        values, codes = self._values[indices], self._codes[indices]
        if isinstance(self.schema, ImageSchema):
            # Bytes to [-1, 1] by the type's own range, as nothing may be measured on the records.
            pixels = torch.from_numpy(values).permute(0, 3, 1, 2).contiguous()
            return pixels.float().div_(127.5).sub_(1), torch.from_numpy(codes[:, 0].astype(np.int64))
        labels = codes[:, label_place(self.schema)] if self.schema.label else np.zeros(len(codes))
        matrix = _matrix(values, codes, self.schema)
        return torch.from_numpy(matrix), torch.from_numpy(labels.astype(np.int64))

    def raw(self, rows: slice) -> tuple[np.ndarray, np.ndarray]:
        """Values and codes of some records as they are in the arrays."""
        return self._values[rows], self._codes[rows]


def _require_valid(indices: np.ndarray, count: int) -> None:
    """Refuses -1, which is numpy's last record, without numpy's errors, which state the number of records."""
    whole = np.issubdtype(indices.dtype, np.integer)
    if not whole or (len(indices) and (indices.min() < 0 or indices.max() >= count)):
        raise IndexError("not the index of a record")


def _matrix(numbers: np.ndarray, codes: np.ndarray, schema: TableSchema) -> np.ndarray:
    where = spans(schema)
    matrix = np.zeros((len(numbers), where[-1].stop), dtype=np.float32)
    rows = np.arange(len(numbers))
    named = {column.name: span for column, span in zip(schema.columns, where, strict=True)}
    for column, place in zip(number_columns(schema), numbers.T, strict=True):
        matrix[:, named[column.name].start] = place
    for category, place in zip(category_columns(schema), codes.T, strict=True):
        matrix[rows, named[category.name].start + place.astype(np.int64)] = 1
    return matrix


def _mapped(path: Path, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    if 0 in shape:  # nothing of this kind is declared, and an empty file cannot be mapped
        return np.zeros(shape, dtype)
    return np.memmap(path, dtype=dtype, mode="r", shape=shape)
