"""Servers of a test run, in a process of their own: `python -m tests.stack DIRECTORY`.

The first test that needs a server starts it, and every pytest-xdist worker uses it. It stops when the pytest
process that made DIRECTORY ends, even by a signal: the kernel closes the last writing end of the pipe there.
"""

import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psycopg

from local.stack import Stack

TEMPLATE = "sluice_template"  # a copy of the migrated database to which nobody can connect
ROLES = ("service", "train", "publish", "sweep")


def new_directory() -> Path:
    """A directory for servers, in memory where there is room: what tests write need not survive them."""
    memory = Path("/dev/shm")
    at = memory if memory.is_dir() and shutil.disk_usage(memory).free > 2 << 30 else None
    return Path(tempfile.mkdtemp(prefix="sluice-test-", dir=at))


class Run:
    """The directory of one run, owned by the pytest process that the user started."""

    def __init__(self) -> None:
        self.directory = new_directory()
        os.mkfifo(self.directory / "alive")
        self._alive = os.open(self.directory / "alive", os.O_RDWR)

    def end(self) -> None:
        """Closes the pipe, waits until the servers have stopped, and removes the directory."""
        os.close(self._alive)
        lock = self.directory / "running"
        if lock.exists():
            with lock.open() as file:
                fcntl.flock(file, fcntl.LOCK_EX)
        shutil.rmtree(self.directory, ignore_errors=True)


def addresses(directory: Path) -> dict[str, Any]:
    """Addresses and credentials of the servers of a run; starts them if no other process did."""
    answer = directory / "servers.json"
    with (directory / "starting").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not answer.exists():
            log = directory / "stack.log"
            with log.open("a") as errors:
                child = subprocess.Popen(
                    [sys.executable, "-m", "tests.stack", str(directory)],
                    cwd=Path(__file__).resolve().parent.parent,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    start_new_session=True,  # Ctrl-C reaches pytest alone
                )
            child.returncode = 0  # else Python warns if it outlives this process; Run.end waits for it
            assert child.stdout is not None
            with child.stdout:
                text = child.stdout.read()
            if not text:
                raise RuntimeError(f"the servers of the tests did not start:\n{log.read_text()}")
            answer.write_text(text)
    found: dict[str, Any] = json.loads(answer.read_text())
    return found


def main(directory: Path) -> None:
    alive = os.open(directory / "alive", os.O_RDONLY | os.O_NONBLOCK)
    lock = (directory / "running").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    stack = Stack(directory / "data", durable=False, witness=directory / "witness")
    try:
        stack.start_servers()
        stack.prepare()
        # PostgreSQL refuses to copy a database that somebody uses, and some tests connect to `sluice` itself.
        with psycopg.connect(stack.owner_url.rsplit("/", 1)[0] + "/postgres", autocommit=True) as admin:
            admin.execute(f"CREATE DATABASE {TEMPLATE} TEMPLATE sluice ALLOW_CONNECTIONS false")
        answer = {
            "environments": {role: stack.environment(role) for role in ROLES},
            "owner_url": stack.owner_url,
            "s3_endpoint": stack.s3_endpoint,
            "s3_identities": stack.state["s3"],
        }
        os.write(1, json.dumps(answer).encode())
        os.close(1)  # sys.stdout.close() would leave it open, and whoever started this reads to its end
        select.select([alive], [], [])  # nobody writes: readable means that the last writer is gone
    finally:
        stack.stop()
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
