"""Fixtures of all tests: real servers, started when a test first asks for them, one set for the whole run."""

import os
import socket
import sys
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
from tests import stack

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"

# A test is marked "server" if it uses one of these fixtures, lies in tests/e2e, or carries the mark itself.
SERVER_FIXTURES = {"servers", "place", "seaweedfs", "valkey"}
# Files that take longest, in this order: started last, one of them would keep a core waiting for the other.
LONG_FILES = (
    "e2e/test_restore.py", "worker/test_jobs.py", "e2e/test_up.py", "e2e/test_jobs.py",
    "service/test_fuzz.py", "worker/test_publish.py", "e2e/", "worker/test_checking.py", "core/test_ledger",
    "privacy/", "worker/",
)  # fmt: skip

_run: list[stack.Run] = []  # in the pytest process that the user started, its run


@dataclass(frozen=True)
class Servers:
    """Addresses of the shared servers, the environment of each role, and the credentials of the owner."""

    environments: dict[str, dict[str, str]]
    owner_url: str
    s3_endpoint: str
    s3_identities: dict[str, dict[str, str]]


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        _run.append(stack.Run())
        # Before torch is imported, and for every process that a test starts: tests run on all cores already.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Requests of tests that name no limit: a busy machine may need more than httpx's 5 s.
    vars(httpx._config.DEFAULT_TIMEOUT_CONFIG).update(
        dict.fromkeys(("connect", "read", "write", "pool"), 300)
    )


def pytest_configure_node(node: Any) -> None:
    """Called by pytest-xdist in the controller for every worker that it starts."""
    node.workerinput["run_directory"] = str(_run[0].directory)


def pytest_unconfigure() -> None:
    while _run:
        _run.pop().end()


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by mark
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def rank(item: pytest.Item) -> int:
        path = item.path.relative_to(ROOT / "tests").as_posix()
        return next((i for i, name in enumerate(LONG_FILES) if path.startswith(name)), len(LONG_FILES))

    items.sort(key=rank)
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        if SERVER_FIXTURES & fixtures or ROOT / "tests/e2e" in item.path.parents:
            item.add_marker("server")


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """In the controller of a parallel run: prints a failure when it happens, in case the run is cut off."""
    if report.failed and hasattr(report, "node"):
        sys.stdout.write(f"\n{report.nodeid} failed in {report.when}\n{report.longreprtext}\n\n")
        sys.stdout.flush()


@pytest.fixture(scope="session")
def servers(request: pytest.FixtureRequest) -> Servers:
    workerinput = getattr(request.config, "workerinput", None)
    directory = Path(workerinput["run_directory"]) if workerinput else _run[0].directory
    return Servers(**stack.addresses(directory))


@contextmanager
def new_database(servers: Servers) -> Iterator[Callable[[str], str]]:
    """A copy of the migrated database; yields a function from a role, or 'owner', to its URL."""
    name = f"t_{uuid.uuid4().hex}"
    with psycopg.connect(servers.owner_url.rsplit("/", 1)[0] + "/postgres", autocommit=True) as admin:
        admin.execute("SELECT pg_advisory_lock(1)")  # PostgreSQL copies a template for one client at a time
        admin.execute(f"CREATE DATABASE {name} TEMPLATE {stack.TEMPLATE}")
        admin.execute("SELECT pg_advisory_unlock(1)")

        def url(role: str) -> str:
            environment = servers.environments.get(role, {"SLUICE_DATABASE_URL": servers.owner_url})
            return environment["SLUICE_DATABASE_URL"].rsplit("/", 1)[0] + f"/{name}"

        yield url
        admin.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def database(servers: Servers) -> Iterator[Callable[[str], str]]:
    """A database for one test. Modules whose tests do not disturb each other override it for all of them."""
    with new_database(servers) as url:
        yield url


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
        with httpx.Client(base_url=f"http://127.0.0.1:{listening.getsockname()[1]}", timeout=300) as client:
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
