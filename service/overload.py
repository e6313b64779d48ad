"""Refuses what cannot be served soon: at once, and before anything else is done for the request.

A request is *proven* if its credentials were good when they were last used. All others, with no credentials,
wrong ones or good ones that are new to this process, are *strangers* and count against the address they come
from. Strangers and proven requests have separate places, so the first never take those of the second.
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

REMEMBERED = 10_000  # credentials that were good
REDEEM = "/v1/invitations/redeem"
STRANGERS_THREADS = 2  # look up credentials that are not proven; the other threads are for proven requests
_LOG_EVERY = 10.0
_log = log.get("overload")


class Overloaded(Problem):
    status, slug, title = 503, "overloaded", "Too many requests are waiting"


class Slots:
    """Counts what is under way, in all and for each key. Holds no key that has nothing under way."""

    def __init__(self, *, total: int, each: int) -> None:
        self._total, self._each = total, each
        self._taken, self._all = Counter[Hashable](), 0

    def require(self, key: Hashable) -> None:
        """Raises if there is no place left for this key, or none at all."""
        if self._all >= self._total:
            raise Overloaded("Try again after the seconds in Retry-After.", headers={"Retry-After": "2"})
        if self._taken[key] >= self._each:
            detail = "Too many requests of yours are under way; wait for their answers."
            raise TooMany(detail, headers={"Retry-After": "1"})

    def take(self, key: Hashable) -> None:
        self._taken[key] += 1
        self._all += 1

    def give_back(self, key: Hashable) -> None:
        self._taken[key] -= 1
        self._all -= 1
        if not self._taken[key]:
            del self._taken[key]


class Admission:
    """Decides which requests are served. Used by the event loop alone."""

    def __init__(self, settings: ServiceSettings) -> None:
        waiting = settings.requests_waiting
        self.proven = Slots(total=waiting, each=max(1, waiting // 2))
        self.strangers = Slots(total=waiting, each=settings.anonymous_at_once)
        # Its body is read of anybody, so that it has few places, and they are not those of people signing in.
        self.redeeming = Slots(total=50, each=5)
        self.strangers_threads = CapacityLimiter(STRANGERS_THREADS)
        self.rates = Rates(settings.anonymous_per_minute)
        self.good: OrderedDict[bytes, None] = OrderedDict()  # digests of credentials, the newest last

    def admit(self, scope: Scope) -> "Ticket":
        """A place among the requests under way; raises if there is none."""
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        return Ticket(self, network_of(scope), hashlib.sha256(given).digest(), scope["path"])


class Ticket:
    """The place of one request, from its arrival to its answer."""

    def __init__(self, admission: Admission, address: Hashable, credentials: bytes, path: str) -> None:
        self._admission, self._address, self._credentials = admission, address, credentials
        # Only a route that names roles looks the credentials up again.
        self.proven = credentials in admission.good and path.startswith("/v1/") and path != REDEEM
        self._slots: Slots = admission.redeeming if path == REDEEM else admission.strangers
        self._key: Hashable = address
        if self.proven:
            self._slots, self._key = admission.proven, credentials
        self._slots.require(self._key)
        if not self.proven:
            admission.rates.count(address)
        self._slots.take(self._key)
        self._held = True

    @property
    def threads(self) -> CapacityLimiter | None:
        """Which threads may look the credentials up."""
        return None if self.proven else self._admission.strangers_threads

    def accepted(self) -> None:
        """The credentials are good: from now on they are proven, and the address is not charged for them."""
        good = self._admission.good
        good[self._credentials] = None
        good.move_to_end(self._credentials)
        if len(good) > REMEMBERED:
            good.popitem(last=False)
        if not self.proven:
            self._admission.rates.refund(self._address)

    def refused(self) -> None:
        """The credentials are not good, or not any more."""
        if self.proven:
            self._admission.good.pop(self._credentials, None)
            self._admission.rates.count(self._address)

    def close(self) -> None:
        if self._held:
            self._slots.give_back(self._key)
            self._held = False


def network_of(scope: Scope) -> Hashable:
    """The address a request comes from; of IPv6 the /64, since whoever has one address has all of those."""
    try:
        address = ipaddress.ip_address((scope.get("client") or ("",))[0])
    except ValueError:  # a socket without addresses
        return None
    if isinstance(address, ipaddress.IPv6Address):
        return address.ipv4_mapped or int(address) >> 64
    return address


Answer = Callable[[Request], Awaitable[Response]]


class Overload:
    """Gives answers that are in memory at once, refuses above the bounds.

    An answer from memory costs no more than a refusal, so it has no limit. Neither is logged line by line, or
    a storm would fill the disk; metrics count both.
    """

    def __init__(self, app: ASGIApp, admission: Admission, in_memory: Mapping[str, Answer]) -> None:
        self.app, self.admission, self.in_memory = app, admission, in_memory
        self._refused, self._logged = 0, 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        in_memory = self.in_memory.get(scope["path"]) if scope["method"] == "GET" else None
        answer = None
        try:
            if in_memory is not None:
                answer = await in_memory(Request(scope))
                scope["route"] = SimpleNamespace(path=scope["path"])
            else:
                ticket = scope["state"]["ticket"] = self.admission.admit(scope)
        except Problem as problem:
            if in_memory is None:
                self._count_refusal()
            answer = problems.answer(Request(scope), problem)
        except Exception:  # of the database: the route meets it again, where it is logged and named
            return await self.app(scope, receive, send)
        if answer is not None:
            scope["state"]["unlogged"] = True
            return await answer(scope, receive, send)

        async def send_and_release(message: Message) -> None:
            if message["type"] == "http.response.start" and _is_stream(message):
                ticket.close()  # streams are bounded by their own number, not by that of waiting requests
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
