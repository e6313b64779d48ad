"""Images from npz arrays, IDX pairs or PNG folders by class, one piece at a time."""

import gzip
import io
import os
import struct
import zipfile
from dataclasses import dataclass
from typing import IO

import numpy as np
from numpy.lib import format as npy
from PIL import Image, PngImagePlugin

from core.faults import Failure, Fault
from core.schema import ImageSchema
from worker.records import Report
from worker.records.archive import open_archive, plain
from worker.records.layout import CODE
from worker.records.reading import CHUNK, PICKLES, Allowance, Sink, check, exactly, image_bytes, pieces

_ZIP, _NPY, _PNG, _GZIP = b"PK\3\4", b"\x93NUMPY", b"\x89PNG\r\n\x1a\n", b"\x1f\x8b"
_IDX_IMAGES, _IDX_LABELS = b"\0\0\x08\x03", b"\0\0\x08\x01"

# Size is compared with the schema before a pixel is unpacked, which is stricter than Pillow's own guard.
Image.MAX_IMAGE_PIXELS = None
_MODES = {1: ("L", "1"), 3: ("RGB", "P")}


def read_images(file: IO[bytes], *, schema: ImageSchema, sink: Sink, allowance: Allowance) -> Report:
    head = file.read(len(_PNG))
    check(not head.startswith(PICKLES), Fault.UNSAFE_CONTENT)
    check(head.startswith(_ZIP), Fault.UNSUPPORTED_FORMAT)
    with open_archive(file, allowance=allowance) as archive:
        members = [member for member in archive.infolist() if not member.is_dir()]
        check(bool(members), Fault.EMPTY)
        with archive.open(members[0]) as stream:
            first = stream.read(len(_PNG))
        check(not first.startswith(PICKLES), Fault.UNSAFE_CONTENT)
        if first.startswith(_NPY):
            _read_npz(archive, schema, sink)
        elif first.startswith((_GZIP, _IDX_IMAGES, _IDX_LABELS)):
            _read_idx(archive, schema, sink, allowance)
        elif first == _PNG:
            _read_png(archive, schema, sink)
        else:
            raise Failure(Fault.UNSUPPORTED_FORMAT)
    return Report()


def _put_labels(labels: np.ndarray, schema: ImageSchema, sink: Sink) -> None:
    check(bool(((labels >= 0) & (labels < len(schema.classes))).all()), Fault.LABEL_MISMATCH)
    sink.codes.write(labels.astype(CODE).tobytes())


# npz

_MAX_HEADER = 4096


@dataclass(frozen=True)
class _Header:
    dtype: np.dtype
    fortran: bool
    shape: tuple[int, ...]
    length: int


def _npy_header(stream: IO[bytes]) -> _Header:
    """Parses the header of an array with numpy; only its length is checked here first."""
    start = exactly(stream, len(_NPY) + 2)
    version = start[len(_NPY) :]
    known = start.startswith(_NPY) and version in (b"\1\0", b"\2\0", b"\3\0")
    check(known, Fault.UNSUPPORTED_FORMAT)
    size = exactly(stream, 2 if version == b"\1\0" else 4)
    length = int.from_bytes(size, "little")
    check(length <= _MAX_HEADER, Fault.TOO_LARGE)
    # Versions 2 and 3 differ only in how names of fields are encoded, and no array here has fields.
    read = npy.read_array_header_1_0 if len(size) == 2 else npy.read_array_header_2_0
    body = exactly(stream, length)
    try:
        shape, fortran, dtype = read(io.BytesIO(size + body))
    except Exception:  # ValueError, or what Python's parser raises for deep nesting
        raise Failure(Fault.DAMAGED) from None
    check(dtype.kind != "O", Fault.UNSAFE_CONTENT)
    check(min(shape, default=0) >= 0, Fault.DAMAGED)
    return _Header(dtype, fortran, shape, len(start) + len(size) + length)


def _read_npz(archive: zipfile.ZipFile, schema: ImageSchema, sink: Sink) -> None:
    names, single = set(archive.namelist()), len(schema.classes) == 1
    check("x.npy" not in names or "y.npy" in names or single, Fault.LABEL_MISMATCH)
    check(names == {"x.npy", "y.npy"} or (single and names == {"x.npy"}), Fault.UNSUPPORTED_FORMAT)
    count = _read_x(archive, schema, sink)
    if "y.npy" in names:
        _read_y(archive, schema, sink, count)
    else:  # all of the only class
        for start in range(0, count, CHUNK):
            _put_labels(np.zeros(min(CHUNK, count - start), np.uint8), schema, sink)


def _read_x(archive: zipfile.ZipFile, schema: ImageSchema, sink: Sink) -> int:
    with archive.open("x.npy") as stream:
        header = _npy_header(stream)
        check(header.dtype == np.uint8, Fault.DTYPE_MISMATCH)
        count, *rest = header.shape or (0,)
        shapes = [[schema.height, schema.width, schema.channels]]
        if schema.channels == 1:
            shapes.append([schema.height, schema.width])
        check(rest in shapes, Fault.SHAPE_MISMATCH)
        check(count > 0, Fault.EMPTY)
        total = count * image_bytes(schema)
        check(header.length + total == archive.getinfo("x.npy").file_size, Fault.DAMAGED)
        for piece in pieces(stream, total):
            (sink.spool if header.fortran else sink.values).write(piece)
    if header.fortran:
        _reorder(sink, count=count, planes=image_bytes(schema), shape=rest)
    return count


def _reorder(sink: Sink, *, count: int, planes: int, shape: list[int]) -> None:
    """Converts Fortran order, which stores each pixel of all records together, a block at a time."""
    sink.spool.flush()
    block = max(CHUNK // planes, 1)
    for start in range(0, count, block):
        size = min(block, count - start)
        read = [os.pread(sink.spool.fileno(), size, plane * count + start) for plane in range(planes)]
        turned = np.frombuffer(b"".join(read), np.uint8).reshape((size, *shape), order="F")
        sink.values.write(turned.tobytes())


def _read_y(archive: zipfile.ZipFile, schema: ImageSchema, sink: Sink, count: int) -> None:
    with archive.open("y.npy") as stream:
        header = _npy_header(stream)
        check(header.dtype.kind in "iu", Fault.DTYPE_MISMATCH)
        check(header.shape == (count,), Fault.SHAPE_MISMATCH)
        for piece in pieces(stream, count * header.dtype.itemsize, unit=header.dtype.itemsize):
            _put_labels(np.frombuffer(piece, header.dtype), schema, sink)


# IDX: a zip with one file of images and one of labels, recognised by their content, not by their names.


class _Counted(gzip.GzipFile):
    """A gzip stream that counts what it yields against the allowance."""

    def __init__(self, stream: IO[bytes], allowance: Allowance) -> None:
        super().__init__(fileobj=stream, mode="rb")
        self._allowance = allowance

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        self._allowance.take(len(data))
        return data


def _idx(archive: zipfile.ZipFile, member: zipfile.ZipInfo, allowance: Allowance) -> IO[bytes]:
    with archive.open(member) as stream:
        zipped = stream.read(len(_GZIP)) == _GZIP
    stream = archive.open(member)
    return _Counted(stream, allowance) if zipped else stream  # type: ignore[return-value]


def _read_idx(archive: zipfile.ZipFile, schema: ImageSchema, sink: Sink, allowance: Allowance) -> None:
    members = archive.infolist()
    check(len(members) == 2, Fault.UNSUPPORTED_FORMAT)
    streams: dict[bytes, IO[bytes]] = {}
    for member in members:
        stream = _idx(archive, member, allowance)
        streams[exactly(stream, 4)] = stream
    check(streams.keys() == {_IDX_IMAGES, _IDX_LABELS}, Fault.UNSUPPORTED_FORMAT)

    images, labels = streams[_IDX_IMAGES], streams[_IDX_LABELS]
    count, height, width = struct.unpack(">III", exactly(images, 12))
    check((height, width, 1) == (schema.height, schema.width, schema.channels), Fault.SHAPE_MISMATCH)
    check(count > 0, Fault.EMPTY)
    check(exactly(labels, 4) == struct.pack(">I", count), Fault.SHAPE_MISMATCH)
    check(count * image_bytes(schema) <= allowance.left, Fault.TOO_LARGE)
    for piece in pieces(images, count * image_bytes(schema)):
        sink.values.write(piece)
    for piece in pieces(labels, count):
        _put_labels(np.frombuffer(piece, np.uint8), schema, sink)


# PNG folders


def _read_png(archive: zipfile.ZipFile, schema: ImageSchema, sink: Sink) -> None:
    code = {name: place for place, name in enumerate(schema.classes)}
    most = 2 * image_bytes(schema) + (64 << 10)
    for member in archive.infolist():
        folder, _, name = member.filename.rpartition("/")
        check(not name or plain(name), Fault.UNSAFE_CONTENT)
        check(folder in code, Fault.LABEL_MISMATCH)
        if not name:  # the entry of the folder itself
            check(not member.file_size, Fault.UNSAFE_CONTENT)
            continue
        check(member.file_size <= most, Fault.TOO_LARGE)
        sink.values.write(_pixels(archive.read(member), schema))
        sink.codes.write(CODE.type(code[folder]).tobytes())


def _pixels(data: bytes, schema: ImageSchema) -> bytes:
    check(data.startswith(_PNG), Fault.UNSUPPORTED_FORMAT)
    with PngImagePlugin.PngImageFile(io.BytesIO(_essential(data))) as image:
        check(image.size == (schema.width, schema.height), Fault.SHAPE_MISMATCH)
        check(data[24] <= 8, Fault.DTYPE_MISMATCH)  # bits per channel; Pillow would halve 16 silently
        check(image.mode in _MODES[schema.channels], Fault.SHAPE_MISMATCH)
        return image.convert(_MODES[schema.channels][0]).tobytes()


def _essential(data: bytes) -> bytes:
    """Keeps only the chunks that pixels need: text, profiles and other chunks can be decompression bombs."""
    chunks, at, kind = [_PNG], len(_PNG), b""
    while kind != b"IEND":
        length, kind = struct.unpack_from(">I4s", data, at)
        end = at + length + 12
        check(end <= len(data), Fault.DAMAGED)
        check(kind not in (b"acTL", b"fcTL", b"fdAT"), Fault.UNSAFE_CONTENT)
        if kind in (b"IHDR", b"PLTE", b"IDAT", b"IEND"):
            chunks.append(data[at:end])
        at = end
    check(at == len(data), Fault.UNSAFE_CONTENT)
    return b"".join(chunks)
