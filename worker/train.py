"""The train worker: checks uploads, reads records, trains, stores the results in the vault.

`python -m worker.train`, one process per GPU (CUDA_VISIBLE_DEVICES) or for the CPU.
"""

import base64
import os
import threading

from celery import Celery

from core.database import connect
from core.queue import celery_app
from core.settings import TrainSettings
from core.stores import s3
from core.stores.private import PrivateStore, Vault
from core.stores.witness import witness_store
from core.unwrap import unwrapper
from core.witness import WitnessLog
from sluice.envelope import WrappingKey
from worker import process, workspace
from worker.checking import Checker
from worker.record_registry import RecordRegistry
from worker.retention import CLEAN_SECONDS, REMOVE_SECONDS, Remover, Retention, repeat_until
from worker.training import Trainer


def register(app: Celery, trainer: Trainer, checker: Checker) -> None:
    process.register_task(app, "train.run", trainer.run)
    process.register_task(app, "train.check", checker.check)


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
    registry = RecordRegistry(witness_store(settings), key)
    return Checker(
        engine=trainer.engine, private=trainer.private, keys=trainer.keys, registry=registry, key=key
    )


def make_remover(settings: TrainSettings, trainer: Trainer) -> Remover:
    checker = make_checker(settings, trainer)  # a second one, because threads must not share a registry
    return Remover(
        engine=trainer.engine, private=trainer.private, vault=trainer.vault,
        register=checker.register_bindings, retention=Retention.of(settings),
    )  # fmt: skip


def main() -> None:
    # Threads that spin while they wait made a step ten times slower on a machine that others use too.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    settings = process.settings_or_exit(TrainSettings, "train")
    workspace.use("train")
    trainer, url = make_trainer(settings), str(settings.queue_url)
    app = celery_app("train", url)
    register(app, trainer, make_checker(settings, trainer))
    remover = make_remover(settings, trainer)
    # In threads of their own: a task would wait until the running training ends.
    for action, seconds in ((remover.remove_due, REMOVE_SECONDS), (remover.clean, CLEAN_SECONDS)):
        threading.Thread(target=repeat_until, args=(trainer.stopping, action, seconds), daemon=True).start()
    process.serve(app, trainer.engine, url, "train", stopping=trainer.stopping)


if __name__ == "__main__":
    main()
