"""Connections to PostgreSQL at READ COMMITTED; the ledger's guarantee rests on one conditional UPDATE."""

from sqlalchemy import Engine, create_engine

APPLICATION_ROLES = ("service", "train", "publish", "sweep")
# A process that freezes in the middle of a transaction holds its locks no longer than this.
FROZEN_SECONDS = 30


def connect(url: str, *, pool_size: int = 5) -> Engine:
    """An engine that drops dead connections, so that a restarted database is noticed and not fatal."""
    return create_engine(
        url.replace("postgres://", "postgresql://", 1).replace("postgresql://", "postgresql+psycopg://", 1),
        pool_size=pool_size,
        max_overflow=0,  # what does not fit waits: more connections than the server allows would be refused
        pool_pre_ping=True,
        isolation_level="READ COMMITTED",
        hide_parameters=True,  # an error's text may reach a log, and a parameter may be anything
        connect_args={
            "connect_timeout": 5,
            "options": f"-c idle_in_transaction_session_timeout={FROZEN_SECONDS}s",
        },
    )


def database_role(role: str) -> str:
    """The PostgreSQL role a process of this role logs in as."""
    return f"sluice_{role}"
