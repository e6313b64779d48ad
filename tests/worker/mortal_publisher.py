"""A publisher that can be told when to die: forks a fresh one per order, with torch already loaded.

Reads JSON orders from standard input: {"release": id, "point": name or null, "count": n, "end": "kill" |
"stop" | "drain"}; answers with the exit status of each. Keeps nothing between orders but the readings of one
event, named on the command line, which are slow to make in every child.
"""

import json
import os
import signal
import sys
import uuid
from datetime import timedelta

import torch

from core import log
from core.settings import PublishSettings, load
from sluice.privacy.accountant import Accountant
from sluice.privacy.events import from_dict
from sluice.release.verify import readable
from worker import bundle  # noqa: F401 (loaded once, before the forks)
from worker.publish import make_publisher


def run(order: dict) -> None:
    log.configure("publish")
    torch.set_num_threads(1)
    publisher = make_publisher(load(PublishSettings))
    publisher.lease, publisher.beat_seconds = timedelta(seconds=order.get("lease", 20)), 0.2
    left = [order.get("count", 1)]

    def point(name: str) -> None:
        if name != order.get("point"):
            return
        left[0] -= 1
        if left[0]:
            return
        match order.get("end", "kill"):
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "drain":
                publisher.stopping.set()

    publisher.point = point
    again = publisher.run(uuid.UUID(order["release"]))
    os._exit(10 if again else 0)


def say(**fact: int) -> None:
    sys.stdout.write(json.dumps(fact) + "\n")
    sys.stdout.flush()


def main() -> None:
    for accountant in Accountant:
        readable(accountant, event=from_dict(json.loads(sys.argv[1])), delta=1e-5, relation="add_remove")
    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if child == 0:
            run(order)
        say(pid=child)
        if order.get("wait", True):
            _, status = os.waitpid(child, 0)
            say(status=os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
