"""Migrates the database named in the environment: `python -m migrations`."""

import sys

from core.settings import MigrateSettings, SettingsProblem, load
from migrations import DatabaseIsNewer, migrate


def main() -> None:
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
        )
    except (SettingsProblem, DatabaseIsNewer) as problem:
        sys.exit(f"sluice: {problem}")


if __name__ == "__main__":
    main()
