"""Health check of a worker's container: has the role a recent heartbeat from this host? `alive.py ROLE`."""

import sys

from sqlalchemy import func, select

from core.database import connect
from core.heartbeats import ALIVE, part_name
from core.settings import SweepSettings, load
from core.tables import Heartbeat


def main(role: str) -> None:
    settings = load(SweepSettings)  # every worker has the settings that the sweeper needs
    here = part_name(role).rpartition("/")[0] + "/"  # role and host, without the process id
    engine = connect(str(settings.database_url), pool_size=1)
    recent = select(Heartbeat.name).where(
        Heartbeat.name.startswith(here, autoescape=True), Heartbeat.seen_at > func.now() - ALIVE
    )
    with engine.connect() as connection:
        heartbeat = connection.scalar(recent.limit(1))
    engine.dispose()
    if heartbeat is None:
        sys.exit(f"no recent heartbeat from {here}")


if __name__ == "__main__":
    main(sys.argv[1])
