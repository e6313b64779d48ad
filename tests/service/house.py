"""A running service with people in it, shared by the tests of HTTP."""

import base64
import hashlib
import os
import secrets
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
from fastapi import FastAPI
from psycopg.types.json import Jsonb
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from core import binding
from core.database import connect
from core.people import Role, add_person, invite, redeem
from core.settings import ServiceSettings
from core.stores.witness import DirectoryWitness
from core.witness import WitnessLog, compare
from service.app import create_app
from tests.conftest import Servers, served
from worker.lease import JobLease

IMAGES = {"kind": "image", "height": 8, "width": 8, "classes": ["clear", "shadow"]}
# Cheap to account for: no subsampling.
PLAN = {"kind": "swd_one_shot", "directions": 10}
BUDGET = {"epsilon": 10.0, "delta": 1e-6}
# As far as the service reads it: what a release states of one owner.
STATED = {"epsilon": {"renyi": 1.0, "pld": 0.9}, "delta": 1e-6, "relation": "add_remove"}


@dataclass(frozen=True)
class Caller:
    """A person with a key, and a client that sends it."""

    name: str
    id: uuid.UUID
    key: str
    http: httpx.Client

    def __getattr__(self, verb: str) -> Any:
        return getattr(self.http, verb)


@contextmanager
def fresh_database(servers: Servers) -> Iterator[Callable[[str], str]]:
    """A copy of the migrated database for several tests; gives its URL for a role, or for 'owner'."""
    name = f"t_{uuid.uuid4().hex}"
    with psycopg.connect(servers.owner_url.rsplit("/", 1)[0] + "/postgres", autocommit=True) as admin:
        admin.execute("SELECT pg_advisory_lock(1)")
        admin.execute(f"CREATE DATABASE {name} TEMPLATE sluice")
        admin.execute("SELECT pg_advisory_unlock(1)")

        def url(role: str) -> str:
            owner = role == "owner"
            whole = servers.owner_url if owner else servers.environments[role]["SLUICE_DATABASE_URL"]
            return whole.rsplit("/", 1)[0] + f"/{name}"

        yield url
        admin.execute(f"DROP DATABASE {name} WITH (FORCE)")


def settings_for(servers: Servers, url: Callable[[str], str], **others: Any) -> ServiceSettings:
    values = {k.removeprefix("SLUICE_").lower(): v for k, v in servers.environments["service"].items()}
    return ServiceSettings(**values | {"database_url": url("service")} | others)


@dataclass
class House:
    servers: Servers
    url: Callable[[str], str]
    settings: ServiceSettings
    app: FastAPI
    anonymous: httpx.Client
    engine: Engine
    witness: DirectoryWitness
    people: dict[str, Caller] = field(default_factory=dict)
    _clients: list[httpx.Client] = field(default_factory=list)

    def __getattr__(self, name: str) -> Caller:
        try:
            return self.__dict__["people"][name]
        except KeyError:
            raise AttributeError(name) from None

    # -- people

    def person(self, role: str, name: str | None = None) -> Caller:
        """Adds a person with a key."""
        name = name or f"{role}-{uuid.uuid4().hex[:8]}"
        with self.session("owner") as session:
            person = add_person(session, name=name, role=Role(role))
            _, key = redeem(session, invite(session, person, by=None)[1], label="test", days=1)
            id = person.id
        return self.caller(name, id, key)

    def invited(self, by: Caller, role: str, confirmed_by: Caller | None = None) -> Caller:
        """A person whom an admin added over HTTP, with the key from the invitation."""
        added = by.post("/v1/admin/people", json={"name": f"i{uuid.uuid4().hex}", "role": role}).json()
        invitation = added["invitation"]
        if confirmed_by:
            answer = confirmed_by.post(f"/v1/admin/invitations/{invitation['id']}/confirm")
            assert answer.status_code == 200, answer.text
            invitation = answer.json()
        return self.redeemed(added["id"], invitation["invitation"])

    def redeemed(self, person: str, invitation: str) -> Caller:
        answer = self.anonymous.post("/v1/invitations/redeem", json={"invitation": invitation})
        assert answer.status_code == 201, answer.text
        return self.caller(person, uuid.UUID(person), answer.json()["key"])

    def caller(self, name: str, id: uuid.UUID, key: str) -> Caller:
        http = httpx.Client(
            base_url=self.anonymous.base_url, timeout=60, headers={"Authorization": f"Bearer {key}"}
        )
        self._clients.append(http)
        return Caller(name, id, key, http)

    def populate(self) -> None:
        curators = ("curator", "mate", "curator2", "revoked", "expired", "disabled")
        for name in ("admin2", *curators, "analyst"):
            self.people[name] = self.person("curator" if name in curators else name.rstrip("2"), name)
        self.people["admin"] = self.person("admin", "admin1")
        now = datetime.now(UTC)
        self.sql("UPDATE keys SET revoked_at = %s WHERE person_id = %s", now, self.revoked.id)
        late = now - timedelta(seconds=1)
        self.sql("UPDATE keys SET expires_at = %s WHERE person_id = %s", late, self.expired.id)
        self.sql("UPDATE people SET disabled_at = %s WHERE id = %s", now, self.disabled.id)
        self.team(self.curator, self.mate)
        self.team(self.curator2)

    def team(self, *members: Caller) -> str:
        """A new team of these people; gives its id."""
        id = uuid.uuid4()
        self.sql("INSERT INTO teams (id, name) VALUES (%s, %s)", id, f"team-{id.hex[:8]}")
        for who in members:
            self.sql("UPDATE people SET team_id = %s WHERE id = %s", id, who.id)
        return str(id)

    # -- the other processes, by their own database roles

    def sql(self, statement: str, *values: Any, role: str = "owner") -> list[tuple[Any, ...]]:
        with psycopg.connect(self.url(role), autocommit=True) as connection:
            done = connection.execute(statement, values)
            return done.fetchall() if done.description else []

    def witnessed(self) -> None:
        """Records that the sweeper compared ledger and witness just now and found no difference."""
        self.sql("UPDATE witness SET checked_at = clock_timestamp(), behind = NULL", role="sweep")

    def sweep(self) -> None:
        """Compares ledger and witness as the sweeper does."""
        engine = connect(self.url("sweep"), pool_size=1)
        with Session(engine) as session, session.begin():
            compare(session, WitnessLog(self.witness))
        engine.dispose()

    def checked(self, dataset: str, *, report: dict[str, Any] | None = None, few: bool = False) -> str | None:
        """Binds a dataset as the train worker does, by the hash of its file. Returns the new state."""
        id = uuid.UUID(dataset)
        known = self.sql(
            "SELECT id FROM datasets WHERE sha256 = (SELECT sha256 FROM datasets WHERE id = %s) AND id <> %s"
            " AND (account_id IS NOT NULL OR state = 'held')",
            id, id,
        )  # fmt: skip
        with self.session("train") as session:
            return binding.bind_decided(session, id) or binding.bind(
                session,
                id,
                overlaps={other: 1.0 for (other,) in known},
                few=few,
                report=report or {"clamped": 0},
            )

    @contextmanager
    def session(self, role: str) -> Iterator[Session]:
        """One transaction of a role."""
        engine = connect(self.url(role), pool_size=1)
        try:
            with Session(engine) as session, session.begin():
                yield session
        finally:
            engine.dispose()

    def accepted(self, dataset: str, **decision: Any) -> dict[str, Any]:
        """Has an admin accept a held dataset and the train worker bind it."""
        body = {"decision": "accept", "reason": "other people"} | decision
        answer = self.admin.post(f"/v1/datasets/{dataset}/review", json=body)
        assert answer.status_code == 202, answer.text
        self.checked(dataset)
        return self.admin.get(f"/v1/datasets/{dataset}").json()

    def job_row(self, job: str, **values: Any) -> None:
        """Updates a job with the database role of the train worker."""
        names = ", ".join(f"{name} = %s" for name in values)
        self.sql(f"UPDATE jobs SET {names} WHERE id = %s", *values.values(), job, role="train")

    # -- flows

    def register(self, who: Caller, **others: Any) -> dict[str, Any]:
        body = {"name": "d", "schema": IMAGES, "nominal_size": 100, "budget": BUDGET} | others
        answer = who.post("/v1/datasets", json=body)
        assert answer.status_code == 201, answer.text
        return answer.json()

    def begin(self, who: Caller, id: str, key: bytes = bytes(384)) -> httpx.Response:
        """Begins an upload. The service cannot tell a wrapped key from other bytes of that length."""
        body = {"key_id": self.app.state.upload_key.id, "wrapped_key": base64.b64encode(key).decode()}
        return who.post(f"/v1/datasets/{id}/upload", json=body)

    def upload(self, who: Caller, id: str, *parts: bytes) -> None:
        """Sends parts to signed URLs, as a client does."""
        assert self.begin(who, id).status_code == 200
        numbers = list(range(1, len(parts) + 1))
        signed = who.post(f"/v1/datasets/{id}/upload/urls", json={"numbers": numbers}).json()["parts"]
        for part, content in zip(signed, parts, strict=True):
            assert httpx.put(part["url"], content=content, timeout=60).status_code == 200

    def seal(self, who: Caller, id: str, content: bytes) -> httpx.Response:
        told = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        return who.post(f"/v1/datasets/{id}/seal", json=told)

    def sealed(self, who: Caller, content: bytes | None = None, **others: Any) -> dict[str, Any]:
        content = content or os.urandom(64)
        id = self.register(who, **others)["id"]
        self.upload(who, id, content)
        answer = self.seal(who, id, content)
        assert answer.status_code == 202, answer.text
        return answer.json()

    def ready(self, who: Caller, content: bytes | None = None, **others: Any) -> dict[str, Any]:
        """A checked dataset with an account, ready for jobs."""
        dataset = self.sealed(who, content, **others)
        if self.checked(dataset["id"]) == "held":
            self.accepted(dataset["id"])
        return who.get(f"/v1/datasets/{dataset['id']}").json()

    def job(self, who: Caller, dataset: str, *, key: str | None = None, **others: Any) -> httpx.Response:
        body = {"dataset": dataset, "plan": PLAN, "target": {"epsilon": 1.0}} | others
        return who.post("/v1/jobs", json=body, headers={"Idempotency-Key": key} if key else {})

    def trained(self, who: Caller, dataset: str, **others: Any) -> str:
        """A job that was claimed, trained and settled as by a train worker."""
        return self.finish(self.job(who, dataset, **others).json()["id"])

    def finish(self, job: str) -> str:
        engine = connect(self.url("train"), pool_size=1)
        held = JobLease.claim(engine, uuid.UUID(job))
        held.open()
        held.trained(synthesizer_key=f"synthesizers/{job}/1/", synthesizer_sha256=bytes(32), steps=1)
        engine.dispose()
        return job

    def draft(self, who: Caller, job: str, **others: Any) -> dict[str, Any]:
        answer = who.post("/v1/releases", json={"job": job, "name": "Scans, synthetic"} | others)
        assert answer.status_code == 202, answer.text
        return answer.json()

    def built(self, release: str, digest: bytes | None = None, privacy: dict[str, Any] | None = None) -> str:
        """Records a bundle as the publisher does; returns its digest."""
        digest = digest or os.urandom(32)
        files = [{"path": "manifest.json", "size": 2, "sha256": hashlib.sha256(b"{}").hexdigest()}]
        self.sql(
            "UPDATE releases SET state = 'in_review', digest = %s, files = %s, manifest = %s, privacy = %s,"
            " preview = %s, built_at = now() WHERE id = %s",
            digest, Jsonb(files), Jsonb({"kind": "sluice-release"}), Jsonb(privacy or STATED), b"a picture",
            release, role="publish",
        )  # fmt: skip
        listed = "INSERT INTO review_copies SELECT id, build, digest FROM releases WHERE id = %s"
        self.sql(f"{listed} ON CONFLICT DO NOTHING", release, role="publish")
        return digest.hex()

    def put(self, release: str) -> None:
        """Records a release as published, as the publisher does."""
        self.sql(
            "UPDATE releases SET state = 'published', attestation = '{}', published_at = now() WHERE id = %s",
            release, role="publish",
        )  # fmt: skip

    def published(self, who: Caller, job: str, **others: Any) -> dict[str, Any]:
        id = self.draft(who, job, **others)["id"]
        digest = self.built(id)
        assert self.admin.post(f"/v1/releases/{id}/approve", json={"digest": digest}).status_code == 200
        assert who.post(f"/v1/releases/{id}/publish").status_code == 202
        self.put(id)
        return who.get(f"/v1/releases/{id}").json()

    def balance(self, account: str) -> dict[str, int]:
        """The balance as stored in the table."""
        found = self.sql("SELECT capacity, held, settled FROM accounts WHERE id = %s", account)
        return dict(zip(("capacity", "held", "settled"), found[0], strict=True))


@contextmanager
def opened(servers: Servers, **settings: Any) -> Iterator[House]:
    """A service of its own with its people."""
    with fresh_database(servers) as url, tempfile.TemporaryDirectory() as witness:
        engine = connect(url("service"), pool_size=2)
        # Every caller here has one address; tests/service/test_overload.py sets its limits itself.
        chosen = settings_for(servers, url, **{"anonymous_per_minute": 1_000_000} | settings)
        app = create_app(chosen)
        with served(app) as anonymous, ExitStack() as closing:
            house = House(servers, url, chosen, app, anonymous, engine, DirectoryWitness(Path(witness)))
            closing.callback(engine.dispose)
            closing.callback(lambda: [client.close() for client in house._clients])
            house.populate()
            house.witnessed()
            yield house


@contextmanager
def signed_earlier(seconds: float) -> Iterator[None]:
    """URLs signed meanwhile bear a signing time this many seconds in the past."""
    with pytest.MonkeyPatch.context() as patch:
        earlier = datetime.now(UTC) - timedelta(seconds=seconds)
        patch.setattr("botocore.auth.get_current_datetime", lambda: earlier)
        yield


def new_key() -> str:
    return secrets.token_hex(16)
