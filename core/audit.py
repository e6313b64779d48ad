"""The audit log: one row for each action, view or download, written before it happens.

Each row is added by one statement in its own transaction, so that the lock of the hash chain is held briefly.
An action whose row cannot be written is refused. docs/decisions/0046-audit-log.md
"""

import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC
from typing import Any

from sqlalchemy import BigInteger, Engine, Integer, Text, cast, func, literal, select
from sqlalchemy.dialects.postgresql import ARRAY

from core.tables import AuditRow


@dataclass(frozen=True, kw_only=True)
class Actor:
    """Who acts, and from where. Workers are identified by their database role only."""

    person: uuid.UUID | None = None
    name: str | None = None
    role: str | None = None
    key: uuid.UUID | None = None
    address: str | None = None
    request: str | None = None


def write(
    engine: Engine,
    action: str,
    objects: Sequence[object] = (),
    *,
    actor: Actor | None = None,
    status: int | None = None,
    answers: int | None = None,
    times: int = 1,
    durable: bool = True,
) -> int:
    """Adds a row and returns its number. Raises if it cannot be written.

    A row that is not `durable` may be lost if the database server crashes within a second, but only together
    with all later changes.
    """
    row = func.add_audit(
        *asdict(actor or Actor()).values(), action,
        literal([str(object) for object in objects], ARRAY(Text)), cast(status, Integer),
        cast(answers, BigInteger), cast(times, BigInteger), durable,
    )  # fmt: skip
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        return int(connection.execute(select(row)).scalar_one())


def as_row(row: AuditRow) -> dict[str, Any]:
    """A row as it is hashed, exported and shown."""
    return {
        "number": row.number,
        "at": row.at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        "writer": row.writer,
        "person": row.person_id and str(row.person_id),
        "name": row.name,
        "role": row.role,
        "key": row.key_id and str(row.key_id),
        "address": row.address,
        "request": row.request,
        "action": row.action,
        "objects": row.objects,
        "status": row.status,
        "answers": row.answers,
        "times": row.times,
        "previous": row.previous.hex(),
        "digest": row.digest.hex(),
    }
