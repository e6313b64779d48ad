"""What routes and actions share: the database session, pages of a list, rows or 404."""

import base64
import binascii
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Query, Request
from sqlalchemy import Select, UpdateBase, tuple_
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from core.errors import Invalid, NotFound, Problem
from service.schemas import Page

T = TypeVar("T")
V = TypeVar("V")


async def _session(request: Request) -> Session:
    return Session(request.app.state.engine, expire_on_commit=False)


# Takes a connection with its first statement; service.routing.Route closes it in the thread of the route.
SessionDep = Annotated[Session, Depends(_session)]
Cursor = Annotated[str | None, Query(max_length=200, description="`next` of the previous page.")]


def media_types(*types: str) -> dict[int | str, dict[str, Any]]:
    """Documents the content types of a route that does not answer with a JSON model."""
    return {200: {"content": {media_type: {"schema": {"type": "string"}} for media_type in types}}}


@dataclass(frozen=True)
class _Paging:
    limit: Annotated[int, Query(ge=1, le=200, description="Maximum number of items.")] = 50
    cursor: Cursor = None

    def page(
        self, session: Session, query: Select[T], model: Any, view: Callable[[Sequence[T]], list[V]]
    ) -> Page[V]:
        """Newest first. The cursor identifies the last row seen, so rows added later do not shift pages."""
        at, id = model.created_at, model.id
        if self.cursor is not None:
            query = query.where(tuple_(at, id) < tuple_(*_decode(self.cursor)))
        rows: list[Any] = list(session.scalars(query.order_by(at.desc(), id.desc()).limit(self.limit + 1)))
        shown = rows[: self.limit]
        return Page(items=view(shown), next=_encode(shown[-1]) if len(rows) > self.limit else None)


Paging = Annotated[_Paging, Depends()]


def _encode(row: Any) -> str:
    return base64.urlsafe_b64encode(f"{row.created_at.isoformat()} {row.id}".encode()).decode()


def _decode(cursor: str) -> tuple[datetime, uuid.UUID]:
    try:
        at, id = base64.urlsafe_b64decode(cursor.encode()).decode().rsplit(" ", 1)
        when = datetime.fromisoformat(at)
        if when.tzinfo is None:
            raise ValueError(cursor)
        return when, uuid.UUID(id)
    except (ValueError, binascii.Error, UnicodeError):
        raise invalid_cursor() from None


def invalid_cursor() -> Invalid:
    return Invalid("The cursor was not issued by this service; start without one.")


def find_row(session: Session, query: Select[T] | UpdateBase, name: str) -> T:
    """The row a query selects or updates; otherwise 404, whether it does not exist or is not visible."""
    row: T | None = session.scalars(query).one_or_none()
    if row is None:
        raise NotFound(f"No {name} that you may see has this id.")
    return row


def commit_new(session: Session, row: object, conflict: Problem) -> None:
    """Inserts and commits a row, or raises `conflict` if a unique constraint refuses it."""
    session.add(row)
    try:
        session.commit()
    except IntegrityError:
        session.rollback()
        raise conflict from None
