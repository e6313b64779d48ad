"""The sweeper: repairs what a dead process left behind. `python -m worker.sweep`.

Appends the ledger's state to the witness, wakes workers for rows that wait, ends jobs whose attempts are used
up, and trims the audit log.
"""

import signal
import threading
import time
import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from types import FrameType

import redis
from celery import Celery
from sqlalchemy import Engine, func, select, update
from sqlalchemy.orm import Session

from core import ledger, log
from core.database import connect
from core.faults import Fault
from core.heartbeats import forget_gone
from core.ledger import Move
from core.queue import celery_app, wake_worker
from core.settings import SweepSettings
from core.stores.witness import witness_store
from core.tables import Dataset, Job, JobState, Release, ReviewCopy, Revocations
from core.witness import WitnessLog, compare
from worker import process
from worker.lease import MAX_ATTEMPTS, DatasetLease, JobLease, ReleaseLease
from worker.review_copies import unneeded

_log = log.get("sweep")
SWEEP_SECONDS = 2.0
BATCH = 100
Waiting = list[tuple[str, uuid.UUID]]  # task and id


def keep_witness(engine: Engine, witness: WitnessLog) -> None:
    with Session(engine) as session, session.begin():
        compare(session, witness)


def waiting(session: Session) -> Waiting:
    """Jobs and checks that wait for a train worker, or whose worker's lease has expired."""
    jobs = select(Job.id).where(JobLease.due()).order_by(Job.created_at).limit(BATCH)
    checks = select(Dataset.id).where(DatasetLease.due()).order_by(Dataset.sealed_at).limit(BATCH)
    return [
        (task, id)
        for task, ids in (("train.run", jobs), ("train.check", checks))
        for id in session.scalars(ids)
    ]


def unpublished(session: Session) -> Waiting:
    """Releases that wait for the publisher, review copies to remove, and a revocation list that is due."""
    due = select(Release.id).where(ReleaseLease.due()).order_by(Release.created_at).limit(BATCH)
    copies = unneeded().with_only_columns(ReviewCopy.release_id).distinct().limit(BATCH)
    tasks = [("publish.run", id) for ids in (due, copies) for id in session.scalars(ids)]
    # A list states when it was signed, so a verifier notices if newer ones are held back.
    newest = session.scalars(select(func.max(Revocations.at))).one()
    if newest is not None and newest < datetime.now(UTC) - timedelta(days=1):
        tasks.append(("publish.revocations", uuid.UUID(int=0)))
    return tasks


def wake_workers(
    engine: Engine,
    app: Celery,
    queued: Callable[[], int],
    waiting: Callable[[Session], Waiting] = waiting,
) -> None:
    """Sends a message for each row that waits, if the queue is empty: none pile up behind a long job."""
    if queued():
        return
    with Session(engine) as session:
        for task, id in waiting(session):
            wake_worker(app, task, id)


def end_exhausted_jobs(engine: Engine) -> None:
    """Ends jobs whose last attempt died too; they are charged if they opened their records."""
    exhausted = (Job.state == JobState.RUNNING, Job.lease_until < func.now(), Job.fence >= MAX_ATTEMPTS)
    values = {"state": JobState.FAILED, "fault": Fault.LOST.value, "finished_at": func.now()}
    lost = update(Job).where(*exhausted).values(values).returning(Job.id, Job.account_id, Job.opened_at)
    with Session(engine) as session, session.begin():
        for id, account_id, opened_at in session.execute(lost).all():
            end = ledger.void if opened_at is None else ledger.settle
            end(session, account_id, job=id, move=Move(actor="sweep", reason="ended: lost"))
            _log.warning("job_lost", job_id=str(id))


def trim_audit_log(engine: Engine, days: int) -> int:
    """Removes older rows of the audit log and returns their number. The remaining chain still verifies."""
    before = datetime.now(UTC) - timedelta(days=days)
    with engine.begin() as connection:
        return int(connection.execute(select(func.trim_audit_log(before))).scalar_one())


def main() -> None:
    settings = process.settings_or_exit(SweepSettings, "sweep")
    engine = connect(str(settings.database_url), pool_size=2)
    url = str(settings.queue_url)
    stopping = threading.Event()

    def stop(_signal: int, _frame: FrameType | None) -> None:
        stopping.set()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    witness = WitnessLog(witness_store(settings))
    train, publish = celery_app("train", url), celery_app("publish", url)
    queue = redis.Redis.from_url(url, socket_timeout=5, socket_connect_timeout=5)
    trim_at = [0.0]

    def work() -> None:
        keep_witness(engine, witness)
        end_exhausted_jobs(engine)
        wake_workers(engine, train, lambda: int(queue.llen("train:train")))
        wake_workers(engine, publish, lambda: int(queue.llen("publish:publish")), unpublished)
        forget_gone(engine)
        if settings.audit_days is not None and time.monotonic() > trim_at[0]:
            trim_audit_log(engine, settings.audit_days)
            trim_at[0] = time.monotonic() + 3600

    process.live(engine, url, "sweep", stopping, work, every=SWEEP_SECONDS)
    engine.dispose()


if __name__ == "__main__":
    main()
