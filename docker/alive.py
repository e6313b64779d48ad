"""Health of a worker's container: has a process of this role shown a sign of life here? `alive.py ROLE`."""

import sys

from sqlalchemy import func, select

from core.database import connect
from core.heartbeats import ALIVE, part_name
from core.settings import SweepSettings, load
from core.tables import Heartbeat


def main(role: str) -> None:
    settings = load(SweepSettings)  # the part of every worker's settings that this needs
    here = part_name(role).rpartition("/")[0] + "/"  # role and host; the process has another number
    engine = connect(str(settings.database_url), pool_size=1)
    lately = select(Heartbeat.name).where(
        Heartbeat.name.startswith(here, autoescape=True), Heartbeat.seen_at > func.now() - ALIVE
    )
    with engine.connect() as connection:
        seen = connection.scalar(lately.limit(1))
    engine.dispose()
    if seen is None:
        sys.exit(f"no sign of life from {here}")


if __name__ == "__main__":
    main(sys.argv[1])
