"""Starts, monitors and stops the servers and processes of `sluice up`."""

import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote, urlsplit, urlunsplit

from sqlalchemy import update
from sqlalchemy.orm import Session

from core.database import connect, database_role
from core.errors import Problem
from core.people import first_admin, invite_admin
from core.probe import ask_service
from core.settings import RuleSettings, ServiceSettings, SettingsProblem, load
from core.stores.access import ROLES as S3_ROLES
from core.tables import Witness
from local import state as data_directory
from local.child import Child
from local.ports import HOST, port_is_free
from local.servers import Postgres, Seaweed, Valkey
from local.state import ROLES
from sluice.client.problems import CannotRun

# Settings of the service that follow from the servers in use.
_CHOSEN = {
    "database_url", "queue_url", "s3_endpoint", "s3_region", "s3_ca", "s3_access_key", "s3_secret_key",
    "private_bucket", "public_bucket",
}  # fmt: skip
_EXTERNAL_S3 = ("S3_REGION", "S3_CA", "PRIVATE_BUCKET", "VAULT_BUCKET", "PUBLIC_BUCKET", "WITNESS_BUCKET")
_KMS = ("KMS_ENDPOINT", "KMS_REGION", "KMS_ACCESS_KEY", "KMS_SECRET_KEY")
# Settings that `sluice up` passes from its environment to its children.
_DAYS = tuple(
    f"{name}_DAYS" for name in ("UPLOAD", "SYNTHESIZER", "REJECTED_UPLOAD", "UNFINISHED_UPLOAD", "CHECKPOINT")
)
_PASSED_ON = {
    "service": tuple(name.upper() for name in ServiceSettings.model_fields if name not in _CHOSEN),
    "train": ("DIAGNOSTICS", *_DAYS, *_KMS),
    "publish": _KMS,
    "sweep": ("AUDIT_DAYS",),
}
# Keys that `sluice up` creates and stores, unless the environment names another, such as one in a KMS.
_KEYS = {
    "service": ("UPLOAD_PUBLIC_KEY",),
    "train": ("FINGERPRINT_KEY", "UPLOAD_KEY", "SYNTHESIZER_PUBLIC_KEY"),
    "publish": ("SIGNING_KEY", "SYNTHESIZER_KEY"),
}
_MAX_FAILED_STARTS = 5  # in a row


def _from_environment(names: Iterable[str]) -> dict[str, str]:
    return {name: os.environ[f"SLUICE_{name}"] for name in names if f"SLUICE_{name}" in os.environ}


class Stack:
    """The servers and processes of one data directory. Use it from the main thread."""

    def __init__(
        self,
        data: Path,
        *,
        port: int = 8000,
        durable: bool = True,
        witness: Path | None = None,
        lost_witness: bool = False,
        invite: str | None = None,
    ) -> None:
        self.data, self.port, self.durable = data.resolve(), port, durable
        self.certificate = os.environ.get("SLUICE_TLS_CERT")
        self.lost_witness, self.invite = lost_witness, invite
        self.stopping = threading.Event()
        self.timings: dict[str, float] = {}
        self.first_key: str | None = None  # of the first admin, in the run that created the directory
        self.invitation: str | None = None  # of the second admin, in that run, or of the admin to be invited
        self.servers: list[Child] = []
        self.processes: list[Child] = []
        self._lock = data_directory.claim(self.data)
        try:
            self.state = data_directory.load(self.data)
            self._choose_servers()
            self.witness = self._choose_witness(witness)
        except BaseException:
            self._lock.close()
            raise

    def _choose_servers(self) -> None:
        self.owner_url = os.environ.get("SLUICE_DATABASE_URL", "")
        self.queue_url = os.environ.get("SLUICE_QUEUE_URL", "")
        self.s3_endpoint = os.environ.get("SLUICE_S3_ENDPOINT", "")
        self.postgres = None if self.owner_url else Postgres(self.data, self.state, durable=self.durable)
        self.valkey = None if self.queue_url else Valkey(self.data, self.state, durable=self.durable)
        self.seaweed = None if self.s3_endpoint else Seaweed(self.data, self.state)
        if self.postgres:
            self.owner_url = self.postgres.owner_url
        if self.seaweed:
            self.s3_endpoint = self.seaweed.endpoint
        else:
            self._require_identities()

    def _choose_witness(self, chosen: Path | None) -> Path | None:
        """A directory, unless an external S3 server has a witness bucket."""
        if chosen is None and not self.seaweed and os.environ.get("SLUICE_WITNESS_BUCKET"):
            return None
        directory = data_directory.witness_directory(self.data, self.state, chosen, lost=self.lost_witness)
        self.state["witness"] = str(directory)
        data_directory.save(self.data, self.state)
        return directory

    def _require_identities(self) -> None:
        for role in S3_ROLES:
            for key in ("access_key", "secret_key"):
                name = f"SLUICE_{role}_S3_{key}".upper()
                if not os.environ.get(name):
                    raise CannotRun(
                        f"SLUICE_S3_ENDPOINT is set but {name} is not: give each role an identity of "
                        "its own, with the rights in docker/iam"
                    )

    @property
    def url(self) -> str:
        return f"{'https' if self.certificate else 'http'}://{HOST}:{self.port}"

    def environment(self, role: str) -> dict[str, str]:
        """The environment of a process of this role; it holds no secrets of other roles."""
        queue_url = os.environ.get(f"SLUICE_{role.upper()}_QUEUE_URL", self.queue_url)
        settings = {"DATABASE_URL": self._database_url(role), "QUEUE_URL": queue_url}
        if self.valkey:
            settings["QUEUE_URL"] = self.valkey.url(role)
        if role in S3_ROLES:
            settings["S3_ENDPOINT"] = self.s3_endpoint
            for key in ("access_key", "secret_key"):
                external = f"SLUICE_{role}_S3_{key}".upper()
                settings[f"S3_{key.upper()}"] = (
                    self.state["s3"][role][key] if self.seaweed else os.environ[external]
                )
            if not self.seaweed:
                settings |= _from_environment(_EXTERNAL_S3)
        if role in ("train", "sweep") and self.witness:
            settings["WITNESS_DIR"] = str(self.witness)
        settings |= {name: self.state[name.lower()] for name in _KEYS.get(role, ())}
        settings |= _from_environment((*_PASSED_ON.get(role, ()), *_KEYS.get(role, ())))
        return {f"SLUICE_{name}": value for name, value in settings.items()}

    def _database_url(self, role: str) -> str:
        at = urlsplit(self.owner_url)
        login = f"{database_role(role)}:{quote(self.state['database'][role])}"
        return urlunsplit(at._replace(netloc=f"{login}@{at.netloc.rpartition('@')[2]}"))

    def start(self) -> None:
        """Starts servers, migrates the database, starts our processes; on an error, stops them all."""
        began = time.monotonic()
        try:
            if not port_is_free(self.port):
                raise CannotRun(
                    f"port {self.port} is in use: stop what listens there, or choose another with --port"
                )
            self.start_servers()
            self.prepare()
            self.start_processes()
        except BaseException:
            self.stop()
            raise
        self.timings["all ready"] = time.monotonic() - began

    def start_servers(self) -> None:
        # The fast ones first: they start while initdb runs.
        for server in (self.seaweed, self.valkey):
            if server:
                self._launch(server.child(), self.servers)
        if self.postgres:
            began = time.monotonic()
            self.postgres.create()
            self.timings["initdb"] = time.monotonic() - began
            self._launch(self.postgres.child(), self.servers)
        self._await(self.servers)

    def prepare(self) -> None:
        """Migrates the database, sets the roles' passwords and creates the first admin."""
        from migrations import UnknownRevision, migrate

        began = time.monotonic()
        try:
            passwords = {role: self.state["database"][role] for role in ROLES}
            migrate(self.owner_url, passwords, independent_days=load(RuleSettings).independent_days)
        except (UnknownRevision, SettingsProblem) as problem:
            raise CannotRun(str(problem)) from None
        engine = connect(self.owner_url)
        with Session(engine) as session, session.begin():
            created = first_admin(session)
            if created:
                self.first_key, self.invitation = created
            if self.invite:
                try:
                    self.invitation = invite_admin(session, self.invite)
                except Problem as problem:
                    raise CannotRun(problem.detail) from None
            if self.lost_witness:
                session.execute(update(Witness).values(generation=0))
        engine.dispose()
        self.timings["migrations"] = time.monotonic() - began

    def start_processes(self) -> None:
        def child(role: str, module: str, *arguments: str) -> Child:
            return Child(
                name=role,
                command=[sys.executable, "-m", module, *arguments],
                log=self.data / f"log/{role}.log",
                probe=lambda: self._probe(role),
                environment=self.environment(role),
            )

        self._launch(child("service", "service", "--port", str(self.port)), self.processes)
        for role in ("train", "publish", "sweep"):
            self._launch(child(role, f"worker.{role}"), self.processes)
        self._await(self.processes)

    def _launch(self, child: Child, group: list[Child]) -> None:
        group.append(child)
        child.start()

    def _await(self, group: list[Child]) -> None:
        for child in group:
            self.timings[child.name] = child.wait_ready(self.stopping.is_set)

    def health(self) -> dict[str, str]:
        """The state of every part, as the service reports it."""
        ready = json.loads(ask_service(self.port, "/readyz", certificate=self.certificate, timeout=5))
        states: dict[str, str] = ready["needs"] | {"service": "ok"} | ready["workers"]
        return states

    def _probe(self, role: str) -> None:
        if self.health()[role] != "ok":
            raise ConnectionError(role)

    def watch(self, say: Callable[[str], None]) -> None:
        """Restarts children that end, until stopping is requested or one fails to start repeatedly."""
        failed_starts: Counter[str] = Counter()
        while not self.stopping.wait(0.1):
            for child in self.servers + self.processes:
                if child.died():
                    say(child.exit_report())
                    failed_starts[child.name] = 0 if child.ready else failed_starts[child.name] + 1
                    if failed_starts[child.name] == _MAX_FAILED_STARTS:
                        raise CannotRun(
                            f"{child.name} failed to start {_MAX_FAILED_STARTS} times: see {child.log}"
                        )
                    child.start()
                elif not child.ready:
                    with suppress(Exception):  # not ready yet; the exception depends on the client library
                        child.probe()
                        child.ready = True
                        say(f"{child.name} is up again")

    def stop(self) -> None:
        """Stops our processes first, while their servers still answer, then the servers."""
        began = time.monotonic()
        for group in (self.processes, self.servers):
            if group:
                with ThreadPoolExecutor(len(group)) as pool:
                    list(pool.map(Child.stop, group))
            group.clear()
        if self.seaweed:
            self.seaweed.clean()
        self._lock.close()
        self.timings["all stopped"] = time.monotonic() - began

    def __enter__(self) -> "Stack":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
