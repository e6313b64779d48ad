"""The publish worker: builds, publishes and withdraws releases. `python -m worker.publish`.

The release's row decides what is done, under a lease; a message only wakes the worker.

Guarantee: what becomes public is, byte for byte, a bundle that somebody who may approved, of a job whose
charge is settled; once public it is never replaced. docs/guarantees.md#releases
"""

import hashlib
import json
import os
import tempfile
import time
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from celery import Celery
from sqlalchemy import func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from core import audit, log
from core.database import connect
from core.faults import Failure, Fault
from core.queue import celery_app
from core.settings import PublishSettings
from core.signing import signer
from core.stores import s3
from core.stores.bundles import Bundles
from core.stores.public import PublicStore
from core.tables import Approval, Job, Release, ReleaseState, Revocations, SigningKey
from core.unwrap import unwrapper
from sluice.privacy.problems import Problem as PrivacyProblem
from sluice.release.canonical import canonical
from sluice.release.manifest import ATTESTATION, MANIFEST, PRIVACY, SUMS, paths, release_statement, sums
from sluice.release.revocations import revocations
from sluice.release.statement import REVOCATIONS_TYPE, STATEMENT_TYPE, Signer, sign
from sluice.release.verify import check_release
from worker import process, review_copies, workspace
from worker.build import build, snapshot, timestamp
from worker.charges import charges_of, require_stated
from worker.lease import Fenced, HandBack, LeaseWorker, ReleaseLease, retry_delay

_log = log.get("publish")
RETRY_SECONDS = 30.0  # until the first retry after a transient error
LIST_AGE = timedelta(days=1)  # after which a new revocation list is signed


@dataclass(kw_only=True)
class Publisher(LeaseWorker[ReleaseLease]):
    """Works on releases; holds the stores and the signing key of a publish worker."""

    LEASE_TYPE, PROPAGATED = ReleaseLease, (Fenced, SQLAlchemyError)

    bundles: Bundles
    public: PublicStore
    signer: Signer

    def start(self) -> None:
        """Publishes the public half of the signing key, and a revocation list signed with it."""
        key = insert(SigningKey).values(id=self.signer.key_id, public=self.signer.public)
        with self.engine.begin() as connection:
            connection.execute(key.on_conflict_do_nothing())
        self.renew_list(own_key=True)

    def run(self, id: uuid.UUID) -> bool:
        try:
            return super().run(id)
        finally:
            review_copies.remove_unneeded(self.engine, self.public, id)

    def _attempt(self, lease: ReleaseLease, context: dict[str, Any]) -> bool:
        audit.write(self.engine, f"release {lease.row.state}", [lease.row.id])
        return super()._attempt(lease, context)

    def _work(self, lease: ReleaseLease) -> None:
        if lease.row.state == ReleaseState.BUILDING:
            build(lease, self.bundles, self.public, self._proceed)
        elif lease.row.state == ReleaseState.PUBLISHING:
            self._publish(lease)
        else:
            self._withdraw(lease)

    def _proceed(self, lease: ReleaseLease) -> None:
        if self.stopping.is_set():
            raise HandBack
        lease.renew()

    def _fault_of(self, problem: Exception) -> Fault | None:
        if isinstance(problem, PrivacyProblem):
            altered = problem.slug == "bundle-altered"
            return Fault.BUNDLE_ALTERED if altered else Fault.ACCOUNTING_MISMATCH
        return super()._fault_of(problem)

    def _stopped(self, lease: ReleaseLease, fault: Fault | None) -> bool:
        """Ends a build with its fault. Publications and withdrawals are retried with growing delays.

        After MAX_ATTEMPTS a publication waits until somebody asks for it again.
        """
        if fault is not None and lease.row.state == ReleaseState.BUILDING:
            lease.finish(ReleaseState.FAILED, fault=fault.value)
        else:
            delay = retry_delay(lease.row.attempts, first=RETRY_SECONDS)
            lease.write(fault=fault and fault.value, lease_until=func.now() + delay)
        return False

    def _clean_up(self, lease: ReleaseLease) -> None:
        """If the release was withdrawn meanwhile, this worker may have put a file after its removal."""
        with Session(self.engine) as session:
            state = session.scalars(select(Release.state).where(Release.id == lease.row.id)).one()
        if lease.row.state == ReleaseState.PUBLISHING and state in (
            ReleaseState.WITHDRAWING,
            ReleaseState.WITHDRAWN,
        ):
            self._remove(lease.row)

    # Publishing

    def _publish(self, lease: ReleaseLease) -> None:
        row = lease.row
        digest = row.digest or b""
        with tempfile.TemporaryDirectory(prefix="sluice-publish-") as name:
            directory, hashes = Path(name), {}
            for path in paths(row.formats):
                self._proceed(lease)
                self.bundles.fetch(row.id, digest, path, directory / path)
                with (directory / path).open("rb") as file:
                    hashes[path] = hashlib.file_digest(file, "sha256").hexdigest()
            small = {path: (directory / path).read_bytes() for path in (MANIFEST, PRIVACY, SUMS)}
            # Before signing: a statement about other bytes would be stored and block the right one.
            if hashes[SUMS] != digest.hex() or small[SUMS] != sums(hashes):
                raise Failure(Fault.BUNDLE_ALTERED)
            with snapshot(self.engine) as session:
                charges = charges_of(session, session.get_one(Job, row.job_id))
                approvals = _approvals(session, row)
                keys = {key.id: key.public for key in session.scalars(select(SigningKey))}
            require_stated(charges, json.loads(small[PRIVACY]))
            envelope = (row.attestation or "").encode() or self._sign(lease, hashes, small, approvals)
            # The same verification that analysts run, before anything is public.
            checked = check_release(envelope, hashes=hashes, small=small, keys=keys, revocations=None)
            if (checked.release, checked.bundle) != (str(row.id), digest.hex()):
                raise Failure(Fault.BUNDLE_ALTERED)
            (directory / ATTESTATION).write_bytes(envelope)
            for path in [*sorted(hashes), ATTESTATION]:  # the statement last: without it there is no release
                self._proceed(lease)
                self.public.put(row.id, digest, path, directory / path)
        with Session(self.engine) as session, session.begin():
            lease.finish(
                ReleaseState.PUBLISHED, session, published_at=datetime.fromisoformat(checked.published_at)
            )
            older = update(Release).where(
                Release.id == row.supersedes, Release.state == ReleaseState.PUBLISHED
            )
            session.execute(older.values(state=ReleaseState.SUPERSEDED))

    def _sign(
        self, lease: ReleaseLease, hashes: dict[str, str], small: dict[str, bytes], approvals: list[Any]
    ) -> bytes:
        """Signs once and stores the statement before anything is public; later attempts use the same one."""
        row, manifest = lease.row, json.loads(small[MANIFEST])
        statement = release_statement(
            release=str(row.id), bundle=(row.digest or b"").hex(), hashes=hashes,
            privacy=json.loads(small[PRIVACY]), code=manifest["code"],
            published_at=timestamp(datetime.now(UTC)),
            review={"reviewers": row.reviewers, "author": str(row.author_id), "approvals": approvals},
        )  # fmt: skip
        envelope = sign(statement, STATEMENT_TYPE, self.signer)
        lease.write(attestation=envelope.decode())
        return envelope

    # Withdrawing

    def _withdraw(self, lease: ReleaseLease) -> None:
        row = lease.row
        row.withdrawn_at = row.withdrawn_at or datetime.now(UTC)
        self._remove(row)
        tombstone = canonical({"kind": "sluice-withdrawn", **_list_entry(row)})
        self.public.bury(row.id, row.digest or b"", tombstone)
        with Session(self.engine) as session, session.begin():
            lease.finish(ReleaseState.WITHDRAWN, session, withdrawn_at=row.withdrawn_at)
            self._append_list(session)

    def _remove(self, row: Release) -> None:
        for path in [ATTESTATION, *sorted(paths(row.formats))]:
            self.public.remove(row.id, row.digest or b"", path)

    def renew_list(self, *, own_key: bool = False) -> None:
        """Signs a new revocation list if there is none, or the last one is a day old.

        At the start also if the last one has another key's signature; not for every message, because two
        publishers with different keys would then sign lists without end.
        """
        newest = select(Revocations).order_by(Revocations.number.desc()).limit(1)
        with Session(self.engine) as session, session.begin():
            _lock_lists(session)
            last = session.scalars(newest).one_or_none()
            if last is not None and last.at > datetime.now(UTC) - LIST_AGE:
                [signature] = json.loads(last.envelope)["signatures"]
                if not own_key or signature["keyid"] == self.signer.key_id:
                    return
            self._append_list(session)

    def _append_list(self, session: Session) -> None:
        """Signs a list of everything that was ever withdrawn, under the next number."""
        _lock_lists(session)
        gone = (
            select(Release)
            .where(Release.state == ReleaseState.WITHDRAWN)
            .order_by(Release.withdrawn_at, Release.id)
        )
        number = session.scalars(select(func.coalesce(func.max(Revocations.number), 0))).one() + 1
        entries = [_list_entry(row) for row in session.scalars(gone)]
        listed = revocations(number, datetime.now(UTC), entries)
        envelope = sign(listed, REVOCATIONS_TYPE, self.signer).decode()
        session.execute(insert(Revocations).values(number=number, envelope=envelope))


def _lock_lists(session: Session) -> None:
    """Lists are made one at a time: each has to contain everything that those before it did."""
    session.execute(select(func.pg_advisory_xact_lock(0x511CE)))


def _list_entry(row: Release) -> dict[str, str]:
    bundle, at = (row.digest or b"").hex(), timestamp(row.withdrawn_at or row.created_at)
    return {"release": str(row.id), "bundle": bundle, "at": at, "reason": row.reason or ""}


def _approvals(session: Session, row: Release) -> list[dict[str, str]]:
    """The approvals of these bytes; one of them by another person than the author, unless one may publish."""
    these = select(Approval).where(Approval.release_id == row.id, Approval.digest == row.digest)
    approvals = list(session.scalars(these.order_by(Approval.at, Approval.person_id)))
    if not any(row.reviewers == 1 or approval.person_id != row.author_id for approval in approvals):
        raise Failure(Fault.NOT_APPROVED)
    return [
        {"person": str(approval.person_id), "digest": approval.digest.hex(), "at": timestamp(approval.at)}
        for approval in approvals
    ]


def register(app: Celery, publisher: Publisher) -> None:
    process.register_task(app, "publish.run", publisher.run)
    process.register_task(app, "publish.revocations", lambda _: publisher.renew_list())


def make_publisher(settings: PublishSettings) -> Publisher:
    client = s3.client_for(settings)
    keys = unwrapper(settings.synthesizer_key.get_secret_value(), settings)
    return Publisher(
        engine=connect(str(settings.database_url)),
        bundles=Bundles(client, settings.vault_bucket, keys),
        public=PublicStore(client, settings.public_bucket),
        signer=signer(settings),
    )


def main() -> None:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in worker.train
    settings = process.settings_or_exit(PublishSettings, "publish")
    workspace.use("publish")
    publisher, url = make_publisher(settings), str(settings.queue_url)
    while True:
        try:
            publisher.start()
            break
        except SQLAlchemyError as problem:
            _log.warning("connection_lost", kind=type(problem).__name__)
            time.sleep(1)
    app = celery_app("publish", url)
    register(app, publisher)
    process.serve(app, publisher.engine, url, "publish", stopping=publisher.stopping)


if __name__ == "__main__":
    main()
