"""Hash chains: every row of the ledger and of the audit log has the digest of the row before it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

GENESIS = bytes(32)  # the link of the first row
Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Broken:
    """The first row that does not follow from the one before, and why."""

    number: int
    why: str


def broken_link(row: Row, number: int, head: bytes, digest: Callable[[bytes, Row], bytes]) -> Broken | None:
    """Whether a row has this number, is linked to the digest `head`, and has the digest of its own fields."""
    if row["number"] != number:
        return Broken(number=number, why="is missing")
    if row["previous"] != head.hex():
        return Broken(number=number, why="is not linked to the row before it")
    try:
        unchanged = digest(head, row).hex() == row["digest"]
    except (ValueError, TypeError, KeyError):
        unchanged = False
    return None if unchanged else Broken(number=number, why="was changed after it was written")
