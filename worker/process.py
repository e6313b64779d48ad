"""What the worker processes have in common: settings, logs, signs of life, a clean end."""

import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from core.settings import PublishSettings, SettingsProblem, SweepSettings, TrainSettings, load
from core.witness import WitnessDamaged

_log = log.get("life")
S = TypeVar("S", bound="TrainSettings | PublishSettings | SweepSettings")


@contextmanager
def repeating(action: Callable[[], object], seconds: float) -> Iterator[None]:
    """Does something now and then from another thread while the block takes long."""
    done = threading.Event()

    def repeat() -> None:
        while not done.wait(seconds):
            try:
                action()
            except SQLAlchemyError as problem:
                _log.warning("heartbeat_missed", kind=type(problem).__name__)

    thread = threading.Thread(target=repeat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def where(problem: Exception) -> list[str]:
    """Files and lines of the traceback, and no values."""
    return [f"{Path(f.filename).name}:{f.lineno}" for f in traceback.extract_tb(problem.__traceback__)]


def settings_or_exit(kind: type[S], role: str) -> S:
    try:
        settings = load(kind)
    except SettingsProblem as problem:
        sys.exit(f"sluice: {problem}")
    log.configure(role)
    return settings


def live(
    engine: Engine,
    queue_url: str,
    role: str,
    stopping: threading.Event,
    work: Callable[[], None] = lambda: None,
    every: float = BEAT_SECONDS,
) -> None:
    """Beats until told to stop, does `work` between beats; a lost server is waited for, not died of."""
    queue = redis.Redis.from_url(queue_url, socket_timeout=5, socket_connect_timeout=5)
    trouble = False
    while True:
        try:
            queue.ping()
            beat(engine, role)
            work()
            trouble = False
        except (SQLAlchemyError, RedisError, BotoCoreError, ClientError, OSError, WitnessDamaged) as problem:
            if not trouble:
                _log.warning("part_lost_server", kind=type(problem).__name__)
            trouble = True
        if stopping.wait(1 if trouble else every):
            break
    queue.close()
    try:
        leave(engine, role)
    except SQLAlchemyError:
        _log.warning("part_left_without_saying")


def serve(
    app: Celery, engine: Engine, queue_url: str, role: str, stopping: threading.Event | None = None
) -> None:
    """Consumes the role's queue, one job at a time, until SIGTERM sets `stopping`: a long job hands back."""
    stopping = stopping or threading.Event()
    beating = threading.Thread(
        target=live, args=(engine, queue_url, role, stopping), name="life", daemon=True
    )

    @worker_ready.connect(weak=False)
    def start(**_: object) -> None:
        beating.start()

    @worker_shutting_down.connect(weak=False)
    def stop(**_: object) -> None:
        stopping.set()

    # A thread, not a forked child: nothing outlives this process, and no random state is shared by a fork.
    quiet = ["--loglevel=warning", "--without-heartbeat", "--without-gossip", "--without-mingle"]
    app.worker_main(["--quiet", "worker", "--pool=threads", "--concurrency=1", *quiet])
    stopping.set()
    if beating.is_alive():
        beating.join(timeout=5)
    engine.dispose()
