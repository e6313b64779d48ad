"""The local stack keeps its promises: private, orderly, mortal with its parent, and it forgets nothing."""

import json
import os
import pwd
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import urllib.request
from contextlib import nullcontext, suppress
from pathlib import Path

import psutil
import psycopg
import pytest
import redis
from botocore.exceptions import BotoCoreError, ClientError

from core.stores import s3
from local.servers import Postgres
from tests.e2e.driving import PATIENCE, SLUICE, plain_environment, survivors, wait_for

PARTS = {"postgres", "valkey", "s3", "service", "train", "publish", "sweep"}


def state_of(data):
    return json.loads((data / "state.json").read_text())


def owner_url(data):
    state = state_of(data)
    return Postgres(data, state, durable=True).owner_url


def vault(data):
    state = state_of(data)
    return s3.client(
        endpoint=f"http://127.0.0.1:{state['ports'][8]}",
        region="us-east-1",
        attempts=1,
        **state["s3"]["train"],
    )


def write_row(data, text):
    with psycopg.connect(owner_url(data)) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS kept (text text)")
        connection.execute("INSERT INTO kept VALUES (%s)", [text])


def rows(data):
    with psycopg.connect(owner_url(data)) as connection:
        return [text for (text,) in connection.execute("SELECT text FROM kept").fetchall()]


def all_ok(up):
    """Whether every server and worker says that it is ready."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{up.port}/readyz") as answer:
            ready = json.load(answer)
    except OSError:
        return False
    return {*ready["needs"].values(), *ready["workers"].values()} == {"ok"}


def test_up_serves_keeps_to_itself_and_finds_its_data_again(running):
    up, data = running.ready(), running.data
    wait_for(lambda: all_ok(up))
    assert set(up.children()) == PARTS

    # private: the directory and every file with a secret
    assert stat.S_IMODE(data.stat().st_mode) == 0o700
    state = state_of(data)
    secrets = [*state["database"].values(), *state["queue"].values()] + [
        i["secret_key"] for i in state["s3"].values()
    ]
    for path in data.rglob("*"):
        if path.is_file() and any(secret.encode() in path.read_bytes() for secret in secrets):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
            assert path.name in ("state.json", "identities.json")

    # loopback only, and no secret on a command line
    for process in up.family():
        for connection in process.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN:
                assert connection.laddr.ip == "127.0.0.1", (process.cmdline(), connection)
        assert not any(secret in " ".join(process.cmdline()) for secret in secrets)

    # each process knows its own role's secrets alone
    own = {
        role: {
            state["database"].get(role),
            state["queue"].get(role),
            state["s3"].get(role, {}).get("secret_key"),
        }
        for role in ("service", "train", "publish", "sweep")
    }
    for role, process in up.children().items():
        known = {secret for secret in secrets if any(secret in v for v in process.environ().values())}
        assert known == own.get(role, set()) - {None}, role

    # a second one on the same directory
    second = subprocess.run(
        [*SLUICE, "up", "--data", str(data), "--port", "1"],
        capture_output=True,
        text=True,
        env=plain_environment(),
        check=False,
    )
    assert second.returncode == 1
    assert second.stderr.startswith("sluice: another sluice is running on ")
    assert "--data" in second.stderr

    # Ctrl-C stops all in order, and the next start finds everything
    write_row(data, "before")
    vault(data).put_object(Bucket="sluice-vault", Key="checkpoints/kept", Body=b"before")
    family = up.family()
    assert up.stop(signal.SIGINT) == 0
    up.expect("stopped in")
    assert survivors(family, 0) == []
    last = {
        p: (data / f"log/{p}.log").stat().st_mtime_ns for p in ("service", "train", "publish", "postgres")
    }
    assert max(last["service"], last["train"], last["publish"]) < last["postgres"]

    running.ready()
    assert "before" in rows(data)
    assert vault(data).get_object(Bucket="sluice-vault", Key="checkpoints/kept")["Body"].read() == b"before"
    assert state_of(data)["database"] == state["database"]


def test_kill_9_of_the_parent_takes_the_children_and_loses_nothing(running):
    up, data = running.ready(), running.data
    rows_kept, objects_kept = [], []
    killed = threading.Event()

    def write(kept, one):
        while not killed.is_set():
            try:
                one(f"parent-{len(kept)}")
            except Exception:
                return
            kept.append(f"parent-{len(kept)}")

    client = vault(data)
    write_row(data, "first")
    connection = psycopg.connect(owner_url(data), autocommit=True)
    writers = [
        threading.Thread(
            target=write, args=(rows_kept, lambda k: connection.execute("INSERT INTO kept VALUES (%s)", [k]))
        ),
        threading.Thread(
            target=write,
            args=(
                objects_kept,
                lambda k: client.put_object(Bucket="sluice-vault", Key=f"checkpoints/{k}", Body=k.encode()),
            ),
        ),
    ]
    for writer in writers:
        writer.start()
    family = up.family()
    wait_for(lambda: min(len(rows_kept), len(objects_kept)) >= 20)
    up.process.kill()
    up.process.wait()
    assert survivors(family) == []
    killed.set()
    for writer in writers:
        writer.join()
    connection.close()

    running.ready()
    assert set(rows(data)) >= {"first", *rows_kept}
    client = vault(data)
    for key in objects_kept:
        assert (
            client.get_object(Bucket="sluice-vault", Key=f"checkpoints/{key}")["Body"].read() == key.encode()
        )


@pytest.mark.parametrize("kills", [5, pytest.param(20, marks=pytest.mark.long)])
@pytest.mark.parametrize("server", ["postgres", "valkey", "s3"])
def test_kill_9_of_a_server_under_writes_loses_nothing_acknowledged(server, kills, running):
    up, data = running.ready(), running.data
    state = state_of(data)
    write_row(data, "first")
    queue_url = f"redis://service:{state['queue']['service']}@127.0.0.1:{state['ports'][1]}/0"
    client = vault(data)
    acknowledged = []

    def write_until_it_fails(enough):
        connection = psycopg.connect(owner_url(data), autocommit=True) if server == "postgres" else None
        connection = redis.Redis.from_url(queue_url) if server == "valkey" else connection
        with (
            connection or nullcontext(),
            suppress(psycopg.Error, redis.RedisError, BotoCoreError, ClientError),
        ):
            while True:
                key = f"{server}-{kills}-{len(acknowledged)}"
                if server == "postgres":
                    connection.execute("INSERT INTO kept VALUES (%s)", [key])
                elif server == "valkey":
                    connection.lpush("train:kept", key)
                else:
                    client.put_object(Bucket="sluice-vault", Key=f"checkpoints/{key}", Body=key.encode())
                acknowledged.append(key)
                enough.set()

    for _ in range(kills):
        enough = threading.Event()
        writer = threading.Thread(target=write_until_it_fails, args=[enough])
        writer.start()
        assert enough.wait(PATIENCE)
        up.children()[server].kill()
        writer.join()
        up.expect(f"{server} is up again")

    if server == "postgres":
        assert set(rows(data)) >= set(acknowledged)
    elif server == "valkey":
        reader = queue_url.replace(f"service:{state['queue']['service']}", f"train:{state['queue']['train']}")
        with redis.Redis.from_url(reader) as connection:
            kept = {key.decode() for key in connection.rpop("train:kept", 2 * len(acknowledged))}
        assert kept >= set(acknowledged)
    else:
        for key in acknowledged:
            assert (
                client.get_object(Bucket="sluice-vault", Key=f"checkpoints/{key}")["Body"].read()
                == key.encode()
            )
    wait_for(lambda: all_ok(up))


def test_a_worker_that_dies_is_started_again(running):
    up = running.ready()
    for role in ("train", "publish", "sweep", "service"):
        before = up.children()[role]
        before.kill()
        up.expect(f"{role} is up again")
        assert up.children()[role].pid != before.pid


def test_it_runs_as_an_ordinary_user(start):
    if os.geteuid() != 0:
        pytest.skip("this run is an ordinary user already")
    nobody = pwd.getpwnam("nobody")
    who = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
    probe = [sys.executable, "-c", "import sluice.cli.main"]
    try:
        seen = subprocess.run(probe, **who, cwd="/", capture_output=True, env=plain_environment())
        readable = seen.returncode == 0
    except PermissionError:  # not even the interpreter
        readable = False
    if not readable:
        pytest.skip("an ordinary user cannot read this checkout")
    with tempfile.TemporaryDirectory() as home:  # tmp_path lies under a directory that only root may enter
        shutil.chown(home, nobody.pw_uid, nobody.pw_gid)
        up = start(Path(home, "data"), environment={"HOME": home}, cwd=home, **who).ready()
        assert {p.uids().real for p in up.family()} == {nobody.pw_uid}
        wait_for(lambda: all_ok(up))
        up.stop()


def test_servers_of_your_own_are_used_when_their_addresses_are_set(start, tmp_path):
    from local.stack import Stack

    with_servers = Stack(tmp_path / "servers", durable=False, witness=tmp_path / "servers-witness")
    try:
        with_servers.start_servers()
        environment = {
            "SLUICE_DATABASE_URL": with_servers.owner_url,
            "SLUICE_QUEUE_URL": with_servers.valkey.url("service"),
            "SLUICE_TRAIN_QUEUE_URL": with_servers.valkey.url("train"),
            "SLUICE_PUBLISH_QUEUE_URL": with_servers.valkey.url("publish"),
            "SLUICE_S3_ENDPOINT": with_servers.s3_endpoint,
        }
        for role in ("service", "train", "publish", "sweep"):
            for key, value in with_servers.state["s3"][role].items():
                environment[f"SLUICE_{role}_S3_{key}".upper()] = value
        incomplete = {k: v for k, v in environment.items() if k != "SLUICE_TRAIN_S3_SECRET_KEY"}
        refused = start(environment=incomplete)
        refused.expect("SLUICE_TRAIN_S3_SECRET_KEY is not")
        assert refused.process.wait(PATIENCE) == 1

        up = start(environment=environment).ready()
        assert set(up.children()) == PARTS - {"postgres", "valkey", "s3"}
        wait_for(lambda: all_ok(up))
        up.stop()
    finally:
        with_servers.stop()
