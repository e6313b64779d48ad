"""The private side: checks uploads, reads records, trains, keeps what it learned in the vault.

`python -m worker.train`, one process per GPU (CUDA_VISIBLE_DEVICES) or for the CPU.
"""

import os
import uuid
from collections.abc import Callable

from celery import Celery

from core import log
from core.database import connect
from core.queue import bell, ring
from core.settings import TrainSettings
from core.stores import s3
from core.stores.private import PrivateStore
from core.stores.vault import Vault
from worker import life
from worker.checking import check
from worker.training import Trainer

_log = log.get("train")


def register(app: Celery, trainer: Trainer) -> None:
    """The two things that can be rung for. A message is an id; anything else finds nothing to do."""

    def answer(name: str, do: Callable[[uuid.UUID], object]) -> None:
        def task(id: object = None, *_: object, **__: object) -> None:
            try:
                asked = uuid.UUID(str(id))
            except ValueError:
                _log.warning("message_not_understood", task=name)
                return
            if do(asked):
                ring(app, name, asked)

        app.task(task, name=name)

    answer("train.run", trainer.run)
    answer("train.check", lambda id: check(trainer.engine, trainer.private, id))


def make_trainer(settings: TrainSettings) -> Trainer:
    client = s3.client_for(settings)
    return Trainer(
        engine=connect(str(settings.database_url)),
        private=PrivateStore(client, settings.private_bucket),
        vault=Vault(client, settings.vault_bucket),
    )


def main() -> None:
    # Threads that spin while they wait made a step ten times slower on a machine that others use too.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    settings = life.settings_or_exit(TrainSettings, "train")
    trainer, url = make_trainer(settings), str(settings.queue_url)
    app = bell("train", url)
    register(app, trainer)
    life.serve(app, trainer.engine, url, "train", stopping=trainer.stopping)


if __name__ == "__main__":
    main()
