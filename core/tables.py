"""The rows both processes share. Constraints and triggers that guard them live in migrations/."""

import uuid
from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, ForeignKey, MetaData, SmallInteger, Text, func
from sqlalchemy.dialects.postgresql import JSONB, TIMESTAMP
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Base(DeclarativeBase):
    metadata = MetaData(naming_convention={"ck": "%(table_name)s_%(constraint_name)s"})
    type_annotation_map = {  # noqa: RUF012 (SQLAlchemy reads it from the class)
        datetime: TIMESTAMP(timezone=True),
        dict[str, Any]: JSONB,
        str: Text,
    }


class Account(Base):
    """The budget of the people in a dataset; its balance is an integer cost at one fixed Rényi order."""

    __tablename__ = "accounts"

    id: Mapped[uuid.UUID] = mapped_column(primary_key=True, default=uuid.uuid4)
    relation: Mapped[str]
    epsilon: Mapped[float]
    delta: Mapped[float]
    order: Mapped[int] = mapped_column("renyi_order", SmallInteger)
    capacity: Mapped[int] = mapped_column(BigInteger)
    held: Mapped[int] = mapped_column(BigInteger, server_default="0")
    settled: Mapped[int] = mapped_column(BigInteger, server_default="0")
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class Entry(Base):
    """One move of an account's balance. Rows are added and stay as they are."""

    __tablename__ = "entries"

    account_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("accounts.id"), primary_key=True)
    number: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    kind: Mapped[str]
    cost: Mapped[int] = mapped_column(BigInteger)
    event: Mapped[dict[str, Any] | None]
    readings: Mapped[dict[str, Any] | None]
    actor: Mapped[str]
    reason: Mapped[str]
    at: Mapped[datetime] = mapped_column(server_default=func.now())
    previous: Mapped[bytes]
    digest: Mapped[bytes]


class Part(Base):
    """A running process that can do its work right now: connected to the database and to its queue."""

    __tablename__ = "parts"

    name: Mapped[str] = mapped_column(primary_key=True)
    role: Mapped[str]
    version: Mapped[str]
    seen_at: Mapped[datetime] = mapped_column(server_default=func.now())
