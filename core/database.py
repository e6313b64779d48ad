"""Connections to PostgreSQL, at READ COMMITTED."""

from sqlalchemy import Engine, create_engine

APPLICATION_ROLES = ("service", "train", "publish", "sweep")
# A process that freezes in a transaction loses its locks after this time.
FROZEN_SECONDS = 30


def connect(url: str, *, pool_size: int = 5) -> Engine:
    """An engine that replaces dead connections, so that processes survive a restart of the database."""
    return create_engine(
        url.replace("postgres://", "postgresql://", 1).replace("postgresql://", "postgresql+psycopg://", 1),
        pool_size=pool_size,
        max_overflow=0,  # callers wait for a connection: the server refuses more than its limit
        pool_pre_ping=True,
        isolation_level="READ COMMITTED",
        hide_parameters=True,  # error texts reach logs, and parameters may be private
        connect_args={
            "connect_timeout": 5,
            "options": f"-c idle_in_transaction_session_timeout={FROZEN_SECONDS}s",
        },
    )


def database_role(role: str) -> str:
    """The PostgreSQL role a process of this role logs in as."""
    return f"sluice_{role}"
