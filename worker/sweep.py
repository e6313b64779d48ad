"""Goes round and puts right what a dead process left behind. `python -m worker.sweep`."""

import signal
import threading
from types import FrameType

from sqlalchemy.orm import Session

from core.database import connect
from core.parts import forget_gone
from core.settings import SweepSettings
from core.stores import s3
from core.stores.witness import WitnessShelf
from core.witness import compare
from worker import life


def main() -> None:
    settings = life.settings_or_exit(SweepSettings, "sweep")
    engine = connect(str(settings.database_url), pool_size=1)
    stopping = threading.Event()

    def stop(_signal: int, _frame: FrameType | None) -> None:
        stopping.set()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    shelf = WitnessShelf(s3.client_for(settings), settings.vault_bucket)

    def work() -> None:
        with Session(engine) as session, session.begin():
            compare(session, shelf)
        forget_gone(engine)

    life.live(engine, str(settings.queue_url), "sweep", stopping, work)
    engine.dispose()


if __name__ == "__main__":
    main()
