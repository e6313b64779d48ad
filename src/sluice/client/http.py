"""Requests to one service: retries, pages, streams and refusals. `sluice.client.api` has the methods."""

import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from importlib.metadata import version
from typing import Any, Self
from urllib.parse import quote

import httpx

from sluice.client.problems import CannotRun, Refused, Unreachable

Json = dict[str, Any]

_ATTEMPTS = 3
_MAX_ANSWER_BYTES = 256 << 20
_MAX_RETRY_AFTER = 30.0
# The first quote for a large plan takes seconds; an unreachable host is noticed by the connect timeout.
_TIMEOUT = httpx.Timeout(120, connect=5)
_TRANSFER_HEADERS = ("content-encoding", "content-length", "transfer-encoding")


class Connection:
    """An HTTP connection to one service, with or without an API key. Threads may share it."""

    def __init__(
        self,
        url: str,
        key: str | None = None,
        *,
        transport: httpx.BaseTransport | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.url, self._sleep = _checked_url(url), sleep
        if key is not None and not (key.isascii() and key.isprintable() and key and " " not in key):
            raise CannotRun(
                "that is not an API key: keys are one word and start with sl_; ask an admin for an invitation"
            )
        headers = {"User-Agent": f"sluice/{version('sluice')}"}
        self._http = httpx.Client(
            base_url=self.url,
            headers=headers | ({"Authorization": f"Bearer {key}"} if key else {}),
            timeout=_TIMEOUT,
            transport=transport,
        )

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _get(self, *path: str, **query: Any) -> Json:
        body: Json = self._json("GET", *path, query=query)
        return body

    def _list(self, *path: str) -> list[Json]:
        body: list[Json] = self._json("GET", *path)
        return body

    def _post(self, *path: str, **options: Any) -> Json:
        answer: Json = self._json("POST", *path, **options)
        return answer

    def _pages(self, *path: str, **query: Any) -> Iterator[Json]:
        """The items of all pages of a list."""
        cursor = None
        while True:
            page = self._get(*path, cursor=cursor, **query)
            yield from page["items"]
            if page["next"] is None:
                return
            if page["next"] == cursor:
                raise ValueError("the service returned the same page twice")
            cursor = page["next"]

    def _wait(self, fetch: Callable[[], Json], done: Callable[[Json], bool]) -> Json:
        """Fetches, at growing intervals up to 2 s, until `done`."""
        interval = 0.2
        while not done(body := fetch()):
            self._sleep(interval)
            interval = min(2.0, interval * 1.5)
        return body

    def _json(self, method: str, *path: str, **options: Any) -> Any:
        answer = self._send(method, *path, **options)
        if answer.status_code == httpx.codes.NO_CONTENT:
            return None
        try:
            return answer.json()
        except (ValueError, RecursionError):
            raise not_sluice(answer) from None

    def _send(
        self,
        method: str,
        *path: str,
        query: Json | None = None,
        body: Json | None = None,
        key: str | None = None,
        retry: bool = False,
    ) -> httpx.Response:
        """Sends a request, again if it got lost and repeating is safe: not a POST, `retry`, or with a key."""
        headers = {"Idempotency-Key": key} if key else {}
        params = {name: value for name, value in (query or {}).items() if value is not None}
        repeatable = retry or key is not None or method != "POST"
        for attempts_left in reversed(range(_ATTEMPTS)):
            interval = 0.5
            try:
                request = self._http.build_request(
                    method, _url_path(*path), params=params, json=body, headers=headers
                )
                answer = _read_whole(self._http.send(request, stream=True))
            except httpx.TransportError as error:
                never_sent = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
                if not attempts_left or not (repeatable or never_sent):
                    raise self._unreachable(error) from None
            else:
                if answer.status_code != httpx.codes.TOO_MANY_REQUESTS or not attempts_left:
                    break
                interval = _retry_after(answer)
                if interval > _MAX_RETRY_AFTER:
                    break
            self._sleep(interval)
        if not answer.is_success:
            raise _refusal(answer)
        return answer

    @contextmanager
    def _stream(
        self, *path: str, timeout: httpx.Timeout = _TIMEOUT, **query: Any
    ) -> Iterator[httpx.Response]:
        """An answer whose body is read as it arrives."""
        try:
            with self._http.stream("GET", _url_path(*path), params=query, timeout=timeout) as answer:
                if not answer.is_success:
                    raise _refusal(_read_whole(answer))
                yield answer
        except httpx.TransportError as error:
            raise self._unreachable(error) from None

    def _unreachable(self, error: Exception) -> Unreachable:
        if isinstance(error, httpx.TimeoutException):
            return Unreachable(
                f"{self.url} did not answer in time: try again, or check whether it is overloaded"
            )
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            return Unreachable(
                f"the certificate of {self.url} is not trusted: name a file with the certificate of its "
                "authority in SSL_CERT_FILE, or check --url"
            )
        return Unreachable(
            f"cannot reach {self.url}: start the service there, or name another with --url or sluice login"
        )


def server_sent_events(lines: Iterable[str]) -> Iterator[Json]:
    """The JSON data of each event; comment lines only keep the connection open."""
    data: list[str] = []
    for line in lines:
        if line.startswith("data:"):
            data.append(line.removeprefix("data:").removeprefix(" "))
        elif not line and data:
            yield json.loads("\n".join(data))
            data = []


def not_sluice(answer: httpx.Response) -> Refused:
    address, status = answer.url.copy_with(query=None), answer.status_code
    return Refused(
        status=status,
        slug="not-sluice",
        title="The answer is not from a Sluice service",
        detail=f"{address} answered HTTP {status}; check --url, or try again.",
    )


def _checked_url(url: str) -> str:
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        parsed = httpx.URL("")
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise CannotRun(f"{url!r} is not an address: give one like https://sluice.example.org with --url")
    return url.rstrip("/")


def _url_path(*parts: str) -> str:
    """A path of these parts. Each is quoted, so that an id with a slash cannot reach another address."""
    root = "" if parts[0] == ".well-known" else "/v1"
    return root + "".join(f"/{quote(str(part), safe='') or '-'}" for part in parts)


def _read_whole(answer: httpx.Response) -> httpx.Response:
    """The answer with all of its body; refuses one that is larger than any the service gives."""
    body = bytearray()
    with closing(answer):
        for chunk in answer.iter_bytes():
            body += chunk
            if len(body) > _MAX_ANSWER_BYTES:
                raise not_sluice(answer)
    headers = {name: value for name, value in answer.headers.items() if name not in _TRANSFER_HEADERS}
    return httpx.Response(answer.status_code, headers=headers, content=bytes(body), request=answer.request)


def _retry_after(answer: httpx.Response) -> float:
    try:
        return max(0.5, float(answer.headers.get("Retry-After", "1")))
    except ValueError:
        return 1.0


def _refusal(answer: httpx.Response) -> Refused:
    try:
        body = answer.json()
        standard = {name: body.pop(name) for name in ("status", "slug", "title", "detail")}
        body.pop("type", None)
        refused = Refused(**standard | {"status": answer.status_code}, **body)
        json.dumps(
            [str(refused), refused.to_dict()], allow_nan=False
        )  # checks that both forms can be printed
        return refused
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return not_sluice(answer)
