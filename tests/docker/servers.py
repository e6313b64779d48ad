"""Starting a server for a test, and reaching the S3 server among them."""

import signal
import subprocess
import time
from contextlib import contextmanager

from core.stores import s3
from local.child import shim


@contextmanager
def running(command, log, *, nobody=False, answers, **options):
    """A server, from the moment that `answers()` does not raise."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            shim([str(part) for part in command], nobody=nobody, death_signal=signal.SIGKILL),
            stdout=out,
            stderr=out,
            **options,
        )
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                answers()
                break
            except Exception:
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.05)
        yield
    finally:
        process.kill()
        process.wait()


def store(made, ports, *, ca=None):
    keys = {k: (made / f"publish_s3_{k}").read_text() for k in ("access_key", "secret_key")}
    return s3.client(
        endpoint=f"https://s3:{ports['s3.port']}",
        region="us-east-1",
        attempts=1,
        ca=ca or str(made / "ca.crt"),
        **keys,
    )
