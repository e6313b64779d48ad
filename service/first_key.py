"""Prints the first admin's key and a second admin's invitation, once: `python -m service.first_key`."""

import sys

from sqlalchemy.orm import Session

from core.database import connect
from core.people import SECOND_ADMIN, first_admin
from core.settings import ServiceSettings, SettingsProblem, load


def main() -> None:
    try:
        settings = load(ServiceSettings)
    except SettingsProblem as problem:
        sys.exit(f"sluice: {problem}")
    engine = connect(str(settings.database_url))
    with Session(engine) as session, session.begin():
        made = first_admin(session)
    engine.dispose()
    if made is None:
        sys.exit("sluice: there is an admin already; ask them for an invitation")
    sys.stdout.write(f"{made.key}\n")
    sys.stderr.write(f"{SECOND_ADMIN}: {made.second_admin}\n")


if __name__ == "__main__":
    main()
