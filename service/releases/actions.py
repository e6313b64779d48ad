"""Draft, approve, publish, withdraw. The database holds to the same rules: see migrations."""

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
from core.people import Role, require_independent
from core.stores.public import SIGNED_SECONDS, DownloadSigner, public_key, review_key
from core.tables import Account, Approval, Dataset, Job, Person, Reader, Release, ReviewCopy
from core.witness import require_ledger_in_sync
from service.auth import Principal
from service.jobs.actions import find as find_job
from service.jobs.actions import require_synthesizer
from service.releases.schemas import (
    ApprovalView,
    DatasetCard,
    Download,
    Downloads,
    NewRelease,
    ReleaseView,
    ReviewedJob,
    ReviewView,
)

ATTESTATION = "attestation.json"
OUT = ("published", "superseded")
TOMBSTONES = ("withdrawing", "withdrawn")


class AuthorCannotApprove(Problem):
    status, slug, title = 403, "author-cannot-approve", "A release needs the yes of somebody else"


class AnotherBundle(Problem):
    status, slug, title = 409, "approval-of-another-bundle", "This is not the bundle under review"


class NotApproved(Problem):
    status, slug, title = 409, "not-approved", "Nobody has approved this bundle yet"


class NoSamples(Problem):
    status, slug, title = 422, "no-samples", "A classifier has no samples"


class Withdrawn(Problem):
    status, slug, title = 410, "release-withdrawn", "The release was withdrawn"


def visible(principal: Principal) -> Select[tuple[Release]]:
    """Everybody sees what was published to them, and that it was withdrawn; drafts only who works on them."""
    granted = select(Reader.release_id).where(Reader.person_id == principal.id)
    published = and_(
        Release.published_at.is_not(None),
        or_(Release.audience == "everyone", Release.id.in_(granted)),
    )
    return select(Release).where(or_(published, works_on(principal)))


def works_on(principal: Principal) -> ColumnElement[bool]:
    """The releases that a person may draft, review and approve: those of the datasets they work with."""
    if principal.role is Role.ANALYST:
        return false()
    return Release.job_id.in_(
        select(Job.id).join(Dataset, Dataset.id == Job.dataset_id).where(principal.works_with_dataset())
    )


def searched(query: Select[tuple[Release]], text: str) -> Select[tuple[Release]]:
    return query.where(
        or_(Release.name.icontains(text, autoescape=True), Release.note.icontains(text, autoescape=True))
    )


def find(session: Session, principal: Principal, id: uuid.UUID) -> Release:
    found = session.scalars(visible(principal).where(Release.id == id)).one_or_none()
    if found is None:
        raise NotFound("No release that you may see has this id.")
    return found


def viewed(session: Session, principal: Principal, rows: Sequence[Release]) -> list[ReleaseView]:
    """Releases as this person may see them."""
    worked_on = select(Release.id).where(Release.id.in_([row.id for row in rows]), works_on(principal))
    given: dict[uuid.UUID, list[ApprovalView]] = {id: [] for id in session.scalars(worked_on)}
    approvals = select(Approval).where(Approval.release_id.in_(given)).order_by(Approval.at)
    for each in session.scalars(approvals):
        given[each.release_id].append(
            ApprovalView(person=each.person_id, digest=each.digest.hex(), note=each.note, at=each.at)
        )
    return [ReleaseView.of(row, given.get(row.id)) for row in rows]


def draft(session: Session, principal: Principal, body: NewRelease, *, reviewers: int) -> Release:
    """Asks for a bundle. Sampling is post-processing, so it costs nothing, however often."""
    require_ledger_in_sync(session)  # a database that forgot a charge must not publish as if there were none
    job = find_job(session, principal, body.job)
    if job.state != "trained":
        raise WrongState("Only a trained job can be released; wait for it to end.", state=job.state)
    require_synthesizer(session, job.id)
    if body.supersedes is not None:
        older = _authored(session, principal, body.supersedes)
        if older.state != "published":
            raise WrongState("Only a published release can be superseded.", state=older.state)
    row = Release(
        id=uuid.uuid4(), job_id=job.id, author_id=principal.id, name=body.name, note=body.note,
        licence=body.licence, count=body.count,
        seed=secrets.randbelow(2**53) if body.seed is None else body.seed, formats=sorted(set(body.formats)),
        audience=body.audience, reviewers=reviewers, supersedes=body.supersedes,
        state="building", build=1, fence=0, done=0, created_at=datetime.now(UTC),
    )  # fmt: skip
    if job.source_id is not None:
        if body.model_fields_set & {"count", "seed", "formats"}:
            raise NoSamples("Leave out count, seed and formats: an adaptation releases its classifier alone.")
        row.count, row.seed, row.formats = 0, 0, []
    session.add(row)
    session.flush()
    return row


def review(session: Session, principal: Principal, id: uuid.UUID) -> ReviewView:
    """Where a release comes from, for whoever may approve it: declared facts and costs, nothing measured."""
    row = _found_to_review(session, principal, id)
    jobs = [_reviewed(session, job) for job in _chain(session, row.job_id)]
    return ReviewView(
        release=row.id, name=row.name, state=row.state, author=session.get_one(Person, row.author_id).name,
        digest=row.digest.hex() if row.digest else None, job=jobs[0], earlier=jobs[1:],
    )  # fmt: skip


def _chain(session: Session, id: uuid.UUID | None) -> Iterator[Job]:
    """A job, and of a relay all jobs that it goes on from."""
    while id is not None:
        job = session.get_one(Job, id)
        yield job
        id = job.after_id


def _reviewed(session: Session, job: Job) -> ReviewedJob:
    def card(id: uuid.UUID) -> DatasetCard:
        dataset = session.get_one(Dataset, id)
        account = session.get_one(Account, dataset.account_id)
        return DatasetCard.of(dataset, account, session.get_one(Person, dataset.owner_id).name)

    return ReviewedJob.of(job, card(job.dataset_id), card(job.source_id) if job.source_id else None)


def approve(session: Session, principal: Principal, id: uuid.UUID, *, digest: str, note: str) -> Release:
    """One person's yes to these very bytes. Saying it twice changes nothing."""
    row = _found_to_review(session, principal, id)
    if row.reviewers > 1 and row.author_id == principal.id:
        raise AuthorCannotApprove("Ask somebody of your team, or an admin, to look at it and approve.")
    if row.reviewers > 1:
        require_independent(session, row.author_id, principal.id)
    row = _locked(session, id)
    if row.state not in ("in_review", "approved"):
        raise WrongState("Only a release in review can be approved.", state=row.state)
    if row.digest is None or row.digest.hex() != digest:
        raise AnotherBundle("It was built anew since you looked; look again and approve its present digest.")
    yes = insert(Approval).values(release_id=id, digest=row.digest, person_id=principal.id, note=note)
    session.execute(yes.on_conflict_do_nothing())
    row.state = "approved"
    session.commit()
    return row


def rebuild(session: Session, principal: Principal, id: uuid.UUID) -> Release:
    """Builds the bundle anew; every approval was of the old one."""
    _authored(session, principal, id)
    row = _locked(session, id)
    _require(row, "in_review", "approved", "failed")
    require_synthesizer(session, row.job_id)
    row.state, row.fault, row.digest, row.done, row.build = "building", None, None, 0, row.build + 1
    row.lease_until, row.attempts = None, 0
    session.commit()
    return row


def discard(session: Session, principal: Principal, id: uuid.UUID) -> Release:
    _authored(session, principal, id)
    row = _locked(session, id)
    _require(row, "building", "in_review", "approved", "failed")
    row.state = "discarded"
    session.commit()
    return row


def publish(session: Session, principal: Principal, id: uuid.UUID) -> Release:
    """Lets the publisher put the approved bundle on the shelf. Safe to repeat."""
    require_ledger_in_sync(session)
    _authored(session, principal, id)
    row = _locked(session, id)
    if row.state in OUT:
        return row
    if row.state == "publishing":  # tries may have ended with a fault: this begins a new count
        if row.fault is not None:
            row.attempts, row.lease_until = 0, None
            session.commit()
        return row
    if row.state == "in_review":
        raise NotApproved("Have somebody else approve its digest first.")
    _require(row, "approved")
    row.state, row.lease_until, row.attempts = "publishing", None, 0
    session.commit()
    return row


def withdraw(session: Session, principal: Principal, id: uuid.UUID, *, reason: str) -> Release:
    """No more links from now on; the publisher removes the files and signs the list. Epsilon stays spent."""
    _authored(session, principal, id)
    row = _locked(session, id)
    if row.state in TOMBSTONES:
        return row
    _require(row, "publishing", *OUT)
    row.state, row.reason, row.withdrawn_at = "withdrawing", reason, datetime.now(UTC)
    row.lease_until, row.attempts = None, 0
    session.commit()
    return row


def add_reader(session: Session, principal: Principal, id: uuid.UUID, person: uuid.UUID) -> Release:
    row = _authored(session, principal, id)
    if session.get(Person, person) is None:
        raise NotFound("Nobody has this id.")
    session.execute(insert(Reader).values(release_id=id, person_id=person).on_conflict_do_nothing())
    session.commit()
    return row


def remove_reader(session: Session, principal: Principal, id: uuid.UUID, person: uuid.UUID) -> None:
    _authored(session, principal, id)
    session.execute(delete(Reader).where(and_(Reader.release_id == id, Reader.person_id == person)))
    session.commit()


def preview(session: Session, principal: Principal, id: uuid.UUID) -> bytes:
    row = _standing(find(session, principal, id))
    if not row.formats:
        raise NotFound("A classifier has no picture; its release has files to look at.")
    found = session.scalars(select(Release.preview).where(Release.id == id)).one()
    if row.digest is None or found is None:
        raise WrongState("The release is not built yet.", state=row.state)
    return found


def downloads(
    session: Session, principal: Principal, id: uuid.UUID, paths: list[str], signer: DownloadSigner
) -> Downloads:
    """Signed addresses of exactly these files."""
    row = _standing(find(session, principal, id))
    if row.state not in OUT or row.digest is None:
        raise WrongState("The release is not published yet.", state=row.state)
    known: dict[str, dict[str, Any]] = {file["path"]: file for file in row.files or ()}
    statement = (row.attestation or "").encode()
    sha256 = hashlib.sha256(statement).hexdigest()
    known[ATTESTATION] = {"path": ATTESTATION, "size": len(statement), "sha256": sha256}
    return _signed(known, paths, signer, partial(public_key, id, row.digest))


def review_downloads(
    session: Session, principal: Principal, id: uuid.UUID, paths: list[str], signer: DownloadSigner
) -> Downloads:
    """Signed addresses of files of the bundle under review: the bytes of the digest that is approved.

    They are samples of a model whose training is paid for, so that a look at them costs nothing.
    """
    row = _found_to_review(session, principal, id)
    if row.state not in ("in_review", "approved") or row.digest is None:
        raise WrongState("There is no bundle under review; one that is out has /downloads.", state=row.state)
    if session.get(ReviewCopy, (id, row.build, row.digest)) is None:
        raise WrongState("It was built before bundles were kept for review; build it anew.", state=row.state)
    known = {file["path"]: file for file in row.files or ()}
    return _signed(known, paths, signer, partial(review_key, id, row.build, row.digest))


def _signed(
    known: dict[str, dict[str, Any]], paths: list[str], signer: DownloadSigner, key: Callable[[str], str]
) -> Downloads:
    if odd := [path for path in paths if path not in known]:
        raise NotFound(f"{len(odd)} of the paths are none of this release; see its files.")
    files = [Download(**known[path], url=signer.sign_download(key(path))) for path in paths]
    return Downloads(files=files, expires_in=SIGNED_SECONDS)


def _standing(row: Release) -> Release:
    if row.state in TOMBSTONES:
        raise Withdrawn("Delete copies you have; its reason says why. What it cost stays spent.")
    return row


def _found_to_review(session: Session, principal: Principal, id: uuid.UUID) -> Release:
    row = find(session, principal, id)
    if session.scalars(select(Release.id).where(Release.id == id, works_on(principal))).one_or_none() is None:
        raise Forbidden("Only the team of its dataset, or an admin, reviews a release.")
    return row


def _authored(session: Session, principal: Principal, id: uuid.UUID) -> Release:
    row = _found_to_review(session, principal, id)
    if not principal.is_admin and row.author_id != principal.id:
        raise Forbidden("Only its author or an admin may do this.")
    return row


def _locked(session: Session, id: uuid.UUID) -> Release:
    """The row as it is now, until this transaction ends."""
    held = select(Release).where(Release.id == id).with_for_update()
    return session.scalars(held.execution_options(populate_existing=True)).one()


def _require(row: Release, *states: str) -> None:
    if row.state not in states:
        raise WrongState(f"This can be done to a release that is {' or '.join(states)}.", state=row.state)
