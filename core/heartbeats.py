"""Heartbeats: each process regularly records that it can work."""

import os
import socket
from datetime import timedelta
from importlib.metadata import version

from sqlalchemy import Engine, delete, func, select
from sqlalchemy.dialects.postgresql import insert

from core.tables import Heartbeat

BEAT_SECONDS = 5
ALIVE = timedelta(seconds=15)
GONE = timedelta(hours=1)


def part_name(role: str) -> str:
    return f"{role}@{socket.gethostname()}/{os.getpid()}"


def beat(engine: Engine, role: str) -> None:
    """Records that this process is connected to its database and queue."""
    row = insert(Heartbeat).values(name=part_name(role), role=role, version=version("sluice"))
    fresh = {"role": row.excluded.role, "version": row.excluded.version, "seen_at": func.now()}
    with engine.begin() as connection:
        connection.execute(row.on_conflict_do_update(index_elements=[Heartbeat.name], set_=fresh))


def leave(engine: Engine, role: str) -> None:
    """Removes the heartbeat of this process, which stops on purpose."""
    with engine.begin() as connection:
        connection.execute(delete(Heartbeat).where(Heartbeat.name == part_name(role)))


def alive(engine: Engine) -> set[str]:
    """The roles of which at least one process is running."""
    with engine.connect() as connection:
        return set(connection.scalars(select(Heartbeat.role).where(Heartbeat.seen_at > func.now() - ALIVE)))


def forget_gone(engine: Engine) -> None:
    """Removes heartbeats of processes that ended without removing their own."""
    with engine.begin() as connection:
        connection.execute(delete(Heartbeat).where(Heartbeat.seen_at < func.now() - GONE))
