"""A server or worker as a child process that ends when this process ends, with its log in a file."""

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
#   while its files keep our uid outside.
# death signal: set last, since a change of credentials clears it.
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
    """Our environment without SLUICE_ and AWS_ variables, which may hold secrets of other roles."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("SLUICE_", "AWS_"))}


@dataclass(kw_only=True)
class Child:
    """One process. Start it from the main thread: the kernel ties the death signal to that thread."""

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
                # Ctrl-C in the terminal signals only us; we stop the children in order.
                process_group=0,
            )
        if self.stdin is not None and self.process.stdin is not None:
            self.process.stdin.write(self.stdin.encode())
            self.process.stdin.close()

    def wait_ready(self, stopping: Callable[[], bool]) -> float:
        """Probes until the child is ready; returns the seconds since its start."""
        problem: Exception | None = None
        while time.monotonic() < self.started + self.ready_seconds:
            if stopping():
                raise KeyboardInterrupt
            if self.died():
                raise CannotRun(self.exit_report())
            try:
                self.probe()
                self.ready = True
                return time.monotonic() - self.started
            except Exception as error:  # what a probe raises depends on its client library
                problem = error
                time.sleep(0.03)
        raise CannotRun(
            f"{self.name} did not answer for {self.ready_seconds:.0f} s ({type(problem).__name__}): "
            f"see {self.log}, or try again on an idle machine"
        )

    def died(self) -> bool:
        return self.process is not None and self.process.poll() is not None

    def exit_report(self) -> str:
        code = self.process.returncode if self.process else None
        if code == _NO_NAMESPACE:
            return (
                "PostgreSQL does not run as root and this system allows no user namespaces: "
                "start Sluice as an ordinary user, or set SLUICE_DATABASE_URL to a server of your own"
            )
        lines = self.log.read_text(errors="replace").strip().splitlines()[-5:]
        return f"{self.name} ended with code {code}; the last lines of {self.log}:\n  " + "\n  ".join(lines)

    def stop(self) -> None:
        """Sends the stop signal, waits, then kills; every server here survives being killed."""
        if self.process is None or self.process.poll() is not None:
            return
        self.process.send_signal(self.stop_signal)
        try:
            self.process.wait(self.stop_seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def check_port(port: int) -> None:
    """Connects to a port. Cheaper than a client library's failed attempt while the server is starting."""
    socket.create_connection((HOST, port), timeout=1).close()
