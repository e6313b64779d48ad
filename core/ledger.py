"""The ledger: append-only rows in a hash chain, each of which changes the balance of its account.

Guarantee: held + settled never exceeds capacity, under any concurrency. The only way to change a balance is
to insert a row that is linked to the one before it; no application role may write it.
docs/guarantees.md#ledger
"""

import uuid
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from core.errors import Problem
from core.tables import Account, Entry, Job
from sluice.privacy.account import capacity as capacity_of
from sluice.privacy.accountant import cost as cost_of
from sluice.privacy.events import Event
from sluice.privacy.relation import Relation
from sluice.release.chain import GENESIS, Broken
from sluice.release.ledger import Balance, digest, fold


class BudgetExceeded(Problem):
    status, slug, title = 409, "budget-exceeded", "Not enough budget left"


class BudgetNotRaised(Problem):
    status, slug, title = 422, "budget-not-raised", "A budget can only be raised"


class NothingReserved(Problem):
    status, slug, title = 409, "nothing-reserved", "This job has no reservation in the account"


class RecordsOpened(Problem):
    status, slug, title = 409, "records-opened", "This job has opened its records"


@dataclass(frozen=True, kw_only=True)
class Move:
    """Who changes the balance, and why; both are stored in the row."""

    actor: str
    reason: str


def price(event: Event, account: Account) -> int:
    return cost_of(event, order=account.order, relation=Relation(account.relation))


def open_account(
    session: Session,
    *,
    relation: Relation,
    epsilon: float,
    delta: float,
    order: int,
    move: Move,
    id: uuid.UUID | None = None,
) -> Account:
    """Creates an account with its first grant; with an `id`, one that a restored backup lacks."""
    account = Account(
        id=id or uuid.uuid4(),
        relation=relation,
        epsilon=epsilon,
        delta=delta,
        order=order,
        capacity=0,
        head=GENESIS,
    )
    session.add(account)
    session.flush()
    room = capacity_of(epsilon, delta, order)
    _append(session, _lock(session, account.id), kind="grant", cost=room, move=move, terms=_terms(account))
    session.refresh(account)
    return account


def reserve(
    session: Session,
    account: Account,
    event: Event,
    *,
    job: uuid.UUID,
    readings: Mapping[str, Any],
    move: Move,
) -> int:
    """Reserves an event's cost for a job and returns it. The cost is computed before the lock is taken."""
    cost = price(event, account)
    locked = _lock(session, account.id)
    if cost > locked.remaining:
        raise BudgetExceeded(
            "The job costs more than is left in the account; ask for less, or have the budget raised.",
            asked={"cost": cost, **readings},
            left={"cost": locked.remaining},
        )
    _append(
        session, locked, kind="reserve", cost=cost, move=move, job=job, event=event.to_dict(),
        readings=dict(readings),
    )  # fmt: skip
    return cost


def settle(session: Session, account_id: uuid.UUID, *, job: uuid.UUID, move: Move) -> None:
    """Turns a job's reservation into final spending; the sum of both stays the same."""
    _end(session, account_id, job=job, kind="settle", move=move)


def void(session: Session, account_id: uuid.UUID, *, job: uuid.UUID, move: Move) -> None:
    """Returns a job's reservation, unless its records were opened; the database checks that too."""
    _end(session, account_id, job=job, kind="void", move=move)


def _end(session: Session, account_id: uuid.UUID, *, job: uuid.UUID, kind: str, move: Move) -> None:
    mine = (Entry.account_id == account_id, Entry.job_id == job)
    reserved = session.scalars(select(Entry.cost).where(*mine, Entry.kind == "reserve")).one_or_none()
    if reserved is None:
        raise NothingReserved("This job never reserved anything in this account.")
    # The job is locked before the account, as workers do, so that there is no deadlock.
    opened = session.scalars(select(Job.opened_at).where(Job.id == job).with_for_update(key_share=True))
    if opened.one_or_none() is not None and kind == "void":
        raise RecordsOpened("The job opened its records, so its cost is spent.")
    # Checked under the account's lock, so that a job cannot be ended twice.
    locked = _lock(session, account_id)
    if session.scalars(select(Entry.kind).where(*mine, Entry.kind.in_(("settle", "void")))).one_or_none():
        raise NothingReserved("This job's reservation was settled or voided before.")
    _append(session, locked, kind=kind, cost=reserved, move=move, job=job)


def raise_budget(session: Session, account: Account, *, epsilon: float, move: Move) -> None:
    """Grants the difference to a larger epsilon at the account's own delta and order.

    The database requires a confirmed proposal of this epsilon.
    """
    room = capacity_of(epsilon, account.delta, account.order)
    locked = _lock(session, account.id)
    if locked.epsilon >= epsilon or locked.capacity >= room:
        raise BudgetNotRaised(f"The budget is already {locked.epsilon:g}; name a larger epsilon.")
    terms = _terms(account) | {"epsilon": epsilon}
    _append(session, locked, kind="grant", cost=room - locked.capacity, move=move, terms=terms)


def forfeit(session: Session, account: Account, *, cost: int, move: Move) -> list[uuid.UUID]:
    """Charges spending that the witness has and this database lacks; at most all that is left.

    Reservations are settled too, since those jobs may have run and been published after the backup was taken.
    Returns the jobs' ids; the caller ends them.
    """
    mine = select(Entry.job_id).where(Entry.account_id == account.id, Entry.job_id.is_not(None))
    reserved, ended = mine.where(Entry.kind == "reserve"), mine.where(Entry.kind.in_(("settle", "void")))
    promised = select(Job.id).where(Job.id.in_(reserved), Job.id.not_in(ended)).order_by(Job.id)
    jobs = list(session.scalars(promised.with_for_update(key_share=True)))
    for job in jobs:
        settle(session, account.id, job=job, move=move)
    locked = _lock(session, account.id)
    lost = max(0, min(cost, locked.remaining))
    _append(session, locked, kind="settle", cost=lost, move=move)
    return jobs


def _terms(account: Account) -> dict[str, Any]:
    """The terms of a grant, stored in its row so that the hash chain covers them."""
    return {
        "relation": str(account.relation),
        "epsilon": account.epsilon,
        "delta": account.delta,
        "order": account.order,
    }


@dataclass(frozen=True, kw_only=True)
class _Locked:
    """An account locked by this transaction, with the values that its next row needs."""

    id: uuid.UUID
    moves: int
    head: bytes
    at: datetime
    epsilon: float
    capacity: int
    remaining: int


def _lock(session: Session, account_id: uuid.UUID) -> _Locked:
    row = session.execute(select(func.lock_account(account_id).table_valued(*_LOCKED))).one()
    return _Locked(id=account_id, **row._asdict())


_LOCKED = ("moves", "head", "at", "epsilon", "capacity", "remaining")


def _append(
    session: Session,
    locked: _Locked,
    *,
    kind: str,
    cost: int,
    move: Move,
    job: uuid.UUID | None = None,
    event: dict[str, Any] | None = None,
    readings: dict[str, Any] | None = None,
    terms: dict[str, Any] | None = None,
) -> None:
    """Inserts a row. A trigger changes the balance in the same statement, or refuses the row."""
    entry = Entry(
        account_id=locked.id, number=locked.moves + 1, kind=kind, cost=cost, job_id=job, event=event,
        readings=readings, terms=terms, actor=move.actor, reason=move.reason, at=locked.at,
        previous=locked.head,
    )  # fmt: skip
    entry.digest = digest(locked.head, as_row(entry))
    session.add(entry)
    session.flush()


def as_row(entry: Entry) -> dict[str, Any]:
    """An entry as it is hashed, exported and shown."""
    return {
        "account": str(entry.account_id),
        "number": entry.number,
        "kind": entry.kind,
        "cost": entry.cost,
        "job": str(entry.job_id) if entry.job_id else None,
        "event": entry.event,
        "readings": entry.readings,
        "terms": entry.terms,
        "actor": entry.actor,
        "reason": entry.reason,
        "at": entry.at.astimezone(UTC).isoformat(timespec="microseconds"),
        "previous": entry.previous.hex(),
        "digest": entry.digest.hex() if entry.digest else None,
    }


def rows(session: Session, account_id: uuid.UUID) -> Iterator[dict[str, Any]]:
    """All rows of an account in order, fetched in batches."""
    query = select(Entry).where(Entry.account_id == account_id).order_by(Entry.number)
    with session.scalars(query.execution_options(yield_per=1000, populate_existing=True)) as found:
        for entry in found:
            yield as_row(entry)


def verify(session: Session, account: Account) -> Broken | None:
    """Recomputes hash chain and balance; returns the first inconsistent row, or None."""
    # One statement reads one snapshot, so that an account that changes meanwhile is not reported as broken.
    query = (
        select(Account, Entry)
        .join(Entry, Entry.account_id == Account.id, isouter=True)
        .where(Account.id == account.id)
        .order_by(Entry.number)
        .execution_options(yield_per=1000, populate_existing=True)
    )
    terms: dict[str, Any] | None = None

    def walk() -> Generator[dict[str, Any]]:
        nonlocal account, terms
        with session.execute(query) as found:
            for now, entry in found:
                account = now
                if entry is not None:
                    terms = entry.terms or terms
                    yield as_row(entry)

    with closing(walk()) as steps:  # closes the cursor if it ends early
        balance, head, number, broken = fold(steps)
    if broken:
        return broken
    if (number, head) != (account.moves, account.head):
        return Broken(number=number + 1, why="rows are missing at the end")
    if balance != Balance(capacity=account.capacity, held=account.held, settled=account.settled):
        return Broken(number=number, why="the account's balance is not the sum of its rows")
    if terms != _terms(account):
        return Broken(number=number, why="the account's terms are not those it was granted under")
    return None
