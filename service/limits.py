"""Limits per caller: size and duration of a body, requests per minute."""

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Hashable

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from core.errors import Problem

MAX_COUNTED = 100_000  # keys or addresses
BODY_SECONDS = 60.0
ANONYMOUS_BODY_SECONDS = 5.0  # for a request without credentials
LARGEST_BODY = 1 << 20  # files are uploaded directly to the store


class TooMany(Problem):
    status, slug, title = 429, "rate-limited", "Too many requests"


class Bodies:
    """Refuses a body that is too large, counted as it arrives whatever its header says, or too slow."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        has_credentials = any(name == b"authorization" for name, _ in scope["headers"])
        seconds = BODY_SECONDS if has_credentials else ANONYMOUS_BODY_SECONDS
        deadline = asyncio.get_running_loop().time() + seconds
        seen, complete = 0, False

        async def counted() -> Message:
            nonlocal seen, complete
            try:  # after the body, receive() waits for the client to disconnect, without a deadline
                async with asyncio.timeout_at(None if complete else deadline):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408) from None
            complete = not message.get("more_body", False)
            seen += len(message.get("body", b""))
            if seen > LARGEST_BODY:
                raise HTTPException(413)  # FastAPI turns other exceptions into 400 while it reads a body
            return message

        await self.app(scope, counted, send)


class Rates:
    """Counts requests per key or address and minute, in bounded memory."""

    def __init__(self, per_minute: int) -> None:
        self._most, self._lock = per_minute, threading.Lock()
        self._counts: OrderedDict[tuple[Hashable, int], int] = OrderedDict()

    def count(self, key: Hashable) -> None:
        now = time.time()
        minute = int(now // 60)
        with self._lock:
            while self._counts and (next(iter(self._counts))[1] < minute or len(self._counts) > MAX_COUNTED):
                self._counts.popitem(last=False)
            seen = self._counts[key, minute] = self._counts.get((key, minute), 0) + 1
        if seen > self._most:
            wait = 60 - int(now % 60)
            raise TooMany(f"Wait {wait} s, or spread requests over time.", headers={"Retry-After": str(wait)})

    def refund(self, key: Hashable) -> None:
        """Subtracts one request from the count of the current minute."""
        minute = int(time.time() // 60)
        with self._lock:
            if self._counts.get((key, minute), 0) > 0:
                self._counts[key, minute] -= 1
