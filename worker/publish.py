"""The public side: samples from a synthesizer and puts releases on the shelf. `python -m worker.publish`.

Rows decide: whatever rang, the publisher looks at the release and does what is due (build, publish, withdraw)
under a fence and a lease, so that a second one, or one thought dead, changes nothing.

Guarantee: what becomes public is, byte for byte, a bundle that somebody who may approved, of a job whose
charge is settled; once public it is never replaced. docs/guarantees.md#releases
"""

import hashlib
import json
import os
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from celery import Celery
from pydantic import TypeAdapter
from sqlalchemy import Engine, and_, func, or_, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session, undefer

from core import audit, log
from core.database import connect
from core.faults import Failure, Fault
from core.queue import celery_app, wake_worker
from core.schema import ImageSchema, Schema, TableSchema
from core.settings import PublishSettings
from core.signing import signer
from core.stores import s3
from core.stores.bundles import Bundles
from core.stores.public import PublicStore
from core.tables import Approval, Dataset, Job, Release, Revocations, SigningKey
from core.unwrap import unwrapper
from sluice.envelope import CannotDecrypt
from sluice.privacy.problems import Problem as PrivacyProblem
from sluice.release import attest
from sluice.release.manifest import ATTESTATION, MANIFEST, PRIVACY, SUMS
from sluice.release.statement import Signer
from worker import copies, process, workspace
from worker.claims import LEASE, MOST_ATTEMPTS, Fenced, due_release, pause
from worker.paid import all_paid, require_stated

_log = log.get("publish")
_SCHEMA: TypeAdapter[ImageSchema | TableSchema] = TypeAdapter(Schema)
AGAIN = 30.0  # seconds until something that may pass is tried again for the first time
FRESH = timedelta(days=1)  # of a list of withdrawn releases


class HandBack(Exception):
    """Not now: the worker stops."""


@dataclass(kw_only=True)
class Hold:
    """The right to work on a release in its state, until a higher fence exists. Writes go through it."""

    engine: Engine
    row: Release
    lease: timedelta
    done: int = 0

    def write(self, session: Session | None = None, **values: Any) -> None:
        row = self.row
        mine = and_(Release.id == row.id, Release.fence == row.fence, Release.state == row.state)
        change = update(Release).where(mine).values(**values).returning(Release.id)
        change = change.execution_options(synchronize_session=False)
        if session is not None:
            found = session.execute(change).one_or_none()
        else:
            with Session(self.engine) as own, own.begin():
                found = own.execute(change).one_or_none()
        if found is None:
            raise Fenced

    def beat(self) -> None:
        """Renews the lease, or finds that somebody else holds the release now."""
        self.write(lease_until=func.now() + self.lease, done=max(self.done, self.row.done))


@dataclass(kw_only=True)
class Publisher:
    """What a publish worker has: two stores, a key to sign with, its hold on the database."""

    engine: Engine
    bundles: Bundles
    public: PublicStore
    signer: Signer
    stopping: threading.Event = field(default_factory=threading.Event)
    lease: timedelta = LEASE
    beat_seconds: float = 2.0
    point: Callable[[str], object] = str  # named moments: does nothing here, tests end the process there

    def start(self) -> None:
        """Makes the public half of the key known, and sees that there is a list under it."""
        mine = insert(SigningKey).values(id=self.signer.key_id, public=self.signer.public)
        with self.engine.begin() as connection:
            connection.execute(mine.on_conflict_do_nothing())
        self.renew(own_key=True)

    def run(self, id: uuid.UUID) -> bool:
        """Does what is due for a release, if anything; True if it should be rung for again."""
        try:
            return self._work(id)
        finally:
            copies.remove_unneeded(self.engine, self.public, id)

    def _work(self, id: uuid.UUID) -> bool:
        held = self._claim(id)
        if held is None:
            _log.info("nothing_to_do", release_id=str(id))
            return False
        said = {"release_id": str(id), "fence": held.row.fence, "state": held.row.state}
        _log.info("release_claimed", **said)
        audit.write(self.engine, f"release {held.row.state}", [id])
        self.point("claimed")
        do = {"building": self._build, "publishing": self._publish, "withdrawing": self._withdraw}
        try:
            try:
                if held.row.attempts > MOST_ATTEMPTS and held.row.state != "withdrawing":
                    raise Failure(Fault(held.row.fault or Fault.LOST))
                with _beating(held, self.beat_seconds):
                    do[held.row.state](held)
                _log.info("release_done", **said)
            except HandBack:
                held.write(lease_until=None, attempts=held.row.attempts - 1)
                return True
            except (Fenced, SQLAlchemyError):
                raise
            except Exception as problem:
                fault = _fault_of(problem)
                where = process.where(problem)
                kind = type(problem).__name__
                _log.warning("release_stopped", **said, fault=fault and fault.value, kind=kind, where=where)
                self._stop(held, fault)
        except Fenced:
            _log.warning("release_fenced", **said)
            self._tidy(held.row)
        return False

    def _claim(self, id: uuid.UUID) -> Hold | None:
        free = or_(Release.lease_until.is_(None), Release.lease_until < func.now())
        take = update(Release).where(Release.id == id, due_release(), free)
        counted = {"fence": Release.fence + 1, "attempts": Release.attempts + 1}
        take = take.values(**counted, lease_until=func.now() + self.lease)
        with Session(self.engine, expire_on_commit=False) as session, session.begin():
            if session.execute(take.returning(Release.id)).one_or_none() is None:
                return None
            row = session.get_one(Release, id, options=[undefer(Release.attestation)])
            session.expunge(row)
        return Hold(engine=self.engine, row=row, lease=self.lease)

    def _stop(self, held: Hold, fault: Fault | None) -> None:
        """A build ends with its fault. What was asked for after review is tried again, later and later.

        After MOST_ATTEMPTS a publication waits until somebody asks for it again.
        """
        if fault is not None and held.row.state == "building":
            held.write(state="failed", fault=fault.value, lease_until=None, attempts=0)
        else:
            again = func.now() + pause(held.row.attempts, first=AGAIN)
            held.write(fault=fault and fault.value, lease_until=again)

    def _snapshot(self) -> Session:
        """All that is read in it is of one moment: the ledger that is stated is the one that was verified."""
        engine = self.engine.execution_options(isolation_level="REPEATABLE READ")
        return Session(engine, expire_on_commit=False)

    # Building

    def _build(self, held: Hold) -> None:
        from worker import bundle  # brings torch, which takes seconds, and a worker starts without

        row = held.row
        with self._snapshot() as session:
            job = session.get_one(Job, row.job_id)
            source = session.get_one(Dataset, job.source_id) if job.source_id else None
            # A classifier has the classes of the public images that it learned labels from.
            declared = source or session.get_one(Dataset, job.dataset_id)
            schema = _SCHEMA.validate_python(declared.schema)
            paid = all_paid(session, job)
        if not isinstance(schema, ImageSchema):
            raise Failure(Fault.UNFIT_SYNTHESIZER)
        privacy = paid[0].statement() | {
            "others": [each.statement() for each in paid[1:]],
            "sources": [_described(source, schema)] if source else [],
        }
        facts = bundle.Facts(
            release=str(row.id), name=row.name, note=row.note, licence=row.licence,
            created_at=_moment(row.created_at), reviewers=row.reviewers, count=row.count, seed=row.seed,
            formats=tuple(sorted(row.formats)), schema=schema, privacy=privacy,
        )  # fmt: skip
        self.point("paid")
        kind = "synthesizer" if row.formats else "classifier"
        try:
            files = self.bundles.trained(job.synthesizer_key or "", kind, most=bundle.MOST_OF_A_SYNTHESIZER)
        except CannotDecrypt:
            raise Failure(Fault.UNFIT_SYNTHESIZER) from None
        trained = hashlib.sha256(b"".join(hashlib.sha256(files[name]).digest() for name in sorted(files)))
        if trained.digest() != job.synthesizer_sha256:
            raise Failure(Fault.UNFIT_SYNTHESIZER)
        self.point("fetched")

        def drawn(done: int) -> None:
            held.done = done
            self._go_on(held)
            self.point("drawn")

        with tempfile.TemporaryDirectory(prefix="sluice-publish-") as name:
            directory = Path(name)
            made = bundle.build(directory, facts, files, drawn=drawn)
            self.point("built")
            copy = copies.begin(self.engine, row, made.digest)
            for file in made.files:
                self._go_on(held)
                self.bundles.put(row.id, made.digest, file["path"], directory / file["path"])
                self.public.put_copy(copy(file["path"]), directory / file["path"])
                self.point("kept")
        held.write(
            state="in_review", fault=None, lease_until=None, attempts=0, done=row.count, digest=made.digest,
            files=made.files, manifest=made.manifest, privacy=dict(facts.privacy), preview=made.preview,
            built_at=func.now(),
        )  # fmt: skip
        self.point("in review")

    def _go_on(self, held: Hold) -> None:
        if self.stopping.is_set():
            raise HandBack
        held.beat()

    # Publishing

    def _publish(self, held: Hold) -> None:
        row = held.row
        digest = row.digest or b""
        with tempfile.TemporaryDirectory(prefix="sluice-publish-") as name:
            directory = Path(name)
            hashes = {}
            for path in attest.paths(row.formats):
                self._go_on(held)
                self.bundles.fetch(row.id, digest, path, directory / path)
                with (directory / path).open("rb") as file:
                    hashes[path] = hashlib.file_digest(file, "sha256").hexdigest()
            small = {path: (directory / path).read_bytes() for path in (MANIFEST, PRIVACY, SUMS)}
            # Before anything is signed: a statement about other bytes would be kept, and stand in the way.
            if hashes[SUMS] != digest.hex() or small[SUMS] != attest.sums(hashes):
                raise Failure(Fault.BUNDLE_ALTERED)
            self.point("refetched")
            with self._snapshot() as session:
                paid = all_paid(session, session.get_one(Job, row.job_id))
                approvals = _approvals(session, row)
                keys = {key.id: key.public for key in session.scalars(select(SigningKey))}
            require_stated(paid, json.loads(small[PRIVACY]))
            envelope = (row.attestation or "").encode() or self._sign(held, hashes, small, approvals)
            self.point("signed")
            # Looked at with the analysts' own eyes, before there is anything for them to see.
            checked = attest.check_release(envelope, hashes=hashes, small=small, keys=keys, revocations=None)
            if (checked.release, checked.bundle) != (str(row.id), digest.hex()):
                raise Failure(Fault.BUNDLE_ALTERED)
            (directory / ATTESTATION).write_bytes(envelope)
            for path in [*sorted(hashes), ATTESTATION]:  # the statement last: without it there is no release
                self._go_on(held)
                self.public.put(row.id, digest, path, directory / path)
                self.point("put")
        with Session(self.engine) as session, session.begin():
            at = datetime.fromisoformat(checked.published_at)
            held.write(session, state="published", fault=None, lease_until=None, attempts=0, published_at=at)
            older = update(Release).where(Release.id == row.supersedes, Release.state == "published")
            session.execute(older.values(state="superseded"))
        self.point("published")

    def _sign(
        self, held: Hold, hashes: dict[str, str], small: dict[str, bytes], approvals: list[Any]
    ) -> bytes:
        """Signed once, and kept before anything is public: every later attempt ends with this statement."""
        row, manifest = held.row, json.loads(small[MANIFEST])
        statement = attest.release_statement(
            release=str(row.id), bundle=(row.digest or b"").hex(), hashes=hashes,
            privacy=json.loads(small[PRIVACY]), code=manifest["code"],
            published_at=_moment(datetime.now(UTC)),
            review={"reviewers": row.reviewers, "author": str(row.author_id), "approvals": approvals},
        )  # fmt: skip
        envelope = attest.sign(statement, attest.STATEMENT_TYPE, self.signer)
        held.write(attestation=envelope.decode())
        return envelope

    def _tidy(self, row: Release) -> None:
        """Withdrawn while it was being put: this worker may have put a file after another removed them."""
        with Session(self.engine) as session:
            now = session.scalars(select(Release.state).where(Release.id == row.id)).one()
        if row.state == "publishing" and now in ("withdrawing", "withdrawn"):
            self._remove(row)

    # Withdrawing

    def _withdraw(self, held: Hold) -> None:
        row = held.row
        row.withdrawn_at = row.withdrawn_at or datetime.now(UTC)
        self._remove(row)
        self.point("removed")
        entry = _entry(row)
        self.public.bury(row.id, row.digest or b"", attest.canonical({"kind": "sluice-withdrawn", **entry}))
        self.point("buried")
        with Session(self.engine) as session, session.begin():
            held.write(
                session, state="withdrawn", fault=None, lease_until=None, attempts=0,
                withdrawn_at=row.withdrawn_at,
            )  # fmt: skip
            self._append_list(session)
        self.point("listed")

    def _remove(self, row: Release) -> None:
        for path in [ATTESTATION, *sorted(attest.paths(row.formats))]:
            self.public.remove(row.id, row.digest or b"", path)

    def renew(self, *, own_key: bool = False) -> None:
        """A new list if there is none, or the last is a day old; at the start also if it is of another key.

        Not whenever a message asks: between two publishers with different keys lists would never end.
        """
        newest = select(Revocations).order_by(Revocations.number.desc()).limit(1)
        with Session(self.engine) as session, session.begin():
            _alone(session)
            last = session.scalars(newest).one_or_none()
            if last is not None and last.at > datetime.now(UTC) - FRESH:
                [signature] = json.loads(last.envelope)["signatures"]
                if not own_key or signature["keyid"] == self.signer.key_id:
                    return
            self._append_list(session)

    def _append_list(self, session: Session) -> None:
        """All that was ever withdrawn, signed, under the next number."""
        _alone(session)
        gone = select(Release).where(Release.state == "withdrawn").order_by(Release.withdrawn_at, Release.id)
        number = session.scalars(select(func.coalesce(func.max(Revocations.number), 0))).one() + 1
        entries = [_entry(row) for row in session.scalars(gone)]
        listed = attest.revocations(number, datetime.now(UTC), entries)
        envelope = attest.sign(listed, attest.REVOCATIONS_TYPE, self.signer).decode()
        session.execute(insert(Revocations).values(number=number, envelope=envelope))


def _alone(session: Session) -> None:
    """One list at a time: each has to hold everything that those before it did."""
    session.execute(select(func.pg_advisory_xact_lock(0x511CE)))


def _entry(row: Release) -> dict[str, str]:
    bundle, at = (row.digest or b"").hex(), _moment(row.withdrawn_at or row.created_at)
    return {"release": str(row.id), "bundle": bundle, "at": at, "reason": row.reason or ""}


def _moment(at: datetime) -> str:
    return at.astimezone(UTC).isoformat(timespec="microseconds")


def _described(source: Dataset, schema: ImageSchema) -> dict[str, Any]:
    """A public dataset that was learned from without a charge, by facts that were declared or uploaded."""
    sha256 = source.content_sha256 or source.sha256 or b""  # the latter for one that was never encrypted
    shape = {"kind": schema.kind, "height": schema.height, "width": schema.width, "channels": schema.channels}
    return {
        "name": source.name, "sha256": sha256.hex(), "declared_public": source.public,
        "records": source.nominal_size, "schema": shape,
    }  # fmt: skip


def _approvals(session: Session, row: Release) -> list[dict[str, str]]:
    """Who approved these very bytes; not the author alone, where it takes two."""
    these = select(Approval).where(Approval.release_id == row.id, Approval.digest == row.digest)
    given = list(session.scalars(these.order_by(Approval.at, Approval.person_id)))
    if not any(row.reviewers == 1 or each.person_id != row.author_id for each in given):
        raise Failure(Fault.NOT_APPROVED)
    return [
        {"person": str(each.person_id), "digest": each.digest.hex(), "at": _moment(each.at)} for each in given
    ]


def _fault_of(problem: Exception) -> Fault | None:
    """The fault it is, or None for what may pass: a server away, a full disk, the unforeseen."""
    if isinstance(problem, Failure):
        return problem.fault
    if isinstance(problem, PrivacyProblem):
        return Fault.BUNDLE_ALTERED if problem.slug == "bundle-altered" else Fault.ACCOUNTING_MISMATCH
    return Fault.OUT_OF_MEMORY if isinstance(problem, MemoryError) else None


@contextmanager
def _beating(held: Hold, seconds: float) -> Iterator[None]:
    """Keeps the lease from another thread while one file or one chunk takes long."""
    done = threading.Event()

    def beat() -> None:
        while not done.wait(seconds):
            try:
                held.beat()
            except Fenced:
                return
            except SQLAlchemyError as problem:
                _log.warning("heartbeat_missed", release_id=str(held.row.id), kind=type(problem).__name__)

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def register(app: Celery, publisher: Publisher) -> None:
    """The two things that can be rung for. A message is an id; anything else finds nothing to do."""

    def run(id: object = None, *_: object, **__: object) -> None:
        try:
            asked = uuid.UUID(str(id))
        except ValueError:
            _log.warning("message_not_understood", task="publish.run")
            return
        if publisher.run(asked):
            wake_worker(app, "publish.run", asked)

    def revocations(*_: object, **__: object) -> None:
        publisher.renew()

    app.task(run, name="publish.run", shared=False)
    app.task(revocations, name="publish.revocations", shared=False)


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
            _log.warning("part_lost_server", kind=type(problem).__name__)
            time.sleep(1)
    app = celery_app("publish", url)
    register(app, publisher)
    process.serve(app, publisher.engine, url, "publish", stopping=publisher.stopping)


if __name__ == "__main__":
    main()
