"""What can be done with budgets: looked at, raised by two people, checked, read again."""

import csv
import io
import json
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Select, exists, func, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from core import ledger
from core.errors import NotFound, Problem, WrongState
from core.people import Role, require_independent
from core.tables import Account, Dataset, Entry, Grant, Witness
from core.witness import charge_lost, refuse_altered, require_ledger_in_sync
from service.auth import Principal
from service.budget.schemas import AccountView, Acknowledgement, Chain, NewGrant, Recomputed, Reread
from service.jobs.actions import paid_events
from service.jobs.pricing import read, remaining
from service.jobs.schemas import Readings
from sluice.privacy.accountant import Accountant, epsilon
from sluice.privacy.events import Event, from_dict
from sluice.privacy.problems import TooCostlyToAccount
from sluice.privacy.relation import Relation


class SecondPersonNeeded(Problem):
    status, slug, title = 403, "second-person-needed", "Another person has to confirm this"


class RestoreNeeded(Problem):
    status, slug, title = 409, "restore-needed", "The database has forgotten more than spending"


class GrantOpen(Problem):
    status, slug, title = 409, "grant-open", "Another proposal for this account is open"


def visible(principal: Principal) -> Select[tuple[Account]]:
    """An admin sees all accounts, a curator those that checked datasets of theirs or their team draw on.

    A dataset that is not checked only claims its hash: knowing a hash is not having the data.
    """
    if principal.role is Role.ADMIN:
        return select(Account)
    mine = (Dataset.account_id == Account.id, principal.works_with_dataset(), Dataset.state == "ready")
    return select(Account).where(exists().where(*mine))


def find(session: Session, principal: Principal, id: uuid.UUID) -> Account:
    found = session.scalars(visible(principal).where(Account.id == id)).one_or_none()
    if found is None:
        raise NotFound("No account that you may see has this id.")
    return found


def view(session: Session, account: Account, *, pld: bool = False) -> AccountView:
    paid = paid_events(session, account.id)
    relation = Relation(account.relation)
    if pld:
        spent = read(paid, delta=account.delta, relation=relation)
    else:
        spent = Readings(renyi=_epsilon(paid, account, Accountant.RENYI), pld=None)
    last = session.scalars(select(func.max(Entry.at)).where(Entry.account_id == account.id)).one()
    datasets = session.scalars(select(func.count()).where(Dataset.account_id == account.id)).one()
    return AccountView(
        id=account.id, relation=relation, epsilon=account.epsilon, delta=account.delta, order=account.order,
        granted=account.capacity, held=account.held, settled=account.settled,
        left=remaining(account, account.left), spent=spent, datasets=datasets, moves=account.moves,
        head=account.head.hex(), last_move_at=last or account.created_at,
    )  # fmt: skip


def chain(session: Session, account: Account) -> Chain:
    broken = ledger.verify(session, account)
    return Chain(ok=broken is None, broken_row=broken and broken.number, why=broken and broken.why)


def exported(session: Session, account: Account) -> Iterator[str]:
    """All rows as CSV, with nothing a spreadsheet would run."""
    out = io.StringIO()
    writer = csv.writer(out)
    names = [
        "number",
        "at",
        "kind",
        "cost",
        "job",
        "renyi",
        "pld",
        "actor",
        "reason",
        "terms",
        "event",
        "previous",
        "digest",
    ]
    writer.writerow(names)
    for row in ledger.rows(session, account.id):
        readings = row["readings"] or {}
        flat = row | {"renyi": readings.get("renyi"), "pld": readings.get("pld")}
        writer.writerow([_inert(flat[name]) for name in names])
        yield out.getvalue()
        out.seek(0)
        out.truncate()
    yield out.getvalue()


def _inert(value: Any) -> str:
    text = "" if value is None else json.dumps(value) if isinstance(value, dict) else str(value)
    return "'" + text if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


def propose(session: Session, principal: Principal, id: uuid.UUID, body: NewGrant) -> Grant:
    account = find(session, principal, id)
    if body.epsilon <= account.epsilon:
        raise ledger.BudgetNotRaised(f"The budget is already {account.epsilon:g}; name a larger epsilon.")
    grant = Grant(
        id=uuid.uuid4(), account_id=account.id, epsilon=body.epsilon, reason=body.reason,
        proposed_by=principal.id, proposed_at=datetime.now(UTC), state="proposed",
    )  # fmt: skip
    session.add(grant)
    try:
        session.commit()
    except IntegrityError:
        session.rollback()
        raise GrantOpen("Confirm or withdraw the open proposal first.") from None
    return grant


def confirm(session: Session, principal: Principal, account_id: uuid.UUID, grant_id: uuid.UUID) -> Grant:
    """Puts a proposal in force; the one who made it cannot."""
    account, grant = find(session, principal, account_id), _grant(session, account_id, grant_id)
    if grant.state == "confirmed" and grant.decided_by == principal.id:
        return grant
    if grant.proposed_by == principal.id:
        raise SecondPersonNeeded(
            "You proposed it; ask another curator of this data, or an admin, to confirm."
        )
    require_independent(session, grant.proposed_by, principal.id)
    require_ledger_in_sync(session)
    _decide(session, principal, grant, "confirmed")
    ledger.raise_budget(
        session, account, epsilon=grant.epsilon, move=principal.move(f"grant {grant.id}: {grant.reason}")
    )
    session.commit()
    session.refresh(grant)
    return grant


def withdraw(session: Session, principal: Principal, account_id: uuid.UUID, grant_id: uuid.UUID) -> Grant:
    find(session, principal, account_id)
    grant = _grant(session, account_id, grant_id)
    if grant.state != "withdrawn":
        _decide(session, principal, grant, "withdrawn")
        session.commit()
        session.refresh(grant)
    return grant


def _grant(session: Session, account_id: uuid.UUID, grant_id: uuid.UUID) -> Grant:
    grant = session.get(Grant, grant_id)
    if grant is None or grant.account_id != account_id:
        raise NotFound("This account has no such proposal.")
    return grant


def _decide(session: Session, principal: Principal, grant: Grant, state: str) -> None:
    open_one = update(Grant).where(Grant.id == grant.id, Grant.state == "proposed")
    decided = open_one.values(state=state, decided_by=principal.id, decided_at=datetime.now(UTC)).returning(
        Grant.id
    )
    if session.execute(decided).one_or_none() is None:
        raise WrongState("The proposal was decided before.", state=grant.state)


def recompute(session: Session, account: Account, accountant: Accountant) -> Recomputed:
    """Reads all history again; shows where an accountant now says otherwise than when the row was written."""
    rows = []
    reserved = (
        select(Entry).where(Entry.account_id == account.id, Entry.kind == "reserve").order_by(Entry.number)
    )
    for entry in session.scalars(reserved):
        stored = (entry.readings or {}).get(accountant.value)
        now = _epsilon((from_dict(entry.event),), account, accountant)
        same = stored == now or (None not in (stored, now) and abs(stored - now) <= 1e-9 * max(stored, now))
        rows.append(Reread(number=entry.number, job=entry.job_id, stored=stored, now=now, changed=not same))
    total = _epsilon(paid_events(session, account.id), account, accountant)
    return Recomputed(accountant=accountant, delta=account.delta, total=total, rows=rows)


def _epsilon(events: tuple[Event, ...], account: Account, accountant: Accountant) -> float | None:
    relation = Relation(account.relation)
    try:
        return epsilon(events, delta=account.delta, accountant=accountant, relation=relation).epsilon
    except TooCostlyToAccount:
        return None


def acknowledge(session: Session, principal: Principal, body: Acknowledgement) -> Witness:
    """Accepts that a restored database forgot spending: what the witness knows of it counts as spent."""
    row = session.scalars(select(Witness).with_for_update()).one()
    if row.behind is None or row.behind["generation"] != body.generation or row.behind.get("lost"):
        raise WrongState("The ledger is not behind a witness of this generation; look at it again.")
    refuse_altered(row.behind)
    capacities = {str(id): capacity for id, capacity in session.execute(select(Account.id, Account.capacity))}
    if any(capacities.get(id, 0) < seen["capacity"] for id, seen in row.behind["accounts"].items()):
        raise RestoreNeeded(
            "An account or a grant is missing; `sluice restore` makes it again, and charges it."
        )
    charge_lost(session, row.behind["accounts"], principal.move(f"behind its witness: {body.reason}"))
    session.execute(update(Witness).values(acknowledged=body.generation))
    session.commit()
    session.refresh(row)
    return row
