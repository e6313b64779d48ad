"""The service over HTTP: one method per thing that can be asked of it.

    with Sluice("https://sluice.example.org", key) as service:
        release = service.release("digits")
        release.download("digits")
        x, y = release.load()

Answers are the JSON the service gave (docs/api.md). Refusals raise `sluice.client.problems.Refused`.
"""

import json
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote

import httpx

from sluice.client.problems import CannotRun, Refused

if TYPE_CHECKING:
    from sluice.client.release import Release

Json = dict[str, Any]

ENDED = ("trained", "failed", "cancelled")
UNCHECKED = ("draft", "uploading", "checking")

_ATTEMPTS = 3
_LARGEST = 256 << 20  # bytes of an answer
_OF_TRANSFER = ("content-encoding", "content-length", "transfer-encoding")
_RECONNECTS = 10
_LONGEST_WAIT = 30.0
# The first pricing of a large plan takes seconds; a silent network is noticed by the connect limit.
_PATIENCE = httpx.Timeout(120, connect=5)
# The stream says something every second, if only that it is still there.
_STREAM = httpx.Timeout(15, connect=5)


class Sluice:
    """A connection to one service as one person; without a key, for what everybody may know. Safe to share
    between threads."""

    def __init__(
        self,
        url: str,
        key: str | None = None,
        *,
        transport: httpx.BaseTransport | None = None,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self.url, self._pause = _address(url), pause
        if key is not None and not (key.isascii() and key.isprintable() and key and " " not in key):
            raise CannotRun(
                "that is not an API key: it is one word and starts with sl_; ask an admin for an invitation"
            )
        headers = {"User-Agent": f"sluice/{version('sluice')}"}
        self._http = httpx.Client(
            base_url=self.url,
            headers=headers | ({"Authorization": f"Bearer {key}"} if key else {}),
            timeout=_PATIENCE,
            transport=transport,
        )

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def me(self) -> Json:
        """Who you are to this service."""
        return self._get("/v1/me")

    # -- datasets

    def register(self, body: Json, *, key: str | None = None) -> Json:
        """Declares a dataset. The same key and body give the same dataset again."""
        return self._post("/v1/datasets", body, key=key or str(uuid.uuid4()))

    def datasets(self, *, state: str | None = None) -> Iterator[Json]:
        return self._pages("/v1/datasets", state=state)

    def dataset(self, id: str) -> Json:
        return self._get(f"/v1/datasets/{_part(id)}")

    def delete_dataset(self, id: str, *, reason: str | None = None) -> Json:
        """Deletes a dataset; `removed_at` is empty until the private side has removed its bytes."""
        found: Json = self._call("DELETE", f"/v1/datasets/{_part(id)}", query={"reason": reason})
        return found

    def removed(self, id: str, *, seconds: float = 60.0) -> Json:
        """Waits until the bytes of a deleted dataset are gone, for so long at most."""
        until = time.monotonic() + seconds
        return self._settled(
            lambda: self.dataset(id), lambda found: bool(found["removed_at"]) or time.monotonic() > until
        )

    def upload_key(self) -> Json:
        """What uploads are encrypted for: `id` and `public`, an RSA key as PEM."""
        return self._get("/.well-known/sluice-upload-key.json")

    def begin_upload(self, id: str, *, key_id: str, wrapped_key: str) -> Json:
        """Begins an upload or finds the one begun with this key: `part_bytes`, and which parts `arrived`."""
        body = {"key_id": key_id, "wrapped_key": wrapped_key}
        return self._post(f"/v1/datasets/{_part(id)}/upload", body, again=True)

    def sign_parts(self, id: str, numbers: list[int], *, size: int | None = None) -> dict[int, str]:
        """Addresses that take one part each by PUT, for a quarter of an hour. `size` is of the whole file."""
        body = {"numbers": numbers, "size": size}
        answer = self._post(f"/v1/datasets/{_part(id)}/upload/urls", body, again=True)
        return {part["number"]: part["url"] for part in answer["parts"]}

    def seal(self, id: str, *, size: int, sha256: str) -> Json:
        return self._post(f"/v1/datasets/{_part(id)}/seal", {"size": size, "sha256": sha256}, again=True)

    def checked(self, id: str) -> Json:
        """Waits until a sealed dataset is `ready`, `held` for review, or `rejected` with a fault."""
        return self._settled(lambda: self.dataset(id), lambda found: found["state"] not in UNCHECKED)

    def review_dataset(self, id: str, decision: str, *, reason: str, account: str | None = None) -> Json:
        """An admin's decision about a held dataset: `accept`, `join` an account, or `reject`."""
        body = {"decision": decision, "reason": reason, "account": account}
        return self._post(f"/v1/datasets/{_part(id)}/review", body)

    def budget(self, dataset: str) -> Json:
        """The account a dataset draws on."""
        return self._get(f"/v1/datasets/{_part(dataset)}/budget")

    # -- quotes and jobs

    def quote(self, dataset: str, plan: Json, *, target: Json | None = None) -> Json:
        """What a plan would cost this dataset's account. Writes nothing."""
        return self._post("/v1/quotes", {"dataset": dataset, "plan": plan, "target": target}, again=True)

    def start_job(
        self,
        dataset: str,
        plan: Json,
        *,
        target: Json | None = None,
        key: str | None = None,
        **builds_on: Any,
    ) -> Json:
        """Charges the account and enqueues a training. The same key and body give the same job again.

        `source` is the public dataset of an adaptation; `shared` hands a generator on to who says `after`.
        """
        body = {"dataset": dataset, "plan": plan, "target": target, **builds_on}
        return self._post("/v1/jobs", body, key=key or str(uuid.uuid4()))

    def jobs(self, *, state: str | None = None, dataset: str | None = None) -> Iterator[Json]:
        return self._pages("/v1/jobs", state=state, dataset=dataset)

    def job(self, id: str) -> Json:
        return self._get(f"/v1/jobs/{_part(id)}")

    def cancel(self, id: str) -> Json:
        return self._post(f"/v1/jobs/{_part(id)}/cancel", again=True)

    def watch(self, id: str) -> Iterator[Json]:
        """The job whenever it changes, until it ends; a cut line is picked up again."""
        last, failures = None, 0
        while True:
            try:
                with self._http.stream("GET", f"/v1/jobs/{_part(id)}/events", timeout=_STREAM) as answer:
                    if answer.status_code in (429, 502, 503, 504):
                        raise httpx.ReadError(f"HTTP {answer.status_code}")
                    if not answer.is_success:
                        answer.read()
                        raise _refusal(answer)
                    failures += 1  # unless it says something
                    for job in _events(answer.iter_lines()):
                        failures = 0
                        if job != last:
                            yield job
                        if job["state"] in ENDED:
                            return
                        last = job
            except httpx.TransportError as problem:
                failures += 1
                if failures > _RECONNECTS:
                    raise self._unreachable(problem) from None
            if failures > _RECONNECTS:
                raise ValueError("a stream of events without any")
            self._pause(min(5.0, 0.2 * 2**failures))

    def diagnostics(self, id: str, format: str = "jsonl") -> bytes:
        """Losses and norms of a job you own, as `jsonl` or `svg`, where the site keeps them: facts about
        records, for nobody else."""
        return self._send("GET", f"/v1/jobs/{_part(id)}/diagnostics", query={"format": format}).content

    # -- releases

    def create_release(self, body: Json, *, key: str | None = None) -> Json:
        """Has a bundle built of a trained job. The same key and body give the same release again."""
        return self._post("/v1/releases", body, key=key or str(uuid.uuid4()))

    def releases(self, *, search: str | None = None, state: str | None = None) -> Iterator[Json]:
        return self._pages("/v1/releases", search=search, state=state)

    def release_view(self, id: str) -> Json:
        return self._get(f"/v1/releases/{_part(id)}")

    def release(self, name: str) -> "Release":
        """A release by its id, or the newest of that name, published if there is one."""
        from sluice.client.release import Release

        try:
            return Release(service=self, view=self.release_view(str(uuid.UUID(name))))
        except ValueError:
            named = [one for one in self.releases(search=name) if one["name"] == name]
        if not named:
            raise CannotRun(f"no release is called {name}: sluice releases list shows those you may see")
        return Release(service=self, view=min(named, key=lambda one: one["state"] != "published"))

    def preview(self, id: str) -> bytes:
        return self._send("GET", f"/v1/releases/{_part(id)}/preview").content

    def review(self, id: str) -> Json:
        """Where a release comes from, for whoever may approve it: job, dataset, source, earlier jobs."""
        return self._get(f"/v1/releases/{_part(id)}/review")

    def approve(self, id: str, digest: str, note: str = "") -> Json:
        """Your yes to the bundle of this digest and to no other."""
        return self._move(id, "approve", {"digest": digest, "note": note})

    def rebuild(self, id: str) -> Json:
        return self._move(id, "rebuild")

    def discard(self, id: str) -> Json:
        return self._move(id, "discard")

    def publish(self, id: str) -> Json:
        return self._move(id, "publish")

    def withdraw(self, id: str, reason: str) -> Json:
        return self._move(id, "withdraw", {"reason": reason})

    def _move(self, id: str, move: str, body: Json | None = None) -> Json:
        return self._post(f"/v1/releases/{_part(id)}/{move}", body, again=True)

    def built(self, id: str, tell: Callable[[Json], None] = lambda _: None) -> Json:
        """Waits until a bundle is built: `in_review`, or `failed` with a fault."""
        return self._until(id, ("building",), tell)

    def published(self, id: str, tell: Callable[[Json], None] = lambda _: None) -> Json:
        """Waits until a release that was to be published, or withdrawn, is."""
        return self._until(id, ("publishing", "withdrawing"), tell)

    def _until(self, id: str, moving: tuple[str, ...], tell: Callable[[Json], None]) -> Json:
        def look() -> Json:
            found = self.release_view(id)
            tell(found)
            return found

        return self._settled(look, lambda found: found["state"] not in moving)

    def add_reader(self, id: str, person: str) -> None:
        self._send("POST", f"/v1/releases/{_part(id)}/readers", body={"person": person}, again=True)

    def remove_reader(self, id: str, person: str) -> None:
        self._send("DELETE", f"/v1/releases/{_part(id)}/readers/{_part(person)}")

    def downloads(self, id: str, paths: list[str], *, review: bool = False) -> list[Json]:
        """Addresses of files of a published release or one under `review`, good for a quarter of an hour."""
        path = f"/v1/releases/{_part(id)}/{'review/' if review else ''}downloads"
        found: list[Json] = self._post(path, {"paths": paths}, again=True)["files"]
        return found

    def signing_keys(self) -> list[Json]:
        found: list[Json] = self._get("/.well-known/sluice-keys.json")["keys"]
        return found

    def revocations(self) -> bytes:
        """The newest signed list of withdrawn releases, as it was signed."""
        return self._send("GET", "/.well-known/sluice-revocations.json").content

    # -- budgets

    def accounts(self) -> Iterator[Json]:
        return self._pages("/v1/admin/ledger", limit=200)

    def ledger(self, account: str, *, after: int = 0, limit: int = 10_000) -> Json:
        """An account, the service's own verdict on its chain, and rows: `next` says where to go on."""
        return self._get(f"/v1/admin/ledger/{_part(account)}", after=after, limit=limit)

    def ledger_csv(self, account: str) -> Iterator[bytes]:
        """All rows as CSV, as they come."""
        try:
            path = f"/v1/admin/ledger/{_part(account)}"
            with self._http.stream("GET", path, params={"format": "csv"}) as answer:
                if not answer.is_success:
                    answer.read()
                    raise _refusal(answer)
                yield from answer.iter_bytes()
        except httpx.TransportError as problem:
            raise self._unreachable(problem) from None

    def audit_log(self, **filters: Any) -> Iterator[Json]:
        """The newest row first; filters are `person`, `action`, `object`, `since`, `until`."""
        return self._pages("/v1/admin/audit-log", **filters)

    def audit_lines(self, **filters: Any) -> Iterator[Json]:
        """The oldest row first, as they are kept and verified."""
        after, most = 0, 10_000
        while True:
            query = {"format": "jsonl", "after": after, "limit": most, **filters}
            answer = self._send("GET", "/v1/admin/audit-log", query=query)
            try:
                rows = [json.loads(line) for line in answer.content.splitlines()]
                after = rows[-1]["number"] if rows else after
            except (ValueError, KeyError, TypeError):
                raise _stranger(answer) from None
            yield from rows
            if len(rows) < most:  # not until there are none: each request adds a row
                return

    def grants(self, account: str) -> list[Json]:
        found: list[Json] = self._call("GET", f"/v1/admin/ledger/{_part(account)}/grants")
        return found

    def propose_grant(self, account: str, *, epsilon: float, reason: str) -> Json:
        """Proposes a larger epsilon; in force once another person confirms it."""
        body = {"epsilon": epsilon, "reason": reason}
        return self._post(f"/v1/admin/ledger/{_part(account)}/grants", body)

    def confirm_grant(self, account: str, grant: str) -> Json:
        path = f"/v1/admin/ledger/{_part(account)}/grants/{_part(grant)}/confirm"
        return self._post(path, again=True)

    def withdraw_grant(self, account: str, grant: str) -> Json:
        path = f"/v1/admin/ledger/{_part(account)}/grants/{_part(grant)}/withdraw"
        return self._post(path, again=True)

    # -- people and keys

    def people(self) -> Iterator[Json]:
        return self._pages("/v1/admin/people", limit=200)

    def add_person(self, *, name: str, role: str) -> Json:
        """A person and their `invitation`, whose text is in this answer and nowhere else."""
        return self._post("/v1/admin/people", {"name": name, "role": role})

    def disable_person(self, id: str) -> Json:
        return self._post(f"/v1/admin/people/{_part(id)}/disable", again=True)

    def invite(self, person: str) -> Json:
        """A new invitation for somebody who lost their key; its text is in this answer and nowhere else."""
        return self._post(f"/v1/admin/people/{_part(person)}/invitations")

    def invitations(self, person: str | None = None) -> Iterator[Json]:
        return self._pages("/v1/admin/invitations", person=person, limit=200)

    def confirm_invitation(self, id: str) -> Json:
        """Lets an admin in whom another admin invited; gives the text of the invitation."""
        return self._post(f"/v1/admin/invitations/{_part(id)}/confirm")

    def withdraw_invitation(self, id: str) -> None:
        self._call("DELETE", f"/v1/admin/invitations/{_part(id)}")

    def redeem(self, invitation: str, *, label: str = "key", days: int = 365) -> Json:
        """Your key, from an invitation that works once; its text is in this answer and nowhere else."""
        return self._post("/v1/invitations/redeem", {"invitation": invitation, "label": label, "days": days})

    def keys(self, person: str | None = None) -> list[Json]:
        """Your keys, or for an admin those of a person; without their text."""
        path = "/v1/me/keys" if person is None else f"/v1/admin/people/{_part(person)}/keys"
        found: list[Json] = self._call("GET", path)
        return found

    def add_key(self, *, label: str, days: int) -> Json:
        """A further key of yours; its text is in this answer and nowhere else."""
        return self._post("/v1/me/keys", {"label": label, "days": days})

    def revoke_key(self, id: str) -> None:
        """A key of yours; an admin may revoke anybody's."""
        admin = self.me()["role"] == "admin"
        self._call("DELETE", f"/v1/{'admin' if admin else 'me'}/keys/{_part(id)}")

    # -- teams

    def teams(self) -> list[Json]:
        found: list[Json] = self._call("GET", "/v1/admin/teams")
        return found

    def set_quotas(self, team: str, quotas: Json) -> Json:
        """`bytes`, `jobs` and `job_seconds` of a team; null is the default of the site."""
        return self._post(f"/v1/admin/teams/{_part(team)}/quotas", quotas, again=True)

    def add_team(self, name: str) -> Json:
        return self._post("/v1/admin/teams", {"name": name})

    def move_person(self, id: str, team: str | None, *, datasets: bool = False) -> Json:
        """Puts a person into a team, or into none; `datasets`: those of no team go with them."""
        body = {"team": team, "datasets": datasets}
        return self._post(f"/v1/admin/people/{_part(id)}/team", body, again=True)

    # -- the wire

    def _get(self, path: str, **query: Any) -> Json:
        found: Json = self._call("GET", path, query=query)
        return found

    def _post(
        self, path: str, body: Json | None = None, *, key: str | None = None, again: bool = False
    ) -> Json:
        found: Json = self._call("POST", path, body=body, key=key, again=again)
        return found

    def _pages(self, path: str, **query: Any) -> Iterator[Json]:
        cursor = None
        while True:
            page = self._get(path, cursor=cursor, **query)
            yield from page["items"]
            if page["next"] is None:
                return
            if page["next"] == cursor:
                raise ValueError("the page after this one is this one")
            cursor = page["next"]

    def _settled(self, look: Callable[[], Json], done: Callable[[Json], bool]) -> Json:
        """Looks again, less and less often, until it is done."""
        wait = 0.2
        while not done(found := look()):
            self._pause(wait)
            wait = min(2.0, wait * 1.5)
        return found

    def _call(self, method: str, path: str, **more: Any) -> Any:
        answer = self._send(method, path, **more)
        if answer.status_code == httpx.codes.NO_CONTENT:
            return None
        try:
            return answer.json()
        except (ValueError, RecursionError):
            raise _stranger(answer) from None

    def _send(
        self,
        method: str,
        path: str,
        *,
        query: Json | None = None,
        body: Json | None = None,
        key: str | None = None,
        again: bool = False,
    ) -> httpx.Response:
        """One request; sent again if it got lost and a second one does no harm (`again`, or a key)."""
        headers = {"Idempotency-Key": key} if key else {}
        given = {name: value for name, value in (query or {}).items() if value is not None}
        harmless = again or key is not None or method != "POST"
        for left in reversed(range(_ATTEMPTS)):
            wait = 0.5
            try:
                sent = self._http.build_request(method, path, params=given, json=body, headers=headers)
                answer = _read(self._http.send(sent, stream=True))
            except httpx.TransportError as problem:
                never_sent = isinstance(problem, httpx.ConnectError | httpx.ConnectTimeout)
                if not left or not (harmless or never_sent):
                    raise self._unreachable(problem) from None
            else:
                if answer.status_code != httpx.codes.TOO_MANY_REQUESTS or not left:
                    break
                wait = _retry_after(answer)
                if wait > _LONGEST_WAIT:
                    break
            self._pause(wait)
        if not answer.is_success:
            raise _refusal(answer)
        return answer

    def _unreachable(self, problem: Exception) -> CannotRun:
        if isinstance(problem, httpx.TimeoutException):
            return CannotRun(
                f"{self.url} gave no answer in time: try again, or look whether it is overloaded"
            )
        if "CERTIFICATE_VERIFY_FAILED" in str(problem):
            return CannotRun(
                f"the certificate of {self.url} is not trusted: name a file with the certificate of its "
                "authority in SSL_CERT_FILE, or look at --url"
            )
        return CannotRun(
            f"cannot reach {self.url}: start the service there, or name another with --url or sluice login"
        )


def _address(url: str) -> str:
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        parsed = httpx.URL("")
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise CannotRun(f"{url!r} is not an address: give one like https://sluice.example.org with --url")
    return url.rstrip("/")


def _part(id: str) -> str:
    """An id as one part of a path: what a person typed cannot reach another address."""
    return quote(str(id), safe="") or "-"


def _read(answer: httpx.Response) -> httpx.Response:
    """All of an answer, unless it is larger than any this service gives."""
    body = bytearray()
    with closing(answer):
        for part in answer.iter_bytes():
            body += part
            if len(body) > _LARGEST:
                raise _stranger(answer)
    kept = {name: value for name, value in answer.headers.items() if name not in _OF_TRANSFER}
    return httpx.Response(answer.status_code, headers=kept, content=bytes(body), request=answer.request)


def _retry_after(answer: httpx.Response) -> float:
    try:
        return max(0.5, float(answer.headers.get("Retry-After", "1")))
    except ValueError:
        return 1.0


def _refusal(answer: httpx.Response) -> Refused:
    try:
        body = answer.json()
        named = {name: body.pop(name) for name in ("status", "slug", "title", "detail")}
        body.pop("type", None)
        refused = Refused(**named | {"status": answer.status_code}, **body)
        json.dumps([str(refused), refused.to_dict()], allow_nan=False)  # it can be shown, in both ways
        return refused
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return _stranger(answer)


def _stranger(answer: httpx.Response) -> Refused:
    address, status = answer.url.copy_with(query=None), answer.status_code
    return Refused(
        status=status,
        slug="not-sluice",
        title="This is not the answer of a Sluice service",
        detail=f"{address} answered HTTP {status}; look at --url, or try again.",
    )


def _events(lines: Iterable[str]) -> Iterator[Json]:
    """The data of server-sent events; comments only keep the line open."""
    data: list[str] = []
    for line in lines:
        if line.startswith("data:"):
            data.append(line.removeprefix("data:").removeprefix(" "))
        elif not line and data:
            yield json.loads("\n".join(data))
            data = []
