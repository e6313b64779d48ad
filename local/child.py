"""A server or worker as a child that cannot outlive us, with its log in a file."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from local.ports import HOST
from sluice.client.problems import CannotRun

# Runs in the child just before the real program. Arguments: nobody(0|1), death signal, parent, command.
# nobody: PostgreSQL refuses to run as root. In a user namespace that maps our uid to 65534 it sees "nobody",
#   while its files stay ours: no user is added, nothing changes hands.
# death signal: asked for last, since a change of credentials clears it.
_SHIM = r"""
import ctypes, os, sys
nobody, signal_number, parent, command = sys.argv[1] == "1", int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
if sys.platform == "linux":
    libc = ctypes.CDLL(None, use_errno=True)
    if nobody:
        uid, gid = os.geteuid(), os.getegid()
        if libc.unshare(0x10000000) != 0:
            sys.exit(77)
        for name, text in ("setgroups", "deny"), ("uid_map", f"65534 {uid} 1"), ("gid_map", f"65534 {gid} 1"):
            with open("/proc/self/" + name, "w") as file:
                file.write(text)
    libc.prctl(1, signal_number)
    if os.getppid() != parent:
        sys.exit(78)
os.execv(command[0], command)
"""
_NO_NAMESPACE = 77


def shim(command: Sequence[str], *, nobody: bool, death_signal: signal.Signals) -> list[str]:
    head = [sys.executable, "-I", "-S", "-c", _SHIM, "1" if nobody else "0"]
    return [*head, str(int(death_signal)), str(os.getpid()), *command]


def bare_environment() -> dict[str, str]:
    """What a child may inherit: nothing that names a secret of some role, ours or a cloud's."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("SLUICE_", "AWS_"))}


@dataclass(kw_only=True)
class Child:
    """One process. Started from the main thread only: the kernel ties the death signal to that thread."""

    name: str
    command: Sequence[str]
    log: Path
    probe: Callable[[], None]
    environment: Mapping[str, str] = field(default_factory=dict)
    stop_signal: signal.Signals = signal.SIGTERM
    death_signal: signal.Signals = signal.SIGKILL
    stop_seconds: float = 5
    ready_seconds: float = 180
    nobody: bool = False
    stdin: str | None = None
    directory: Path | None = None
    process: subprocess.Popen[bytes] | None = None
    started: float = 0
    ready: bool = False

    def start(self) -> None:
        self.ready = False
        with self.log.open("ab") as out:
            self.started = time.monotonic()
            self.process = subprocess.Popen(
                shim(self.command, nobody=self.nobody, death_signal=self.death_signal),
                stdin=subprocess.PIPE if self.stdin is not None else subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=bare_environment() | dict(self.environment),
                cwd=self.directory,
                # A Ctrl-C in the terminal reaches us alone, and we stop the children in order.
                process_group=0,
            )
        if self.stdin is not None and self.process.stdin is not None:
            self.process.stdin.write(self.stdin.encode())
            self.process.stdin.close()

    def wait_ready(self, stopping: Callable[[], bool]) -> float:
        """Probes until the child answers as a user would need it; gives the seconds since its start."""
        problem: Exception | None = None
        while time.monotonic() < self.started + self.ready_seconds:
            if stopping():
                raise KeyboardInterrupt
            if self.died():
                raise CannotRun(self.obituary())
            try:
                self.probe()
                self.ready = True
                return time.monotonic() - self.started
            except Exception as not_yet:  # whatever a client library raises while its server starts
                problem = not_yet
                time.sleep(0.03)
        raise CannotRun(
            f"{self.name} gave no answer for {self.ready_seconds:.0f} s ({type(problem).__name__}): "
            f"see {self.log}, or try again on an idle machine"
        )

    def died(self) -> bool:
        return self.process is not None and self.process.poll() is not None

    def obituary(self) -> str:
        code = self.process.returncode if self.process else None
        if code == _NO_NAMESPACE:
            return (
                "PostgreSQL does not run as root and this system allows no user namespaces: "
                "start Sluice as an ordinary user, or set SLUICE_DATABASE_URL to a server of your own"
            )
        lines = self.log.read_text(errors="replace").strip().splitlines()[-5:]
        return f"{self.name} ended with code {code}; the last lines of {self.log}:\n  " + "\n  ".join(lines)

    def stop(self) -> None:
        """Asks, waits, then insists; every server here survives being killed."""
        if self.process is None or self.process.poll() is not None:
            return
        self.process.send_signal(self.stop_signal)
        try:
            self.process.wait(self.stop_seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def check_port(port: int) -> None:
    """A cheap first probe: a client library's failed attempt costs time that a starting server needs."""
    socket.create_connection((HOST, port), timeout=1).close()
