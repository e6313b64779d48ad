"""Rules for budgets: visibility, grants confirmed by a second person, ledger export, recomputation."""

import csv
import io
import json
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Select, exists, func, select, update
from sqlalchemy.orm import Session

from core import ledger
from core.errors import Problem, WrongState
from core.tables import Account, Dataset, DatasetState, Entry, Grant, Witness
from core.witness import charge_lost, refuse_altered, require_ledger_in_sync
from service.auth import Principal
from service.budget.schemas import AccountView, Acknowledgement, Chain, NewGrant, Recomputed, Reread
from service.deps import commit_new, find_row
from service.jobs.actions import paid_events
from service.jobs.pricing import read, remaining
from service.jobs.schemas import Readings
from sluice.privacy.accountant import Accountant, epsilon
from sluice.privacy.events import Event, from_dict
from sluice.privacy.problems import TooCostlyToAccount
from sluice.privacy.relation import Relation

_CSV_COLUMNS = (
    "number", "at", "kind", "cost", "job", "renyi", "pld", "actor", "reason", "terms", "event", "previous",
    "digest",
)  # fmt: skip


class SecondPersonNeeded(Problem):
    status, slug, title = 403, "second-person-needed", "A second person has to confirm this"


class RestoreNeeded(Problem):
    status, slug, title = 409, "restore-needed", "Database lacks accounts or grants"


class GrantOpen(Problem):
    status, slug, title = 409, "grant-open", "Another proposal for this account is open"


def visible(principal: Principal) -> Select[Account]:
    """All accounts for an admin; for a curator, accounts of checked datasets that they work with.

    Unchecked datasets do not count: their hash is only claimed, and knowing a hash is not having the data.
    """
    if principal.is_admin:
        return select(Account)
    worked_with = (
        Dataset.account_id == Account.id,
        principal.works_with_dataset(),
        Dataset.state == DatasetState.READY,
    )
    return select(Account).where(exists().where(*worked_with))


def find(session: Session, principal: Principal, id: uuid.UUID) -> Account:
    return find_row(session, visible(principal).where(Account.id == id), "account")


def view(session: Session, account: Account, *, pld: bool = False) -> AccountView:
    paid = paid_events(session, account.id)
    if pld:
        spent = read(paid, delta=account.delta, relation=Relation(account.relation))
    else:
        spent = Readings(renyi=_epsilon(paid, account, Accountant.RENYI), pld=None)
    last = session.scalars(select(func.max(Entry.at)).where(Entry.account_id == account.id)).one()
    datasets = session.scalars(select(func.count()).where(Dataset.account_id == account.id)).one()
    return AccountView.from_row(
        account, granted=account.capacity, left=remaining(account, account.left), spent=spent,
        datasets=datasets, head=account.head.hex(), last_move_at=last or account.created_at,
    )  # fmt: skip


def chain(session: Session, account: Account) -> Chain:
    broken = ledger.verify(session, account)
    return Chain(ok=True) if broken is None else Chain(ok=False, broken_row=broken.number, why=broken.why)


def export_csv(session: Session, account: Account) -> Iterator[str]:
    """All rows as CSV, without cells that a spreadsheet would evaluate."""
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(_CSV_COLUMNS)
    for row in ledger.rows(session, account.id):
        readings = row["readings"] or {}
        flat = row | {"renyi": readings.get("renyi"), "pld": readings.get("pld")}
        writer.writerow([_inert(flat[name]) for name in _CSV_COLUMNS])
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
        raise ledger.BudgetNotRaised(f"The budget is already {account.epsilon:g}; give a larger epsilon.")
    grant = Grant(
        id=uuid.uuid4(), account_id=account.id, epsilon=body.epsilon, reason=body.reason,
        proposed_by=principal.id, proposed_at=datetime.now(UTC), state="proposed",
    )  # fmt: skip
    commit_new(session, grant, GrantOpen("Confirm or withdraw the open proposal first."))
    return grant


def confirm(session: Session, principal: Principal, account_id: uuid.UUID, grant_id: uuid.UUID) -> Grant:
    """Raises the budget as proposed. The proposer cannot confirm."""
    account, grant = find(session, principal, account_id), _grant(session, account_id, grant_id)
    if grant.state == "confirmed" and grant.decided_by == principal.id:
        return grant
    principal.require_second_person(
        session,
        grant.proposed_by,
        SecondPersonNeeded("You proposed it; ask another curator of this data, or an admin, to confirm."),
    )
    require_ledger_in_sync(session)
    _decide(session, principal, grant, "confirmed")
    move = principal.move(f"grant {grant.id}: {grant.reason}")
    ledger.raise_budget(session, account, epsilon=grant.epsilon, move=move)
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
    query = select(Grant).where(Grant.id == grant_id, Grant.account_id == account_id)
    return find_row(session, query, "proposal of this account")


def _decide(session: Session, principal: Principal, grant: Grant, state: str) -> None:
    undecided = update(Grant).where(Grant.id == grant.id, Grant.state == "proposed")
    values = {"state": state, "decided_by": principal.id, "decided_at": datetime.now(UTC)}
    if session.execute(undecided.values(values).returning(Grant.id)).one_or_none() is None:
        raise WrongState("The proposal was decided before.", state=grant.state)


def recompute(session: Session, account: Account, accountant: Accountant) -> Recomputed:
    """Computes the epsilon of every reservation again and compares it with the value stored then."""
    rows = []
    reserved = select(Entry).where(Entry.account_id == account.id, Entry.kind == "reserve")
    for entry in session.scalars(reserved.order_by(Entry.number)):
        stored = (entry.readings or {}).get(accountant.value)
        now = _epsilon((from_dict(entry.event),), account, accountant)
        if stored is None or now is None:
            same = stored is now
        else:
            same = abs(stored - now) <= 1e-9 * max(stored, now)
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
    """Charges the spending that a restored database lacks, as recorded by the witness."""
    row = session.scalars(select(Witness).with_for_update()).one()
    if row.behind is None or row.behind["generation"] != body.generation or row.behind.get("lost"):
        raise WrongState("The ledger is not behind a witness of this generation; fetch the witness again.")
    refuse_altered(row.behind)
    capacities = {str(id): capacity for id, capacity in session.execute(select(Account.id, Account.capacity))}
    if any(capacities.get(id, 0) < seen["capacity"] for id, seen in row.behind["accounts"].items()):
        raise RestoreNeeded("An account or a grant is missing; `sluice restore` restores and charges it.")
    charge_lost(session, row.behind["accounts"], principal.move(f"behind its witness: {body.reason}"))
    session.execute(update(Witness).values(acknowledged=body.generation))
    session.commit()
    session.refresh(row)
    return row
