"""How records lie in numbers, derived from the declared schema alone: widths, order and scale."""

from dataclasses import dataclass

import numpy as np

from core.schema import CategoryColumn, ImageSchema, NumberColumn, TableSchema

CODE = np.dtype("<u2")  # holds 1,000 classes and 10,000 categories


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Two raw arrays without headers, so that reading them parses nothing: values and codes per record.

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
    """How many values each code of a record may take."""
    if isinstance(schema, ImageSchema):
        return [len(schema.classes)]
    return [len(column.domain) for column in category_columns(schema)]


def label_place(schema: TableSchema) -> int:
    """Which of the codes of a record is its label."""
    return [column.name for column in category_columns(schema)].index(schema.label or "")


def spans(schema: TableSchema) -> list[slice]:
    """Where each declared column lies in the matrix: one place for a number, one per category otherwise."""
    found, at = [], 0
    for column in schema.columns:
        width = len(column.domain) if isinstance(column, CategoryColumn) else 1
        found.append(slice(at, at + width))
        at += width
    return found


def scale(column: NumberColumn, values: np.ndarray) -> np.ndarray:
    """Declared bounds to [-1, 1]. Halves first: `high - low` may overflow."""
    middle, half = column.low / 2 + column.high / 2, column.high / 2 - column.low / 2
    return np.clip((values - middle) / (half or 1.0), -1, 1)


def unscale(column: NumberColumn, scaled: np.ndarray) -> np.ndarray:
    """Numbers as they were before `scale`, to about seven digits of the declared range."""
    middle, half = column.low / 2 + column.high / 2, column.high / 2 - column.low / 2
    values = middle + half * scaled.astype(np.float64)
    return np.round(values) if column.integer else values
