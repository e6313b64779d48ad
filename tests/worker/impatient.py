"""A train worker whose messages come back after SECONDS, though its jobs take longer."""

import os
import sys

from core.queue import celery_app
from core.settings import TrainSettings
from worker import process
from worker.train import make_checker, make_trainer, register


def main() -> None:
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    settings = process.settings_or_exit(TrainSettings, "train")
    trainer, url = make_trainer(settings), str(settings.queue_url)
    app = celery_app("train", url)
    app.conf.broker_transport_options["visibility_timeout"] = int(sys.argv[1])
    app.conf.broker_transport_options["unacked_restore_throttle"] = 1
    register(app, trainer, make_checker(settings, trainer))
    process.serve(app, trainer.engine, url, "train", stopping=trainer.stopping)


if __name__ == "__main__":
    main()
