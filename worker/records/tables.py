"""Reads tables from CSV or Parquet, a block of rows at a time; the schema gives order, bounds and codes."""

import csv
import sys
from collections.abc import Iterator, Mapping
from importlib.abc import MetaPathFinder
from typing import IO, Any

import numpy as np

from core.faults import Failure, Fault
from core.schema import CategoryColumn, TableSchema
from worker.records import Report
from worker.records.layout import CODE, category_columns, layout, number_columns, scale
from worker.records.reading import PICKLES, Allowance, Sink, check

_PARQUET = b"PAR1"
_OTHERS = (b"PK\3\4", b"\x1f\x8b", b"\x89PNG", b"\x93NUMPY", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"ARROW1\0\0")
_ROWS, _CELLS = 8192, 1 << 18  # of a block, whichever is fewer rows
_LINE_MOST = 1 << 20
_UTF8_MARK, _WIDE_MARKS = b"\xef\xbb\xbf", (b"\xff\xfe", b"\xfe\xff")


class _NoPandas(MetaPathFinder):
    """Keeps pyarrow from importing pandas at a later moment, when no file can be opened any more."""

    def find_spec(self, name: str, *_: object) -> None:
        if name == "pandas":
            raise ImportError(name)


def prepare(file: IO[bytes]) -> None:
    """Imports the libraries for the file's format, before the sandbox refuses to open files."""
    if file.read(len(_PARQUET)) == _PARQUET:
        sys.meta_path.insert(0, _NoPandas())
        import pyarrow.compute
        import pyarrow.parquet

        pyarrow.set_cpu_count(1)
        pyarrow.set_io_thread_count(1)
    file.seek(0)


def read_table(file: IO[bytes], *, schema: TableSchema, sink: Sink, allowance: Allowance) -> Report:
    head = file.read(8)
    file.seek(0)
    check(not head.startswith(PICKLES), Fault.UNSAFE_CONTENT)
    check(not head.startswith(_OTHERS), Fault.UNSUPPORTED_FORMAT)
    writer = _Writer(schema, sink)
    blocks = _parquet(file, schema, allowance) if head.startswith(_PARQUET) else _csv(file, head, schema)
    for block in blocks:
        writer.put(block)
    check(writer.rows > 0, Fault.EMPTY)
    return Report(clamped=writer.clamped, mapped=writer.mapped)


class _Writer:
    """Writes rows of both formats, so that equal tables give equal records.

    Guarantee: how a row is written depends on the declared schema and on that row alone.
    """

    def __init__(self, schema: TableSchema, sink: Sink) -> None:
        self._schema, self._sink = schema, sink
        self.rows = self.clamped = self.mapped = 0

    def put(self, block: Mapping[str, np.ndarray]) -> None:
        """Writes a block of columns by name: float64 numbers, and codes with -1 for undeclared values."""
        count = len(next(iter(block.values())))
        numbers = np.empty((count, len(number_columns(self._schema))), np.float32)
        codes = np.empty((count, len(category_columns(self._schema))), CODE)
        for place, column in enumerate(number_columns(self._schema)):
            values = block[column.name]
            check(bool(np.isfinite(values).all()), Fault.NOT_FINITE)
            bounded = np.clip(np.round(values) if column.integer else values, column.low, column.high)
            self.clamped += int(np.count_nonzero(bounded != values))
            numbers[:, place] = scale(column, bounded)
        for place, category in enumerate(category_columns(self._schema)):
            coded = block[category.name]
            self.mapped += int(np.count_nonzero(coded < 0))
            codes[:, place] = np.where(coded < 0, category.domain.index(category.other), coded)
        self._sink.values.write(numbers.astype("<f4").tobytes())
        self._sink.codes.write(codes.tobytes())
        self.rows += count


# CSV


def _csv(file: IO[bytes], head: bytes, schema: TableSchema) -> Iterator[dict[str, np.ndarray]]:
    check(bool(head), Fault.EMPTY)
    check(not head.startswith(_WIDE_MARKS), Fault.ENCODING)
    file.seek(len(_UTF8_MARK) if head.startswith(_UTF8_MARK) else 0)
    rows = csv.reader(_lines(file), strict=True)
    try:
        names = next(rows, [])
        check(_same_names(names, schema), Fault.COLUMNS_MISMATCH)
        lookup = {c.name: {v: i for i, v in enumerate(c.domain)} for c in category_columns(schema)}
        most = _block_rows(schema)
        block: list[list[str]] = []
        for row in rows:
            check(len(row) == len(names), Fault.RAGGED)
            block.append(row)
            if len(block) == most:
                yield _columns(names, block, lookup)
                block = []
    except csv.Error:  # unbalanced quotes, or a field beyond any declared value
        raise Failure(Fault.RAGGED) from None
    if block:
        yield _columns(names, block, lookup)


def _lines(file: IO[bytes]) -> Iterator[str]:
    while line := file.readline(_LINE_MOST + 1):
        check(len(line) <= _LINE_MOST, Fault.TOO_LARGE)
        check(b"\0" not in line, Fault.ENCODING)
        try:
            yield line.decode("utf-8")
        except UnicodeDecodeError:
            raise Failure(Fault.ENCODING) from None


def _columns(
    names: list[str], rows: list[list[str]], lookup: Mapping[str, Mapping[str, int]]
) -> dict[str, np.ndarray]:
    block: dict[str, np.ndarray] = {}
    for name, cells in zip(names, zip(*rows, strict=True), strict=True):
        codes = lookup.get(name)
        block[name] = _numbers(cells) if codes is None else np.array([codes.get(cell, -1) for cell in cells])
    return block


def _numbers(cells: tuple[str, ...]) -> np.ndarray:
    check(all(cells), Fault.NOT_FINITE)
    together = "".join(cells)
    check(together.isascii() and "_" not in together, Fault.DTYPE_MISMATCH)  # Python's own liberties
    try:
        return np.array(list(map(float, cells)))
    except ValueError:
        raise Failure(Fault.DTYPE_MISMATCH) from None


# Parquet


def _parquet(file: IO[bytes], schema: TableSchema, allowance: Allowance) -> Iterator[dict[str, np.ndarray]]:
    import pyarrow as pa
    from pyarrow import parquet

    options = {
        "thrift_string_size_limit": 16 << 20,
        "thrift_container_size_limit": 1 << 20,
        "buffer_size": 1 << 20,  # row groups are streamed, however large
        "page_checksum_verification": True,
    }
    declared = parquet.ParquetFile(file, **options).schema_arrow
    check(_same_names(declared.names, schema), Fault.COLUMNS_MISMATCH)
    for column in schema.columns:
        field = declared.field(column.name)
        check(b"ARROW:extension:name" not in (field.metadata or {}), Fault.UNSAFE_CONTENT)
        check(_fits(field.type, category=isinstance(column, CategoryColumn)), Fault.DTYPE_MISMATCH)
    categories = {column.name: pa.array(column.domain) for column in category_columns(schema)}
    # As dictionaries, so that a long value repeated is kept once.
    table = parquet.ParquetFile(file, read_dictionary=list(categories), **options)
    promised = table.metadata.num_rows
    each = layout(schema).value_bytes + layout(schema).code_bytes
    groups = [table.metadata.row_group(place) for place in range(table.num_row_groups)]
    allowance.take(max(promised * each, sum(group.total_byte_size for group in groups)))
    for batch in table.iter_batches(batch_size=_block_rows(schema), use_threads=False):
        promised -= len(batch)
        check(promised >= 0, Fault.DAMAGED)
        yield {
            name: _codes(batch[name], categories[name]) if name in categories else _floats(batch[name])
            for name in declared.names
        }
    check(promised == 0, Fault.DAMAGED)


def _fits(kind: Any, *, category: bool) -> bool:
    from pyarrow import types

    if not category:
        fits = [types.is_integer, types.is_floating, types.is_decimal]
    else:
        fits = [types.is_string, types.is_large_string, types.is_integer, types.is_boolean]
        kind = kind.value_type if types.is_dictionary(kind) else kind
    return any(is_type(kind) for is_type in fits)


def _floats(values: Any) -> np.ndarray:
    from pyarrow import compute, float64

    floats: np.ndarray = compute.cast(values, float64(), safe=False).to_numpy(zero_copy_only=False)
    return floats


def _codes(values: Any, domain: Any) -> np.ndarray:
    """Positions in the domain; -1 for null and for undeclared values."""
    from pyarrow import compute, int64, string, types

    if types.is_dictionary(values.type):
        places = _codes(values.dictionary, domain)
        indices = compute.fill_null(values.indices.cast(int64()), len(places)).to_numpy()
        codes: np.ndarray = np.append(places, -1)[indices]
    else:
        positions = compute.index_in(compute.cast(values, string()), value_set=domain)
        codes = compute.fill_null(positions.cast(int64()), -1).to_numpy(zero_copy_only=False)
    return codes


def _block_rows(schema: TableSchema) -> int:
    return min(_ROWS, _CELLS // len(schema.columns))


def _same_names(names: list[str], schema: TableSchema) -> bool:
    """Requires each declared name once, in any order, and no other: undeclared columns are not stored."""
    return len(names) == len(schema.columns) and set(names) == {column.name for column in schema.columns}
