"""Gives each request an id, which is in its response and in all log lines about it."""

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
    """Middleware in plain ASGI: Starlette's BaseHTTPMiddleware would buffer streams."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        header = dict(scope["headers"]).get(HEADER.lower().encode(), b"")
        # The caller's id is used only if it cannot forge a log line.
        request_id = header.decode() if _USABLE.match(header) else uuid.uuid4().hex
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
                # Logged here, with the request id; uvicorn's log would print the text of the exception.
                _log.error("request_failed", kind=type(problem).__name__, where=_where(problem))
                if not status:  # otherwise the response has begun, and the server closes the connection
                    await problems.unexpected(Request(scope))(scope, receive, send_with_id)
            finally:
                # The pattern of the route: the path itself may contain text of the caller.
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
    """File names and line numbers of the traceback, innermost last, without values."""
    frames = traceback.extract_tb(problem.__traceback__)
    return [f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames[-5:]]


def _method(method: str) -> str:
    return method if method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS") else "other"
