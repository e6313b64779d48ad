"""What can be done with datasets. The budget belongs to the people in the data: the private side binds it."""

import base64
import uuid
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime

from botocore.exceptions import BotoCoreError, ClientError
from sqlalchemy import Select, func, or_, select, update
from sqlalchemy.orm import Session

from core.errors import Forbidden, Invalid, NotFound, Problem, WrongState
from core.faults import Fault
from core.people import require_independent
from core.settings import ServiceSettings
from core.stores.uploads import PART_BYTES, Part, UploadGone, UploadStore
from core.tables import Account, Dataset, Job, Review
from service import quotas
from service.auth import Principal
from service.datasets.schemas import DatasetView, Decision, NewDataset, PartNumbers, Seal, UploadKey
from sluice.envelope import WrappingKey
from sluice.privacy.account import capacity, default_order
from sluice.privacy.problems import InvalidAccount


class AccountConflict(Problem):
    status, slug, title = 409, "account-conflict", "The data already belongs to another budget"


class SizeMismatch(Problem):
    status, slug, title = 409, "size-mismatch", "What arrived is not as long as declared"


class UploadTooLarge(Problem):
    status, slug, title = 413, "upload-too-large", "The file is larger than this site takes"


class SizeNeeded(Problem):
    status, slug, title = 422, "size-needed", "The size of the upload has to be declared"


class NotEncrypted(Problem):
    status, slug, title = 422, "not-encrypted", "Uploads are encrypted before they are sent"


class WrongUploadKey(Problem):
    status, slug, title = 409, "wrong-upload-key", "The upload is encrypted for another key"


class SharesPrivateRecords(Problem):
    status, slug, title = (
        409,
        "shares-private-records",
        "Records of a private dataset cannot be declared public",
    )


def visible(principal: Principal, *, deleted: bool = False) -> Select[tuple[Dataset]]:
    """A curator sees their own and their team's, an admin all; what is deleted only where it is asked for."""
    query = select(Dataset).where(principal.works_with_dataset())
    return query if deleted else query.where(Dataset.state != "deleted")


def find(session: Session, principal: Principal, id: uuid.UUID, *, deleted: bool = False) -> Dataset:
    found = session.scalars(visible(principal, deleted=deleted).where(Dataset.id == id)).one_or_none()
    if found is None:
        raise NotFound("No dataset of yours has this id.")
    return found


def find_own(session: Session, principal: Principal, id: uuid.UUID, *, deleted: bool = False) -> Dataset:
    """A dataset to upload into, seal or delete: its owner does that, and no team mate."""
    found = find(session, principal, id, deleted=deleted)
    if found.owner_id != principal.id:
        raise Forbidden("Only the owner of a dataset uploads, seals or deletes it.")
    return found


def viewed(session: Session, principal: Principal, rows: Sequence[Dataset]) -> list[DatasetView]:
    """Datasets as this person may see them, with the terms of the accounts they draw on."""
    ids = {row.account_id for row in rows if row.account_id}
    accounts = {
        account.id: account for account in session.scalars(select(Account).where(Account.id.in_(ids)))
    }
    counts = (
        select(Dataset.account_id, func.count())
        .where(Dataset.account_id.in_(ids))
        .group_by(Dataset.account_id)
    )
    shared = {id for id, count in session.execute(counts) if count > 1}
    decided = select(Review).where(Review.dataset_id.in_([row.id for row in rows]))
    reviews = {review.dataset_id: review for review in session.scalars(decided)}
    return [
        DatasetView.of(
            row,
            principal,
            account=accounts.get(row.account_id) if row.account_id else None,
            shared=row.account_id in shared,
            review=reviews.get(row.id),
        )
        for row in rows
    ]


def view(session: Session, principal: Principal, row: Dataset) -> DatasetView:
    return viewed(session, principal, [row])[0]


def ready(row: Dataset) -> Dataset:
    """Only a dataset whose records were read has an account to draw on."""
    if row.state == "held":
        raise WrongState("The dataset is held for review; an admin decides about it.", state=row.state)
    if row.state != "ready":
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
        parent_id=body.parent, public=body.public, over_cap=over_cap, state="draft", causes=[], matches=[],
        # Of our own making: a name given by a caller never becomes part of an address.
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
    current: WrappingKey,
    key: UploadKey | None,
) -> Dataset:
    """Begins, or finds the upload begun with this data key: a lost client goes on where it stopped."""
    row = find_own(session, principal, id)
    if row.state not in ("draft", "uploading"):
        return in_upload(row)
    if key is None:
        raise NotEncrypted(
            "Send key_id and wrapped_key: docs/api.md describes the format; sluice datasets upload does it."
        )
    wrapped = base64.b64decode(key.wrapped_key)
    same = row.state == "uploading" and row.wrapped_key == wrapped and row.key_id == key.key_id
    if same and not _gone(row, uploads):
        return row
    if key.key_id != current.id or len(wrapped) != current.wrapped_bytes:
        raise WrongUploadKey("Fetch /.well-known/sluice-upload-key.json and encrypt the data key with that.")
    before, upload = row.upload_id, uploads.begin(row.object_key)
    mine = update(Dataset).where(
        Dataset.id == id, Dataset.state == row.state, Dataset.upload_id.is_not_distinct_from(before)
    )
    values = {"state": "uploading", "upload_id": upload, "key_id": key.key_id, "wrapped_key": wrapped}
    begun = session.execute(mine.values(**values).returning(Dataset.id)).one_or_none()
    session.commit()
    given_up = upload if begun is None else before  # None: somebody else began at the same moment
    if given_up:
        uploads.abandon(row.object_key, given_up)
    session.refresh(row)
    if row.wrapped_key != wrapped:
        raise WrongState("The upload was begun with another key just now; begin again.", state=row.state)
    return in_upload(row)


def _gone(row: Dataset, uploads: UploadStore) -> bool:
    """Stores give up uploads that nobody finishes; then there is nothing left to go on with."""
    try:
        uploads.parts(row.object_key, row.upload_id or "")
    except UploadGone:
        return True
    return False


def in_upload(row: Dataset) -> Dataset:
    if row.state == "draft":
        raise WrongState("No upload was begun; POST to /upload first.", state=row.state)
    if row.state != "uploading":
        raise WrongState("The content is sealed and stays as it is; register a new dataset.", state=row.state)
    return row


def declare_size(
    session: Session, principal: Principal, id: uuid.UUID, body: PartNumbers, settings: ServiceSettings
) -> Dataset:
    """Where bytes are limited: the size of an upload counts before its first part is signed, and binds it."""
    row = in_upload(find_own(session, principal, id))
    if row.declared_bytes is None and quotas.of_dataset(session, row, settings).bytes is not None:
        if body.size is None:
            raise SizeNeeded("Give the `size` of the whole file: your team has a quota of bytes.")
        quotas.require_room(session, row, body.size, settings)
        said = update(Dataset).where(Dataset.id == id, Dataset.declared_bytes.is_(None))
        session.execute(said.values(declared_bytes=body.size))
        session.commit()
        session.refresh(row)
    if row.declared_bytes is not None:
        if body.size not in (None, row.declared_bytes):
            raise WrongState("Another size was declared for this upload; delete the dataset and start over.")
        if max(body.numbers) > -(-row.declared_bytes // PART_BYTES):
            raise SizeMismatch("The file has fewer parts than that; sign those it has.")
    return row


def seal(
    session: Session,
    principal: Principal,
    id: uuid.UUID,
    body: Seal,
    uploads: UploadStore,
    settings: ServiceSettings,
) -> Dataset:
    """Fixes what was sent, under the hash that is claimed for it.

    Whose records these are is found out by reading them later: the answer is the same whatever the claim.
    """
    row = find_own(session, principal, id)
    sha256 = bytes.fromhex(body.sha256)
    if row.sealed_at is not None and (row.sha256, row.size) == (sha256, body.size):
        if row.state == "checking":  # said again, perhaps because the first time was cut off here
            with suppress(UploadGone):
                uploads.complete(row.object_key, row.upload_id or "", _arrived(row, body.size, uploads))
        return row
    in_upload(row)
    if body.size > settings.upload_bytes_max:
        raise UploadTooLarge(
            "Delete this dataset and divide the file, or ask the operator to raise SLUICE_UPLOAD_BYTES_MAX.",
            most_bytes=settings.upload_bytes_max,
        )
    if row.wrapped_key is None:  # begun before uploads were encrypted
        raise NotEncrypted("Begin again: POST key_id and wrapped_key to /upload, and send all parts anew.")
    parts = _arrived(row, body.size, uploads)
    _require_parent(session, row)
    quotas.require_room(session, row, body.size, settings)
    sealed = (
        update(Dataset)
        .where(Dataset.id == id, Dataset.state == "uploading", Dataset.upload_id == row.upload_id)
        .values(state="checking", size=body.size, sha256=sha256, sealed_at=datetime.now(UTC))
    )
    if session.execute(sealed.returning(Dataset.id)).one_or_none() is None:
        raise WrongState("The dataset was sealed or deleted just now; look at it again.")
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
    account = session.get_one(Account, parent.account_id)
    if account.relation != row.relation:
        raise AccountConflict(
            f"These people have a budget under {account.relation}; register the data with that relation."
        )


def decide(session: Session, principal: Principal, id: uuid.UUID, body: Decision) -> Dataset:
    """A second person's decision about a held dataset; the private side carries it out."""
    row = session.scalars(
        select(Dataset).where(Dataset.id == id, Dataset.state != "deleted").with_for_update()
    ).one_or_none()
    if row is None:
        raise NotFound("No dataset has this id.")
    if row.state != "held":
        raise WrongState("Only a dataset that is held waits for a decision.", state=row.state)
    if body.decision != "reject" or row.owner_id == principal.id:
        require_independent(session, row.owner_id, principal.id)
    if body.decision == "join":
        account = session.get(Account, body.account)
        if account is None:
            raise NotFound("No account has this id.")
        if account.relation != row.relation:
            raise AccountConflict(
                f"The account is under {account.relation}; reject this, and have it registered so."
            )
    if row.public and body.decision != "reject":
        _require_nothing_private(session, row, body)
    session.add(
        Review(
            dataset_id=id,
            decision=body.decision,
            account_id=body.account,
            reason=body.reason,
            decided_by=principal.id,
        )
    )
    session.flush()
    if body.decision == "reject":
        row.state, row.fault = "rejected", Fault.NOT_ACCEPTED.value
    else:
        row.state = "checking"
    session.commit()
    return row


def _require_nothing_private(session: Session, row: Dataset, body: Decision) -> None:
    """What a public dataset tells is never charged: it must hold no record that anybody keeps private."""
    others = [uuid.UUID(match["dataset"]) for match in row.matches]
    public = set(session.scalars(select(Dataset.id).where(Dataset.id.in_(others), Dataset.public)))
    if body.decision == "join" or set(others) - public:
        raise SharesPrivateRecords(
            "Reject it; its owner can register it as private, on the budget of these people."
        )


def delete(
    session: Session, principal: Principal, id: uuid.UUID, uploads: UploadStore, reason: str | None
) -> Dataset:
    """Ends a dataset in whatever state it is; the private side removes its bytes. Safe to repeat.

    Its account, and what was spent, stay.
    """
    row = (find if principal.is_admin else find_own)(session, principal, id, deleted=True)
    if principal.is_admin and not reason:
        raise Invalid("Say why: add ?reason= to the address. The owner of the dataset is shown it.")
    # First the row's lock, which a job that starts takes too; then a look for jobs.
    session.refresh(row, with_for_update=True)
    if row.state != "deleted":
        uses = or_(Job.dataset_id == id, Job.source_id == id)
        busy = session.scalars(select(Job.id).where(uses, Job.state.in_(("queued", "running")))).all()
        if busy:
            raise WrongState(
                "Jobs work on this dataset: let them end, or cancel them with POST /v1/jobs/ID/cancel.",
                jobs=[str(job) for job in busy],
            )
        row.state, row.deleted_by, row.deletion_reason = "deleted", principal.id, reason
        session.commit()
        session.refresh(row)
    if row.upload_id and row.removed_at is None:
        # Signed addresses stop working now; if the store does not answer, the private side aborts it.
        with suppress(BotoCoreError, ClientError):
            uploads.abandon(row.object_key, row.upload_id)
    return row
