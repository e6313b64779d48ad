"""A train worker that can be told when to die: forks a fresh one per order, with torch already loaded.

Reads JSON orders from standard input: {"job": id, "point": name or null, "count": n, "end": "kill" | "stop" |
"drain" | "cut", "environment": {...}}; answers with the exit status of each. Keeps nothing between orders.
"""

import json
import os
import signal
import sys
import time
import uuid
from datetime import timedelta

import torch

from core import log
from core.settings import TrainSettings, load
from worker import training
from worker.train import make_trainer
from worker.trainers import TRAINERS  # noqa: F401 (loaded once, before the forks)


def run(order: dict) -> None:
    log.configure("train")
    torch.set_num_threads(1)
    for name, value in order.get("environment", {}).items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})
    trainer = make_trainer(load(TrainSettings))
    trainer.lease, trainer.beat_seconds, trainer.checkpoint_seconds = timedelta(seconds=2), 0.3, 0.0
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
                trainer.stopping.set()
            case "slow":
                time.sleep(order["seconds"])

    trainer.point = point
    again = trainer.run(uuid.UUID(order["job"]))
    os._exit(10 if again else 0)


def say(**fact: int) -> None:
    sys.stdout.write(json.dumps(fact) + "\n")
    sys.stdout.flush()


def main() -> None:
    training._WITNESS_SECONDS = 5.0
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
