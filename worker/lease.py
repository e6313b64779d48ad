"""Leases: the exclusive, time-limited right of one worker to work on one row (a job, a release, a dataset).

Guarantee: a lease is claimed by one conditional UPDATE that raises the row's fencing token, and every write
of its holder names that token, so a worker whose lease was taken over changes nothing.
docs/guarantees.md#jobs
"""

import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar, Generic, Self, TypeVar

from sqlalchemy import ColumnElement, Engine, and_, func, or_, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session, undefer

from core import audit, ledger, log
from core.faults import Failure, Fault
from core.ledger import Move
from core.tables import Dataset, DatasetState, Diagnosis, Entry, Job, JobState, Release, ReleaseState
from worker.process import traceback_lines

LEASE = timedelta(seconds=20)
MAX_ATTEMPTS = 20
_log = log.get("lease")
Row = TypeVar("Row", Job, Release, Dataset)


class Fenced(Exception):
    """Another worker holds the row now; nothing this one still does may count."""


class HandBack(Exception):
    """The worker stops working on the row before it is done, and another one may continue at once."""


def expired(until: Any) -> ColumnElement[bool]:
    """No worker holds the row whose lease ends at `until`."""
    return or_(until.is_(None), until < func.now())


def retry_delay(attempts: int, *, first: float = 2.0) -> timedelta:
    """Time to wait after the given number of attempts failed for a transient reason; at most an hour."""
    return timedelta(seconds=min(first * 2.0 ** (attempts - 1), 3600.0))


@dataclass(kw_only=True)
class Lease(Generic[Row]):
    """A lease on one row. `write` is the only way its holder changes the row."""

    TABLE: ClassVar[Any]
    KIND: ClassVar[str]
    FENCE: ClassVar[str] = "fence"  # column of the fencing token, which every claim raises
    UNTIL: ClassVar[str] = "lease_until"
    OPTIONS: ClassVar[tuple[Any, ...]] = ()

    engine: Engine
    row: Row
    duration: timedelta = LEASE
    lost: bool = False  # set by the heartbeat when another worker holds the row

    @classmethod
    def due(cls) -> ColumnElement[bool]:
        """Rows that a worker may claim now."""
        raise NotImplementedError

    @classmethod
    def on_claim(cls) -> dict[str, Any]:
        """What a claim changes besides token and expiry."""
        return {}

    @classmethod
    def claim(cls, engine: Engine, id: uuid.UUID, *, duration: timedelta = LEASE) -> Self | None:
        """Takes a lease on a row that is due; None if there is no such row."""
        table = cls.TABLE
        values = {cls.FENCE: getattr(table, cls.FENCE) + 1, cls.UNTIL: func.now() + duration}
        take = update(table).where(table.id == id, cls.due()).values(values | cls.on_claim())
        take = take.returning(table.id).execution_options(synchronize_session=False)
        with Session(engine, expire_on_commit=False) as session, session.begin():
            if session.execute(take).one_or_none() is None:
                return None
            row = session.get_one(table, id, options=cls.OPTIONS)
        return cls(engine=engine, row=row, duration=duration)

    @property
    def fence(self) -> int:
        return int(getattr(self.row, self.FENCE))

    @property
    def exhausted(self) -> bool:
        """The row was claimed more often than is allowed."""
        return self.fence > MAX_ATTEMPTS

    @property
    def mine(self) -> ColumnElement[bool]:
        """The row, as long as no other worker claimed it and nobody changed its state."""
        table = self.TABLE
        fence = getattr(table, self.FENCE) == self.fence
        return and_(table.id == self.row.id, fence, table.state == self.row.state)

    def write(self, session: Session | None = None, *, returning: Any = None, **values: Any) -> Any:
        """Changes the row, in `session` or its own transaction; raises Fenced if the lease is lost."""
        change = update(self.TABLE).where(self.mine).values(values)
        change = change.returning(self.TABLE.id if returning is None else returning)
        change = change.execution_options(synchronize_session=False)
        if session is not None:
            changed = session.execute(change).one_or_none()
        else:
            with self.engine.begin() as connection:
                changed = connection.execute(change).one_or_none()
        if changed is None:
            raise Fenced
        return changed[0]

    def renew(self) -> None:
        """Extends the lease and stores the progress; raises Fenced if the lease is lost."""
        values: dict[str, Any] = {self.UNTIL: func.now() + self.duration, **self.progress()}
        self.write(**values)

    def progress(self) -> dict[str, Any]:
        return {}

    def hand_back(self) -> None:
        """Ends the lease so that another worker can claim the row at once."""
        self.write(**{self.UNTIL: None})

    @contextmanager
    def heartbeat(self, seconds: float) -> Iterator[None]:
        """Renews the lease from another thread while the block runs; database errors are retried."""
        done = threading.Event()

        def beat() -> None:
            while not done.wait(seconds):
                try:
                    self.renew()
                except Fenced:
                    self.lost = True
                    return
                except SQLAlchemyError as problem:
                    _log.warning("heartbeat_missed", id=str(self.row.id), kind=type(problem).__name__)

        thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


@dataclass(kw_only=True)
class ReleaseLease(Lease[Release]):
    """A lease on a release that is to be built, published or withdrawn."""

    TABLE, KIND, OPTIONS = Release, "release", (undefer(Release.attestation),)
    done: int = 0  # samples drawn so far

    @classmethod
    def due(cls) -> ColumnElement[bool]:
        """A withdrawal is retried without limit, because its files would stay public."""
        retried = or_(Release.attempts <= MAX_ATTEMPTS, Release.state == ReleaseState.WITHDRAWING)
        open = Release.state.in_((ReleaseState.BUILDING, ReleaseState.PUBLISHING, ReleaseState.WITHDRAWING))
        return and_(open, retried, expired(Release.lease_until))

    @classmethod
    def on_claim(cls) -> dict[str, Any]:
        return {"attempts": Release.attempts + 1}

    @property
    def exhausted(self) -> bool:
        return self.row.attempts > MAX_ATTEMPTS and self.row.state != ReleaseState.WITHDRAWING

    def progress(self) -> dict[str, Any]:
        return {"done": max(self.done, self.row.done)}

    def hand_back(self) -> None:
        self.write(lease_until=None, attempts=self.row.attempts - 1)

    def finish(self, state: ReleaseState, session: Session | None = None, **values: Any) -> None:
        """Ends the work on the release in `state`."""
        self.write(session, state=state, lease_until=None, attempts=0, **{"fault": None, **values})


@dataclass(kw_only=True)
class DatasetLease(Lease[Dataset]):
    """A lease on the check of a sealed dataset."""

    TABLE, KIND, FENCE, UNTIL = Dataset, "dataset", "attempts", "retry_at"

    @classmethod
    def due(cls) -> ColumnElement[bool]:
        return and_(Dataset.state == DatasetState.CHECKING, expired(Dataset.retry_at))


@dataclass(kw_only=True)
class JobLease(Lease[Job]):
    """A lease on the training of one job."""

    TABLE, KIND = Job, "job"
    step: int | None = None  # of this attempt, once it made one
    cancelled: bool = False
    began: float = field(default_factory=time.monotonic)
    data_key: bytes | None = field(default=None, repr=False)  # of the job's dataset, once it is unwrapped

    @classmethod
    def due(cls) -> ColumnElement[bool]:
        abandoned = and_(Job.state == JobState.RUNNING, Job.lease_until < func.now())
        return or_(Job.state == JobState.QUEUED, abandoned)

    @classmethod
    def on_claim(cls) -> dict[str, Any]:
        return {"state": JobState.RUNNING, "started_at": func.coalesce(Job.started_at, func.now())}

    @property
    def ran_seconds(self) -> int:
        """How long workers have worked on the job in all attempts; time in the queue does not count."""
        return self.row.ran_seconds + int(time.monotonic() - self.began)

    def require_time_left(self) -> None:
        if self.row.limit_seconds is not None and self.ran_seconds >= self.row.limit_seconds:
            raise Failure(Fault.TIME_LIMIT)

    def check(self) -> None:
        """Stops the training if the heartbeat found that the lease is lost or the job was cancelled."""
        if self.lost:
            raise Fenced
        if self.cancelled:
            raise Failure(Fault.CANCELLED)

    def progress(self) -> dict[str, Any]:
        return {"step": self.row.step if self.step is None else self.step, "ran_seconds": self.ran_seconds}

    def renew(self) -> None:
        extended = {"lease_until": func.now() + self.duration, **self.progress()}
        self.cancelled = self.write(returning=Job.cancel_asked_at.is_not(None), **extended)

    def open(self) -> None:
        """Commits that records are about to be read; from then on the charge is not given back."""
        read = filter(None, (self.row.id, self.row.dataset_id, self.row.source_id))
        audit.write(self.engine, "records opened for a job", list(read))
        opened = func.coalesce(Job.opened_at, func.now())
        self.write(opened_at=opened, lease_until=func.now() + self.duration)

    def checkpointed(self) -> None:
        """Makes this attempt's checkpoint the one that the next attempt continues from."""
        self.write(checkpoint=self.fence)

    def diagnosed(self, *, lines: str, picture: str) -> None:
        """Stores the diagnostics that the job's curator may see, unless a later attempt has stored some."""
        self.renew()
        row = {"fence": self.fence, "lines": lines, "picture": picture}
        stored = insert(Diagnosis).values(job_id=self.row.id, **row).on_conflict_do_update(
            index_elements=[Diagnosis.job_id],
            set_={**row, "at": func.now()},
            where=Diagnosis.fence <= self.fence,
        )  # fmt: skip
        with self.engine.begin() as connection:
            connection.execute(stored)

    def hand_back(self) -> None:
        self.write(state=JobState.QUEUED, lease_until=None, ran_seconds=self.ran_seconds)

    def trained(self, *, synthesizer_key: str, synthesizer_sha256: bytes, steps: int) -> None:
        """Settles the charge and ends the job in one transaction that only the lease's holder can commit."""
        self._end(
            "settle", "trained", state=JobState.TRAINED, synthesizer_key=synthesizer_key,
            synthesizer_sha256=synthesizer_sha256, step=steps,
        )  # fmt: skip

    def failed(self, fault: Fault) -> None:
        """Ends the job with a fault. The charge is given back if no records were opened."""
        state = JobState.CANCELLED if fault is Fault.CANCELLED else JobState.FAILED
        with Session(self.engine) as session:
            opened = session.scalars(select(Job.opened_at).where(self.mine)).one_or_none()
        kind = "void" if opened is None else "settle"
        self._end(kind, f"ended: {fault.value}", state=state, fault=fault.value)

    def _end(self, kind: str, reason: str, **values: Any) -> None:
        with Session(self.engine) as session, session.begin():
            self.write(session, finished_at=func.now(), lease_until=None, **values)
            move = {"settle": ledger.settle, "void": ledger.void}[kind]
            move(session, self.row.account_id, job=self.row.id, move=Move(actor="train", reason=reason))

    def reserve_entry(self) -> Entry | None:
        """The ledger row that reserved this job's charge."""
        of_job = (Entry.account_id == self.row.account_id, Entry.job_id == self.row.id)
        with Session(self.engine, expire_on_commit=False) as session:
            return session.scalars(select(Entry).where(*of_job, Entry.kind == "reserve")).one_or_none()


L = TypeVar("L", JobLease, ReleaseLease, DatasetLease)


@dataclass(kw_only=True)
class LeaseWorker(ABC, Generic[L]):
    """Runs the work on one row under a lease: claim, heartbeat, hand-back, faults, bounded attempts."""

    LEASE_TYPE: ClassVar[type[Any]]
    PROPAGATED: ClassVar[tuple[type[Exception], ...]] = (Fenced,)  # not turned into a fault
    EXHAUSTED: ClassVar[Fault] = Fault.LOST

    engine: Engine
    stopping: threading.Event = field(default_factory=threading.Event)
    lease: timedelta = LEASE
    beat_seconds: float = 2.0

    def run(self, id: uuid.UUID) -> bool:
        """Works on a row if it is due; True if the worker should be woken for it again."""
        kind = self.LEASE_TYPE.KIND
        lease: L | None = self.LEASE_TYPE.claim(self.engine, id, duration=self.lease)
        if lease is None:
            _log.info("nothing_to_do", **{f"{kind}_id": str(id)})
            return False
        context: dict[str, Any] = {f"{kind}_id": str(id), "fence": lease.fence, "state": lease.row.state}
        _log.info(f"{kind}_claimed", **context)
        try:
            return self._attempt(lease, context)
        except Fenced:
            _log.warning(f"{kind}_fenced", **context)
            self._clean_up(lease)
            return False

    def _attempt(self, lease: L, context: dict[str, Any]) -> bool:
        try:
            if lease.exhausted:  # its attempts ended without storing why
                raise Failure(Fault(lease.row.fault or self.EXHAUSTED))
            with lease.heartbeat(self.beat_seconds):
                self._work(lease)
            _log.info(f"{lease.KIND}_done", **context)
            return False
        except HandBack:
            lease.hand_back()
            _log.info(f"{lease.KIND}_handed_back", **context)
            return True
        except self.PROPAGATED:
            raise
        except Exception as problem:
            fault = self._fault_of(problem)
            # The text of an unexpected error may quote a record: only its type and place are logged.
            _log.warning(
                f"{lease.KIND}_stopped", **context, fault=fault and fault.value, kind=type(problem).__name__,
                where=traceback_lines(problem),
            )  # fmt: skip
            return self._stopped(lease, fault)

    @abstractmethod
    def _work(self, lease: L) -> None: ...

    def _fault_of(self, problem: Exception) -> Fault | None:
        """The fault to store, or None for an unforeseen error, such as a server that does not answer."""
        if isinstance(problem, MemoryError) or type(problem).__name__ == "OutOfMemoryError":
            return Fault.OUT_OF_MEMORY
        return problem.fault if isinstance(problem, Failure) else None

    @abstractmethod
    def _stopped(self, lease: L, fault: Fault | None) -> bool:
        """Ends the row's work with a fault, or has it retried; True if the worker should be woken again."""

    def _clean_up(self, lease: L) -> None:
        """Called when the lease was lost: removes what this worker may have written after that."""
