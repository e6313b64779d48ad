"""Writes the audit log: a row before a route runs, and a second one if the request is refused.

A request whose row cannot be written is not served. Bad credentials and requests above a rate limit are
counted: per address or key and minute, one row for the first and one with the number of the others.
"""

import threading
import time
import uuid
from dataclasses import replace
from typing import Any, NamedTuple

from anyio import to_thread
from fastapi import Request
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError
from starlette.types import Scope

from core import audit, log
from core.audit import Actor
from core.tables import Key

_log = log.get("audit")
MAX_SOURCES = 1000  # counted separately in one minute; all others are counted together


def actor_of(request: Request, **person: Any) -> Actor:
    address = request.client.host if request.client else None
    return Actor(address=address, request=request.state.request_id, **person)


def record_request(request: Request, actor: Actor) -> None:
    """Writes the row of an admitted request and remembers its number for rows that refer to it."""
    request.state.actor = actor
    engine: Engine = request.app.state.engine
    request.state.audit_number = audit.write(
        engine, _action(request), _objects(request), actor=actor, durable=False
    )


def record_download(request: Request, files: list[str]) -> None:
    """Writes a durable row with the file names, which are in the body, before the links are sent."""
    audit.write(
        request.app.state.engine, "download", [*_objects(request), *files], actor=request.state.actor,
        answers=request.state.audit_number,
    )  # fmt: skip


def record_redeemed(request: Request, key: Key) -> None:
    """Writes that an invitation was redeemed, by the person it was issued to, before the key is shown."""
    actor = actor_of(request, person=key.person_id, key=key.id)
    audit.write(request.app.state.engine, "invitation redeemed", [key.person_id, key.id], actor=actor)


async def record_refusal(scope: Scope, status: int) -> None:
    """Writes the row of a refused request. The response is sent even if this fails: nothing was done."""
    state = scope.get("state", {})
    if status < 400 or "audit_number" not in state:
        return

    def write() -> None:
        request = Request(scope)
        audit.write(
            scope["app"].state.engine, _action(request), _objects(request), actor=state["actor"],
            status=status, answers=state["audit_number"], durable=False,
        )  # fmt: skip

    try:
        await to_thread.run_sync(write)
    except SQLAlchemyError as problem:
        _log.error("refusal_not_recorded", kind=type(problem).__name__)


class Refusal(NamedTuple):
    """Requests of one kind and from one source that were not admitted."""

    action: str
    status: int
    actor: Actor = Actor()


class Refusals:
    """Counts requests that were not admitted and writes the counts each minute, so a flood adds few rows."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._lock = engine, threading.Lock()
        self._minute, self._counts = 0, dict[Refusal, int]()

    def count(self, refusal: Refusal) -> None:
        with self._lock:
            due = self._take_due()
            if refusal not in self._counts and len(self._counts) >= MAX_SOURCES:
                refusal = Refusal(refusal.action, refusal.status)
            first = refusal not in self._counts
            self._counts[refusal] = 0 if first else self._counts[refusal] + 1
        self._write([*due, (refusal, 1)] if first else due)

    def flush(self, *, all: bool = False) -> None:
        """Writes the counts of past minutes; with `all`, those of the current minute too."""
        with self._lock:
            due = self._take_due(all=all)
        self._write(due)

    def _take_due(self, *, all: bool = False) -> list[tuple[Refusal, int]]:
        minute = int(time.time() // 60)
        if minute == self._minute and not all:
            return []
        due = [(refusal, times) for refusal, times in self._counts.items() if times]
        self._minute, self._counts = minute, {}
        return due

    def _write(self, due: list[tuple[Refusal, int]]) -> None:
        for (action, status, actor), times in due:
            audit.write(self._engine, action, actor=actor, status=status, times=times, durable=False)


def count_refused_sign_in(request: Request) -> None:
    actor = replace(actor_of(request), request=None)
    request.app.state.refusals.count(Refusal("sign-in", 401, actor))


def count_rate_limited(request: Request, actor: Actor) -> None:
    request.app.state.refusals.count(Refusal("any request", 429, replace(actor, request=None)))


def _action(request: Request) -> str:
    route = getattr(request.scope.get("route"), "path", None)
    return f"{request.method} {route}"


def _objects(request: Request) -> list[str]:
    """The ids in the path; anything that is not an id is text of the caller and is left out."""
    ids = []
    for value in request.path_params.values():
        try:
            ids.append(str(uuid.UUID(str(value))))
        except ValueError:
            continue
    return ids
