"""A train or publish worker that ends at a chosen moment: `python -m tests.worker.mortal ROLE [EVENT]`.

Reads JSON orders from standard input: {"id": row, "moment": name or null, "count": n, "end": "kill", "stop"
or "drain", "set": {attribute: value}}. Each order is run by a fork of this process, which has torch loaded
and no connection open; the answers are its pid and its exit status (10: woken again). A moment is before or
after a call of production code, which knows nothing of it.
"""

import json
import os
import signal
import sys
import uuid
from datetime import timedelta

import torch

from core import log
from core.settings import PublishSettings, TrainSettings
from core.settings import load as load_settings
from core.stores.bundles import Bundles
from core.stores.public import PublicStore
from sluice.privacy.accountant import Accountant
from sluice.privacy.events import from_dict
from sluice.release.verify import readable
from worker import bundle, publish, training, uploads
from worker.lease import JobLease, LeaseWorker
from worker.publish import Publisher, make_publisher
from worker.train import make_trainer
from worker.trainers import TRAINERS
from worker.training import Trainer

dict(TRAINERS)  # imports every trainer once, before the forks

MOMENTS = {
    "train": {
        "claimed": ("before", LeaseWorker, "_attempt"),
        "planned": ("after", Trainer, "_paid_plan"),
        "witnessed": ("after", Trainer, "_await_witness"),
        "opened": ("after", JobLease, "open"),
        "fetching": ("before", uploads, "fetch"),
        "fetched": ("after", uploads, "fetch"),
        "read": ("after", Trainer, "_records"),
        "built": ("before", Trainer, "_resume"),
        "restored": ("after", Trainer, "_resume"),
        "records": ("after", Trainer, "_start"),
        "stepped": ("before", JobLease, "check"),
        "before checkpoint": ("before", Trainer, "_save"),
        "after checkpoint": ("before", JobLease, "checkpointed"),
        "checkpointed": ("after", JobLease, "checkpointed"),
        "diagnostics": ("after", Trainer, "_store_diagnostics"),
        "followed": ("after", Trainer, "_follow"),
        "synthesizer": ("after", Trainer, "_results"),
        "stored": ("before", JobLease, "trained"),
        "settled": ("after", JobLease, "trained"),
        "wiped": ("after", training, "clean_vault"),
        "handing back": ("before", JobLease, "hand_back"),
        "handed back": ("after", JobLease, "hand_back"),
        "failing": ("before", JobLease, "failed"),
        "failed": ("after", JobLease, "failed"),
    },
    "publish": {
        "claimed": ("before", LeaseWorker, "_attempt"),
        "paid": ("before", Bundles, "trained"),
        "fetched": ("after", Bundles, "trained"),
        "drawn": ("after", Publisher, "_proceed"),  # the first calls in a build
        "built": ("after", bundle, "build"),
        "kept": ("after", PublicStore, "put_copy"),
        "in review": ("after", publish, "build"),
        "refetched": ("before", publish, "snapshot"),
        "signed": ("before", publish, "check_release"),
        "put": ("after", PublicStore, "put"),
        "published": ("after", Publisher, "_publish"),
        "removed": ("after", Publisher, "_remove"),
        "buried": ("after", PublicStore, "bury"),
        "listed": ("after", Publisher, "_withdraw"),
    },
}


def end_at(moment, count, action):
    """Has `action` called the `count`-th time that the moment comes."""
    when, owner, name = moment
    original, left = getattr(owner, name), [count]

    def call(*args, **kwargs):
        if when == "before":
            reached()
        result = original(*args, **kwargs)
        if when == "after":
            reached()
        return result

    def reached():
        left[0] -= 1
        if left[0] == 0:
            action()

    setattr(owner, name, call)


def run(worker, role, order):
    log.configure(role)
    torch.set_num_threads(1)
    for name, value in order.get("set", {}).items():
        setattr(worker, name, timedelta(seconds=value) if name == "lease" else value)
    ends = {
        "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
        "drain": worker.stopping.set,
    }
    if order["moment"] is not None:
        end_at(MOMENTS[role][order["moment"]], order.get("count", 1), ends[order.get("end", "kill")])
    os._exit(10 if worker.run(uuid.UUID(order["id"])) else 0)


def say(**fact):
    sys.stdout.write(json.dumps(fact) + "\n")
    sys.stdout.flush()


def make_worker(role):
    if role == "train":
        import opacus.validators  # noqa: F401 (imported by the first training: seconds that every fork would spend)
        import safetensors.torch  # noqa: F401

        torch.set_num_threads(1)
        torch.optim.Adam([torch.zeros(1, requires_grad=True)])  # imports torch._dynamo
        training._WITNESS_SECONDS = 1.0
        trainer = make_trainer(load_settings(TrainSettings))
        trainer.beat_seconds, trainer.checkpoint_seconds = 0.3, 0.0
        return trainer
    event = from_dict(json.loads(sys.argv[2]))
    for accountant in Accountant:  # cached for every child, because it takes long
        readable(accountant, event=event, delta=1e-5, relation="add_remove")
    publisher = make_publisher(load_settings(PublishSettings))
    publisher.beat_seconds = 0.2
    return publisher


def main():
    role = sys.argv[1]
    worker = make_worker(role)
    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if child == 0:
            try:
                run(worker, role, order)
            finally:
                os._exit(1)  # an error ends the child, not the loop it was forked from
        say(pid=child)
        if order.get("wait", True):
            _, status = os.waitpid(child, 0)
            say(status=os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
