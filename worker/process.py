"""What the worker processes have in common: settings, logs, tasks, heartbeats, shutdown."""

import sys
import threading
import traceback
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import redis
from botocore.exceptions import BotoCoreError, ClientError
from celery import Celery
from celery.signals import worker_ready, worker_shutting_down
from redis.exceptions import RedisError
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from core import log
from core.heartbeats import BEAT_SECONDS, beat, leave
from core.queue import wake_worker
from core.settings import PublishSettings, SettingsProblem, SweepSettings, TrainSettings, load
from core.witness import WitnessDamaged

_log = log.get("process")
S = TypeVar("S", bound="TrainSettings | PublishSettings | SweepSettings")


def traceback_lines(problem: Exception) -> list[str]:
    """Files and lines of the traceback, without values."""
    frames = traceback.extract_tb(problem.__traceback__)
    return [f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames]


def settings_or_exit(kind: type[S], role: str) -> S:
    try:
        settings = load(kind)
    except SettingsProblem as problem:
        sys.exit(f"sluice: {problem}")
    log.configure(role)
    return settings


def register_task(app: Celery, name: str, action: Callable[[uuid.UUID], object]) -> None:
    """Calls `action` with the id in each message; wakes a worker for the same id if it returns True."""

    def task(id: object = None, *_: object, **__: object) -> None:
        try:
            row_id = uuid.UUID(str(id))
        except ValueError:
            _log.warning("message_not_understood", task=name)
            return
        if action(row_id):
            wake_worker(app, name, row_id)

    app.task(task, name=name, shared=False)


def live(
    engine: Engine,
    queue_url: str,
    role: str,
    stopping: threading.Event,
    work: Callable[[], None] = lambda: None,
    every: float = BEAT_SECONDS,
) -> None:
    """Writes heartbeats and calls `work` until `stopping`; connection errors are logged and retried."""
    queue = redis.Redis.from_url(queue_url, socket_timeout=5, socket_connect_timeout=5)
    failing = False
    while True:
        try:
            queue.ping()
            beat(engine, role)
            work()
            failing = False
        except (SQLAlchemyError, RedisError, BotoCoreError, ClientError, OSError, WitnessDamaged) as problem:
            if not failing:
                _log.warning("connection_lost", kind=type(problem).__name__)
            failing = True
        if stopping.wait(1 if failing else every):
            break
    queue.close()
    try:
        leave(engine, role)
    except SQLAlchemyError:
        _log.warning("heartbeat_not_removed")


def serve(
    app: Celery, engine: Engine, queue_url: str, role: str, stopping: threading.Event | None = None
) -> None:
    """Consumes the role's queue, one task at a time, until SIGTERM sets `stopping`; long tasks hand back."""
    stopping = stopping or threading.Event()
    heartbeats = threading.Thread(
        target=live, args=(engine, queue_url, role, stopping), name="heartbeats", daemon=True
    )

    def start(**_: object) -> None:
        heartbeats.start()

    def stop(**_: object) -> None:
        stopping.set()

    worker_ready.connect(start, weak=False)
    worker_shutting_down.connect(stop, weak=False)
    # A thread, not a forked child: nothing outlives this process, and no random state is shared by a fork.
    quiet = ["--loglevel=warning", "--without-heartbeat", "--without-gossip", "--without-mingle"]
    app.worker_main(["--quiet", "worker", "--pool=threads", "--concurrency=1", *quiet])
    stopping.set()
    if heartbeats.is_alive():
        heartbeats.join(timeout=5)
    engine.dispose()
