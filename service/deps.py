"""What routes are given: a database session, a page of a list."""

import base64
import binascii
import uuid
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any, Generic, TypeVar

from fastapi import Depends, Query, Request
from pydantic import BaseModel, ConfigDict
from sqlalchemy import Select, tuple_
from sqlalchemy.orm import Session

from core.errors import Invalid

T = TypeVar("T")


async def _session(request: Request) -> Session:
    return Session(request.app.state.engine, expire_on_commit=False)


# Takes a connection with its first statement; service.routing.Route closes it in the thread of the route.
SessionDep = Annotated[Session, Depends(_session)]
Limit = Annotated[int, Query(ge=1, le=200, description="How many at most.")]
Cursor = Annotated[str | None, Query(max_length=200, description="`next` of the page before.")]


def answers(*kinds: str) -> dict[int | str, dict[str, Any]]:
    """Says in the document what a route answers with when that is not JSON of a model."""
    return {200: {"content": {kind: {"schema": {"type": "string"}} for kind in kinds}}}


class Body(BaseModel):
    """What a request may say: these fields and no others."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class View(BaseModel):
    model_config = ConfigDict(frozen=True)


class Page(View, Generic[T]):
    items: list[T]
    next: str | None = None


def page(
    session: Session, query: Select[Any], at: Any, id: Any, *, limit: int, cursor: str | None
) -> tuple[Sequence[Any], str | None]:
    """The newest first; a cursor names the last row seen, so that new rows do not shift pages."""
    if cursor is not None:
        query = query.where(tuple_(at, id) < tuple_(*_decoded(cursor)))
    rows = session.scalars(query.order_by(at.desc(), id.desc()).limit(limit + 1)).all()
    more = len(rows) > limit
    rows = rows[:limit]
    return rows, _encoded(rows[-1].__dict__[at.key], rows[-1].id) if more else None


def _encoded(at: datetime, id: uuid.UUID) -> str:
    return base64.urlsafe_b64encode(f"{at.isoformat()} {id}".encode()).decode()


def _decoded(cursor: str) -> tuple[datetime, uuid.UUID]:
    try:
        at, id = base64.urlsafe_b64decode(cursor.encode()).decode().rsplit(" ", 1)
        when = datetime.fromisoformat(at)
        if when.tzinfo is None:
            raise ValueError(cursor)
        return when, uuid.UUID(id)
    except (ValueError, binascii.Error, UnicodeError):
        raise Invalid("The cursor is not one this service gave out; start without one.") from None
