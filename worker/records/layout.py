"""The array layout of records, derived from the declared schema alone: widths, order and scale."""

from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from core.schema import CategoryColumn, ImageSchema, NumberColumn, TableSchema

CODE = np.dtype("<u2")  # holds 1,000 classes and 10,000 categories


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Two raw arrays without headers, so that reading them needs no parser: values and codes per record.

    Images: pixels as bytes, and the class. Tables: scaled numbers, and the codes of categories.
    """

    dtype: np.dtype
    shape: tuple[int, ...]
    codes: int

    @property
    def value_bytes(self) -> int:
        return self.dtype.itemsize * int(np.prod(self.shape))

    @property
    def code_bytes(self) -> int:
        return CODE.itemsize * self.codes


def layout(schema: ImageSchema | TableSchema) -> Layout:
    if isinstance(schema, ImageSchema):
        shape = (schema.height, schema.width, schema.channels)
        return Layout(dtype=np.dtype("u1"), shape=shape, codes=1)
    return Layout(
        dtype=np.dtype("<f4"), shape=(len(number_columns(schema)),), codes=len(category_columns(schema))
    )


def number_columns(schema: TableSchema) -> list[NumberColumn]:
    return [column for column in schema.columns if isinstance(column, NumberColumn)]


def category_columns(schema: TableSchema) -> list[CategoryColumn]:
    return [column for column in schema.columns if isinstance(column, CategoryColumn)]


def domain_sizes(schema: ImageSchema | TableSchema) -> list[int]:
    """The number of values of each code of a record."""
    if isinstance(schema, ImageSchema):
        return [len(schema.classes)]
    return [len(column.domain) for column in category_columns(schema)]


def label_place(schema: TableSchema) -> int:
    """The index of the label among the codes of a record."""
    return [column.name for column in category_columns(schema)].index(schema.label or "")


def spans(schema: TableSchema) -> list[slice]:
    """The columns of the matrix for each declared column: one for a number, one per category otherwise."""
    widths = [len(column.domain) if isinstance(column, CategoryColumn) else 1 for column in schema.columns]
    return [slice(end - width, end) for end, width in zip(accumulate(widths), widths, strict=True)]


def scale(column: NumberColumn, values: np.ndarray) -> np.ndarray:
    """Maps the declared bounds to [-1, 1]."""
    middle, half = _middle_and_half(column)
    return np.clip((values - middle) / (half or 1.0), -1, 1)


def unscale(column: NumberColumn, scaled: np.ndarray) -> np.ndarray:
    """Inverts `scale`, to about seven digits of the declared range."""
    middle, half = _middle_and_half(column)
    values = middle + half * scaled.astype(np.float64)
    return np.round(values) if column.integer else values


def _middle_and_half(column: NumberColumn) -> tuple[float, float]:
    return column.low / 2 + column.high / 2, column.high / 2 - column.low / 2  # `high - low` may overflow
