"""Limits on what one caller may ask of the service: size of a body, requests in a minute."""

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Hashable

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from core.errors import Problem

MOST_REMEMBERED = 100_000  # keys or addresses that are counted at a time
BODY_SECONDS = 60.0
STRANGERS_BODY_SECONDS = 5.0  # where a body is read of somebody without a key
LARGEST_BODY = 1 << 20  # rows travel straight to the bucket; a request only describes them


class TooMany(Problem):
    status, slug, title = 429, "rate-limited", "Too many requests"


class Bodies:
    """Refuses a body above the limit by what arrives, whatever its header says, and one that is too slow."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        known = any(name == b"authorization" for name, _ in scope["headers"])
        deadline = asyncio.get_running_loop().time() + (BODY_SECONDS if known else STRANGERS_BODY_SECONDS)
        seen, complete = 0, False

        async def counted() -> Message:
            nonlocal seen, complete
            try:  # once the body is here, the wait is for the client to leave
                async with asyncio.timeout_at(None if complete else deadline):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408) from None
            complete = not message.get("more_body", False)
            seen += len(message.get("body", b""))
            if seen > LARGEST_BODY:
                raise HTTPException(413)  # of the framework: others become 400 while a body is read
            return message

        await self.app(scope, counted, send)


class Rates:
    """Counts requests of each key or address in the running minute. What it remembers is bounded."""

    def __init__(self, per_minute: int) -> None:
        self._most, self._lock = per_minute, threading.Lock()
        self._counts: OrderedDict[tuple[Hashable, int], int] = OrderedDict()

    def count(self, key: Hashable) -> None:
        now = time.time()
        minute = int(now // 60)
        with self._lock:
            while self._counts and (
                next(iter(self._counts))[1] < minute or len(self._counts) > MOST_REMEMBERED
            ):
                self._counts.popitem(last=False)
            seen = self._counts[key, minute] = self._counts.get((key, minute), 0) + 1
        if seen > self._most:
            wait = 60 - int(now % 60)
            raise TooMany(f"Wait {wait} s, or spread requests over time.", headers={"Retry-After": str(wait)})

    def refund(self, key: Hashable) -> None:
        """Takes one request of the running minute out of the count."""
        minute = int(time.time() // 60)
        with self._lock:
            if self._counts.get((key, minute), 0) > 0:
                self._counts[key, minute] -= 1
