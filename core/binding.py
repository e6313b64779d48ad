"""Assigns a checked dataset to a budget account, or holds it until a second person has decided.

Guarantee: a dataset gets an account only after its records were read. Records that are also in another
account get a budget of their own only if a second person gives a reason.
docs/guarantees.md#records-and-accounts
"""

import uuid
from collections.abc import Mapping
from typing import Any

from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from core import ledger
from core.faults import Fault
from core.ledger import Move
from core.tables import Account, Dataset, DatasetState, Review
from core.witness import require_ledger_in_sync
from sluice.privacy.relation import Relation


def bind(
    session: Session,
    dataset_id: uuid.UUID,
    *,
    overlaps: Mapping[uuid.UUID, float],
    few: bool,
    report: dict[str, Any],
    accounts: Mapping[uuid.UUID, uuid.UUID] | None = None,
) -> str | None:
    """Ends the check of a dataset whose file is as declared: `ready` or `held`; None if it is not `checking`.

    `overlaps` is the share of records in common with other datasets, 0 if unknown; `accounts` are those of
    datasets that are not in this database.
    """
    row = _waiting(session, dataset_id)
    if row is None:
        return None
    rows = session.execute(select(Dataset.id, Dataset.account_id).where(Dataset.id.in_(overlaps)))
    known: dict[uuid.UUID, uuid.UUID | None] = {row.id: row.account_id for row in rows}
    found = {id: known.get(id) or (accounts or {}).get(id) for id in overlaps}
    own = _own_account(session, row, set(found.values()))
    reasons = {
        "public": row.public,
        "overlap": any(account is None or account != own for account in found.values()),
        "budget": own is None and row.over_cap,
        "few": own is None and few,
    }
    causes = [name for name, holds in reasons.items() if holds]
    if causes:
        matches = [
            {"dataset": str(id), "account": account and str(account), "share": _words(overlaps[id])}
            for id, account in found.items()
        ]
        return _write(
            session, row, state=DatasetState.HELD, causes=causes, matches=matches, report=report, attempts=0
        )
    account = own or _new_account(session, row, "dataset")
    return _write(session, row, state=DatasetState.READY, account_id=account, report=report)


def bind_decided(session: Session, dataset_id: uuid.UUID) -> str | None:
    """Makes a held dataset ready after its review; None if there is no decision or it is not `checking`."""
    review = session.get(Review, dataset_id)
    row = _waiting(session, dataset_id) if review and review.decision != "reject" else None
    if review is None or row is None:
        return None
    parent = session.get(Dataset, row.parent_id) if row.parent_id else None
    account = row.account_id or review.account_id or (parent.account_id if parent else None)
    account = account or _new_account(session, row, "accepted dataset")
    return _write(session, row, state=DatasetState.READY, account_id=account)


def reject(session: Session, dataset_id: uuid.UUID, fault: Fault) -> str | None:
    """Ends the check of a file that is not as declared; it gets no account."""
    row = _waiting(session, dataset_id)
    return _write(session, row, state=DatasetState.REJECTED, fault=fault.value) if row else None


def _waiting(session: Session, dataset_id: uuid.UUID) -> Dataset | None:
    waiting = select(Dataset).where(Dataset.id == dataset_id, Dataset.state == DatasetState.CHECKING)
    return session.scalars(waiting.with_for_update()).one_or_none()


def _own_account(session: Session, row: Dataset, found: set[uuid.UUID | None]) -> uuid.UUID | None:
    """The account of the parent dataset, or the only overlapping one if the owner has a dataset on it."""
    if row.account_id is not None:  # bound when it was sealed, by an older version
        return row.account_id
    if row.parent_id is not None:
        return session.get_one(Dataset, row.parent_id).account_id
    only = next(iter(found)) if len(found) == 1 else None
    if only is None or row.public:
        return None
    mine = (Dataset.account_id == only, Dataset.owner_id == row.owner_id, Dataset.public.is_(False))
    shared = (
        select(Account.id)
        .join(Dataset, Dataset.account_id == Account.id)
        .where(*mine, Account.relation == row.relation)
    )
    return session.scalars(shared.limit(1)).one_or_none()


def _new_account(session: Session, row: Dataset, what: str) -> uuid.UUID:
    require_ledger_in_sync(session)
    account = ledger.open_account(
        session,
        relation=Relation(row.relation),
        epsilon=row.epsilon,
        delta=row.delta,
        order=row.order,
        move=Move(actor="train", reason=f"{what} {row.id}"),
    )
    return account.id


def _write(session: Session, row: Dataset, *, state: str, **values: Any) -> str:
    change = update(Dataset).where(Dataset.id == row.id)
    session.execute(
        change.values({"state": state, "checked_at": func.now(), "fault": None, "retry_at": None} | values)
    )
    return state


def _words(share: float) -> str:
    """The share in words for the reviewer, without a count of records. 0: not compared."""
    if not share:
        return "unknown"
    return "most" if share > 0.5 else "many" if share > 0.1 else "some"
