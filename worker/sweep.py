"""Goes round and puts right what a dead process left behind. `python -m worker.sweep`.

Keeps the ledger level with its witness, rings again for work nobody answered to, ends jobs that keep dying.
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
from sqlalchemy import Engine, and_, func, or_, select, update
from sqlalchemy.orm import Session

from core import ledger, log
from core.database import connect
from core.faults import Fault
from core.heartbeats import forget_gone
from core.ledger import Move
from core.queue import celery_app, wake_worker
from core.settings import SweepSettings
from core.stores.witness import witness_store
from core.tables import Dataset, Job, Release, ReviewCopy, Revocations
from core.witness import WitnessLog, compare
from worker import process
from worker.claims import MOST_ATTEMPTS, due_release
from worker.copies import unneeded

_log = log.get("sweep")
SWEEP_SECONDS = 2.0


def keep_witness(engine: Engine, witness: WitnessLog) -> None:
    with Session(engine) as session, session.begin():
        compare(session, witness)


def waiting(session: Session) -> list[tuple[str, object]]:
    """(task, id) of what waits for a worker, or was left by one whose lease ran out."""
    left = and_(Job.state == "running", Job.lease_until < func.now())
    jobs = session.scalars(
        select(Job.id).where(or_(Job.state == "queued", left)).order_by(Job.created_at).limit(100)
    )
    due = or_(Dataset.retry_at.is_(None), Dataset.retry_at < func.now())
    unchecked = select(Dataset.id).where(Dataset.state == "checking", due).order_by(Dataset.sealed_at)
    checks = session.scalars(unchecked.limit(100))
    return [("train.run", id) for id in jobs] + [("train.check", id) for id in checks]


def unpublished(session: Session) -> list[tuple[str, object]]:
    """(task, id) of what waits for the publisher, or was left by one whose lease ran out."""
    free = or_(Release.lease_until.is_(None), Release.lease_until < func.now())
    found = select(Release.id).where(due_release(), free).order_by(Release.created_at).limit(100)
    rings: list[tuple[str, object]] = [("publish.run", id) for id in session.scalars(found)]
    left = unneeded().with_only_columns(ReviewCopy.release_id).distinct().limit(100)
    rings += [("publish.run", id) for id in session.scalars(left)]
    # A list of withdrawn releases says when it was signed: a fresh one cannot be held back unnoticed.
    newest = session.scalars(select(func.max(Revocations.at))).one()
    if newest is not None and newest < datetime.now(UTC) - timedelta(days=1):
        rings.append(("publish.revocations", uuid.UUID(int=0)))
    return rings


def ring_again(
    engine: Engine,
    app: Celery,
    queued: Callable[[], int],
    waiting: Callable[[Session], list[tuple[str, object]]] = waiting,
) -> None:
    """Rings for all that waits, but only into an empty queue: rings never pile up behind a long job."""
    if queued():
        return
    with Session(engine) as session:
        for task, id in waiting(session):
            wake_worker(app, task, id)  # type: ignore[arg-type]


def end_hopeless(engine: Engine) -> None:
    """A job that took worker after worker with it is over: charged if it opened its records."""
    hopeless = (Job.state == "running", Job.lease_until < func.now(), Job.fence >= MOST_ATTEMPTS)
    with Session(engine) as session, session.begin():
        lost = (
            update(Job)
            .where(*hopeless)
            .values(state="failed", fault=Fault.LOST.value, finished_at=func.now())
        )
        for id, account_id, opened_at in session.execute(
            lost.returning(Job.id, Job.account_id, Job.opened_at)
        ).all():
            end = ledger.void if opened_at is None else ledger.settle
            end(session, account_id, job=id, move=Move(actor="sweep", reason="ended: lost"))
            _log.warning("job_lost", job_id=str(id))


def trim_audit_log(engine: Engine, days: int) -> int:
    """Removes rows of the audit log that are older than this; gives how many. The rest still verifies."""
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
        end_hopeless(engine)
        ring_again(engine, train, lambda: int(queue.llen("train:train")))
        ring_again(engine, publish, lambda: int(queue.llen("publish:publish")), unpublished)
        forget_gone(engine)
        if settings.audit_days is not None and time.monotonic() > trim_at[0]:
            trim_audit_log(engine, settings.audit_days)
            trim_at[0] = time.monotonic() + 3600

    process.live(engine, url, "sweep", stopping, work, every=SWEEP_SECONDS)
    engine.dispose()


if __name__ == "__main__":
    main()
