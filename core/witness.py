"""A copy of every account's chain head outside the database, so that a restored backup gives nothing back.

The sweeper compares and renews it; the service grants only what was compared lately and found level. An older
database is behind its witness, and stays shut until an admin acknowledges what is lost.
"""

import json
from datetime import timedelta
from typing import Any, Protocol

from sqlalchemy import func, select, text, update
from sqlalchemy.orm import Session

from core.errors import Problem
from core.tables import Account, Entry, Witness

FRESH = timedelta(seconds=60)
_LOCK = 0x51D1CE  # one comparison at a time, over all sweepers


class LedgerBehindWitness(Problem):
    status, slug, title = 503, "ledger-behind-witness", "The ledger is older than its witness"


class LedgerNotWitnessed(Problem):
    status, slug, title = 503, "ledger-not-witnessed", "The ledger has not been compared with its witness"


class Shelf(Protocol):
    """Where the witness lies: one object, replaced whole. `create` is False if there is one."""

    def create(self, body: bytes) -> bool: ...
    def read(self) -> bytes: ...
    def write(self, body: bytes) -> None: ...


def require_level(session: Session) -> None:
    """Stops whatever would grant or reserve unless the ledger was lately found level with its witness."""
    # A time from the future is as little worth as an old one: a clock was set back.
    fresh = Witness.checked_at.between(func.now() - FRESH, func.now() + FRESH)
    behind, generation, fresh_now = session.execute(select(Witness.behind, Witness.generation, fresh)).one()
    if behind is not None:
        raise LedgerBehindWitness(
            "Spent budget is missing from this database, as after restoring a backup. An admin can look at "
            "/v1/admin/witness and acknowledge the loss; nothing is granted until then.",
            generation=generation,
        )
    if not fresh_now:
        raise LedgerNotWitnessed("The sweeper has not run for a while. Start it, then try again.")


def compare(session: Session, shelf: Shelf) -> None:
    """Compares every account with the witness; renews the witness if the ledger has moved on."""
    if not session.scalar(text(f"SELECT pg_try_advisory_xact_lock({_LOCK})")):
        return
    row = session.scalars(select(Witness)).one()
    if row.generation == 0:
        # A new database, or one that forgot: only where no witness exists is a first one made.
        shelf.create(json.dumps({"generation": 1, "accounts": {}}).encode())
    seen: dict[str, Any] = json.loads(shelf.read())
    generation: int = seen["generation"]
    accounts = {str(account.id): account for account in session.scalars(select(Account))}
    lost = {
        id: then["spent"] for id, then in seen["accounts"].items() if _behind(session, accounts.get(id), then)
    }
    if lost and row.acknowledged != generation:
        behind = {"generation": generation, "accounts": lost}
    else:
        behind = None
        now = {id: _state(account) for id, account in accounts.items()}
        if now != seen["accounts"]:
            # Never a number that was used before, even where the witness itself was put back.
            generation = max(generation, row.generation, row.acknowledged) + 1
            shelf.write(json.dumps({"generation": generation, "accounts": now}).encode())
    session.execute(
        update(Witness).values(checked_at=func.clock_timestamp(), generation=generation, behind=behind)
    )


def _state(account: Account) -> dict[str, Any]:
    return {"moves": account.moves, "head": account.head.hex(), "spent": account.held + account.settled}


def _behind(session: Session, account: Account | None, seen: dict[str, Any]) -> bool:
    if account is None or account.moves < seen["moves"]:
        return True
    if account.moves == seen["moves"]:
        return bool(account.head.hex() != seen["head"])
    then = session.get(Entry, (account.id, seen["moves"]))
    return then is None or bool(then.digest.hex() != seen["head"])
