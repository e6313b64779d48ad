"""Rules for releases: draft, approve, publish, withdraw. The database enforces them too: see migrations."""

import hashlib
import secrets
import uuid
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

from sqlalchemy import ColumnElement, Select, and_, delete, false, or_, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from core.errors import Forbidden, NotFound, Problem, WrongState
from core.people import Role
from core.stores.public import SIGNED_SECONDS, DownloadSigner, public_key, review_key
from core.tables import (
    Account,
    Approval,
    Dataset,
    Job,
    JobState,
    Person,
    Reader,
    Release,
    ReleaseState,
    ReviewCopy,
)
from core.witness import require_ledger_in_sync
from service.auth import Principal
from service.deps import find_row
from service.jobs.actions import find as find_job
from service.jobs.actions import require_synthesizer
from service.jobs.schemas import Readings
from service.releases import schemas
from sluice.methods import Output, find_method

ATTESTATION = "attestation.json"
PUBLISHED = (ReleaseState.PUBLISHED, ReleaseState.SUPERSEDED)
TOMBSTONES = (ReleaseState.WITHDRAWING, ReleaseState.WITHDRAWN)


class AuthorCannotApprove(Problem):
    status, slug, title = 403, "author-cannot-approve", "Authors cannot approve their own release"


class AnotherBundle(Problem):
    status, slug, title = 409, "approval-of-another-bundle", "Digest is not that of the bundle under review"


class NotApproved(Problem):
    status, slug, title = 409, "not-approved", "Bundle has not been approved"


class NoSamples(Problem):
    status, slug, title = 422, "no-samples", "A classifier has no samples"


class Withdrawn(Problem):
    status, slug, title = 410, "release-withdrawn", "Release was withdrawn"


def visible(principal: Principal) -> Select[Release]:
    """Releases published to a person, withdrawn or not, and all releases of datasets they work with."""
    granted = select(Reader.release_id).where(Reader.person_id == principal.id)
    published = and_(
        Release.published_at.is_not(None),
        or_(Release.audience == "everyone", Release.id.in_(granted)),
    )
    return select(Release).where(or_(published, works_on(principal)))


def works_on(principal: Principal) -> ColumnElement[bool]:
    """Condition for the releases a person may draft and review: those of datasets they work with."""
    if principal.role is Role.ANALYST:
        return false()
    return Release.job_id.in_(
        select(Job.id).join(Dataset, Dataset.id == Job.dataset_id).where(principal.works_with_dataset())
    )


def search(query: Select[Release], text: str) -> Select[Release]:
    fields = (Release.name, Release.note)
    return query.where(or_(*(field.icontains(text, autoescape=True) for field in fields)))


def find(session: Session, principal: Principal, id: uuid.UUID) -> Release:
    return find_row(session, visible(principal).where(Release.id == id), "release")


def view_all(session: Session, principal: Principal, rows: Sequence[Release]) -> list[schemas.ReleaseView]:
    """Releases as this person may see them; approvals only for those who work on the release."""
    worked_on = select(Release.id).where(Release.id.in_([row.id for row in rows]), works_on(principal))
    approvals: dict[uuid.UUID, list[schemas.ApprovalView]] = {id: [] for id in session.scalars(worked_on)}
    query = select(Approval).where(Approval.release_id.in_(approvals)).order_by(Approval.at)
    for row in session.scalars(query):
        approvals[row.release_id].append(schemas.ApprovalView.from_row(row, digest=row.digest.hex()))
    return [schemas.ReleaseView.of(row, approvals.get(row.id)) for row in rows]


def draft(session: Session, principal: Principal, body: schemas.NewRelease, *, reviewers: int) -> Release:
    """Requests a bundle. Sampling is post-processing and costs no budget, however often it is done."""
    require_ledger_in_sync(session)  # a release must not omit a charge that a restored database lacks
    job = find_job(session, principal, body.job)
    if job.state != JobState.TRAINED:
        raise WrongState("Only a trained job can be released; wait for it to finish.", state=job.state)
    require_synthesizer(session, job.id)
    if body.supersedes is not None:
        _require(_find_authored(session, principal, body.supersedes), ReleaseState.PUBLISHED)
    row = Release(
        id=uuid.uuid4(), job_id=job.id, author_id=principal.id, name=body.name, note=body.note,
        licence=body.licence, count=body.count,
        seed=secrets.randbelow(2**53) if body.seed is None else body.seed, formats=sorted(set(body.formats)),
        audience=body.audience, reviewers=reviewers, supersedes=body.supersedes,
        state=ReleaseState.BUILDING, build=1, fence=0, done=0, created_at=datetime.now(UTC),
    )  # fmt: skip
    if find_method(job.plan["kind"]).makes is Output.CLASSIFIER:
        if body.model_fields_set & {"count", "seed", "formats"}:
            raise NoSamples("Leave out count, seed and formats: a classifier is released without samples.")
        row.count, row.seed, row.formats = 0, 0, []
    session.add(row)
    session.flush()
    return row


def review(session: Session, principal: Principal, id: uuid.UUID) -> schemas.ReviewView:
    """The origin of a release for its reviewers: declared facts and costs, nothing measured on records."""
    row = _find_to_review(session, principal, id)
    jobs = [_reviewed_job(session, job) for job in _with_earlier(session, row.job_id)]
    return schemas.ReviewView.from_row(
        row, release=row.id, author=session.get_one(Person, row.author_id).name,
        digest=row.digest.hex() if row.digest else None, job=jobs[0], earlier=jobs[1:],
    )  # fmt: skip


def _with_earlier(session: Session, id: uuid.UUID | None) -> Iterator[Job]:
    """A job, and for a relay the jobs whose generators it continues, latest first."""
    while id is not None:
        job = session.get_one(Job, id)
        yield job
        id = job.after_id


def _reviewed_job(session: Session, job: Job) -> schemas.ReviewedJob:
    def card(id: uuid.UUID) -> schemas.DatasetCard:
        dataset = session.get_one(Dataset, id)
        account = session.get_one(Account, dataset.account_id)
        return schemas.DatasetCard.of(dataset, account, session.get_one(Person, dataset.owner_id).name)

    return schemas.ReviewedJob.from_row(
        job, epsilon=Readings.model_validate(job.readings), dataset=card(job.dataset_id),
        source=card(job.source_id) if job.source_id else None,
    )  # fmt: skip


def approve(session: Session, principal: Principal, id: uuid.UUID, *, digest: str, note: str) -> Release:
    """Records one person's approval of the bundle with this digest. Safe to repeat."""
    row = _find_to_review(session, principal, id)
    if row.reviewers > 1:
        refusal = AuthorCannotApprove("Ask another member of your team, or an admin, to review it.")
        principal.require_second_person(session, row.author_id, refusal)
    row = _lock(session, id)
    _require(row, ReleaseState.IN_REVIEW, ReleaseState.APPROVED)
    if row.digest is None or row.digest.hex() != digest:
        raise AnotherBundle("The bundle was rebuilt since; review it again and approve its current digest.")
    approval = insert(Approval).values(release_id=id, digest=row.digest, person_id=principal.id, note=note)
    session.execute(approval.on_conflict_do_nothing())
    row.state = ReleaseState.APPROVED
    session.commit()
    return row


def rebuild(session: Session, principal: Principal, id: uuid.UUID) -> Release:
    """Has the bundle built again; approvals of the old bundle no longer count."""
    row = _lock_authored(session, principal, id)
    _require(row, ReleaseState.IN_REVIEW, ReleaseState.APPROVED, ReleaseState.FAILED)
    require_synthesizer(session, row.job_id)
    row.state, row.build, row.fault = ReleaseState.BUILDING, row.build + 1, None
    row.digest, row.done, row.lease_until, row.attempts = None, 0, None, 0
    session.commit()
    return row


def discard(session: Session, principal: Principal, id: uuid.UUID) -> Release:
    row = _lock_authored(session, principal, id)
    _require(row, ReleaseState.BUILDING, ReleaseState.IN_REVIEW, ReleaseState.APPROVED, ReleaseState.FAILED)
    row.state = ReleaseState.DISCARDED
    session.commit()
    return row


def publish(session: Session, principal: Principal, id: uuid.UUID) -> Release:
    """Has the publisher sign and publish the approved bundle. Safe to repeat."""
    require_ledger_in_sync(session)
    row = _lock_authored(session, principal, id)
    if row.state in PUBLISHED:
        return row
    if row.state == ReleaseState.PUBLISHING:  # if it failed, the publisher tries again
        if row.fault is not None:
            row.attempts, row.lease_until = 0, None
            session.commit()
        return row
    if row.state == ReleaseState.IN_REVIEW:
        raise NotApproved("Ask another person to approve its digest first.")
    _require(row, ReleaseState.APPROVED)
    row.state, row.lease_until, row.attempts = ReleaseState.PUBLISHING, None, 0
    session.commit()
    return row


def withdraw(session: Session, principal: Principal, id: uuid.UUID, *, reason: str) -> Release:
    """Stops downloads; the publisher removes the files and signs the revocation list. Epsilon stays spent."""
    row = _lock_authored(session, principal, id)
    if row.state in TOMBSTONES:
        return row
    _require(row, ReleaseState.PUBLISHING, *PUBLISHED)
    row.state, row.reason, row.withdrawn_at = ReleaseState.WITHDRAWING, reason, datetime.now(UTC)
    row.lease_until, row.attempts = None, 0
    session.commit()
    return row


def add_reader(session: Session, principal: Principal, id: uuid.UUID, person: uuid.UUID) -> Release:
    row = _find_authored(session, principal, id)
    find_row(session, select(Person).where(Person.id == person), "person")
    session.execute(insert(Reader).values(release_id=id, person_id=person).on_conflict_do_nothing())
    session.commit()
    return row


def remove_reader(session: Session, principal: Principal, id: uuid.UUID, person: uuid.UUID) -> None:
    _find_authored(session, principal, id)
    session.execute(delete(Reader).where(and_(Reader.release_id == id, Reader.person_id == person)))
    session.commit()


def preview(session: Session, principal: Principal, id: uuid.UUID) -> bytes:
    row = _require_not_withdrawn(find(session, principal, id))
    if not row.formats:
        raise NotFound("A classifier has no preview; see the files of the release.")
    if row.digest is None or row.preview is None:
        raise WrongState("The release is not built yet.", state=row.state)
    return row.preview


def downloads(
    session: Session, principal: Principal, id: uuid.UUID, paths: list[str], signer: DownloadSigner
) -> schemas.Downloads:
    """Signed URLs of these files of a published release."""
    row = _require_not_withdrawn(find(session, principal, id))
    if row.state not in PUBLISHED or row.digest is None:
        raise WrongState("The release is not published yet.", state=row.state)
    files: dict[str, dict[str, Any]] = {file["path"]: file for file in row.files or ()}
    statement = (row.attestation or "").encode()
    sha256 = hashlib.sha256(statement).hexdigest()
    files[ATTESTATION] = {"path": ATTESTATION, "size": len(statement), "sha256": sha256}
    return _sign(files, paths, signer, partial(public_key, id, row.digest))


def review_downloads(
    session: Session, principal: Principal, id: uuid.UUID, paths: list[str], signer: DownloadSigner
) -> schemas.Downloads:
    """Signed URLs of files of the bundle under review: the bytes that the digest covers.

    They are samples of a model whose training was charged, so reading them costs no budget.
    """
    row = _find_to_review(session, principal, id)
    if row.state not in (ReleaseState.IN_REVIEW, ReleaseState.APPROVED) or row.digest is None:
        raise WrongState("No bundle is under review; use /downloads for a published one.", state=row.state)
    if session.get(ReviewCopy, (id, row.build, row.digest)) is None:
        raise WrongState("It was built before bundles were kept for review; rebuild it.", state=row.state)
    files = {file["path"]: file for file in row.files or ()}
    return _sign(files, paths, signer, partial(review_key, id, row.build, row.digest))


def _sign(
    files: dict[str, dict[str, Any]], paths: list[str], signer: DownloadSigner, key: Callable[[str], str]
) -> schemas.Downloads:
    if unknown := [path for path in paths if path not in files]:
        raise NotFound(f"{len(unknown)} of the paths are not files of this release.")
    signed = [schemas.Download(**files[path], url=signer.sign_download(key(path))) for path in paths]
    return schemas.Downloads(files=signed, expires_in=SIGNED_SECONDS)


def _require_not_withdrawn(row: Release) -> Release:
    if row.state in TOMBSTONES:
        raise Withdrawn("Delete your copies; `reason` says why. The epsilon stays spent.")
    return row


def _find_to_review(session: Session, principal: Principal, id: uuid.UUID) -> Release:
    row = find(session, principal, id)
    if session.scalars(select(Release.id).where(Release.id == id, works_on(principal))).one_or_none() is None:
        raise Forbidden("Only the team of its dataset, or an admin, may review a release.")
    return row


def _find_authored(session: Session, principal: Principal, id: uuid.UUID) -> Release:
    row = _find_to_review(session, principal, id)
    if not principal.is_admin and row.author_id != principal.id:
        raise Forbidden("Only the author or an admin may do this.")
    return row


def _lock_authored(session: Session, principal: Principal, id: uuid.UUID) -> Release:
    _find_authored(session, principal, id)
    return _lock(session, id)


def _lock(session: Session, id: uuid.UUID) -> Release:
    """Reads the row again and locks it until the transaction ends."""
    query = select(Release).where(Release.id == id).with_for_update()
    return session.scalars(query.execution_options(populate_existing=True)).one()


def _require(row: Release, *states: str) -> None:
    if row.state not in states:
        raise WrongState(f"This requires a release that is {' or '.join(states)}.", state=row.state)
