"""The HTTP server: how many connections there may be, and how long a client may take to send a request."""

import asyncio
import resource
from collections import deque
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from core.errors import Problem
from core.settings import ServiceSettings
from service.overload import Slots, network_of

HEAD_SECONDS = 10.0  # for the head of a request, from its first byte or from the start of the connection
WRITE_SECONDS = 30.0  # for a client to take what is waiting for it
_OTHER_FILES = 100  # descriptors for everything but clients
_MOST_FILES = 65_536
AT_A_TIME = 4  # requests begun in one round of the event loop
_FIRST = b"GET /healthz "


def configuration(app: ASGIApp, settings: ServiceSettings, **where: Any) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=limited(most_connections()),
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=3,
        server_header=False,
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
        # uvicorn would believe X-Forwarded-For of anybody on this machine.
        proxy_headers=settings.trusted_proxies is not None,
        forwarded_allow_ips=settings.trusted_proxies or "",
        **where,
    )


def most_connections() -> int:
    """As many as the process may open files, with the soft limit raised as far as that is allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return max(soft, most) - _OTHER_FILES


def limited(total: int) -> type[H11Protocol]:
    """A protocol with at most `total` connections, half of them from one address.

    When a thousand requests arrive together, a few are begun in each round of the event loop, in the order of
    arrival. What arrives meanwhile is looked at between rounds, and /healthz does not wait for the rest.
    """
    slots = Slots(total=total, each=max(1, total // 2))
    waiting: deque[tuple[Any, bytes]] = deque()

    def begin_some(loop: asyncio.AbstractEventLoop) -> None:
        for _ in range(min(AT_A_TIME, len(waiting))):
            connection, data = waiting.popleft()
            if connection.transport.is_closing():
                continue
            try:
                connection.transport.resume_reading()
                connection.take(data)
            except Exception:  # asyncio does the same: one client's fault ends its own connection
                connection.transport.abort()
        if waiting:
            loop.call_soon(begin_some, loop)

    class Connection(H11Protocol):
        _head: asyncio.TimerHandle | None = None
        _unread: asyncio.TimerHandle | None = None
        _counted = False

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._network = network_of({"client": self.client})
            try:
                slots.require(self._network)
            except Problem:
                return transport.abort()
            slots.take(self._network)
            self._counted = True
            self._head = self.loop.call_later(HEAD_SECONDS, transport.abort)

        def data_received(self, data: bytes) -> None:
            under_way = self.cycle is not None and not self.cycle.response_complete
            if under_way or data.startswith(_FIRST):
                return self.take(data)
            # Nothing more is read from it until then, so each connection holds one piece at most.
            self.transport.pause_reading()
            if not waiting:
                self.loop.call_soon(begin_some, self.loop)
            waiting.append((self, data))

        def take(self, data: bytes) -> None:
            super().data_received(data)
            idle = self.cycle is None or self.cycle.response_complete
            if idle and self._head is None:
                self._head = self.loop.call_later(HEAD_SECONDS, self.transport.abort)
            elif not idle:
                self._stop_timer()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._unread = self.loop.call_later(WRITE_SECONDS, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            if self._unread is not None:
                self._unread.cancel()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            if self._unread is not None:
                self._unread.cancel()
            if self._counted:
                slots.give_back(self._network)
            super().connection_lost(exc)

        def _stop_timer(self) -> None:
            if self._head is not None:
                self._head.cancel()
                self._head = None

    return Connection
