"""The audit log as its readers check it: each row follows from the one before, from the first that is kept.

Pure, so that a client can check rows it was given without trusting who gave them. The database computes the
same digests when it adds a row (migrations/versions/0010_baseline.py).
"""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from sluice.release.balance import GENESIS, Broken

TRIMMED = "audit log trimmed"
_HASHED = (
    "number", "at", "writer", "person", "name", "role", "key", "address", "request", "action", "objects",
    "status", "answers", "times",
)  # fmt: skip


def _fields(values: Iterable[Any]) -> str:
    """Each value as LENGTH:TEXT, or - for none: two different rows never give the same text."""
    texts = (None if value is None else str(value) for value in values)
    return "".join("-" if text is None else f"{len(text.encode())}:{text}" for text in texts)


def digest(previous: bytes, row: Mapping[str, Any]) -> bytes:
    values = {name: row[name] for name in _HASHED} | {"objects": _fields(row["objects"])}
    return hashlib.sha256(previous + _fields(values.values()).encode()).digest()


def check(rows: Iterable[Mapping[str, Any]]) -> tuple[int, bytes, Broken | None]:
    """How many rows follow, the digest of the last, and the first that does not follow.

    The rows begin with the first ever written, or after those that a later row says were removed.
    """
    count, number, head = 0, 0, GENESIS
    start: tuple[int, str] | None = None
    removed: tuple[int, str] = (0, GENESIS.hex())
    for row in rows:
        try:
            if start is None:
                start = row["number"] - 1, row["previous"]
                number, head = start[0], bytes.fromhex(start[1])
            if row["number"] != number + 1:
                return count, head, Broken(number=number + 1, why="is missing")
            if row["previous"] != head.hex():
                return count, head, Broken(number=number + 1, why="does not follow the row before it")
            if row["digest"] != digest(head, row).hex():
                return count, head, Broken(number=number + 1, why="is not as it was written")
            if row["action"] == TRIMMED:
                removed = int(row["objects"][0]), row["objects"][1]
            number, head, count = number + 1, bytes.fromhex(row["digest"]), count + 1
        except (KeyError, IndexError, TypeError, ValueError, AttributeError):
            return count, head, Broken(number=number + 1, why="does not have the shape of a row")
    if start is not None and start != removed:
        return count, head, Broken(number=start[0], why="and all before it are missing, and no row says so")
    return count, head, None
