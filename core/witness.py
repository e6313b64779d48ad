"""The witness: a copy of the ledger's head outside the database, as an append-only log of account states.

The sweeper compares the ledger with the log and appends changes. The service grants and reserves budget only
while the last comparison is recent and found no difference. A database restored from a backup has fewer rows
than the log says and grants nothing until the missing spending is charged. docs/guarantees.md#witness
"""

import json
import uuid
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from sqlalchemy import func, select, text, update
from sqlalchemy.orm import Session

from core import ledger
from core.errors import Problem
from core.faults import Fault
from core.ledger import Move
from core.stores.witness import WitnessStore
from core.tables import UNFINISHED_JOBS, Account, Entry, Job, JobState, Witness
from sluice.privacy.relation import Relation
from sluice.release.ledger import Balance

FRESH = timedelta(seconds=60)
# Every 100th entry holds all accounts, so that a process that starts reads at most 100 of them.
FULL_EVERY = 100
_LOCK = 0x51D1CE  # one comparison at a time, over all sweepers

# Of an account: moves, head, capacity, spent (held and settled together), terms.
State = dict[str, Any]


class LedgerBehindWitness(Problem):
    status, slug, title = 503, "ledger-behind-witness", "The ledger lacks rows that the witness has"


class LedgerAltered(Problem):
    status, slug, title = 503, "ledger-altered", "A balance was changed outside the ledger"


class LedgerNotWitnessed(Problem):
    status, slug, title = 503, "ledger-not-witnessed", "The ledger has not been compared with its witness"


class WitnessLost(Problem):
    status, slug, title = 503, "witness-lost", "Entries of the witness are missing"


class WitnessDamaged(Exception):
    """An entry of the log cannot be read as one."""


class WitnessLog:
    """A process's copy of the log: each entry is read once, and new ones before each use."""

    def __init__(self, store: WitnessStore) -> None:
        self._store = store
        self.generation = 0
        self.accounts: dict[str, State] = {}

    def catch_up(self) -> None:
        """Reads new entries. They have consecutive numbers, so nothing needs to be listed."""
        if self.generation == 0:
            self._find_last_full()
        while self._take(self.generation + 1):
            pass

    def append(self, accounts: Mapping[str, State]) -> bool:
        """Appends what has changed; False if another process appended first."""
        generation = self.generation + 1
        full = generation == 1 or generation % FULL_EVERY == 0
        changed = {id: now for id, now in accounts.items() if full or self.accounts.get(id) != now}
        body = {"generation": generation, "full": full, "accounts": changed}
        if not self._store.create(_key(generation), json.dumps(body).encode()):
            return False
        self.generation, self.accounts = generation, dict(accounts)
        return True

    def _find_last_full(self) -> None:
        # Binary search: numbers have no gaps.
        low, high = 0, 1
        while self._read(high * FULL_EVERY) is not None:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._read(middle * FULL_EVERY) is not None else (low, middle)
        if low:
            self._take(low * FULL_EVERY)

    def _take(self, generation: int) -> bool:
        entry = self._read(generation)
        if entry is None:
            return False
        self.accounts = ({} if entry["full"] else self.accounts) | entry["accounts"]
        self.generation = generation
        return True

    def _read(self, generation: int) -> dict[str, Any] | None:
        body = self._store.read(_key(generation))
        if body is None:
            return None
        try:
            entry: dict[str, Any] = json.loads(body)
            if entry["generation"] == generation and {"full", "accounts"} <= entry.keys():
                return entry
        except (ValueError, KeyError, TypeError, AttributeError):
            pass
        raise WitnessDamaged(f"{_key(generation)} is not an entry of the witness")


def _key(generation: int) -> str:
    return f"ledger/{generation:012d}.json"


def require_ledger_in_sync(session: Session) -> None:
    """Raises unless a comparison of the last minute found the ledger equal to its witness."""
    # A time in the future does not count either: a clock was set back.
    fresh = Witness.checked_at.between(func.now() - FRESH, func.now() + FRESH)
    behind, generation, fresh_now = session.execute(select(Witness.behind, Witness.generation, fresh)).one()
    if behind is not None:
        refuse_altered(behind)
        if behind.get("lost"):
            raise WitnessLost(
                "The database has been compared with entries that the witness no longer has. Put the witness "
                "back where it was; docs/operations.md says what to do if it is lost.",
                generation=generation,
            )
        raise LedgerBehindWitness(
            "Spent budget is missing from this database, as after restoring a backup. `sluice restore` "
            "charges it, or an admin acknowledges it at /v1/admin/witness; nothing is granted until then.",
            generation=generation,
        )
    if not fresh_now:
        raise LedgerNotWitnessed("The sweeper has not run for a while. Start it, then try again.")


def refuse_altered(behind: Mapping[str, Any]) -> None:
    """Raises if a balance does not follow from its rows: that cannot be acknowledged, only corrected."""
    if any(found["reason"] == "altered" for found in behind["accounts"].values()):
        raise LedgerAltered(
            "The balance of an account does not follow from its ledger rows. Restore a backup, or have the "
            "database owner correct the row to the values at /v1/admin/witness, as docs/operations.md says."
        )


def compare(session: Session, log: WitnessLog) -> None:
    """Compares every account with the witness and appends changes to the witness."""
    if not session.scalar(text(f"SELECT pg_try_advisory_xact_lock({_LOCK})")):
        return
    row = session.scalars(select(Witness)).one()
    log.catch_up()
    generation, behind = row.generation, None
    if log.generation < generation:
        behind = {"generation": log.generation, "accounts": {}, "lost": True}
    else:
        accounts = _accounts(session)
        found = _differences(session, log.accounts, accounts)
        if row.acknowledged == log.generation:
            # An acknowledgement counts only with the charge: the row alone could be written by SQL.
            found = {
                id: one
                for id, one in found.items()
                if one["reason"] == "altered" or not _made_good(accounts.get(id), one)
            }
        now = {id: _state(account) for id, account in accounts.items()}
        if found:
            behind = {"generation": log.generation, "accounts": found}
        elif (log.generation == 0 or now != log.accounts) and not log.append(now):
            return  # another site appended to this witness: the next round reads it and compares again
        generation = log.generation
    session.execute(
        update(Witness).values(checked_at=func.clock_timestamp(), generation=generation, behind=behind)
    )


def differences(session: Session, log: WitnessLog) -> dict[str, Any]:
    """Account → its state in the witness and the kind of difference: `behind` or `altered`."""
    return _differences(session, log.accounts, _accounts(session))


def is_behind(session: Session, account: Account | None, seen: State) -> bool:
    """Whether the last row that the witness has is missing from the account or differs."""
    if account is None or account.moves < seen["moves"]:
        return True
    if account.moves == seen["moves"]:
        return bool(account.head.hex() != seen["head"])
    then = session.get(Entry, (account.id, seen["moves"]))
    return then is None or bool(then.digest.hex() != seen["head"])


def charge_lost(session: Session, lost: Mapping[str, State], move: Move) -> None:
    """Charges spending that only the witness has, and creates missing accounts and grants again.

    Jobs with a reservation are settled and ended: they may have run and been published since.
    """
    for id, seen in lost.items():
        terms = seen["terms"]
        account = session.get(Account, uuid.UUID(id))
        if account is None:
            account = ledger.open_account(
                session, relation=Relation(terms["relation"]), epsilon=terms["epsilon"], delta=terms["delta"],
                order=terms["order"], move=move, id=uuid.UUID(id),
            )  # fmt: skip
        elif account.capacity < seen["capacity"]:
            # Without the missing grant a part of the charge would not fit and would never be charged.
            ledger.raise_budget(session, account, epsilon=terms["epsilon"], move=move)
            session.refresh(account)
        cost = max(0, seen["spent"] - account.held - account.settled)
        ended = ledger.forfeit(session, account, cost=cost, move=move)
        over = update(Job).where(Job.id.in_(ended), Job.state.in_(UNFINISHED_JOBS))
        session.execute(over.values(state=JobState.FAILED, fault=Fault.LOST.value, finished_at=func.now()))


def _accounts(session: Session) -> dict[str, Account]:
    return {str(account.id): account for account in session.scalars(select(Account))}


def _state(account: Account) -> State:
    return {"moves": account.moves, "head": account.head.hex(), **_balance(account)}


def _balance(account: Account) -> State:
    terms = {name: getattr(account, name) for name in ("relation", "epsilon", "delta", "order")}
    return {"capacity": account.capacity, "spent": account.held + account.settled, "terms": terms}


def _differences(
    session: Session, known: Mapping[str, State], accounts: Mapping[str, Account]
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for id in known.keys() | accounts.keys():
        seen, account = known.get(id), accounts.get(id)
        behind = seen is not None and is_behind(session, account, seen)
        # The rows of an account that is behind do not continue the witnessed ones: count from the first.
        due = account and _due(session, account, None if behind else seen)
        if account is not None and due != _balance(account):
            found[id] = {"reason": "altered", **(due or {})}
        elif behind:
            found[id] = {"reason": "behind", **(seen or {})}
    return found


def _due(session: Session, account: Account, seen: State | None) -> State:
    """The balance that follows from the witnessed state and later rows; for a new account, from all rows."""
    seen = seen or {"moves": 0, "capacity": 0, "spent": 0, "terms": None}
    balance, terms = Balance(capacity=seen["capacity"], settled=seen["spent"]), seen["terms"]
    if seen["moves"] < account.moves:
        # Up to the row at which the account was read: it may have changed since.
        since = (Entry.account_id == account.id, Entry.number.between(seen["moves"] + 1, account.moves))
        rows = select(Entry.kind, Entry.cost, Entry.job_id, Entry.terms).where(*since)
        for kind, cost, job, granted in session.execute(rows.order_by(Entry.number)):
            balance = balance.after({"kind": kind, "cost": cost, "job": job})
            terms = granted or terms
    return {"capacity": balance.capacity, "spent": balance.held + balance.settled, "terms": terms}


def _made_good(account: Account | None, seen: State) -> bool:
    """Whether an account that lost rows was charged all spending of the witness, on the same terms."""
    if account is None or account.held or account.settled < seen["spent"]:
        return False
    terms = _balance(account)["terms"]
    return all(terms[name] == seen["terms"][name] for name in ("relation", "delta", "order"))
