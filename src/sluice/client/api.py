"""The service over HTTP: one method per request.

    with Sluice("https://sluice.example.org", key) as service:
        release = service.release("digits")
        release.download("digits")
        x, y = release.load()

Methods return the service's JSON (docs/api.md) and raise `Refused` where the service refuses.
"""

import json
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from sluice.client.http import Connection, not_sluice, server_sent_events
from sluice.client.http import Json as Json
from sluice.client.problems import CannotRun, Refused, Unreachable

if TYPE_CHECKING:
    from sluice.client.release import Release

_RECONNECTS = 10
# The event stream sends at least a comment every second.
_STREAM_TIMEOUT = httpx.Timeout(15, connect=5)
_OVERLOADED = (429, 502, 503, 504)
_EXPORT_ROWS = 10_000


class Sluice(Connection):
    """A connection to one service as one person; without a key, for public requests. Threads may share it."""

    def me(self) -> Json:
        """The person this key belongs to."""
        return self._get("me")

    # Datasets

    def register(self, body: Json, *, key: str | None = None) -> Json:
        """Declares a dataset. Repeating it with the same key and body returns the same dataset."""
        return self._post("datasets", body=body, key=key or str(uuid.uuid4()))

    def datasets(self, *, state: str | None = None) -> Iterator[Json]:
        return self._pages("datasets", state=state)

    def dataset(self, id: str) -> Json:
        return self._get("datasets", id)

    def delete_dataset(self, id: str, *, reason: str | None = None) -> Json:
        """Deletes a dataset; `removed_at` is null until a train worker has removed its bytes."""
        body: Json = self._json("DELETE", "datasets", id, query={"reason": reason})
        return body

    def wait_removed(self, id: str, *, seconds: float = 60.0) -> Json:
        """Waits until the bytes of a deleted dataset are removed, or until the time is over."""
        deadline = time.monotonic() + seconds
        return self._wait(
            lambda: self.dataset(id), lambda body: bool(body["removed_at"]) or time.monotonic() > deadline
        )

    def upload(
        self, id: str, path: str | Path, *, on_progress: Callable[[int], None] = lambda _: None
    ) -> Json:
        """Encrypts and sends a file, or the parts of it that did not arrive before, and seals the dataset."""
        from sluice.client.upload import upload

        return upload(self, id, Path(path), on_progress=on_progress)

    def upload_key(self) -> Json:
        """The key that uploads are encrypted for: `id` and `public`, an RSA key as PEM."""
        return self._get(".well-known", "sluice-upload-key.json")

    def begin_upload(self, id: str, *, key_id: str, wrapped_key: str) -> Json:
        """Begins an upload or returns the one begun with this key: `part_bytes`, and parts that `arrived`."""
        body = {"key_id": key_id, "wrapped_key": wrapped_key}
        return self._post("datasets", id, "upload", body=body, retry=True)

    def sign_parts(self, id: str, numbers: list[int], *, size: int | None = None) -> dict[int, str]:
        """Addresses that accept one part each by PUT for 15 minutes. `size` is that of the whole upload."""
        body = {"numbers": numbers, "size": size}
        answer = self._post("datasets", id, "upload", "urls", body=body, retry=True)
        return {part["number"]: part["url"] for part in answer["parts"]}

    def seal(self, id: str, *, size: int, sha256: str) -> Json:
        return self._post("datasets", id, "seal", body={"size": size, "sha256": sha256}, retry=True)

    def wait_checked(self, id: str) -> Json:
        """Waits until a sealed dataset is `ready`, `held` for review, or `rejected` with a fault."""
        unchecked = ("draft", "uploading", "checking")
        return self._wait(lambda: self.dataset(id), lambda body: body["state"] not in unchecked)

    def review_dataset(self, id: str, decision: str, *, reason: str, account: str | None = None) -> Json:
        """An admin's decision about a held dataset: `accept`, `join` an account, or `reject`."""
        body = {"decision": decision, "reason": reason, "account": account}
        return self._post("datasets", id, "review", body=body)

    def budget(self, dataset: str) -> Json:
        """The account that a dataset is charged to."""
        return self._get("datasets", dataset, "budget")

    # Quotes and jobs

    def quote(
        self,
        dataset: str,
        plan: Json | None = None,
        *,
        target: Json | None = None,
        method: str | None = None,
        options: Json | None = None,
    ) -> Json:
        """What a plan, or a method with options, would cost this dataset's account. Changes nothing."""
        chosen = {"plan": plan, "target": target, "method": method, "options": options}
        return self._post("quotes", body={"dataset": dataset, **chosen}, retry=True)

    def start_job(
        self,
        dataset: str,
        plan: Json | None = None,
        *,
        target: Json | None = None,
        source: str | None = None,
        shared: bool = False,
        after: str | None = None,
        key: str | None = None,
        method: str | None = None,
        options: Json | None = None,
    ) -> Json:
        """Charges the account and enqueues a training. Repeating it with the same key and body returns the
        same job.

        Give a plan, or a target with or without a method and options of its plan. `source` is a public
        dataset for methods that need one; `shared` lets another owner continue from the generator, in a job
        whose `after` is the id of this one.
        """
        chosen = {"plan": plan, "target": target, "method": method, "options": options}
        builds_on = {"source": source, "shared": shared, "after": after}
        body = {"dataset": dataset, **chosen, **builds_on}
        return self._post("jobs", body=body, key=key or str(uuid.uuid4()))

    def jobs(self, *, state: str | None = None, dataset: str | None = None) -> Iterator[Json]:
        return self._pages("jobs", state=state, dataset=dataset)

    def job(self, id: str) -> Json:
        return self._get("jobs", id)

    def cancel(self, id: str) -> Json:
        return self._post("jobs", id, "cancel", retry=True)

    def watch(self, id: str) -> Iterator[Json]:
        """The job whenever it changes, until it ends. Reconnects after a lost connection."""
        last, failures = None, 0
        while True:
            try:
                with self._stream("jobs", id, "events", timeout=_STREAM_TIMEOUT) as answer:
                    failures += 1  # until the first event arrives
                    for job in server_sent_events(answer.iter_lines()):
                        failures = 0
                        if job != last:
                            yield job
                        if job["state"] in ("trained", "failed", "cancelled"):
                            return
                        last = job
            except (Unreachable, Refused) as problem:
                failures += 1
                if failures > _RECONNECTS or getattr(problem, "status", 503) not in _OVERLOADED:
                    raise
            if failures > _RECONNECTS:
                raise ValueError("the event stream has no events")
            self._sleep(min(5.0, 0.2 * 2**failures))

    def diagnostics(self, id: str, format: str = "jsonl") -> bytes:
        """Losses and norms of a job you own, as `jsonl` or `svg`, if the site keeps them. They depend on
        private records, so they are for the owner only."""
        return self._send("GET", "jobs", id, "diagnostics", query={"format": format}).content

    # Releases

    def create_release(self, body: Json, *, key: str | None = None) -> Json:
        """Has a bundle built from a trained job. Repeating it with the same key and body returns the same
        release."""
        return self._post("releases", body=body, key=key or str(uuid.uuid4()))

    def releases(self, *, search: str | None = None, state: str | None = None) -> Iterator[Json]:
        return self._pages("releases", search=search, state=state)

    def release_view(self, id: str) -> Json:
        return self._get("releases", id)

    def release(self, name: str) -> "Release":
        """A release by id, or the newest of that name, published ones first."""
        from sluice.client.release import Release

        try:
            return Release(service=self, view=self.release_view(str(uuid.UUID(name))))
        except ValueError:
            matches = [view for view in self.releases(search=name) if view["name"] == name]
        if not matches:
            raise CannotRun(f"no release is called {name}: sluice releases list shows those you may see")
        return Release(service=self, view=min(matches, key=lambda view: view["state"] != "published"))

    def preview(self, id: str) -> bytes:
        return self._send("GET", "releases", id, "preview").content

    def review(self, id: str) -> Json:
        """What a release was made from, for reviewers: job, dataset, source, earlier jobs."""
        return self._get("releases", id, "review")

    def approve(self, id: str, digest: str, note: str = "") -> Json:
        """Approves the bundle with this digest and no other."""
        return self._act(id, "approve", {"digest": digest, "note": note})

    def rebuild(self, id: str) -> Json:
        return self._act(id, "rebuild")

    def discard(self, id: str) -> Json:
        return self._act(id, "discard")

    def publish(self, id: str) -> Json:
        return self._act(id, "publish")

    def withdraw(self, id: str, reason: str) -> Json:
        return self._act(id, "withdraw", {"reason": reason})

    def _act(self, id: str, action: str, body: Json | None = None) -> Json:
        return self._post("releases", id, action, body=body, retry=True)

    def wait_built(self, id: str, on_progress: Callable[[Json], None] = lambda _: None) -> Json:
        """Waits until a bundle is built: `in_review`, or `failed` with a fault."""

        def fetch() -> Json:
            view = self.release_view(id)
            on_progress(view)
            return view

        return self._wait(fetch, lambda view: view["state"] != "building")

    def wait_published(self, id: str) -> Json:
        """Waits until publishing or withdrawing a release has ended."""
        busy = ("publishing", "withdrawing")
        return self._wait(lambda: self.release_view(id), lambda view: view["state"] not in busy)

    def add_reader(self, id: str, person: str) -> None:
        self._send("POST", "releases", id, "readers", body={"person": person}, retry=True)

    def remove_reader(self, id: str, person: str) -> None:
        self._send("DELETE", "releases", id, "readers", person)

    def downloads(self, id: str, paths: list[str], *, review: bool = False) -> list[Json]:
        """Addresses of files of a published release, or of one under `review`, valid for 15 minutes."""
        path = ("releases", id, "review", "downloads") if review else ("releases", id, "downloads")
        files: list[Json] = self._post(*path, body={"paths": paths}, retry=True)["files"]
        return files

    def signing_keys(self) -> list[Json]:
        keys: list[Json] = self._get(".well-known", "sluice-keys.json")["keys"]
        return keys

    def revocations(self) -> bytes:
        """The newest signed list of withdrawn releases, as signed."""
        return self._send("GET", ".well-known", "sluice-revocations.json").content

    # Budgets and the audit log

    def accounts(self) -> Iterator[Json]:
        return self._pages("admin", "ledger", limit=200)

    def ledger(self, account: str, *, after: int = 0, limit: int = 10_000) -> Json:
        """An account, the service's own check of its chain, and rows; `next` is where to continue."""
        return self._get("admin", "ledger", account, after=after, limit=limit)

    def ledger_csv(self, account: str) -> Iterator[bytes]:
        """All rows as CSV, in chunks as they arrive."""
        with self._stream("admin", "ledger", account, format="csv") as answer:
            yield from answer.iter_bytes()

    def audit_log(self, **filters: Any) -> Iterator[Json]:
        """Rows, newest first; filters are `person`, `action`, `object`, `since`, `until`."""
        return self._pages("admin", "audit-log", **filters)

    def export_audit_log(self, **filters: Any) -> Iterator[Json]:
        """Rows, oldest first, with all fields that their digests cover."""
        after = 0
        while True:
            query = {"format": "jsonl", "after": after, "limit": _EXPORT_ROWS, **filters}
            answer = self._send("GET", "admin", "audit-log", query=query)
            try:
                rows = [json.loads(line) for line in answer.content.splitlines()]
                after = rows[-1]["number"] if rows else after
            except (ValueError, KeyError, TypeError):
                raise not_sluice(answer) from None
            yield from rows
            if len(rows) < _EXPORT_ROWS:  # not "until empty": each request adds a row
                return

    def grants(self, account: str) -> list[Json]:
        return self._list("admin", "ledger", account, "grants")

    def propose_grant(self, account: str, *, epsilon: float, reason: str) -> Json:
        """Proposes a larger epsilon; it takes effect once another person confirms it."""
        return self._post("admin", "ledger", account, "grants", body={"epsilon": epsilon, "reason": reason})

    def confirm_grant(self, account: str, grant: str) -> Json:
        return self._post("admin", "ledger", account, "grants", grant, "confirm", retry=True)

    def withdraw_grant(self, account: str, grant: str) -> Json:
        return self._post("admin", "ledger", account, "grants", grant, "withdraw", retry=True)

    # People, keys and teams. The text of a key or invitation is in the answer that creates it and not stored.

    def people(self) -> Iterator[Json]:
        return self._pages("admin", "people", limit=200)

    def add_person(self, *, name: str, role: str) -> Json:
        """Adds a person and creates their `invitation`."""
        return self._post("admin", "people", body={"name": name, "role": role})

    def disable_person(self, id: str) -> Json:
        return self._post("admin", "people", id, "disable", retry=True)

    def invite(self, person: str) -> Json:
        """Creates an invitation for a person who lost their key or was disabled."""
        return self._post("admin", "people", person, "invitations")

    def invitations(self, person: str | None = None) -> Iterator[Json]:
        return self._pages("admin", "invitations", person=person, limit=200)

    def confirm_invitation(self, id: str) -> Json:
        """Confirms the invitation of an admin by another admin and returns its text."""
        return self._post("admin", "invitations", id, "confirm")

    def withdraw_invitation(self, id: str) -> None:
        self._send("DELETE", "admin", "invitations", id)

    def redeem(self, invitation: str, *, label: str = "key", days: int = 365) -> Json:
        """Creates your key from an invitation, which works once."""
        body = {"invitation": invitation, "label": label, "days": days}
        return self._post("invitations", "redeem", body=body)

    def keys(self, person: str | None = None) -> list[Json]:
        """Your keys or, for an admin, those of a person; without their text."""
        return self._list("me", "keys") if person is None else self._list("admin", "people", person, "keys")

    def add_key(self, *, label: str, days: int) -> Json:
        """Creates another key for you."""
        return self._post("me", "keys", body={"label": label, "days": days})

    def revoke_key(self, id: str) -> None:
        """Revokes a key of yours; an admin may revoke anybody's."""
        self._send("DELETE", "admin" if self.me()["role"] == "admin" else "me", "keys", id)

    def teams(self) -> list[Json]:
        return self._list("admin", "teams")

    def set_quotas(self, team: str, quotas: Json) -> Json:
        """Sets `bytes`, `jobs` and `job_seconds` of a team; null means the default of the site."""
        return self._post("admin", "teams", team, "quotas", body=quotas, retry=True)

    def add_team(self, name: str) -> Json:
        return self._post("admin", "teams", body={"name": name})

    def move_person(self, id: str, team: str | None, *, datasets: bool = False) -> Json:
        """Puts a person into a team or none, with `datasets` also their datasets that belong to no team."""
        body = {"team": team, "datasets": datasets}
        return self._post("admin", "people", id, "team", body=body, retry=True)
