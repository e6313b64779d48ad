"""Writes into the audit log who asks for what: a row before the route runs, a second one if it is refused.

A request whose row cannot be written is not served. Credentials that are no good, and requests above the
limit of a key, are counted: one row a minute for each address or key, and one with the number of the rest.
"""

import threading
import time
import uuid
from dataclasses import dataclass
from typing import Any

from anyio import to_thread
from fastapi import Request
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError
from starlette.types import Scope

from core import audit, log
from core.audit import Actor
from core.tables import Key

_log = log.get("audit")
MOST_SOURCES = 1000  # counted apart in one minute; all others together


def actor_of(request: Request, **person: Any) -> Actor:
    address = request.client.host if request.client else None
    return Actor(address=address, request=request.state.request_id, **person)


def record_request(request: Request, actor: Actor) -> None:
    """The row of a request that was let in. Its number is kept for the answer."""
    request.state.actor = actor
    engine: Engine = request.app.state.engine
    request.state.audit_number = audit.write(
        engine, _action(request), _objects(request), actor=actor, durable=False
    )


def record_download(request: Request, files: list[str]) -> None:
    """Which files: a row of its own, since the body names them. It is safe before the answer leaves."""
    audit.write(
        request.app.state.engine, "download", [*_objects(request), *files], actor=request.state.actor,
        answers=request.state.audit_number,
    )  # fmt: skip


def record_redeemed(request: Request, key: Key) -> None:
    """Nobody is authenticated yet: the invitation says who it is. The key is shown only after this."""
    actor = actor_of(request, person=key.person_id, key=key.id)
    audit.write(request.app.state.engine, "invitation redeemed", [key.person_id, key.id], actor=actor)


async def record_refusal(scope: Scope, status: int) -> None:
    """If this row is lost, the log says that more was done than was: the answer leaves all the same."""
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


@dataclass(frozen=True)
class _Refused:
    """Requests that are not let in, of one kind and from one source."""

    action: str
    status: int
    person: uuid.UUID | None = None
    name: str | None = None
    role: str | None = None
    key: uuid.UUID | None = None
    address: str | None = None


class Refusals:
    """Counts what is not let in, and writes it down now and then, so that a flood is no flood of rows."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._lock = engine, threading.Lock()
        self._minute, self._counts = 0, dict[_Refused, int]()

    def count(self, refused: _Refused) -> None:
        with self._lock:
            due = self._take_due()
            if refused not in self._counts and len(self._counts) >= MOST_SOURCES:
                refused = _Refused(refused.action, refused.status)
            first = refused not in self._counts
            self._counts[refused] = 0 if first else self._counts[refused] + 1
        if first:
            due = [*due, (refused, 1)]
        self._write(due)

    def flush(self, *, all: bool = False) -> None:
        """Writes what was counted in a minute that is over."""
        with self._lock:
            due = self._take_due(all=all)
        self._write(due)

    def _take_due(self, *, all: bool = False) -> list[tuple[_Refused, int]]:
        minute = int(time.time() // 60)
        if minute == self._minute and not all:
            return []
        due = [(refused, more) for refused, more in self._counts.items() if more]
        self._minute, self._counts = minute, {}
        return due

    def _write(self, due: list[tuple[_Refused, int]]) -> None:
        for refused, times in due:
            identity = {name: getattr(refused, name) for name in ("person", "name", "role", "key", "address")}
            actor = Actor(**identity)
            audit.write(
                self._engine, refused.action, actor=actor, status=refused.status, times=times, durable=False
            )


def refused_sign_in(request: Request) -> None:
    address = request.client.host if request.client else None
    request.app.state.refusals.count(_Refused("sign-in", 401, address=address))


def refused_by_rate(request: Request, actor: Actor) -> None:
    identity = (actor.person, actor.name, actor.role, actor.key, actor.address)
    request.app.state.refusals.count(_Refused("any request", 429, *identity))


def _action(request: Request) -> str:
    route = getattr(request.scope.get("route"), "path", None)
    return f"{request.method} {route}"


def _objects(request: Request) -> list[str]:
    """The ids in the path; what is no id was typed by a person and is left out."""
    ids = []
    for value in request.path_params.values():
        try:
            ids.append(str(uuid.UUID(str(value))))
        except ValueError:
            continue
    return ids
