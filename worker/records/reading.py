"""What every format's reader is given, and the one way from an upload to the arrays of records."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

from core.faults import Failure, Fault
from core.schema import ImageSchema

CHUNK = 4 << 20
# Deflate reaches 1000:1 on nothing but zeros; sparse image sets that people use stay below 120:1.
EXPANSION = 200
GRACE = 16 << 20
PICKLES = tuple(bytes([0x80, protocol]) for protocol in range(2, 6))  # how each protocol begins


@dataclass(frozen=True)
class Sink:
    """Files the reader was handed open; it chooses no name and opens no path."""

    values: IO[bytes]
    codes: IO[bytes]
    spool: IO[bytes]


@dataclass
class Allowance:
    """Bytes an upload may still expand to, by its true size and never by what it claims of itself."""

    left: int

    @classmethod
    def of(cls, *, size: int, disk_bytes: int) -> "Allowance":
        return cls(min(disk_bytes, EXPANSION * size + GRACE))

    def take(self, count: int) -> None:
        self.left -= count
        if self.left < 0:
            raise Failure(Fault.TOO_LARGE)


def check(right: bool, fault: Fault) -> None:
    if not right:
        raise Failure(fault)


def exactly(stream: IO[bytes], count: int) -> bytes:
    data = stream.read(count)
    check(len(data) == count, Fault.DAMAGED)
    return data


def pieces(stream: IO[bytes], count: int, *, unit: int = 1) -> Iterator[bytes]:
    """The next `count` bytes in pieces of whole units; the stream must hold that many and no more."""
    most = max(CHUNK // unit, 1) * unit
    while count:
        piece = exactly(stream, min(count, most))
        count -= len(piece)
        yield piece
    check(not stream.read(1), Fault.DAMAGED)


def image_bytes(schema: ImageSchema) -> int:
    return schema.height * schema.width * schema.channels
