"""Gives each request an id, in its answer and in every log line it causes."""

import re
import time
import uuid

import structlog
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from core import log

HEADER = "X-Request-Id"
_USABLE = re.compile(rb"^[A-Za-z0-9._-]{1,64}$")
_log = log.get("requests")


class RequestIds:
    """Plain ASGI, since a wrapped response would buffer streams."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        given = dict(scope["headers"]).get(HEADER.lower().encode(), b"")
        # A caller's id is kept only when it cannot forge a log line.
        request_id = given.decode() if _USABLE.match(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        started, status = time.monotonic(), 500

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[HEADER] = request_id
            await send(message)

        with structlog.contextvars.bound_contextvars(request_id=request_id):
            try:
                await self.app(scope, receive, send_with_id)
            finally:
                route = getattr(
                    scope.get("route"), "path", None
                )  # the pattern: a path may hold what a caller typed
                _log.info(
                    "request",
                    method=scope["method"],
                    route=route,
                    status=status,
                    ms=round(1000 * (time.monotonic() - started)),
                )
