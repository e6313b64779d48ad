"""Every container of ours, run without an engine: its image's files, user, mounts and commands."""

import json
import shutil
import signal
import subprocess
import sys
import time
import uuid
from contextlib import ExitStack
from urllib.parse import urlsplit

import httpx
import psycopg
import pytest

from local.ports import free_port
from tests.docker.compose import ROOT, SERVICES
from tests.docker.containers import Container, Image
from tests.docker.tls import tls_front

OURS = ("migrate", "api", "train-cpu", "publish", "sweep")


@pytest.fixture(scope="module", autouse=True)
def namespaces():
    try:
        subprocess.run(
            ["unshare", "--user", "--map-root-user", "--mount", "true"], check=True, capture_output=True
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this system has no user namespaces for us")


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    base = tmp_path_factory.mktemp("images")
    return {
        name: Image(ROOT / f"docker/{name}.Dockerfile", base / name, {"TORCH": "cpu"})
        for name in ("service", "worker")
    }


@pytest.fixture(scope="module")
def containers(images, made, valkey, seaweedfs, servers, tmp_path_factory):
    """Those of the compose file, with new secrets and a new database, and on ports that are free."""
    secrets = tmp_path_factory.mktemp("containers") / "secrets"
    shutil.copytree(made, secrets)
    owner, database = urlsplit(servers.owner_url), f"t_{uuid.uuid4().hex}"
    passwords = {
        role: urlsplit(servers.environments[role]["SLUICE_DATABASE_URL"]).password
        for role in ("service", "train", "publish", "sweep")
    }
    with (
        psycopg.connect(servers.owner_url, autocommit=True) as admin,
        tls_front(made, "postgres", owner.port) as postgres,
    ):
        admin.execute(f"CREATE DATABASE {database}")
        # The roles of the test run's PostgreSQL keep their passwords: migrating sets them.
        for role, password in {"migrate": owner.password, **passwords}.items():
            if role != "migrate":
                (secrets / f"{role}_password").write_text(password)
                queue = secrets / f"{role}_queue_url"
                queue.write_text(queue.read_text().replace("@valkey:6379/", f"@valkey:{valkey}/"))
            url = secrets / f"{role}_database_url"
            start, _, end = url.read_text().partition("@postgres:5432/sluice")
            login = start.rpartition(":")[0]
            url.write_text(f"{login}:{password}@postgres:{postgres}/{database}{end}")
        replace = {"8000": str(free_port()), "https://s3:8333": f"https://s3:{seaweedfs['s3.port']}"}
        yield {
            name: Container(
                name, images["service" if name in ("migrate", "api") else "worker"], secrets, replace
            )
            for name in OURS
        }
        admin.execute(f"DROP DATABASE {database} WITH (FORCE)")


@pytest.fixture(scope="module")
def site(containers, tmp_path_factory):
    """All of them up: migrated, then served and worked until every part says that it is well."""
    code, said = containers["migrate"].run()
    assert code == 0, said
    logs = tmp_path_factory.mktemp("logs")
    with ExitStack() as stack:
        processes = {
            name: stack.enter_context(containers[name].running(logs / name))
            for name in OURS
            if name != "migrate"
        }
        address = f"http://127.0.0.1:{containers['api'].replace['8000']}"
        while True:
            for name, process in processes.items():
                assert process.poll() is None, f"{name}: {(logs / name).read_text()}"
            try:
                ready = httpx.get(f"{address}/readyz", timeout=10).json()
                if {*ready["needs"].values(), *ready["workers"].values()} == {"ok"}:
                    break
            except httpx.HTTPError:
                pass
            time.sleep(0.1)
        yield processes


def test_every_part_gets_ready_with_what_its_container_is_given(site):
    assert set(site) == set(OURS) - {"migrate"}
    assert all(process.poll() is None for process in site.values())


@pytest.mark.parametrize("name", [name for name in OURS if name != "migrate"])
def test_health_check_of_the_container_passes(name, site, containers):
    code, said = containers[name].healthy()
    assert code == 0, said


def test_container_reaches_the_object_store_with_the_certificate_it_is_given(containers):
    program = """
from core.settings import SweepSettings, load
from core.stores.s3 import client_for
store = client_for(load(SweepSettings))
print(store.meta.endpoint_url, store.list_objects_v2(Bucket="sluice-witness")["Name"])
"""
    sweep = containers["sweep"]
    code, said = sweep.run(["python", "-c", program])
    assert (code, said.split()) == (0, [sweep.environment["SLUICE_S3_ENDPOINT"], "sluice-witness"])
    assert said.startswith("https://s3:")


def test_migrating_again_changes_nothing_and_ends_well(site, containers):
    assert containers["migrate"].run()[0] == 0


@pytest.mark.parametrize("name", OURS)
def test_container_runs_as_its_user_without_rights_on_files_it_cannot_write(name, containers):
    program = """
import json, os, sys
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
writable = []
for directory in ("/", "/opt/sluice", "/etc", "/run/secrets", "/tmp"):
    try:
        open(directory + "/x", "w").close()
        writable.append(directory)
    except OSError:
        pass
print(json.dumps({
    "user": [os.getuid(), os.getgid()],
    "capabilities": int(status["CapEff"], 16),
    "writable": writable,
    "secrets": sorted(os.listdir("/run/secrets")),
    "checkout": os.path.exists(sys.argv[1]),
    "path": sys.path,
}))
"""
    container = containers[name]
    code, said = container.run(["python", "-c", program, str(ROOT / "core")])
    assert code == 0, said
    told = json.loads(said)
    assert told["user"] == [10001, 10001]
    assert told["capabilities"] == 0
    assert told["writable"] == ["/tmp"]
    assert told["secrets"] == sorted(entry["target"] for entry in SERVICES[name]["secrets"])
    assert not told["checkout"]
    assert [path for path in told["path"] if not path.startswith(sys.base_prefix)] == [
        "/opt/sluice/server",
        f"/opt/sluice/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages",
    ]


@pytest.mark.parametrize(
    ("name", "present", "absent"),
    [
        (
            "api",
            {"service", "migrations", "core", "sluice"},
            {"worker", "local", "torch", "setuptools", "pip"},
        ),
        ("publish", {"worker", "core", "sluice", "torch"}, {"service", "migrations", "local", "pip"}),
    ],
)
def test_image_has_its_own_packages_and_what_they_need(name, present, absent, containers):
    program = "import importlib.util, sys; print(*[n for n in sys.argv[1:] if importlib.util.find_spec(n)])"
    code, said = containers[name].run(["python", "-c", program, *present, *absent])
    assert (code, set(said.split())) == (0, present)


@pytest.mark.parametrize("name", ["api", "sweep"])
def test_container_without_its_secrets_says_which_are_missing(name, containers):
    container = containers[name]
    bare = Container(name, container.image, container.mounts[next(iter(container.mounts))].parent, {})
    bare.mounts = {}
    bare.environment.pop("SLUICE_S3_CA", None)
    code, said = bare.run()
    assert code == 1
    assert said.startswith("sluice: "), said
    assert "SLUICE_DATABASE_URL is missing" in said


def test_worker_image_alone_says_that_it_needs_a_command(containers):
    container = containers["publish"]
    code, said = container.run(container.image.command)
    assert (code, said.strip()) == (
        1,
        "choose a command: python -m worker.train, worker.publish or worker.sweep",
    )


def test_every_part_stops_when_it_is_told_to(site, containers):
    """Last in this file: it ends the site. The HTTP server ends itself with the signal it was sent."""
    for process in site.values():
        process.terminate()
    for name, process in site.items():
        assert process.wait() in (0, -signal.SIGTERM), name
