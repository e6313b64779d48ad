"""The audit log: one row for whatever somebody does, sees or downloads, written before it happens.

Each row is added by one statement in a transaction of its own, so that nobody holds the chain's lock while
something else is waited for. What cannot be written is not done. docs/decisions/0046-audit-log.md
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
    """Who acts, and from where. A worker is known by its database role alone."""

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
    """Adds a row and gives its number. Raises if it cannot be written.

    A row that is not `durable` may be lost if the database server dies within the next second; not while any
    later change stays.
    """
    row = func.add_audit(
        *asdict(actor or Actor()).values(), action,
        literal([str(each) for each in objects], ARRAY(Text)), cast(status, Integer),
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
