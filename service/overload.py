"""Refuses requests that cannot be served soon, before any other work is done for them.

A request is *proven* if its credentials were valid when this process last saw them. All others are *unproven*
and count against the address they come from. Both have slots of their own, so that unproven requests never
take the slots of proven ones.
"""

import hashlib
import ipaddress
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Mapping
from types import SimpleNamespace

from anyio import CapacityLimiter
from fastapi import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from core import log
from core.errors import Problem
from core.settings import ServiceSettings
from service import problems
from service.limits import Rates, TooMany

MAX_PROVEN = 10_000  # credentials remembered
REDEEM = "/v1/invitations/redeem"
UNPROVEN_THREADS = 2  # look up unproven credentials; the other threads are for proven requests
_LOG_EVERY = 10.0
_log = log.get("overload")


class Overloaded(Problem):
    status, slug, title = 503, "overloaded", "Service overloaded"


class Slots:
    """A bounded number of slots, in total and per key. Keys without a slot use no memory."""

    def __init__(self, *, total: int, per_key: int) -> None:
        self._total, self._per_key = total, per_key
        self._taken, self._all = Counter[Hashable](), 0

    def require(self, key: Hashable) -> None:
        """Raises if no slot is free, in total or for this key."""
        if self._all >= self._total:
            raise Overloaded("Try again after the time in Retry-After.", headers={"Retry-After": "2"})
        if self._taken[key] >= self._per_key:
            detail = "Too many of your requests are in progress; wait for their responses."
            raise TooMany(detail, headers={"Retry-After": "1"})

    def take(self, key: Hashable) -> None:
        self._taken[key] += 1
        self._all += 1

    def release(self, key: Hashable) -> None:
        self._taken[key] -= 1
        self._all -= 1
        if not self._taken[key]:
            del self._taken[key]


class Admission:
    """Decides which requests are served. Used in the event loop only."""

    def __init__(self, settings: ServiceSettings) -> None:
        waiting = settings.requests_waiting
        self.proven = Slots(total=waiting, per_key=max(1, waiting // 2))
        self.unproven = Slots(total=waiting, per_key=settings.anonymous_at_once)
        # Redeeming reads the body of an unauthenticated request: few slots, separate from those of sign-ins.
        self.redeeming = Slots(total=50, per_key=5)
        self.unproven_threads = CapacityLimiter(UNPROVEN_THREADS)
        self.rates = Rates(settings.anonymous_per_minute)
        self.proven_credentials: OrderedDict[bytes, None] = OrderedDict()  # digests, the latest last

    def admit(self, scope: Scope) -> "Ticket":
        """Takes a slot for the request; raises if none is free."""
        credentials = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        return Ticket(self, network_of(scope), hashlib.sha256(credentials).digest(), scope["path"])


class Ticket:
    """The slot of one request, from its arrival to its response."""

    def __init__(self, admission: Admission, address: Hashable, credentials: bytes, path: str) -> None:
        self._admission, self._address, self._credentials = admission, address, credentials
        # Only routes with roles check the credentials again.
        self.proven = (
            credentials in admission.proven_credentials and path.startswith("/v1/") and path != REDEEM
        )
        self._slots: Slots = admission.redeeming if path == REDEEM else admission.unproven
        self._key: Hashable = address
        if self.proven:
            self._slots, self._key = admission.proven, credentials
        self._slots.require(self._key)
        if not self.proven:
            admission.rates.count(address)
        self._slots.take(self._key)
        self._open = True

    @property
    def threads(self) -> CapacityLimiter | None:
        """Limiter of the threads that check the credentials; None for the default one."""
        return None if self.proven else self._admission.unproven_threads

    def accepted(self) -> None:
        """The credentials are valid: they are proven now, and do not count against the address."""
        proven = self._admission.proven_credentials
        proven[self._credentials] = None
        proven.move_to_end(self._credentials)
        if len(proven) > MAX_PROVEN:
            proven.popitem(last=False)
        if not self.proven:
            self._admission.rates.refund(self._address)

    def refused(self) -> None:
        """The credentials are not valid, or no longer."""
        if self.proven:
            self._admission.proven_credentials.pop(self._credentials, None)
            self._admission.rates.count(self._address)

    def close(self) -> None:
        if self._open:
            self._slots.release(self._key)
            self._open = False


def network_of(scope: Scope) -> Hashable:
    """The address of a request; for IPv6 the /64 network, which usually belongs to one subscriber."""
    try:
        address = ipaddress.ip_address((scope.get("client") or ("",))[0])
    except ValueError:  # a Unix socket has no address
        return None
    if isinstance(address, ipaddress.IPv6Address):
        return address.ipv4_mapped or int(address) >> 64
    return address


Endpoint = Callable[[Request], Awaitable[Response]]


class Overload:
    """Middleware that serves responses from memory and refuses requests above the limits.

    A response from memory costs no more than a refusal, so it has no limit. Neither is logged per request, so
    that a flood does not fill the disk; metrics count both.
    """

    def __init__(self, app: ASGIApp, admission: Admission, in_memory: Mapping[str, Endpoint]) -> None:
        self.app, self.admission, self.in_memory = app, admission, in_memory
        self._refused, self._logged = 0, 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        in_memory = self.in_memory.get(scope["path"]) if scope["method"] == "GET" else None
        response = None
        try:
            if in_memory is not None:
                response = await in_memory(Request(scope))
                scope["route"] = SimpleNamespace(path=scope["path"])
            else:
                ticket = scope["state"]["ticket"] = self.admission.admit(scope)
        except Problem as problem:
            if in_memory is None:
                self._count_refusal()
            response = problems.answer(Request(scope), problem)
        except Exception:  # of the database: the route raises it again, where it is logged and answered
            return await self.app(scope, receive, send)
        if response is not None:
            scope["state"]["unlogged"] = True
            return await response(scope, receive, send)

        async def send_and_release(message: Message) -> None:
            if message["type"] == "http.response.start" and _is_stream(message):
                ticket.close()  # streams have slots of their own
            await send(message)

        try:
            await self.app(scope, receive, send_and_release)
        finally:
            ticket.close()

    def _count_refusal(self) -> None:
        self._refused += 1
        if time.monotonic() > self._logged + _LOG_EVERY:
            _log.warning("requests_refused", count=self._refused)
            self._refused, self._logged = 0, time.monotonic()


def _is_stream(message: Message) -> bool:
    return any(n == b"content-type" and v.startswith(b"text/event-stream") for n, v in message["headers"])
