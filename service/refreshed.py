"""A value read from elsewhere by one thread and at most twice a second, however many ask for it."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

from anyio import CapacityLimiter, to_thread

T = TypeVar("T")


class Refreshed(Generic[T]):
    """Read when somebody asks and the copy is older than half a second; all who ask meanwhile wait for that.

    A copy of up to a minute is given if the next cannot be read, or not within a second.
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
            # Looked at here, or asyncio logs its text when everybody who waited has gone.
            self._reading.add_done_callback(lambda task: task.cancelled() or task.exception())
        reading = asyncio.shield(self._reading)  # others wait for it too
        if copy is None or time.monotonic() > copy[0] + self.STALE_SECONDS:
            return await reading
        with suppress(Exception):
            return await asyncio.wait_for(reading, timeout=1)
        return copy[1]

    async def _refresh(self) -> T:
        began = time.monotonic()
        try:
            # A limiter of its own: it does not wait for the threads of routes.
            found = await to_thread.run_sync(self._load, limiter=CapacityLimiter(1))
            self._read = (began, found)
            return found
        finally:
            self._reading = None
