"""The public side: samples from a synthesizer and puts releases on the shelf. `python -m worker.publish`."""

from core.database import connect
from core.queue import bell
from core.settings import PublishSettings
from worker import life


def main() -> None:
    settings = life.settings_or_exit(PublishSettings, "publish")
    url = str(settings.queue_url)
    life.serve(bell("publish", url), connect(str(settings.database_url)), url, "publish")


if __name__ == "__main__":
    main()
