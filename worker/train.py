"""The private side: checks uploads, reads records, trains, keeps what it learned in the vault.

`python -m worker.train`, one process per GPU (CUDA_VISIBLE_DEVICES) or for the CPU.
"""

import base64
import os
import threading
import uuid
from collections.abc import Callable

from celery import Celery

from core import log
from core.database import connect
from core.queue import celery_app, wake_worker
from core.settings import TrainSettings
from core.stores import s3
from core.stores.private import PrivateStore, Vault
from core.stores.witness import witness_store
from core.unwrap import unwrapper
from core.witness import WitnessLog
from sluice.envelope import WrappingKey
from worker import process, workspace
from worker.checking import Checker
from worker.known import KnownRecords
from worker.removing import Remover, Retention
from worker.tidying import REMOVE_SECONDS, TIDY_SECONDS, tidy, tidy_until
from worker.training import Trainer

_log = log.get("train")


def register(app: Celery, trainer: Trainer, checker: Checker) -> None:
    """The two things that can be rung for. A message is an id; anything else finds nothing to do."""

    def answer(name: str, do: Callable[[uuid.UUID], object]) -> None:
        def task(id: object = None, *_: object, **__: object) -> None:
            try:
                asked = uuid.UUID(str(id))
            except ValueError:
                _log.warning("message_not_understood", task=name)
                return
            if do(asked):
                wake_worker(app, name, asked)

        app.task(task, name=name, shared=False)

    answer("train.run", trainer.run)
    answer("train.check", checker.check)


def make_trainer(settings: TrainSettings) -> Trainer:
    client = s3.client_for(settings)
    keys = unwrapper(settings.upload_key.get_secret_value(), settings)
    publisher = WrappingKey(settings.synthesizer_public_key)
    return Trainer(
        engine=connect(str(settings.database_url)),
        private=PrivateStore(client, settings.private_bucket),
        keys=keys,
        vault=Vault(client, settings.vault_bucket, own=keys, publisher=publisher),
        witness=WitnessLog(witness_store(settings)),
        diagnostics=settings.diagnostics,
    )


def make_checker(settings: TrainSettings, trainer: Trainer) -> Checker:
    key = base64.b64decode(settings.fingerprint_key.get_secret_value())
    known = KnownRecords(witness_store(settings), key)
    return Checker(engine=trainer.engine, private=trainer.private, keys=trainer.keys, known=known, key=key)


def make_remover(settings: TrainSettings, trainer: Trainer) -> Remover:
    checker = make_checker(settings, trainer)  # of its own: what is known of records is not shared by threads
    return Remover(
        engine=trainer.engine, private=trainer.private, vault=trainer.vault,
        remember=checker.remember_bindings, retention=Retention.of(settings),
    )  # fmt: skip


def tidying(trainer: Trainer, remover: Remover) -> Callable[[], None]:
    def tidy_all() -> None:
        remover.expire()
        remover.expire_synthesizers()
        tidy(trainer.engine, trainer.vault, checkpoints=remover.retention.checkpoint)
        remover.sweep()

    return tidy_all


def main() -> None:
    # Threads that spin while they wait made a step ten times slower on a machine that others use too.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    settings = process.settings_or_exit(TrainSettings, "train")
    workspace.use("train")
    trainer, url = make_trainer(settings), str(settings.queue_url)
    app = celery_app("train", url)
    register(app, trainer, make_checker(settings, trainer))
    # In threads of their own: a task would wait for the training that runs.
    remover = make_remover(settings, trainer)
    for round, seconds in (
        (remover.remove_due, REMOVE_SECONDS),
        (tidying(trainer, remover), TIDY_SECONDS),
    ):
        threading.Thread(target=tidy_until, args=(trainer.stopping, round, seconds), daemon=True).start()
    process.serve(app, trainer.engine, url, "train", stopping=trainer.stopping)


if __name__ == "__main__":
    main()
