"""What the readers of all formats share: output files, limits on expansion, exact reads."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

from core.faults import Failure, Fault
from core.schema import ImageSchema

CHUNK = 4 << 20
# Deflate compresses zeros 1000:1; sparse image sets in use stay below 120:1.
EXPANSION = 200
GRACE = 16 << 20
PICKLES = tuple(bytes([0x80, protocol]) for protocol in range(2, 6))  # first bytes of each protocol


@dataclass(frozen=True)
class Sink:
    """Output files that the caller opened; a reader opens no path."""

    values: IO[bytes]
    codes: IO[bytes]
    spool: IO[bytes]


@dataclass
class Allowance:
    """Bytes an upload may still expand to, from its true size and not from what its headers state."""

    left: int

    @classmethod
    def of(cls, *, size: int, disk_bytes: int) -> "Allowance":
        return cls(min(disk_bytes, EXPANSION * size + GRACE))

    def take(self, count: int) -> None:
        self.left -= count
        if self.left < 0:
            raise Failure(Fault.TOO_LARGE)


def check(condition: bool, fault: Fault) -> None:
    if not condition:
        raise Failure(fault)


def exactly(stream: IO[bytes], count: int) -> bytes:
    data = stream.read(count)
    check(len(data) == count, Fault.DAMAGED)
    return data


def pieces(stream: IO[bytes], count: int, *, unit: int = 1) -> Iterator[bytes]:
    """The next `count` bytes in pieces of whole units; the stream must end after them."""
    most = max(CHUNK // unit, 1) * unit
    while count:
        piece = exactly(stream, min(count, most))
        count -= len(piece)
        yield piece
    check(not stream.read(1), Fault.DAMAGED)


def image_bytes(schema: ImageSchema) -> int:
    return schema.height * schema.width * schema.channels
