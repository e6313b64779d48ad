"""Configures uvicorn: limits on connections, and on the time a client takes to send a request."""

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

HEAD_SECONDS = 10.0  # to send the head of a request, from its first byte or the start of the connection
WRITE_SECONDS = 30.0  # to read a response that is waiting to be sent
_OTHER_FILES = 100  # file descriptors reserved for everything but clients
_MAX_FILES = 65_536
REQUESTS_PER_ROUND = 4  # started in one round of the event loop
_FIRST = b"GET /healthz "


def configuration(app: ASGIApp, settings: ServiceSettings, **where: Any) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=limited(max_connections()),
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=3,
        server_header=False,
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
        # By default uvicorn would trust X-Forwarded-For of any client on this machine.
        proxy_headers=settings.trusted_proxies is not None,
        forwarded_allow_ips=settings.trusted_proxies or "",
        **where,
    )


def max_connections() -> int:
    """As many as the process may open files, after raising the soft limit to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return max(soft, most) - _OTHER_FILES


def limited(total: int) -> type[H11Protocol]:
    """A protocol that accepts at most `total` connections, and half of them from one address.

    When many requests arrive together, a few are started in each round of the event loop, in the order of
    arrival. New data is read between rounds, and /healthz does not wait for the other requests.
    """
    slots = Slots(total=total, per_key=max(1, total // 2))
    waiting: deque[tuple[Any, bytes]] = deque()

    def start_some(loop: asyncio.AbstractEventLoop) -> None:
        for _ in range(min(REQUESTS_PER_ROUND, len(waiting))):
            connection, data = waiting.popleft()
            if connection.transport.is_closing():
                continue
            try:
                connection.transport.resume_reading()
                connection.take(data)
            except Exception:  # as asyncio does: an error closes this connection only
                connection.transport.abort()
        if waiting:
            loop.call_soon(start_some, loop)

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
            in_progress = self.cycle is not None and not self.cycle.response_complete
            if in_progress or data.startswith(_FIRST):
                return self.take(data)
            # Nothing more is read until it is started, so each connection buffers one chunk at most.
            self.transport.pause_reading()
            if not waiting:
                self.loop.call_soon(start_some, self.loop)
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
                slots.release(self._network)
            super().connection_lost(exc)

        def _stop_timer(self) -> None:
            if self._head is not None:
                self._head.cancel()
                self._head = None

    return Connection
