"""A second process for arithmetic that may want too much: bounded in time and memory, kept warm.

Small multipliers can ask for minutes and gigabytes. The process answers one question at a time over its
standard streams; past its time it is ended and the next question starts a fresh one.
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

# Seconds of computing a question may take, and of waiting for the answer on a busy machine.
SECONDS = 10.0
PATIENCE = 60.0
# Address space, most of it mapped libraries; the largest question uses a quarter of it.
BYTES = 2 * 2**30
SERVE = "from sluice.privacy.pld_process import serve; serve()"

lock = threading.Lock()
running: subprocess.Popen[str] | None = None
owner = 0


def start() -> subprocess.Popen[str]:
    """The process, started if there is none. After a fork the pipes are the parent's: begin anew."""
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
    """Ends the process, if this one started it."""
    global running
    if running is not None and owner == os.getpid():
        running.kill()
        running.communicate()
    running = None


atexit.register(stop)


def warm_up() -> None:
    """Starts the process ahead of the first question, so that its imports overlap with other work."""
    with lock:
        start()


def ask(request: dict[str, Any], *, patience: float = PATIENCE) -> float:
    """Has the other process compute an answer, or refuses with a named problem."""
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
    """The loop of the other process. Its input ends when the one that asks does."""
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    signal.signal(signal.SIGPROF, out_of_time)
    from dp_accounting.pld import pld_pmf  # noqa: F401  loaded before a question comes, not while it waits

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
