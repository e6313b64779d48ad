"""Schema, triggers and database roles. `python -m migrations` brings a database to the newest revision."""

from collections.abc import Mapping
from pathlib import Path

import psycopg
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from psycopg import sql
from sqlalchemy import Connection, text, update

from core.database import connect, database_role
from core.tables import Rules
from sluice.methods import METHODS, Output

BASELINE = "0010"  # the oldest revision that this version can upgrade


class UnknownRevision(Exception):
    """The database was migrated by a version of Sluice that this one cannot follow."""


def migrate(url: str, passwords: Mapping[str, str], *, independent_days: int | None = None) -> None:
    """Upgrades the schema, sets the site's rules and the passwords of the application roles."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent))
    engine = connect(url)
    try:
        with engine.begin() as connection:
            _require_known_revision(
                MigrationContext.configure(connection), ScriptDirectory.from_config(config)
            )
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
            _fill_methods(connection)
            if independent_days is not None:
                connection.execute(update(Rules).values(independent_days=independent_days))
            name = connection.dialect.identifier_preparer.quote(connection.engine.url.database or "")
            # No role needs temporary tables, and one could be named like a table of ours.
            connection.execute(text(f"REVOKE TEMPORARY, CREATE ON DATABASE {name} FROM PUBLIC"))
    finally:
        engine.dispose()
    _set_passwords(url, passwords)


def _require_known_revision(context: MigrationContext, scripts: ScriptDirectory) -> None:
    for revision in set(context.get_current_heads()) - {
        script.revision for script in scripts.walk_revisions()
    }:
        if revision < BASELINE:
            raise UnknownRevision(
                f"the database is at revision {revision}, which is older than this version can upgrade: "
                "upgrade it with version 0.1.0 of Sluice first, then start this version"
            )
        raise UnknownRevision(
            f"the database is at revision {revision}, which this version does not know: "
            "start the version of Sluice that wrote it, or restore a backup"
        )


def _fill_methods(connection: Connection) -> None:
    """Stores the facts that triggers check; rows of removed methods stay, since their jobs do."""
    rows = [
        {
            "name": method.name,
            "needs_source": method.needs_source,
            "can_relay": method.can_relay,
            "makes_samples": method.makes is Output.SAMPLES,
        }
        for method in METHODS.values()
    ]
    connection.execute(
        text(
            "INSERT INTO methods (name, needs_source, can_relay, makes_samples)"
            " VALUES (:name, :needs_source, :can_relay, :makes_samples) ON CONFLICT (name) DO UPDATE SET"
            " (needs_source, can_relay, makes_samples)"
            " = (excluded.needs_source, excluded.can_relay, excluded.makes_samples)"
        ),
        rows,
    )


def _set_passwords(url: str, passwords: Mapping[str, str]) -> None:
    with psycopg.connect(url.replace("postgresql+psycopg://", "postgresql://", 1)) as connection:
        for role, password in passwords.items():
            name = database_role(role)
            # Hashed on this side, so that no server log ever holds a password.
            secret = connection.pgconn.encrypt_password(password.encode(), name.encode(), b"scram-sha-256")
            connection.execute(
                sql.SQL("ALTER ROLE {} LOGIN PASSWORD {}").format(
                    sql.Identifier(name), sql.Literal(secret.decode())
                )
            )
