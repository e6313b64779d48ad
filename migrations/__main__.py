"""Migrates the database named in the environment: `python -m migrations [--invite-admin NAME]`."""

import argparse
import sys

from sqlalchemy.orm import Session

from core.database import connect
from core.errors import Problem
from core.people import invite_admin
from core.settings import MigrateSettings, SettingsProblem, load
from migrations import UnknownRevision, migrate


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m migrations", description="Migrates the database.")
    parser.add_argument(
        "--invite-admin", metavar="NAME", help="also print an invitation of this admin, new or without a key"
    )
    name = parser.parse_args().invite_admin
    try:
        settings = load(MigrateSettings)
        migrate(
            str(settings.database_url),
            {
                "service": settings.service_password.get_secret_value(),
                "train": settings.train_password.get_secret_value(),
                "publish": settings.publish_password.get_secret_value(),
                "sweep": settings.sweep_password.get_secret_value(),
            },
            independent_days=settings.independent_days,
        )
        if name:
            with Session(connect(str(settings.database_url))) as session, session.begin():
                text = invite_admin(session, name)
            sys.stdout.write(f"invitation of {name}, shown this once: {text}\n")
    except (SettingsProblem, UnknownRevision, Problem) as problem:
        sys.exit(f"sluice: {problem}")


if __name__ == "__main__":
    main()
