"""One real stack per run: the controller starts PostgreSQL, Valkey and SeaweedFS, every worker uses them."""

import json
import os
import shutil
import socket
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
import uvicorn
from fastapi import FastAPI
from sqlalchemy import Engine

from core.database import connect
from core.settings import ServiceSettings
from local.stack import Stack

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"

_run: dict[str, Any] = {}  # the stack this process started, if any


@dataclass(frozen=True)
class Servers:
    """What a test may know of the shared servers: the environment of each role, and the owner's keys."""

    environments: dict[str, dict[str, str]]
    owner_url: str
    s3_endpoint: str
    s3_identities: dict[str, dict[str, str]]


def _start() -> str:
    memory = Path("/dev/shm")  # a run needs no disk that survives it
    at = memory if memory.is_dir() and shutil.disk_usage(memory).free > 2 << 30 else None
    place = Path(tempfile.mkdtemp(prefix="sluice-test-", dir=at))
    stack = Stack(place / "data", durable=False, witness=place / "witness")
    _run["stack"] = stack
    stack.start_servers()
    stack.prepare()
    return json.dumps(
        [
            {role: stack.environment(role) for role in ("service", "train", "publish", "sweep")},
            stack.owner_url,
            stack.s3_endpoint,
            stack.state["s3"],
        ]
    )


# Files that take minutes, the longest first: begun last, one of them would keep a core waiting for the other.
LONG_FILES = (
    "worker/test_jobs.py", "e2e/test_up.py", "e2e/test_jobs.py", "service/test_fuzz.py",
    "worker/test_publish.py", "core/test_ledger_machine.py", "e2e/", "privacy/test_cost.py",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def turn(item: pytest.Item) -> int:
        path = item.path.relative_to(ROOT / "tests").as_posix()
        return next((i for i, name in enumerate(LONG_FILES) if path.startswith(name)), len(LONG_FILES))

    items.sort(key=turn)


def pytest_configure_node(node: Any) -> None:
    """In the controller of a parallel run, once for each worker it starts."""
    if "servers" not in _run:
        _run["servers"] = _start()
    node.workerinput["servers"] = _run["servers"]


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """In the controller: a failure is told when it happens, so that a run that is cut off still says why."""
    if report.failed and "stack" in _run:
        sys.stdout.write(f"\n{report.nodeid} failed in {report.when}\n{report.longreprtext}\n\n")
        sys.stdout.flush()


def pytest_unconfigure() -> None:
    stack = _run.pop("stack", None)
    if stack:
        stack.stop()
        shutil.rmtree(stack.data.parent, ignore_errors=True)


@pytest.fixture(scope="session")
def servers(request: pytest.FixtureRequest) -> Servers:
    handed = getattr(request.config, "workerinput", {}).get("servers")
    return Servers(*json.loads(handed or _start()))


@pytest.fixture
def database(servers: Servers) -> Iterator[Callable[[str], str]]:
    """A database of the test's own, a copy of the migrated one; gives its URL for a role, or for 'owner'."""
    name = f"t_{uuid.uuid4().hex}"
    with psycopg.connect(servers.owner_url.rsplit("/", 1)[0] + "/postgres", autocommit=True) as admin:
        admin.execute("SELECT pg_advisory_lock(1)")  # a template is copied by one at a time
        admin.execute(f"CREATE DATABASE {name} TEMPLATE sluice")
        admin.execute("SELECT pg_advisory_unlock(1)")

        def url(role: str) -> str:
            whole = (
                servers.owner_url if role == "owner" else servers.environments[role]["SLUICE_DATABASE_URL"]
            )
            return whole.rsplit("/", 1)[0] + f"/{name}"

        yield url
        admin.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def engine(database: Callable[[str], str]) -> Iterator[Engine]:
    """The service's own connection to a database of the test's own."""
    engine = connect(database("service"))
    yield engine
    engine.dispose()


@pytest.fixture
def service_settings(
    servers: Servers, database: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> ServiceSettings:
    for name in [name for name in os.environ if name.startswith("SLUICE_")]:
        monkeypatch.delenv(name)
    values = {k.removeprefix("SLUICE_").lower(): v for k, v in servers.environments["service"].items()}
    return ServiceSettings(**values | {"database_url": database("service")})


@contextmanager
def served(app: FastAPI) -> Iterator[httpx.Client]:
    """The application behind a real server on a real port, and a client for it."""
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=1))
    listening = socket.create_server(("127.0.0.1", 0))
    # asyncio sets this only for sockets that name their protocol; without, each answer waits 40 ms.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{listening.getsockname()[1]}", timeout=30) as client:
            yield client
    finally:
        server.should_exit = True
        thread.join()
        listening.close()


@pytest.fixture(scope="session")
def serve() -> Callable[[FastAPI], AbstractContextManager[httpx.Client]]:
    return served


@pytest.fixture(scope="session")
def shared() -> Path:
    """Reference material beside the checkout."""
    if not SHARED.is_dir():
        pytest.skip("../shared is not here")
    return SHARED
