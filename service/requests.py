"""Gives each request an id, in its answer and in every log line it causes."""

import re
import time
import traceback
import uuid
from pathlib import Path

import structlog
from fastapi import Request
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from core import log
from service import audit, problems
from service.metrics import Metrics

HEADER = "X-Request-Id"
_USABLE = re.compile(rb"^[A-Za-z0-9._-]{1,64}$")
_log = log.get("requests")


class RequestIds:
    """Plain ASGI, since a wrapped response would buffer streams."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        given = dict(scope["headers"]).get(HEADER.lower().encode(), b"")
        # A caller's id is kept only when it cannot forge a log line.
        request_id = given.decode() if _USABLE.match(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        began, status = time.monotonic(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[HEADER] = request_id
                await audit.record_refusal(scope, status)
            await send(message)

        with structlog.contextvars.bound_contextvars(request_id=request_id):
            try:
                await self.app(scope, receive, send_with_id)
            except Exception as problem:
                # Caught here, where the id is bound; a server's own log would print the text of the error.
                _log.error("request_failed", kind=type(problem).__name__, where=_where(problem))
                if not status:  # else the answer is under way and the server cuts it off
                    await problems.unexpected(Request(scope))(scope, receive, send_with_id)
            finally:
                # The pattern: a path may hold what a caller typed.
                route = getattr(scope.get("route"), "path", None)
                method, seconds = _method(scope["method"]), time.monotonic() - began
                self.metrics.observe(method=method, route=route, status=status, seconds=seconds)
                actor = scope["state"].get("actor")
                if not scope["state"].get("unlogged"):
                    _log.info(
                        "request", method=method, route=route, status=status, ms=round(1000 * seconds),
                        actor=actor and str(actor.person),
                    )  # fmt: skip


def _where(problem: Exception) -> list[str]:
    """The lines of the program that led there, innermost last; no values."""
    frames = traceback.extract_tb(problem.__traceback__)
    return [f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames[-5:]]


def _method(given: str) -> str:
    return given if given in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS") else "other"
