"""Makers of uploads that should do harm: each plants a canary, and those that can would run a program."""

import gzip
import io
import itertools
import os
import pickle
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from PIL import Image
from pyarrow import parquet

from core.faults import Fault
from core.schema import CategoryColumn, ImageSchema, NumberColumn, TableSchema

IMAGES = ImageSchema(height=8, width=8, channels=1, classes=("cat", "dog"))
TABLE = TableSchema(
    columns=(
        NumberColumn(name="age", low=0, high=100, integer=True),
        NumberColumn(name="income", low=-1e6, high=1e6),
        CategoryColumn(name="city", categories=("paris", "rome")),
    ),
    label="city",
)

F = Fault
Make = Callable[[Path], bytes]

# In every file as text, name or pixels, where it has room; it must come out nowhere.
CANARY = "q8ZkV3xTn0RwLs7Yb2Mh"


@dataclass(frozen=True)
class Case:
    schema: ImageSchema | TableSchema
    make: Make
    fault: Fault


CASES: dict[str, Case] = {}


def image(fault: Fault) -> Callable[[Make], Make]:
    return _case(IMAGES, fault)


def table(fault: Fault) -> Callable[[Make], Make]:
    return _case(TABLE, fault)


def _case(schema: ImageSchema | TableSchema, fault: Fault) -> Callable[[Make], Make]:
    def keep(make: Make) -> Make:
        assert make.__name__ not in CASES
        CASES[make.__name__] = Case(schema, make, fault)
        return make

    return keep


class Trap:
    """Unpickling this leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


# Parts


def pixels(count: int = 4) -> np.ndarray:
    values = np.random.default_rng(count).integers(0, 256, (count, 64), dtype=np.uint8)
    values[:, : len(CANARY)] = list(CANARY.encode())
    return values.reshape(count, 8, 8)


def labels(count: int = 4) -> np.ndarray:
    return np.arange(count) % 2


def npy(array: np.ndarray, **changes: object) -> bytes:
    out = io.BytesIO()
    np.lib.format.write_array(out, array, allow_pickle=True, **changes)
    return out.getvalue()


def raw_npy(header: str, body: bytes = b"", *, version: int = 1) -> bytes:
    text = header.encode("latin-1")
    return (
        b"\x93NUMPY"
        + bytes([version, 0])
        + struct.pack("<H" if version == 1 else "<I", len(text))
        + text
        + body
    )


def header(descr: str = "'|u1'", order: str = "False", shape: str = "(4, 8, 8)") -> str:
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}\n"


def zipped(members: dict[str, bytes], *, method: int = zipfile.ZIP_DEFLATED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return out.getvalue()


def npz(x: bytes | None = None, y: bytes | None = None, **more: bytes) -> bytes:
    return zipped(
        {"x.npy": x or npy(pixels()), "y.npy": y or npy(labels())} | {f"{k}.npy": v for k, v in more.items()}
    )


def png(array: np.ndarray | None = None, kind: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels(1)[0] if array is None else array).save(out, kind, **options)
    return out.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def with_chunk(extra: bytes, *, before: bytes = b"IDAT") -> bytes:
    data = png()
    at = data.index(before) - 4
    return data[:at] + extra + data[at:]


def folders(**members: bytes) -> bytes:
    return zipped({"cat/1.png": png()} | {f"cat/{name}.png": data for name, data in members.items()})


def idx_images(array: np.ndarray) -> bytes:
    return struct.pack(">IIII", 0x803, *array.shape) + array.tobytes()


def idx_labels(array: np.ndarray) -> bytes:
    return struct.pack(">II", 0x801, len(array)) + array.astype(np.uint8).tobytes()


def idx(images: bytes | None = None, classes: bytes | None = None, **more: bytes) -> bytes:
    images = gzip.compress(idx_images(pixels()) if images is None else images)
    classes = gzip.compress(idx_labels(labels()) if classes is None else classes)
    return zipped({"train-images-idx3-ubyte.gz": images, "train-labels-idx1-ubyte.gz": classes} | more)


def csv_of(*rows: str, head: str = "age,income,city") -> bytes:
    return "\n".join([head, *rows, ""]).encode()


def parquet_of(columns: dict[str, Any] | pa.Table | None = None, **changes: Any) -> bytes:
    good = {"age": [1, 2], "income": [1.0, 2.0], "city": ["rome", "paris"]}
    whole = columns if isinstance(columns, pa.Table) else pa.table(good | (columns or {}))
    out = io.BytesIO()
    parquet.write_table(whole, out, **changes)
    return out.getvalue()


def random_bytes(count: int) -> bytes:
    return np.random.default_rng(count).bytes(count)


# Code that waits to be unpickled


@image(F.UNSAFE_CONTENT)
def pickled_x(trap: Path) -> bytes:
    return npz(x=npy(np.array([Trap(trap), CANARY], dtype=object)))


@image(F.UNSAFE_CONTENT)
def pickled_y(trap: Path) -> bytes:
    return npz(y=npy(np.array([Trap(trap), CANARY, 0, 1], dtype=object)))


@image(F.UNSAFE_CONTENT)
def pickle_itself(trap: Path) -> bytes:
    return pickle.dumps([CANARY, Trap(trap)])


@image(F.UNSUPPORTED_FORMAT)
def pickle_of_protocol_0(trap: Path) -> bytes:
    return pickle.dumps([CANARY, Trap(trap)], protocol=0)


@image(F.UNSAFE_CONTENT)
def torch_file(trap: Path) -> bytes:
    return zipped(
        {"archive/data.pkl": pickle.dumps([CANARY, Trap(trap)], protocol=2), "archive/version": b"3\n"}
    )


@image(F.UNSAFE_CONTENT)
def torch_file_of_old(trap: Path) -> bytes:
    parts = (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}, [CANARY, Trap(trap)])
    return b"".join(pickle.dumps(part, protocol=2) for part in parts)


@image(F.UNSUPPORTED_FORMAT)
def pickled_npy(trap: Path) -> bytes:
    return npy(np.array([Trap(trap), CANARY], dtype=object))


@image(F.UNSUPPORTED_FORMAT)
def pickle_where_y_should_be(trap: Path) -> bytes:
    return npz(y=pickle.dumps([CANARY, Trap(trap)]))


@image(F.DTYPE_MISMATCH)
def objects_in_a_structure(trap: Path) -> bytes:
    return npz(x=raw_npy(header(descr="[('a', '|O')]"), pickle.dumps([CANARY, Trap(trap)])))


@image(F.DAMAGED)
def program_in_an_npy_header(trap: Path) -> bytes:
    return npz(x=raw_npy(header(shape=f"(__import__('os').system('touch {trap} {CANARY}'), 8, 8)")))


@table(F.UNSAFE_CONTENT)
def pickle_as_table(trap: Path) -> bytes:
    return pickle.dumps([CANARY, Trap(trap)])


@table(F.UNSAFE_CONTENT)
def pickled_extension_in_parquet(trap: Path) -> bytes:
    payload = {"ARROW:extension:name": "arrow.py_extension_type"}
    payload["ARROW:extension:metadata"] = pickle.dumps([CANARY, Trap(trap)], protocol=0).decode("latin-1")
    fields = [pa.field("age", pa.int64(), metadata=payload), ("income", pa.float64()), ("city", pa.string())]
    return parquet_of(pa.table([[1], [1.0], ["rome"]], schema=pa.schema(fields)))


# Bombs


@image(F.TOO_LARGE)
def zip_bomb(trap: Path) -> bytes:
    return npz(x=raw_npy(header(shape="(1000000, 8, 8)"), bytes(64_000_000)))


@image(F.UNSUPPORTED_FORMAT)
def zip_bomb_in_layers(trap: Path) -> bytes:
    data = zipped({f"{CANARY}.txt": bytes(1 << 20)})
    for depth in range(5):
        data = zipped({f"{depth}-{copy}.zip": data for copy in range(16)})
    return data


def entry(name: bytes, data: bytes, *, size: int, crc: int = 0, method: int = 8) -> bytes:
    return (
        struct.pack("<4s5H3I2H", b"PK\3\4", 20, 0, method, 0, 0, crc, len(data), size, len(name), 0)
        + name
        + data
    )


def directory(entries: list[tuple[bytes, int, int, int, int]]) -> bytes:
    """Entries are name, offset, packed size, size, method."""
    return b"".join(
        struct.pack(
            "<4s6H3I5H2I",
            b"PK\1\2",
            20,
            20,
            0,
            method,
            0,
            0,
            0,
            packed,
            size,
            len(name),
            0,
            0,
            0,
            0,
            0,
            offset,
        )
        + name
        for name, offset, packed, size, method in entries
    )


def ending(count: int, size: int, offset: int) -> bytes:
    return struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, min(count, 0xFFFF), min(count, 0xFFFF), size, offset, 0)


@image(F.UNSAFE_CONTENT)
def zip_bomb_of_one_body_with_many_names(trap: Path) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    body = packer.compress(bytes(1 << 20)) + packer.flush()
    local = entry(b"cat/0.png", body, size=1 << 20)
    names = [f"cat/{CANARY}{place}.png".encode() for place in range(5000)]
    listed = directory([(name, 0, len(body), 1 << 20, 8) for name in names])
    return local + listed + ending(len(names), len(listed), len(local))


@image(F.UNSAFE_CONTENT)
def zip_bomb_of_overlapping_bodies(trap: Path) -> bytes:
    """The first member quotes the header of the second in a stored block and shares its body."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    body = packer.compress(bytes(1 << 20)) + packer.flush()
    second = entry(b"cat/2.png", body, size=1 << 20)
    quoted = second[: len(second) - len(body)]
    block = b"\0" + struct.pack("<HH", len(quoted), len(quoted) ^ 0xFFFF)
    first = entry(b"cat/1.png", block + second, size=len(quoted) + (1 << 20))
    at = len(first) - len(second)
    listed = directory(
        [
            (b"cat/1.png", 0, len(block) + len(second), len(quoted) + (1 << 20), 8),
            (b"cat/2.png", at, len(body), 1 << 20, 8),
        ]
    )
    return first + listed + ending(2, len(listed), len(first))


@image(F.UNSUPPORTED_FORMAT)
def zip_that_holds_itself(trap: Path) -> bytes:
    """Not a fixed point, but to a program that unpacks what it unpacked there is no difference."""
    data = zipped({f"r/{CANARY}": b""}, method=zipfile.ZIP_STORED)
    for _ in range(50):
        data = zipped({"r/r.zip": data}, method=zipfile.ZIP_STORED)
    return data


@image(F.TOO_LARGE)
def zip_that_claims_exabytes(trap: Path) -> bytes:
    data = bytearray(npz())
    for at in (place for place in range(len(data)) if data[place : place + 4] == b"PK\1\2"):
        data[at + 24 : at + 28] = b"\xfe\xff\xff\xff"
    return bytes(data)


@image(F.EMPTY)
def zip_of_empty_folders(trap: Path) -> bytes:
    return zipped({"cat/": b"", "dog/": b""})


@image(F.UNSUPPORTED_FORMAT)
def zip_of_a_directory_alone(trap: Path) -> bytes:
    return ending(0, 0, 0)


@image(F.UNSAFE_CONTENT)
def zip_of_fifty_thousand_nothings(trap: Path) -> bytes:
    names = [f"cat/{CANARY}{place}".encode() for place in range(50_000)]
    listed = directory([(name, 0, 0, 0, 0) for name in names])
    local = entry(names[0], b"", size=0, method=0)
    return local + listed + ending(len(names), len(listed), len(local))


@image(F.TOO_LARGE)
def gzip_bomb(trap: Path) -> bytes:
    return idx(struct.pack(">IIII", 0x803, 10**6, 8, 8) + bytes(64 * 10**6), idx_labels(labels(10**6)))


@image(F.DAMAGED)
def gzip_bomb_behind_an_honest_header(trap: Path) -> bytes:
    return idx(idx_images(pixels()) + bytes(64_000_000))


@image(F.UNSUPPORTED_FORMAT)
def gzip_bomb_itself(trap: Path) -> bytes:
    return gzip.compress(CANARY.encode() + bytes(32_000_000))


@table(F.UNSUPPORTED_FORMAT)
def gzip_bomb_as_table(trap: Path) -> bytes:
    return gzip.compress(csv_of(f"1,2,{CANARY}") + b"1,2,rome\n" * 3_000_000, compresslevel=1)


@image(F.SHAPE_MISMATCH)
def png_of_four_billion_pixels(trap: Path) -> bytes:
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", 65_535, 65_535, 8, 0, 0, 0, 0))
    body = chunk(b"tEXt", b"Comment\0" + CANARY.encode()) + chunk(b"IDAT", zlib.compress(bytes(1 << 20)))
    return folders(big=png()[:8] + head + body + chunk(b"IEND", b""))


@image(F.TOO_LARGE)
def png_with_pixels_for_a_thousand_images(trap: Path) -> bytes:
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", 8, 8, 8, 0, 0, 0, 0))
    return folders(
        big=png()[:8] + head + chunk(b"IDAT", zlib.compress(bytes(80_000_000), 9)) + chunk(b"IEND", b"")
    )


@image(F.UNSAFE_CONTENT)
def png_with_many_frames(trap: Path) -> bytes:
    return folders(film=with_chunk(chunk(b"acTL", struct.pack(">II", 2**31 - 1, 0))))


@image(F.TOO_LARGE)
def npy_header_of_sixty_megabytes(trap: Path) -> bytes:
    return npz(x=raw_npy(header().rstrip() + " " * 14_000_000 + CANARY + "\n", version=2))


@image(F.TOO_LARGE)
def npy_header_longer_than_the_file(trap: Path) -> bytes:
    return npz(x=b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + CANARY.encode())


@image(F.DAMAGED)
def npy_header_nested_deep(trap: Path) -> bytes:
    return npz(x=raw_npy("(" * 2000 + CANARY + ")" * 2000))


@image(F.DAMAGED)
def npy_shape_that_overflows(trap: Path) -> bytes:
    return npz(x=raw_npy(header(shape="(4611686018427387904, 8, 8)"), CANARY.encode()))


@image(F.DAMAGED)
def npy_shape_larger_than_its_body(trap: Path) -> bytes:
    return npz(x=raw_npy(header(shape="(900000000000000000, 8, 8)"), CANARY.encode()))


@image(F.DAMAGED)
def npy_shape_below_zero(trap: Path) -> bytes:
    return npz(x=raw_npy(header(shape="(-4, 8, 8)"), CANARY.encode() * 8))


@table(F.TOO_LARGE)
def parquet_bomb_of_rows(trap: Path) -> bytes:
    rows = 10_000_000
    city = pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int8)), [CANARY])
    zeros = pa.array(np.zeros(rows, np.int8))
    return parquet_of({"age": zeros, "income": zeros, "city": city}, compression="zstd")


@table(F.TOO_LARGE)
def parquet_bomb_of_one_long_value(trap: Path) -> bytes:
    return parquet_of({"city": [CANARY + "a" * 40_000_000, "rome"]}, compression="zstd")


@table(F.DAMAGED)
def parquet_with_more_rows_than_it_holds(trap: Path) -> bytes:
    """Every 1234 in the footer, a row count, becomes 8191."""
    data = parquet_of({"age": [1] * 1234, "income": [2.0] * 1234, "city": [CANARY] * 1234})
    at = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    return data[:at] + data[at:].replace(b"\xa4\x13", b"\xfe\x7f")


@table(F.DAMAGED)
def parquet_with_an_endless_footer(trap: Path) -> bytes:
    return parquet_of({"city": [CANARY, CANARY]})[:-8] + b"\xff\xff\xff\x7fPAR1"


@table(F.DAMAGED)
def parquet_with_noise_for_a_footer(trap: Path) -> bytes:
    return b"PAR1" + CANARY.encode() + random_bytes(4096) + struct.pack("<I", 4096) + b"PAR1"


@table(F.TOO_LARGE)
def csv_of_a_million_columns(trap: Path) -> bytes:
    names = ",".join(f"c{place}" for place in range(1_000_000))
    return csv_of(CANARY + "," * 999_999, head=names)


@table(F.COLUMNS_MISMATCH)
def csv_of_a_hundred_thousand_columns(trap: Path) -> bytes:
    return csv_of(CANARY, head=",".join(f"c{place}" for place in range(100_000)))


@table(F.RAGGED)
def csv_field_without_end(trap: Path) -> bytes:
    return csv_of(f"1,2,{CANARY}" + "a" * 500_000)


@table(F.TOO_LARGE)
def csv_line_without_end(trap: Path) -> bytes:
    return csv_of(f"1,2,{CANARY}" + "a" * 20_000_000)


@table(F.RAGGED)
def csv_quote_without_end(trap: Path) -> bytes:
    return csv_of(f'1,2,"{CANARY}', *["1,2,rome"] * 200_000)


# Archives that are more, less or other than they seem


@image(F.UNSUPPORTED_FORMAT)
def png_that_is_also_a_zip(trap: Path) -> bytes:
    return png() + npz()


@image(F.UNSUPPORTED_FORMAT)
def page_that_is_also_an_npz(trap: Path) -> bytes:
    return f"<html><script>fetch('//{CANARY}')</script></html>".encode() + npz()


@image(F.UNSAFE_CONTENT)
def npz_that_is_also_a_page(trap: Path) -> bytes:
    out = io.BytesIO(npz())
    with zipfile.ZipFile(out, "a") as archive:
        archive.comment = f"<script>{CANARY}</script>".encode()
    return out.getvalue()


@image(F.UNSAFE_CONTENT)
def npz_with_a_tail(trap: Path) -> bytes:
    return npz() + CANARY.encode()


@image(F.NOT_AN_ARCHIVE)
def npz_with_a_long_tail(trap: Path) -> bytes:
    return npz() + CANARY.encode() * 5000


@image(F.UNSAFE_CONTENT)
def npz_with_a_gap(trap: Path) -> bytes:
    with zipfile.ZipFile(io.BytesIO(data := npz())) as archive:
        start = archive.start_dir
    listed = data[start:-22]
    return data[:start] + CANARY.encode() + listed + ending(2, len(listed), start + len(CANARY))


@image(F.UNSAFE_CONTENT)
def npz_behind_another_zip(trap: Path) -> bytes:
    return zipped({f"cat/{CANARY}.png": png()}) + npz()


@image(F.UNSAFE_CONTENT)
def zip_with_a_link(trap: Path) -> bytes:
    return _with_mode("cat/2.png", f"/etc/{CANARY}".encode(), stat.S_IFLNK | 0o777)


@image(F.UNSAFE_CONTENT)
def zip_with_a_device(trap: Path) -> bytes:
    return _with_mode("cat/2.png", CANARY.encode(), stat.S_IFCHR | 0o666)


def _with_mode(name: str, data: bytes, mode: int) -> bytes:
    out = io.BytesIO(folders())
    member = zipfile.ZipInfo(name)
    member.create_system, member.external_attr = 3, mode << 16
    with zipfile.ZipFile(out, "a") as archive:
        archive.writestr(member, data)
    return out.getvalue()


@image(F.UNSAFE_CONTENT)
def zip_encrypted(trap: Path) -> bytes:
    data = bytearray(zipped({"x.npy": npy(pixels()), "y.npy": CANARY.encode()}))
    for place in range(len(data)):
        if data[place : place + 4] == b"PK\1\2":
            data[place + 8] |= 1
    return bytes(data)


@image(F.UNSAFE_CONTENT)
def zip_with_a_name_twice(trap: Path) -> bytes:
    data = zipped({"x.npy": npy(pixels()), "y.npy": npy(labels()), "z.npy": CANARY.encode()})
    return data.replace(b"z.npy", b"y.npy")


@image(F.UNSUPPORTED_FORMAT)
def zip_packed_otherwise(trap: Path) -> bytes:
    return zipped({"x.npy": npy(pixels()), "y.npy": npy(labels())}, method=zipfile.ZIP_LZMA)


@image(F.DAMAGED)
def zip_with_a_wrong_checksum(trap: Path) -> bytes:
    data = zipped({"x.npy": npy(pixels()), "y.npy": npy(labels())}, method=zipfile.ZIP_STORED)
    return data.replace(pixels().tobytes(), pixels()[::-1].tobytes())


@image(F.DAMAGED)
def zip_whose_names_disagree(trap: Path) -> bytes:
    return npz().replace(b"x.npy", b"w.npy", 1)


@image(F.NOT_AN_ARCHIVE)
def npz_cut_short(trap: Path) -> bytes:
    return npz()[:-60]


@image(F.NOT_AN_ARCHIVE)
def png_folders_cut_short(trap: Path) -> bytes:
    data = zipped({f"cat/{CANARY}{place}.png": png() for place in range(10)})
    return data[: len(data) // 2]


@image(F.UNSUPPORTED_FORMAT)
def tar_with_a_way_up(trap: Path) -> bytes:
    import tarfile

    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        archive.addfile(tarfile.TarInfo(f"../../{CANARY}"))
    return out.getvalue()


@image(F.UNSUPPORTED_FORMAT)
def program(trap: Path) -> bytes:
    return b"\x7fELF" + CANARY.encode() + random_bytes(4096)


@image(F.UNSUPPORTED_FORMAT)
def noise(trap: Path) -> bytes:
    return random_bytes(100_000) + CANARY.encode()


@image(F.EMPTY)
def nothing(trap: Path) -> bytes:
    return b""


@image(F.UNSUPPORTED_FORMAT)
def single_byte(trap: Path) -> bytes:
    return b"P"


@image(F.UNSUPPORTED_FORMAT)
def table_as_images(trap: Path) -> bytes:
    return parquet_of({"city": [CANARY, CANARY]})


@table(F.UNSUPPORTED_FORMAT)
def images_as_table(trap: Path) -> bytes:
    return npz()


# Arrays that are not what was declared


@image(F.LABEL_MISMATCH)
def npz_without_y(trap: Path) -> bytes:
    return zipped({"x.npy": npy(pixels())})


@image(F.UNSUPPORTED_FORMAT)
def npz_without_x(trap: Path) -> bytes:
    return zipped({"y.npy": npy(labels())})


@image(F.UNSUPPORTED_FORMAT)
def npz_with_more(trap: Path) -> bytes:
    return npz(names=npy(np.array([CANARY])))


@image(F.LABEL_MISMATCH)
def y_beyond_the_classes(trap: Path) -> bytes:
    return npz(y=npy(np.array([0, 1, 2, 1])))


@image(F.LABEL_MISMATCH)
def y_below_zero(trap: Path) -> bytes:
    return npz(y=npy(np.array([0, 1, -1, 1])))


@image(F.LABEL_MISMATCH)
def y_that_would_wrap(trap: Path) -> bytes:
    return npz(y=npy(np.array([0, 1, 2**64 - 1, 65536], dtype=np.uint64)))


@image(F.DTYPE_MISMATCH)
def y_of_floats(trap: Path) -> bytes:
    return npz(y=npy(np.array([0.0, 1.0, np.nan, 1e308])))


@image(F.DTYPE_MISMATCH)
def y_of_text(trap: Path) -> bytes:
    return npz(y=npy(np.array([CANARY] * 4)))


@image(F.SHAPE_MISMATCH)
def y_too_short(trap: Path) -> bytes:
    return npz(y=npy(labels(3)))


@image(F.SHAPE_MISMATCH)
def y_of_two_dimensions(trap: Path) -> bytes:
    return npz(y=npy(labels().reshape(4, 1)))


@image(F.DTYPE_MISMATCH)
def x_with_nan_and_infinity(trap: Path) -> bytes:
    values = pixels().astype(np.float32)
    values[0, 0, :3] = np.nan, np.inf, -np.inf
    return npz(x=npy(values))


@image(F.DTYPE_MISMATCH)
def x_of_1e308(trap: Path) -> bytes:
    return npz(x=npy(np.full((4, 8, 8), 1e308)))


@image(F.DTYPE_MISMATCH)
def x_of_int16(trap: Path) -> bytes:
    return npz(x=npy(pixels().astype(np.int16)))


@image(F.SHAPE_MISMATCH)
def x_of_another_size(trap: Path) -> bytes:
    return npz(x=npy(np.zeros((4, 9, 8), np.uint8)))


@image(F.SHAPE_MISMATCH)
def x_of_three_channels(trap: Path) -> bytes:
    return npz(x=npy(np.zeros((4, 8, 8, 3), np.uint8)))


@image(F.SHAPE_MISMATCH)
def x_of_no_dimension(trap: Path) -> bytes:
    return npz(x=npy(np.uint8(7)))


@image(F.EMPTY)
def x_without_rows(trap: Path) -> bytes:
    return npz(x=npy(pixels()[:0]), y=npy(labels(0)))


@image(F.DAMAGED)
def x_cut_short(trap: Path) -> bytes:
    return npz(x=npy(pixels())[:-7])


@image(F.DAMAGED)
def x_with_a_tail(trap: Path) -> bytes:
    return npz(x=npy(pixels()) + CANARY.encode())


@image(F.DAMAGED)
def y_with_a_tail(trap: Path) -> bytes:
    return npz(y=npy(labels()) + CANARY.encode())


@image(F.UNSUPPORTED_FORMAT)
def npy_of_an_unknown_version(trap: Path) -> bytes:
    return npz(x=b"\x93NUMPY\x09\x00" + CANARY.encode())


# IDX


@image(F.SHAPE_MISMATCH)
def idx_of_another_size(trap: Path) -> bytes:
    return idx(idx_images(np.zeros((4, 28, 28), np.uint8)))


@image(F.LABEL_MISMATCH)
def idx_with_an_unknown_class(trap: Path) -> bytes:
    return idx(classes=idx_labels(np.array([0, 1, 2, 250])))


@image(F.SHAPE_MISMATCH)
def idx_of_unequal_counts(trap: Path) -> bytes:
    return idx(classes=idx_labels(labels(3)))


@image(F.TOO_LARGE)
def idx_that_claims_four_billion(trap: Path) -> bytes:
    return idx(
        struct.pack(">IIII", 0x803, 2**32 - 1, 8, 8) + CANARY.encode(), struct.pack(">II", 0x801, 2**32 - 1)
    )


@image(F.DAMAGED)
def idx_cut_short(trap: Path) -> bytes:
    good = gzip.compress(idx_images(pixels()))
    return zipped({"images": good[:-20], "labels": gzip.compress(idx_labels(labels()))})


@image(F.UNSUPPORTED_FORMAT)
def idx_of_three_files(trap: Path) -> bytes:
    return idx(**{CANARY: gzip.compress(b"")})


@image(F.UNSUPPORTED_FORMAT)
def idx_of_images_twice(trap: Path) -> bytes:
    return idx(classes=idx_images(pixels()))


@image(F.EMPTY)
def idx_without_rows(trap: Path) -> bytes:
    return idx(idx_images(pixels()[:0]), idx_labels(labels(0)))


# PNG folders


@image(F.LABEL_MISMATCH)
def png_of_an_undeclared_class(trap: Path) -> bytes:
    return zipped({"cat/1.png": png(), f"{CANARY}/1.png": png()})


@image(F.LABEL_MISMATCH)
def png_without_a_folder(trap: Path) -> bytes:
    return zipped({f"{CANARY}.png": png()})


@image(F.DAMAGED)
def png_cut_short(trap: Path) -> bytes:
    return folders(**{CANARY: png()[:-30]})


@image(F.DAMAGED)
def png_with_broken_pixels(trap: Path) -> bytes:
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", 8, 8, 8, 0, 0, 0, 0))
    return folders(broken=png()[:8] + head + chunk(b"IDAT", CANARY.encode()) + chunk(b"IEND", b""))


@image(F.DAMAGED)
def png_with_too_few_pixels(trap: Path) -> bytes:
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", 8, 8, 8, 0, 0, 0, 0))
    return folders(short=png()[:8] + head + chunk(b"IDAT", zlib.compress(bytes(20))) + chunk(b"IEND", b""))


@image(F.UNSAFE_CONTENT)
def png_with_a_tail(trap: Path) -> bytes:
    return folders(tail=png() + CANARY.encode())


@image(F.DTYPE_MISMATCH)
def png_of_16_bits(trap: Path) -> bytes:
    return folders(deep=png(pixels(1)[0].astype(np.uint16) * 257))


@image(F.SHAPE_MISMATCH)
def png_of_another_size(trap: Path) -> bytes:
    return folders(small=png(np.zeros((4, 4), np.uint8)))


@image(F.SHAPE_MISMATCH)
def png_with_transparency(trap: Path) -> bytes:
    return folders(clear=png(np.zeros((8, 8, 4), np.uint8)))


@image(F.UNSUPPORTED_FORMAT)
def gif_among_pngs(trap: Path) -> bytes:
    return folders(**{CANARY: png(kind="GIF")})


@image(F.UNSUPPORTED_FORMAT)
def svg_among_pngs(trap: Path) -> bytes:
    return folders(vector=f"<svg><script>{CANARY}</script></svg>".encode())


# Tables as text


@table(F.EMPTY)
def table_of_nothing(trap: Path) -> bytes:
    return b""


@table(F.EMPTY)
def csv_without_rows(trap: Path) -> bytes:
    return csv_of()


@table(F.ENCODING)
def csv_in_utf16(trap: Path) -> bytes:
    return csv_of(f"1,2,{CANARY}").decode().encode("utf-16")


@table(F.ENCODING)
def csv_in_utf16_without_a_mark(trap: Path) -> bytes:
    return csv_of(f"1,2,{CANARY}").decode().encode("utf-16-le")


@table(F.ENCODING)
def csv_in_latin1(trap: Path) -> bytes:
    return csv_of(f"1,2,{CANARY}é").decode().encode("latin-1")


@table(F.ENCODING)
def csv_with_nul(trap: Path) -> bytes:
    return csv_of(f"1,2,{CANARY}\0")


@table(F.RAGGED)
def csv_with_a_field_too_many(trap: Path) -> bytes:
    return csv_of("1,2,rome", f"1,2,rome,{CANARY}")


@table(F.RAGGED)
def csv_with_a_field_too_few(trap: Path) -> bytes:
    return csv_of("1,2,rome", CANARY)


@table(F.RAGGED)
def csv_with_an_empty_line(trap: Path) -> bytes:
    return csv_of(f"1,2,{CANARY}", "", "1,2,rome")


@table(F.RAGGED)
def csv_with_text_after_a_quote(trap: Path) -> bytes:
    return csv_of(f'1,2,"rome"{CANARY}')


@table(F.NOT_FINITE)
def csv_with_nan(trap: Path) -> bytes:
    return csv_of(f"1,nan,{CANARY}")


@table(F.NOT_FINITE)
def csv_with_infinity(trap: Path) -> bytes:
    return csv_of(f"1,-Infinity,{CANARY}")


@table(F.NOT_FINITE)
def csv_with_1e309(trap: Path) -> bytes:
    return csv_of(f"1,1e309,{CANARY}")


@table(F.NOT_FINITE)
def csv_with_a_missing_number(trap: Path) -> bytes:
    return csv_of(f"1,,{CANARY}")


@table(F.DTYPE_MISMATCH)
def csv_with_text_for_a_number(trap: Path) -> bytes:
    return csv_of(f"1,{CANARY},rome")


@table(F.DTYPE_MISMATCH)
def csv_with_a_formula_for_a_number(trap: Path) -> bytes:
    return csv_of(f"=cmd|'/c {CANARY}'!A0,2,rome")


@table(F.DTYPE_MISMATCH)
def csv_with_digits_of_another_script(trap: Path) -> bytes:
    return csv_of(f"١٢,2,{CANARY}")


@table(F.DTYPE_MISMATCH)
def csv_with_a_number_of_a_megabyte_of_underscores(trap: Path) -> bytes:
    return csv_of("1_" * 50_000 + f"1,2,{CANARY}")


@table(F.COLUMNS_MISMATCH)
def csv_without_a_header(trap: Path) -> bytes:
    return f"1,2,{CANARY}\n3,4,rome\n".encode()


@table(F.COLUMNS_MISMATCH)
def csv_lacking_a_column(trap: Path) -> bytes:
    return csv_of(f"1,{CANARY}", head="age,city")


@table(F.COLUMNS_MISMATCH)
def csv_with_a_column_too_many(trap: Path) -> bytes:
    return csv_of("1,2,rome,3", head=f"age,income,city,{CANARY}")


@table(F.COLUMNS_MISMATCH)
def csv_with_a_column_twice(trap: Path) -> bytes:
    return csv_of(f"1,2,{CANARY}", head="age,age,city")


@table(F.COLUMNS_MISMATCH)
def csv_with_semicolons(trap: Path) -> bytes:
    return csv_of(f"1;2;{CANARY}", head="age;income;city")


@table(F.COLUMNS_MISMATCH)
def page_as_table(trap: Path) -> bytes:
    return f"<html><body>{CANARY}</body></html>".encode()


# Tables as Parquet


@table(F.DAMAGED)
def parquet_cut_short(trap: Path) -> bytes:
    return parquet_of({"city": [CANARY, CANARY]})[:-40]


@table(F.DAMAGED)
def parquet_with_a_broken_page(trap: Path) -> bytes:
    data = parquet_of({"city": [CANARY, CANARY]}, compression="gzip", write_page_checksum=True)
    return data[:40] + bytes(120) + data[160:]


@table(F.EMPTY)
def parquet_without_rows(trap: Path) -> bytes:
    kinds = {"age": pa.int64(), "income": pa.float64(), "city": pa.string()}
    return parquet_of(pa.table({name: pa.array([], kind) for name, kind in kinds.items()}))


@table(F.NOT_FINITE)
def parquet_with_nan(trap: Path) -> bytes:
    return parquet_of({"income": [1.0, float("nan")], "city": [CANARY, CANARY]})


@table(F.NOT_FINITE)
def parquet_with_infinity(trap: Path) -> bytes:
    return parquet_of({"income": [1.0, float("-inf")], "city": [CANARY, CANARY]})


@table(F.NOT_FINITE)
def parquet_with_a_missing_number(trap: Path) -> bytes:
    return parquet_of({"age": [None, 1], "city": [CANARY, CANARY]})


@table(F.DTYPE_MISMATCH)
def parquet_with_text_for_a_number(trap: Path) -> bytes:
    return parquet_of({"age": ["1", CANARY]})


@table(F.DTYPE_MISMATCH)
def parquet_with_bytes_for_a_category(trap: Path) -> bytes:
    return parquet_of({"city": [CANARY.encode(), b"rome"]})


@table(F.DTYPE_MISMATCH)
def parquet_with_lists(trap: Path) -> bytes:
    return parquet_of({"city": [[CANARY], []]})


@table(F.DTYPE_MISMATCH)
def parquet_nested_deep(trap: Path) -> bytes:
    kind = pa.string()
    value: Any = CANARY
    for _ in range(30):
        kind, value = pa.list_(kind), [value]
    return parquet_of({"city": pa.array([value, value], kind)})


@table(F.COLUMNS_MISMATCH)
def parquet_with_a_column_too_many(trap: Path) -> bytes:
    return parquet_of({CANARY: [1, 2]})


@table(F.COLUMNS_MISMATCH)
def parquet_with_a_column_twice(trap: Path) -> bytes:
    return parquet_of(pa.Table.from_arrays([pa.array([1])] * 3, names=["age", "age", "city"]))


@table(F.COLUMNS_MISMATCH)
def parquet_of_five_thousand_columns(trap: Path) -> bytes:
    return parquet_of(pa.table({f"{CANARY}{place}": [1] for place in range(5000)}))


# Names that would lead a careless program elsewhere; every one is a member beside a good one.
NAMES = [
    "../{}.png",
    "../../../../etc/{}.png",
    "cat/../{}.png",
    "cat/../../{}.png",
    "/etc/{}.png",
    "//server/share/{}.png",
    "./cat/{}.png",
    "cat//{}.png",
    "cat/./{}.png",
    "cat/..",
    "cat/.",
    "cat/.{}.png",
    "cat/%2e%2e%2f{}.png",
    "%2e%2e/{}.png",
    "..%2f{}.png",
    "..\\{}.png",
    "cat\\{}.png",
    "cat/..\\..\\{}.png",
    "C:\\{}.png",
    "C:/{}.png",
    "cat/{}.png:stream",
    "file:///etc/{}.png",
    "~/{}.png",
    "~root/{}.png",
    "/dev/null",
    "cat/CON",
    "cat/nul.png",
    "cat/COM1.{}.png",
    "cat/\u202e{}gnp.exe",
    "cat/\u200b{}.png",
    "\uff0e\uff0e/{}.png",
    "cat/{}\n.png",
    "cat/\x1b[31m{}.png",
    "cat/\x7f{}.png",
    "cat/$(touch {}).png",
    "cat/`touch {}`.png",
    "cat/;touch {}.png",
    "cat/-rf {}.png",
    "cat/ {}.png",
    "cat/{}\0.png",
    "cat/{}" + "a" * 4096 + ".png",
    "cat/" * 1000 + "{}.png",
    "",
    " ",
    "cat",
    "CAT/{}.png",
    "cat /{}.png",
]


def with_name(name: str) -> bytes:
    wanted = name.replace("{}", CANARY).encode()
    if wanted and b"\0" not in wanted:
        return zipped({"cat/1.png": png(), wanted.decode(): png()})
    # The library would tidy these up, so they are written by hand.
    first = entry(b"cat/1.png", png(), size=len(png()), crc=zlib.crc32(png()), method=0)
    second = entry(wanted, png(), size=len(png()), crc=zlib.crc32(png()), method=0)
    members = [(b"cat/1.png", 0, len(png()), len(png()), 0), (wanted, len(first), len(png()), len(png()), 0)]
    listed = directory(members)
    return first + second + listed + ending(2, len(listed), len(first + second))


def truncations(data: bytes, count: int) -> list[bytes]:
    """The file as it is when an upload is cut off, at places spread over it."""
    return [data[:at] for at in itertools.islice(range(1, len(data), max(len(data) // count, 1)), count)]
