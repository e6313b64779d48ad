"""The hash chain of the audit log, verified without trusting the service that sent the rows.

The database computes the same digests when it adds a row (migrations/versions/0010_baseline.py).
"""

import hashlib
from collections.abc import Iterable
from typing import Any

from sluice.release.chain import GENESIS, Broken, Row, broken_link

TRIMMED = "audit log trimmed"
_HASHED = (
    "number", "at", "writer", "person", "name", "role", "key", "address", "request", "action", "objects",
    "status", "answers", "times",
)  # fmt: skip


def _fields(values: Iterable[Any]) -> str:
    """Each value as LENGTH:TEXT, or - for none: two different rows never give the same text."""
    texts = (None if value is None else str(value) for value in values)
    return "".join("-" if text is None else f"{len(text.encode())}:{text}" for text in texts)


def digest(previous: bytes, row: Row) -> bytes:
    values = {name: row[name] for name in _HASHED} | {"objects": _fields(row["objects"])}
    return hashlib.sha256(previous + _fields(values.values()).encode()).digest()


def check(rows: Iterable[Row]) -> tuple[int, bytes, Broken | None]:
    """The number of rows that follow, the digest of the last, and the first row that does not follow.

    The rows begin with the first ever written, or after those that a later row states were trimmed.
    """
    count, number, head = 0, 0, GENESIS
    start: tuple[int, str] | None = None
    trimmed: tuple[int, str] = (0, GENESIS.hex())
    for row in rows:
        try:
            if start is None:
                start = row["number"] - 1, row["previous"]
                number, head = start[0], bytes.fromhex(start[1])
            if broken := broken_link(row, number + 1, head, digest):
                return count, head, broken
            if row["action"] == TRIMMED:
                trimmed = int(row["objects"][0]), row["objects"][1]
            number, head, count = number + 1, bytes.fromhex(row["digest"]), count + 1
        except (KeyError, IndexError, TypeError, ValueError, AttributeError):
            return count, head, Broken(number=number + 1, why="does not have the shape of a row")
    if start is not None and start != trimmed:
        return count, head, Broken(number=start[0], why="and all before it are missing, and no row states it")
    return count, head, None
