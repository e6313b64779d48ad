"""The private side: reads records, trains, keeps what it learned in the vault. `python -m worker.train`."""

from core.database import connect
from core.queue import bell
from core.settings import TrainSettings
from worker import life


def main() -> None:
    settings = life.settings_or_exit(TrainSettings, "train")
    url = str(settings.queue_url)
    life.serve(bell("train", url), connect(str(settings.database_url)), url, "train")


if __name__ == "__main__":
    main()
