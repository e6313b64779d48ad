"""A worker's hold on a job: taken by one conditional UPDATE, kept by a lease, proven by a fencing token."""

import time
import uuid
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from sqlalchemy import Engine, and_, func, or_, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from core import audit, ledger
from core.faults import Failure, Fault
from core.ledger import Move
from core.tables import Diagnosis, Entry, Job, Release

LEASE = timedelta(seconds=20)
MOST_ATTEMPTS = 20


def due_release() -> Any:
    """Something is to be done for the release, and was not tried in vain so often that a person has to look.

    A withdrawal is never given up: its files would stay public.
    """
    hopeful = or_(Release.attempts <= MOST_ATTEMPTS, Release.state == "withdrawing")
    return and_(Release.state.in_(("building", "publishing", "withdrawing")), hopeful)


def pause(attempts: int, *, first: float = 2.0) -> timedelta:
    """How long to wait after an attempt that failed for a passing reason: longer each time, up to an hour."""
    return timedelta(seconds=min(first * 2.0 ** (attempts - 1), 3600.0))


class Fenced(Exception):
    """Another worker holds the job now; whatever this one still does must not count."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """The right to work on a job, until a higher fence exists. Every write goes through it."""

    engine: Engine
    job: Job
    fence: int
    lease: timedelta = LEASE
    began: float = field(default_factory=time.monotonic)
    data_key: bytes | None = field(default=None, repr=False)  # of the job's dataset, once it is opened

    @property
    def ran_seconds(self) -> int:
        """How long workers have worked on the job, in all attempts; time in the queue does not count."""
        return self.job.ran_seconds + int(time.monotonic() - self.began)

    def require_time_left(self) -> None:
        if self.job.limit_seconds is not None and self.ran_seconds >= self.job.limit_seconds:
            raise Failure(Fault.TIME_LIMIT)

    @property
    def _mine(self) -> Any:
        return and_(Job.id == self.job.id, Job.fence == self.fence, Job.state == "running")

    def beat(self, step: int) -> bool:
        """Renews the lease and shows how far it is; True if somebody asked to cancel."""
        values = {"lease_until": func.now() + self.lease, "step": step, "ran_seconds": self.ran_seconds}
        renew = update(Job).where(self._mine).values(values)
        with self.engine.begin() as connection:
            found = connection.execute(renew.returning(Job.cancel_asked_at)).one_or_none()
        if found is None:
            raise Fenced
        return found[0] is not None

    def open(self) -> None:
        """Commits that records are about to be read: from here on nothing is given back."""
        read = filter(None, (self.job.id, self.job.dataset_id, self.job.source_id))
        audit.write(self.engine, "records opened for a job", list(read))
        opened = func.coalesce(Job.opened_at, func.now())
        self._write(opened_at=opened, lease_until=func.now() + self.lease)

    def renew(self) -> None:
        """Makes sure, right before something is written, that nobody else holds the job by now."""
        self._write(lease_until=func.now() + self.lease)

    def checkpointed(self) -> None:
        """Says that this attempt's checkpoint is the one to continue from."""
        self._write(checkpoint=self.fence)

    def diagnosed(self, *, lines: str, picture: str) -> None:
        """Keeps what the job's curator may see of it; an attempt that is over changes nothing."""
        self.renew()
        row = {"fence": self.fence, "lines": lines, "picture": picture}
        kept = insert(Diagnosis).values(job_id=self.job.id, **row)
        newer = kept.on_conflict_do_update(
            index_elements=[Diagnosis.job_id],
            set_={**row, "at": func.now()},
            where=Diagnosis.fence <= self.fence,
        )
        with self.engine.begin() as connection:
            connection.execute(newer)

    def hand_back(self) -> None:
        """Leaves the job to whoever comes next, at once."""
        self._write(state="queued", lease_until=None, ran_seconds=self.ran_seconds)

    def _write(self, **values: Any) -> None:
        with self.engine.begin() as connection:
            done = connection.execute(update(Job).where(self._mine).values(**values).returning(Job.id))
            if done.one_or_none() is None:
                raise Fenced

    def trained(self, *, synthesizer_key: str, synthesizer_sha256: bytes, steps: int) -> None:
        """Settles and ends the job, in one transaction that only the holder of the fence can commit."""
        self._end(
            "settle", "trained", state="trained", synthesizer_key=synthesizer_key,
            synthesizer_sha256=synthesizer_sha256, step=steps,
        )  # fmt: skip

    def failed(self, fault: Fault) -> None:
        """Ends the job with a fault: what was opened is paid for, what was not is given back."""
        state = "cancelled" if fault is Fault.CANCELLED else "failed"
        opened = select(Job.opened_at).where(self._mine)
        with Session(self.engine) as session:
            kind = "void" if session.scalars(opened).one_or_none() is None else "settle"
        self._end(kind, f"ended: {fault.value}", state=state, fault=fault.value)

    def _end(self, kind: str, reason: str, **values: Any) -> None:
        with Session(self.engine) as session, session.begin():
            ended = update(Job).where(self._mine).values(finished_at=func.now(), lease_until=None, **values)
            if session.execute(ended.returning(Job.id)).one_or_none() is None:
                raise Fenced
            move = {"settle": ledger.settle, "void": ledger.void}[kind]
            move(session, self.job.account_id, job=self.job.id, move=Move(actor="train", reason=reason))

    def reserved_at(self) -> int:
        """The number of the ledger row that paid for this job."""
        paid = select(Entry.number).where(
            Entry.account_id == self.job.account_id, Entry.job_id == self.job.id, Entry.kind == "reserve"
        )
        with Session(self.engine) as session:
            return session.scalars(paid).one()


def claim(engine: Engine, job_id: uuid.UUID, *, lease: timedelta = LEASE) -> Claim | None:
    """Takes a job that waits, or whose holder let its lease run out; None if there is nothing to do."""
    free = or_(Job.state == "queued", and_(Job.state == "running", Job.lease_until < func.now()))
    take = (
        update(Job)
        .where(Job.id == job_id, free)
        .values(
            state="running",
            fence=Job.fence + 1,
            lease_until=func.now() + lease,
            started_at=func.coalesce(Job.started_at, func.now()),
        )
        .returning(Job)
    )
    with Session(engine, expire_on_commit=False) as session, session.begin():
        job = session.scalars(take).one_or_none()
        if job is not None:
            session.expunge(job)
    return Claim(engine=engine, job=job, fence=job.fence, lease=lease) if job else None
