"""Limits on what one caller may ask of the service: size of a body, requests in a minute."""

import threading
import time
from collections import OrderedDict
from uuid import UUID

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from core.errors import Problem

LARGEST_BODY = 1 << 20  # rows travel straight to the bucket; a request only describes them


class TooMany(Problem):
    status, slug, title = 429, "rate-limited", "Too many requests"


class Bodies:
    """Refuses a body above the limit by what arrives, whatever its header says."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > LARGEST_BODY:
                raise HTTPException(413)  # of the framework: others become 400 while a body is read
            return message

        await self.app(scope, counted, send)


class Rates:
    """Counts requests of each key in the running minute; keys that fell silent are forgotten."""

    def __init__(self, per_minute: int) -> None:
        self._most, self._lock = per_minute, threading.Lock()
        self._counts: OrderedDict[tuple[UUID, int], int] = OrderedDict()

    def count(self, key: UUID) -> None:
        now = time.time()
        minute = int(now // 60)
        with self._lock:
            while self._counts and next(iter(self._counts))[1] < minute:
                self._counts.popitem(last=False)
            seen = self._counts[key, minute] = self._counts.get((key, minute), 0) + 1
        if seen > self._most:
            wait = 60 - int(now % 60)
            raise TooMany(f"Wait {wait} s, or spread requests over time.", headers={"Retry-After": str(wait)})
