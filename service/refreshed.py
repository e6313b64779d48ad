"""A cached value that is refreshed by one thread at most twice a second, however many requests need it."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

from anyio import CapacityLimiter, to_thread

T = TypeVar("T")


class Refreshed(Generic[T]):
    """Loads the value when it is requested and older than half a second; concurrent requests share the load.

    A value of up to a minute is returned if the load fails or takes longer than a second.
    """

    FRESH_SECONDS = 0.5
    STALE_SECONDS = 60.0

    def __init__(self, load: Callable[[], T]) -> None:
        self._load = load
        self._read: tuple[float, T] | None = None
        self._reading: asyncio.Task[T] | None = None

    async def get(self) -> T:
        copy = self._read
        if copy and time.monotonic() < copy[0] + self.FRESH_SECONDS:
            return copy[1]
        if self._reading is None:
            self._reading = asyncio.create_task(self._refresh())
            # Retrieves the exception: asyncio logs the text of one that nobody retrieved.
            self._reading.add_done_callback(lambda task: task.cancelled() or task.exception())
        reading = asyncio.shield(self._reading)  # cancelling one request must not cancel the shared load
        if copy is None or time.monotonic() > copy[0] + self.STALE_SECONDS:
            return await reading
        with suppress(Exception):
            return await asyncio.wait_for(reading, timeout=1)
        return copy[1]

    async def _refresh(self) -> T:
        began = time.monotonic()
        try:
            # Its own limiter: it does not wait for the threads of routes.
            value = await to_thread.run_sync(self._load, limiter=CapacityLimiter(1))
            self._read = (began, value)
            return value
        finally:
            self._reading = None
