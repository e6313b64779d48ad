"""The ledger of an account: what its rows add up to, and whether each follows from the one before.

No I/O, so that a client can verify rows without trusting the service that sent them.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

from sluice.privacy.account import exceeds
from sluice.privacy.problems import Problem
from sluice.release.canonical import canonical_text
from sluice.release.chain import GENESIS, Broken, Row, broken_link

_HASHED = ("account", "number", "kind", "cost", "job", "event", "readings", "terms", "actor", "reason", "at")


@dataclass(frozen=True, kw_only=True)
class Balance:
    """Integer cost at the account's order: granted, reserved for jobs, and settled."""

    capacity: int = 0
    held: int = 0
    settled: int = 0

    @property
    def left(self) -> int:
        return self.capacity - self.held - self.settled

    def after(self, row: Row) -> "Balance":
        cost = row["cost"]
        match row["kind"]:
            case "grant":
                return replace(self, capacity=self.capacity + cost)
            case "reserve":
                return replace(self, held=self.held + cost)
            case "settle" if row["job"] is None:  # spent after a backup that was restored; the witness has it
                return replace(self, settled=self.settled + cost)
            case "settle":
                return replace(self, held=self.held - cost, settled=self.settled + cost)
            case "void":
                return replace(self, held=self.held - cost)
            case kind:
                raise ValueError(f"no such move: {kind}")


def digest(previous: bytes, row: Row) -> bytes:
    """SHA-256 over the digest of the row before and the canonical form of every field of this row."""
    fields = {name: _as_stored(row[name]) for name in _HASHED}
    return hashlib.sha256(previous + canonical_text(fields).encode()).digest()


def _as_stored(value: Any) -> Any:
    """Whole floats as integers: the database returns 1e16 as an integer, and -0.0 as 0.0."""
    match value:
        case float() if value.is_integer():
            return int(Decimal(repr(value)))
        case dict():
            return {name: _as_stored(item) for name, item in value.items()}
        case list() | tuple():
            return [_as_stored(item) for item in value]
    return value


def fold(rows: Iterable[Row]) -> tuple[Balance, bytes, int, Broken | None]:
    """Balance, last digest and count of the rows before the first broken one, and that one if any."""
    balance, head, number = Balance(), GENESIS, 0
    terms: Mapping[str, Any] | None = None
    for row in rows:
        broken = broken_link(row, number + 1, head, digest)
        why = None
        if broken is None and row["kind"] not in ("grant", "reserve", "settle", "void"):
            why = "is not a known move"
        elif broken is None and row["kind"] == "grant":
            why = _why_not_granted(row, balance.after(row), terms)
            terms = row["terms"]
        if broken or why:
            return balance, head, number, broken or Broken(number=number + 1, why=why or "")
        balance, head, number = balance.after(row), bytes.fromhex(row["digest"]), number + 1
        if balance.left < 0 or balance.held < 0:
            return balance, head, number, Broken(number=number, why="moves more than there is")
    return balance, head, number, None


def _why_not_granted(row: Row, after: Balance, before: Mapping[str, Any] | None) -> str | None:
    """A grant states the terms of its budget; all grants together are at most the capacity of that budget."""
    try:
        terms = {name: row["terms"][name] for name in ("relation", "delta", "order")}
        epsilon, delta, order = row["terms"]["epsilon"], terms["delta"], terms["order"]
        too_much = exceeds(after.capacity, epsilon=epsilon, delta=delta, order=order)
    except (KeyError, TypeError, Problem):
        return "grants without the terms of a budget"
    if before is not None and terms != {name: before[name] for name in terms}:
        return "grants under another relation, delta or order than the first grant"
    return "grants more than its budget holds" if too_much else None
