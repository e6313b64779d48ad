"""Rules for datasets. The train worker binds a dataset to a budget account after it has read the records."""

import base64
import uuid
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime

from botocore.exceptions import BotoCoreError, ClientError
from sqlalchemy import Select, func, or_, select, update
from sqlalchemy.orm import Session

from core.errors import Forbidden, Invalid, Problem, WrongState
from core.faults import Fault
from core.people import require_independent
from core.settings import ServiceSettings
from core.stores.uploads import PART_BYTES, Part, UploadGone, UploadStore
from core.tables import UNFINISHED_JOBS, Account, Dataset, DatasetState, Job, Review
from service import quotas
from service.auth import Principal
from service.datasets.schemas import DatasetView, Decision, NewDataset, PartNumbers, Seal, UploadKey
from service.deps import find_row
from sluice.envelope import WrappingKey
from sluice.privacy.account import capacity, default_order
from sluice.privacy.problems import InvalidAccount


class AccountConflict(Problem):
    status, slug, title = 409, "account-conflict", "Account has another relation"


class SizeMismatch(Problem):
    status, slug, title = 409, "size-mismatch", "Uploaded size differs from the declared size"


class UploadTooLarge(Problem):
    status, slug, title = 413, "upload-too-large", "File exceeds the site's limit"


class SizeNeeded(Problem):
    status, slug, title = 422, "size-needed", "Upload size required"


class NotEncrypted(Problem):
    status, slug, title = 422, "not-encrypted", "Uploads must be encrypted"


class WrongUploadKey(Problem):
    status, slug, title = 409, "wrong-upload-key", "Upload is encrypted for another key"


class SharesPrivateRecords(Problem):
    status, slug, title = 409, "shares-private-records", "Public dataset contains private records"


def visible(principal: Principal, *, deleted: bool = False) -> Select[Dataset]:
    """Datasets of a curator and their team, or all for an admin; deleted ones only if asked for."""
    query = select(Dataset).where(principal.works_with_dataset())
    return query if deleted else query.where(Dataset.state != DatasetState.DELETED)


def find(session: Session, principal: Principal, id: uuid.UUID, *, deleted: bool = False) -> Dataset:
    return find_row(session, visible(principal, deleted=deleted).where(Dataset.id == id), "dataset")


def find_own(session: Session, principal: Principal, id: uuid.UUID, *, deleted: bool = False) -> Dataset:
    """A dataset to upload to, seal or delete, which only its owner may do and no other team member."""
    row = find(session, principal, id, deleted=deleted)
    if row.owner_id != principal.id:
        raise Forbidden("Only the owner of a dataset may upload, seal or delete it.")
    return row


def view_all(session: Session, principal: Principal, rows: Sequence[Dataset]) -> list[DatasetView]:
    """Datasets as this person may see them, with the budgets of their accounts."""
    ids = {row.account_id for row in rows if row.account_id}
    accounts = {row.id: row for row in session.scalars(select(Account).where(Account.id.in_(ids)))}
    uses = select(Dataset.account_id, func.count()).where(Dataset.account_id.in_(ids))
    shared = {id for id, count in session.execute(uses.group_by(Dataset.account_id)) if count > 1}
    of_rows = select(Review).where(Review.dataset_id.in_([row.id for row in rows]))
    reviews = {review.dataset_id: review for review in session.scalars(of_rows)}
    return [
        DatasetView.of(
            row, principal, account=accounts.get(row.account_id) if row.account_id else None,
            shared=row.account_id in shared, review=reviews.get(row.id),
        )
        for row in rows
    ]  # fmt: skip


def view(session: Session, principal: Principal, row: Dataset) -> DatasetView:
    return view_all(session, principal, [row])[0]


def ready(row: Dataset) -> Dataset:
    """Requires that the records were checked: only then does the dataset have an account to charge."""
    if row.state == DatasetState.HELD:
        raise WrongState("The dataset is held for review by an admin.", state=row.state)
    if row.state != DatasetState.READY:
        raise WrongState("The dataset is not ready; seal it and wait for its check.", state=row.state)
    return row


def register(session: Session, principal: Principal, body: NewDataset, caps: ServiceSettings) -> Dataset:
    budget = body.budget
    over_cap = (
        budget.epsilon > caps.cap_epsilon
        or budget.delta > caps.cap_delta
        or budget.delta * body.nominal_size > caps.cap_delta_times_records
    )
    if body.parent is not None:
        find(session, principal, body.parent)
    order = budget.order or default_order(budget.epsilon, budget.delta)
    if capacity(budget.epsilon, budget.delta, order) == 0:
        raise InvalidAccount("This budget has no room at this order; leave the order out, or raise epsilon.")
    row = Dataset(
        id=uuid.uuid4(), owner_id=principal.id, name=body.name,
        schema=body.data_schema.model_dump(mode="json"), nominal_size=body.nominal_size,
        relation=body.relation, epsilon=budget.epsilon, delta=budget.delta, order=order,
        parent_id=body.parent, public=body.public, over_cap=over_cap,
        state=DatasetState.DRAFT, causes=[], matches=[],
        # Random: text of a caller never becomes part of an object's address.
        object_key=f"datasets/{uuid.uuid4().hex}", created_at=datetime.now(UTC),
    )  # fmt: skip
    session.add(row)
    session.flush()
    return row


def begin_upload(
    session: Session,
    principal: Principal,
    id: uuid.UUID,
    uploads: UploadStore,
    *,
    current: WrappingKey,
    key: UploadKey | None,
) -> Dataset:
    """Begins an upload, or returns the one begun with this data key so that a client can resume it."""
    row = find_own(session, principal, id)
    if row.state not in (DatasetState.DRAFT, DatasetState.UPLOADING):
        return require_uploading(row)
    if key is None:
        raise NotEncrypted(
            "Send key_id and wrapped_key: docs/api.md describes the format; sluice datasets upload does it."
        )
    wrapped = base64.b64decode(key.wrapped_key)
    same = row.state == DatasetState.UPLOADING and row.wrapped_key == wrapped and row.key_id == key.key_id
    if same and not _expired(row, uploads):
        return row
    if key.key_id != current.id or len(wrapped) != current.wrapped_bytes:
        raise WrongUploadKey("Fetch /.well-known/sluice-upload-key.json and encrypt the data key with it.")
    before, upload = row.upload_id, uploads.begin(row.object_key)
    unchanged = update(Dataset).where(
        Dataset.id == id, Dataset.state == row.state, Dataset.upload_id.is_not_distinct_from(before)
    )
    begin = unchanged.values(
        state=DatasetState.UPLOADING, upload_id=upload, key_id=key.key_id, wrapped_key=wrapped
    )
    begun = session.execute(begin.returning(Dataset.id)).one_or_none()
    session.commit()
    unused = upload if begun is None else before  # None: a concurrent request began one first
    if unused:
        uploads.abandon(row.object_key, unused)
    session.refresh(row)
    if row.wrapped_key != wrapped:
        raise WrongState(
            "A concurrent request began the upload with another key; begin again.", state=row.state
        )
    return require_uploading(row)


def _expired(row: Dataset, uploads: UploadStore) -> bool:
    """Stores remove unfinished uploads after some time; such an upload cannot be resumed."""
    try:
        uploads.parts(row.object_key, row.upload_id or "")
    except UploadGone:
        return True
    return False


def require_uploading(row: Dataset) -> Dataset:
    if row.state == DatasetState.DRAFT:
        raise WrongState("No upload was begun; POST to /upload first.", state=row.state)
    if row.state != DatasetState.UPLOADING:
        raise WrongState("The content is sealed and cannot change; register a new dataset.", state=row.state)
    return row


def declare_size(
    session: Session, principal: Principal, id: uuid.UUID, body: PartNumbers, settings: ServiceSettings
) -> Dataset:
    """If bytes are limited, counts the size against the quota before the first part is signed."""
    row = require_uploading(find_own(session, principal, id))
    if row.declared_bytes is None and quotas.of_dataset(session, row, settings).bytes is not None:
        if body.size is None:
            raise SizeNeeded("Give the `size` of the whole file: your team has a quota of bytes.")
        quotas.require_room(session, row, body.size, settings)
        undeclared = update(Dataset).where(Dataset.id == id, Dataset.declared_bytes.is_(None))
        session.execute(undeclared.values(declared_bytes=body.size))
        session.commit()
        session.refresh(row)
    if row.declared_bytes is not None:
        if body.size not in (None, row.declared_bytes):
            raise WrongState("Another size was declared for this upload; delete the dataset and start over.")
        if max(body.numbers) > -(-row.declared_bytes // PART_BYTES):
            raise SizeMismatch("A file of the declared size has fewer parts.")
    return row


def seal(
    session: Session,
    principal: Principal,
    id: uuid.UUID,
    body: Seal,
    uploads: UploadStore,
    settings: ServiceSettings,
) -> Dataset:
    """Fixes the uploaded content under the hash claimed for it.

    The response is the same whatever the hash: the worker finds out whose records these are by reading them.
    """
    row = find_own(session, principal, id)
    sha256 = bytes.fromhex(body.sha256)
    if row.sealed_at is not None and (row.sha256, row.size) == (sha256, body.size):
        # A repeated request: the first may have been interrupted before this.
        if row.state == DatasetState.CHECKING:
            with suppress(UploadGone):
                uploads.complete(row.object_key, row.upload_id or "", _arrived(row, body.size, uploads))
        return row
    require_uploading(row)
    if body.size > settings.upload_bytes_max:
        raise UploadTooLarge(
            "Delete this dataset and divide the file, or ask the operator to raise SLUICE_UPLOAD_BYTES_MAX.",
            most_bytes=settings.upload_bytes_max,
        )
    if row.wrapped_key is None:  # begun by a version that did not encrypt uploads
        raise NotEncrypted("Begin again: POST key_id and wrapped_key to /upload, and send all parts again.")
    parts = _arrived(row, body.size, uploads)
    _require_parent(session, row)
    quotas.require_room(session, row, body.size, settings)
    sealed = (
        update(Dataset)
        .where(Dataset.id == id, Dataset.state == DatasetState.UPLOADING, Dataset.upload_id == row.upload_id)
        .values(state=DatasetState.CHECKING, size=body.size, sha256=sha256, sealed_at=datetime.now(UTC))
    )
    if session.execute(sealed.returning(Dataset.id)).one_or_none() is None:
        raise WrongState("A concurrent request sealed or deleted the dataset; fetch it again.")
    session.commit()
    uploads.complete(row.object_key, row.upload_id or "", parts)
    session.refresh(row)
    return row


def _arrived(row: Dataset, size: int, uploads: UploadStore) -> list[Part]:
    parts = uploads.parts(row.object_key, row.upload_id or "")
    arrived = sum(part.size for part in parts)
    if arrived != size:
        raise SizeMismatch("Send the missing parts, or seal with the true size.", arrived=arrived)
    return parts


def _require_parent(session: Session, row: Dataset) -> None:
    parent = session.get(Dataset, row.parent_id) if row.parent_id else None
    if parent is None:
        return
    if parent.account_id is None:
        raise WrongState("The parent dataset is not ready yet; wait for its check.")
    _require_relation(session.get_one(Account, parent.account_id), row)


def _require_relation(account: Account, row: Dataset) -> None:
    if account.relation != row.relation:
        raise AccountConflict(
            f"The account is under {account.relation}; register the data with that relation."
        )


def decide(session: Session, principal: Principal, id: uuid.UUID, body: Decision) -> Dataset:
    """Records an admin's decision about a held dataset; the train worker carries it out."""
    query = select(Dataset).where(Dataset.id == id, Dataset.state != DatasetState.DELETED).with_for_update()
    row = find_row(session, query, "dataset")
    if row.state != DatasetState.HELD:
        raise WrongState("Only a held dataset can be decided about.", state=row.state)
    if body.decision != "reject" or row.owner_id == principal.id:
        require_independent(session, row.owner_id, principal.id)
    if body.decision == "join":
        _require_relation(
            find_row(session, select(Account).where(Account.id == body.account), "account"), row
        )
    if row.public and body.decision != "reject":
        _require_nothing_private(session, row, body)
    review = Review(
        dataset_id=id, decision=body.decision, account_id=body.account, reason=body.reason,
        decided_by=principal.id,
    )  # fmt: skip
    session.add(review)
    session.flush()
    if body.decision == "reject":
        row.state, row.fault = DatasetState.REJECTED, Fault.NOT_ACCEPTED.value
    else:
        row.state = DatasetState.CHECKING
    session.commit()
    return row


def _require_nothing_private(session: Session, row: Dataset, body: Decision) -> None:
    """Training on a public dataset is never charged, so it must not hold a record of a private one."""
    others = [uuid.UUID(match["dataset"]) for match in row.matches]
    public = set(session.scalars(select(Dataset.id).where(Dataset.id.in_(others), Dataset.public)))
    if body.decision == "join" or set(others) - public:
        raise SharesPrivateRecords(
            "Reject it; its owner can register it as private, on the budget of these people."
        )


def delete(
    session: Session, principal: Principal, id: uuid.UUID, uploads: UploadStore, reason: str | None
) -> Dataset:
    """Deletes a dataset in any state; the train worker removes its bytes. Safe to repeat.

    The account and what was spent stay.
    """
    row = (find if principal.is_admin else find_own)(session, principal, id, deleted=True)
    if principal.is_admin and not reason:
        raise Invalid("Give a reason: add ?reason= to the URL. It is shown to the owner of the dataset.")
    # The row is locked before jobs are looked for: a starting job takes the same lock.
    session.refresh(row, with_for_update=True)
    if row.state != DatasetState.DELETED:
        uses = or_(Job.dataset_id == id, Job.source_id == id)
        busy = session.scalars(select(Job.id).where(uses, Job.state.in_(UNFINISHED_JOBS))).all()
        if busy:
            raise WrongState(
                "Jobs use this dataset: wait for them, or cancel them with POST /v1/jobs/ID/cancel.",
                jobs=[str(job) for job in busy],
            )
        row.state, row.deleted_by, row.deletion_reason = DatasetState.DELETED, principal.id, reason
        session.commit()
        session.refresh(row)
    if row.upload_id and row.removed_at is None:
        # Invalidates signed URLs at once; if the store does not answer, the train worker does it later.
        with suppress(BotoCoreError, ClientError):
            uploads.abandon(row.object_key, row.upload_id)
    return row
