"""Prints the first admin's key and the second admin's invitation: `python -m service.first_key`."""

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
        admin = first_admin(session)
    engine.dispose()
    if admin is None:
        sys.exit("sluice: there is an admin already; ask them for an invitation")
    sys.stdout.write(f"{admin.key}\n")
    sys.stderr.write(f"{SECOND_ADMIN}: {admin.second_admin}\n")


if __name__ == "__main__":
    main()
