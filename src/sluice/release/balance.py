"""The ledger as a fold: what its rows add up to, and whether each still follows from the one before.

Pure, so that a client can check rows it was given without trusting who gave them.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

from sluice.privacy.account import exceeds
from sluice.privacy.problems import Problem

GENESIS = bytes(32)
_HASHED = ("account", "number", "kind", "cost", "job", "event", "readings", "terms", "actor", "reason", "at")


@dataclass(frozen=True, kw_only=True)
class Balance:
    """Integer cost at the account's order: granted, promised to jobs, and spent for good."""

    capacity: int = 0
    held: int = 0
    settled: int = 0

    @property
    def left(self) -> int:
        return self.capacity - self.held - self.settled

    def after(self, row: Mapping[str, Any]) -> "Balance":
        cost = row["cost"]
        match row["kind"]:
            case "grant":
                return replace(self, capacity=self.capacity + cost)
            case "reserve":
                return replace(self, held=self.held + cost)
            case "settle" if row["job"] is None:  # spent before a restored backup, known from the witness
                return replace(self, settled=self.settled + cost)
            case "settle":
                return replace(self, held=self.held - cost, settled=self.settled + cost)
            case "void":
                return replace(self, held=self.held - cost)
            case kind:
                raise ValueError(f"no such move: {kind}")


@dataclass(frozen=True, kw_only=True)
class Broken:
    """The first row that does not follow, and why."""

    number: int
    why: str


def digest(previous: bytes, row: Mapping[str, Any]) -> bytes:
    """SHA-256 over the link to the row before and every field of this one, in one canonical form."""
    fields = {name: _canonical(row[name]) for name in _HASHED}
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(previous + text.encode()).digest()


def _canonical(value: Any) -> Any:
    """Whole numbers by their digits: a database gives 1e16 back as an integer, and -0.0 as 0.0."""
    match value:
        case float() if value.is_integer():
            return int(Decimal(repr(value)))
        case dict():
            return {name: _canonical(each) for name, each in value.items()}
        case list() | tuple():
            return [_canonical(each) for each in value]
    return value


def fold(rows: Iterable[Mapping[str, Any]]) -> tuple[Balance, bytes, int, Broken | None]:
    """Balance, head and number of the rows up to the first that is broken, and that one if there is any."""
    balance, head, number = Balance(), GENESIS, 0
    terms: Mapping[str, Any] | None = None
    for row in rows:
        broken = _why_broken(row, number + 1, head)
        if broken is None and row["kind"] == "grant":
            broken = _why_not_granted(row, balance.after(row), terms)
            terms = row["terms"]
        if broken:
            return balance, head, number, Broken(number=number + 1, why=broken)
        balance, head, number = balance.after(row), bytes.fromhex(row["digest"]), number + 1
        if balance.left < 0 or balance.held < 0:
            return balance, head, number, Broken(number=number, why="moves more than there is")
    return balance, head, number, None


def _why_broken(row: Mapping[str, Any], expected: int, head: bytes) -> str | None:
    if row["number"] != expected:
        return f"row {expected} is missing"
    if row["previous"] != head.hex():
        return "is not linked to the row before it"
    try:
        same = digest(head, row).hex() == row["digest"]
    except (ValueError, TypeError, KeyError):
        same = False
    if not same:
        return "was changed after it was written"
    return None if row["kind"] in ("grant", "reserve", "settle", "void") else "is no known move"


def _why_not_granted(row: Mapping[str, Any], after: Balance, before: Mapping[str, Any] | None) -> str | None:
    """A grant states the budget it rests on; all grants together hold no more than that budget does."""
    try:
        terms = {name: row["terms"][name] for name in ("relation", "delta", "order")}
        epsilon, delta, order = row["terms"]["epsilon"], terms["delta"], terms["order"]
        too_much = exceeds(after.capacity, epsilon=epsilon, delta=delta, order=order)
    except (KeyError, TypeError, Problem):
        return "grants without the terms of a budget"
    if before is not None and terms != {name: before[name] for name in terms}:
        return "grants under another relation, delta or order than the first grant"
    return "grants more than its budget holds" if too_much else None
