"""A child process for PLD arithmetic, with limits on time and memory.

Plans with little noise can need minutes and gigabytes. The process answers one request at a time over its
standard streams and then waits for the next. When a request exceeds its time, the process is killed; the next
request starts a new one.
"""

import atexit
import json
import os
import resource
import selectors
import signal
import subprocess
import sys
import threading
from typing import IO, Any, cast

from sluice.privacy.problems import EvaluationsDisagree, Problem, TooCostlyToAccount

# CPU seconds that a request may take, and seconds to wait for its answer on a busy machine.
SECONDS = 10.0
PATIENCE = 60.0
# Limit of address space, most of it mapped libraries; the largest request uses a quarter of it.
BYTES = 2 * 2**30
SERVE = "from sluice.privacy.pld_process import serve; serve()"

lock = threading.Lock()
running: subprocess.Popen[str] | None = None
owner = 0


def start() -> subprocess.Popen[str]:
    """The process, started if there is none, or if this is a fork: the pipes are then the parent's."""
    global running, owner
    if running is None or owner != os.getpid() or running.poll() is not None:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "OPENBLAS_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
        }
        running = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", SERVE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        owner = os.getpid()
    return running


def stop() -> None:
    """Kills the process, if this process started it."""
    global running
    if running is not None and owner == os.getpid():
        running.kill()
        running.communicate()
    running = None


atexit.register(stop)


def warm_up() -> None:
    """Starts the process before the first request, so that its imports overlap with other work."""
    with lock:
        start()


def ask(request: dict[str, Any], *, patience: float = PATIENCE) -> float:
    """Sends a request to the process and returns its answer, or raises a problem."""
    with lock:
        process = start()
        try:
            reply = exchange(process, json.dumps(request), patience)
        except (OSError, ValueError):
            stop()
            raise TooCostlyToAccount(
                "The exact accountant ran out of time or memory; add noise, or read by Rényi."
            ) from None
    if "problem" in reply:
        raise TooCostlyToAccount(reply["problem"])
    if "fault" in reply:
        raise EvaluationsDisagree(
            f"The exact accountant failed ({reply['fault']}); read by Rényi and report this."
        )
    return float(reply["epsilon"])


def exchange(process: subprocess.Popen[str], line: str, patience: float) -> dict[str, Any]:
    sink, source = cast(IO[str], process.stdin), cast(IO[str], process.stdout)
    sink.write(line + "\n")
    sink.flush()
    with selectors.DefaultSelector() as selector:
        selector.register(source, selectors.EVENT_READ)
        if not selector.select(patience):
            raise TimeoutError
    reply: dict[str, Any] = json.loads(source.readline())
    return reply


def out_of_time(*_: object) -> None:
    raise TooCostlyToAccount(f"The exact accountant took over {SECONDS:.0f} s; add noise or read by Rényi.")


def serve(source: IO[str] = sys.stdin, sink: IO[str] = sys.stdout) -> None:
    """The loop of the process. Its input ends when its parent does."""
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    signal.signal(signal.SIGPROF, out_of_time)
    from dp_accounting.pld import pld_pmf  # noqa: F401  imported before the first request

    from sluice.privacy import pld

    for line in source:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            reply: dict[str, object] = {"epsilon": pld.answer(json.loads(line))}
        except Problem as problem:
            reply = {"problem": problem.detail}
        except MemoryError:
            reply = {"problem": "The exact accountant ran out of memory; add noise or read by Rényi."}
        except Exception as error:
            reply = {"fault": type(error).__name__}
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(reply), file=sink, flush=True)
