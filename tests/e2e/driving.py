"""Drives `sluice up` as a person would: a process, its output, signals."""

import io
import os
import queue
import re
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, redirect_stderr, redirect_stdout

import psutil
import pytest

from local.ports import free_port, port_is_free
from sluice.cli.main import main

SLUICE = [sys.executable, "-m", "local"]
PATIENCE = 300  # seconds for anything another process does: a limit for hangs, not a promise of speed


def plain_environment(**more):
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLUICE_", "AWS_", "COV_"))}
    return kept | {"COLUMNS": "200", "PYTHONDONTWRITEBYTECODE": "1"} | more


class Up:
    def __init__(self, data, *, port=None, command="up", environment=None, more=(), **options):
        self.data, self.port = data, port or free_port()
        self.seen, self._lines = [], queue.Queue()
        arguments = [*SLUICE, command, "--data", str(data), "--port", str(self.port), *more]
        self.process = subprocess.Popen(
            arguments,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # Budgets of tests are large, so that many jobs fit; tests of the caps set their own.
            env=plain_environment(SLUICE_WITNESS_DIR=f"{data}-witness", SLUICE_CAP_EPSILON="1000")
            | (environment or {}),
            **options,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.process.stdout:
            self._lines.put(line.rstrip())
        self._lines.put(None)

    def expect(self, pattern, seconds=PATIENCE):
        """The first line from now on that matches."""
        end = time.monotonic() + seconds
        while True:
            try:
                line = self._lines.get(timeout=max(0, end - time.monotonic()))
            except queue.Empty:
                pytest.fail(f"no line like {pattern!r} in {seconds} s; seen:\n" + "\n".join(self.seen))
            if line is None:
                pytest.fail(f"ended without a line like {pattern!r}; seen:\n" + "\n".join(self.seen))
            self.seen.append(line)
            if re.search(pattern, line):
                return line

    def admins(self):
        """The key of the first admin and the invitation of the second, as a new site prints them."""
        key = re.search(r"sl_[\w-]{43}", self.expect("key of the first admin"))[0]
        return key, re.search(r"sli_[\w-]{43}", self.expect("invitation of a second admin"))[0]

    def ready(self):
        self.expect("ready in")
        self.expect("Ctrl-C stops")
        return self

    def children(self):
        """Name of the part → its process, by what was started."""
        marks = {"postgres": "bin/postgres", "valkey": "valkey-server", "s3": "weed", "service": "-m service"}
        marks |= {role: f"-m worker.{role}" for role in ("train", "publish", "sweep")}
        found = {}
        for child in psutil.Process(self.process.pid).children():
            line = " ".join(child.cmdline())
            found |= {name: child for name, mark in marks.items() if mark in line}
        return found

    def family(self):
        return psutil.Process(self.process.pid).children(recursive=True)

    def stop(self, signal_number=None):
        if self.process.poll() is None:
            self.process.send_signal(signal_number) if signal_number else self.process.terminate()
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        return self.process.returncode


def run_client(directory, *arguments, **environment):
    """Runs a command of the client in this process, as if typed there: its exit code, output and errors."""
    out, err, code = io.TextIOWrapper(io.BytesIO()), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["sluice", *map(str, arguments)])
        patch.chdir(directory)
        for name, value in environment.items():
            patch.setenv(name, value)
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
    out.flush()
    return code, out.buffer.getvalue().decode(), err.getvalue()


def survivors(processes, seconds=PATIENCE):
    """Waits for all of these processes to end; returns those that still run after the limit."""
    return psutil.wait_procs(processes, timeout=seconds)[1]


def wait_for(condition, seconds=PATIENCE):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


class Running:
    """A data directory for all tests of a module, and the `sluice up` on it, started again when needed."""

    def __init__(self, start, data):
        self._start, self.data, self.up = start, data, None

    def ready(self):
        if self.up is None or self.up.process.poll() is not None:
            self.up = self._start(self.data).ready()
        return self.up


@contextmanager
def launcher(data):
    """Yields a function that starts `sluice up`; ends whatever still runs afterwards."""
    started = []

    def begin(data=data, **options):
        started.append(Up(data, **options))
        return started[-1]

    try:
        yield begin
    finally:
        for up in started:
            if up.process.poll() is None:
                up.stop()
            assert port_is_free(up.port)
            up.process.stdout.close()
