"""What can be done with datasets. The budget belongs to the people in the data, not to the row."""

import uuid
from contextlib import suppress
from datetime import UTC, datetime

from sqlalchemy import Select, or_, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from core import ledger
from core.errors import NotFound, Problem, WrongState
from core.people import Role
from core.stores.inbox import Inbox, UploadGone
from core.tables import Account, Content, Dataset, Job
from core.witness import require_level
from privacy.account import capacity, default_order
from privacy.problems import InvalidAccount
from privacy.relation import Relation
from service.auth import Who
from service.datasets.schemas import NewDataset, Seal


class AccountConflict(Problem):
    status, slug, title = 409, "account-conflict", "The data already belongs to another budget"


class SizeMismatch(Problem):
    status, slug, title = 409, "size-mismatch", "What arrived is not as long as declared"


def visible(who: Who) -> Select[tuple[Dataset]]:
    """A curator sees their own, an admin all; what is deleted is gone for both."""
    query = select(Dataset).where(Dataset.state != "deleted")
    return query if who.role is Role.ADMIN else query.where(Dataset.owner_id == who.id)


def find(session: Session, who: Who, id: uuid.UUID) -> Dataset:
    found = session.scalars(visible(who).where(Dataset.id == id)).one_or_none()
    if found is None:
        raise NotFound("No dataset of yours has this id.")
    return found


def ready(row: Dataset) -> Dataset:
    """Until its content is checked, a dataset only claims the hash that led to its account."""
    if row.state != "ready":
        raise WrongState("The dataset is not ready; seal it and wait for its check.", state=row.state)
    return row


def register(session: Session, who: Who, body: NewDataset) -> Dataset:
    budget = body.budget
    if body.parent is not None:
        find(session, who, body.parent)
    order = budget.order or default_order(budget.epsilon, budget.delta)
    if capacity(budget.epsilon, budget.delta, order) == 0:
        raise InvalidAccount("This budget has no room at this order; leave the order out, or raise epsilon.")
    row = Dataset(
        id=uuid.uuid4(), owner_id=who.id, name=body.name, schema=body.data_schema.model_dump(mode="json"),
        nominal_size=body.nominal_size, relation=body.relation, epsilon=budget.epsilon, delta=budget.delta,
        order=order, parent_id=body.parent, public=body.public, state="draft",
        # Of our own making: a name given by a caller never becomes part of an address.
        object_key=f"datasets/{uuid.uuid4().hex}", created_at=datetime.now(UTC),
    )  # fmt: skip
    session.add(row)
    session.flush()
    return row


def begin_upload(session: Session, who: Who, id: uuid.UUID, inbox: Inbox) -> Dataset:
    """Begins, or finds the upload that was begun: a lost client goes on where it stopped."""
    row = find(session, who, id)
    if row.state == "draft" or (row.state == "uploading" and _gone(row, inbox)):
        upload = inbox.begin(row.object_key)
        mine = update(Dataset).where(
            Dataset.id == id,
            Dataset.state == row.state,
            Dataset.upload_id.is_not_distinct_from(row.upload_id),
        )
        begun = session.execute(
            mine.values(state="uploading", upload_id=upload).returning(Dataset.id)
        ).one_or_none()
        session.commit()
        if begun is None:  # somebody else began at the same moment
            inbox.abandon(row.object_key, upload)
        session.refresh(row)
    return in_upload(row)


def _gone(row: Dataset, inbox: Inbox) -> bool:
    """Stores give up uploads that nobody finishes; then there is nothing left to go on with."""
    try:
        inbox.parts(row.object_key, row.upload_id or "")
    except UploadGone:
        return True
    return False


def in_upload(row: Dataset) -> Dataset:
    if row.state == "draft":
        raise WrongState("No upload was begun; POST to /upload first.", state=row.state)
    if row.state != "uploading":
        raise WrongState("The content is sealed and stays as it is; register a new dataset.", state=row.state)
    return row


def seal(session: Session, who: Who, id: uuid.UUID, body: Seal, inbox: Inbox) -> Dataset:
    """Fixes content, relation and budget, and finds the account of the people in the data."""
    row = find(session, who, id)
    sha256 = bytes.fromhex(body.sha256)
    upload_id = row.upload_id or ""
    if row.sealed_at is not None and (row.sha256, row.size) == (sha256, body.size):
        if row.state == "checking":  # said again, perhaps because the first time was cut off here
            with suppress(UploadGone):
                inbox.complete(row.object_key, upload_id, inbox.parts(row.object_key, upload_id))
        return row
    in_upload(row)
    parts = inbox.parts(row.object_key, upload_id)
    arrived = sum(part.size for part in parts)
    if arrived != body.size:
        raise SizeMismatch("Send the missing parts, or seal with the true size.", arrived=arrived)
    require_level(session)
    account = _account_of(session, who, row, sha256)
    sealed = (
        update(Dataset)
        .where(Dataset.id == id, Dataset.state == "uploading")
        .values(
            state="checking",
            account_id=account.id,
            size=body.size,
            sha256=sha256,
            sealed_at=datetime.now(UTC),
        )
    )
    if session.execute(sealed.returning(Dataset.id)).one_or_none() is None:
        raise WrongState("The dataset was sealed or deleted just now; look at it again.")
    session.commit()
    inbox.complete(row.object_key, upload_id, parts)
    session.refresh(row)
    return row


def _account_of(session: Session, who: Who, row: Dataset, sha256: bytes) -> Account:
    """The parent's account, or that of the same content, or a new one; never two for the same people."""
    parent = session.get(Dataset, row.parent_id) if row.parent_id else None
    if parent is not None and parent.account_id is None:
        raise WrongState("The parent dataset is not sealed yet; seal it first.")
    known = session.get(Content, sha256)
    if parent is not None and known is not None and parent.account_id != known.account_id:
        raise AccountConflict(
            "This content and the named parent have different budgets; leave the parent out."
        )
    shared = known or parent
    account = session.get_one(Account, shared.account_id) if shared else _new_account(session, who, row)
    if account.relation != row.relation:
        raise AccountConflict(
            f"These people have a budget under {account.relation}; register the data with that relation."
        )
    if known is None:
        kept = insert(Content).values(sha256=sha256, account_id=account.id).on_conflict_do_nothing()
        if session.execute(kept.returning(Content.account_id)).one_or_none() is None:
            raise WrongState("The same content was sealed elsewhere just now; seal again.")
    return account


def _new_account(session: Session, who: Who, row: Dataset) -> Account:
    return ledger.open_account(
        session,
        relation=Relation(row.relation),
        epsilon=row.epsilon,
        delta=row.delta,
        order=row.order,
        move=who.move(f"dataset {row.id} registered"),
    )


def delete(session: Session, who: Who, id: uuid.UUID, inbox: Inbox) -> None:
    """Hides the dataset; its account and what was spent stay."""
    row = find(session, who, id)
    uploading = row.state == "uploading"
    # First the row's lock, which a job that starts takes too; then a look for jobs.
    session.execute(update(Dataset).where(Dataset.id == id).values(state="deleted"))
    uses = or_(Job.dataset_id == id, Job.source_id == id)
    busy = select(Job.id).where(uses, Job.state.in_(("queued", "running"))).limit(1)
    if session.scalars(busy).one_or_none() is not None:
        raise WrongState("A job works on this dataset; cancel it or let it end first.")
    if uploading and row.upload_id:
        inbox.abandon(row.object_key, row.upload_id)
    session.commit()
