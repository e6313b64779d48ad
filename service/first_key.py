"""Prints the first admin's key, once: `python -m service.first_key`."""

import sys

from sqlalchemy.orm import Session

from core.database import connect
from core.people import first_admin
from core.settings import ServiceSettings, SettingsProblem, load


def main() -> None:
    try:
        settings = load(ServiceSettings)
    except SettingsProblem as problem:
        sys.exit(f"sluice: {problem}")
    with Session(connect(str(settings.database_url))) as session, session.begin():
        key = first_admin(session)
    if key is None:
        sys.exit("sluice: there is an admin already; ask them for a key (POST /v1/admin/people/ID/keys)")
    sys.stdout.write(f"{key}\n")


if __name__ == "__main__":
    main()
