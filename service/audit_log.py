"""HTTP for the audit log: pages of JSON, or JSON lines to archive and verify."""

import json
import uuid
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Response
from sqlalchemy import Select, select

from core.audit import as_row
from core.tables import AuditRow
from service.auth import Admin
from service.deps import Cursor, SessionDep, invalid_cursor, media_types
from service.routing import Route
from service.schemas import Moment, Page, SearchText, View

router = APIRouter(tags=["audit log"], route_class=Route)


class AuditRowView(View):
    """`answers` is the number of the row this one refers to; `times` is how often it happened."""

    number: int
    at: str
    writer: str
    person: uuid.UUID | None
    name: str | None
    role: str | None
    key: uuid.UUID | None
    address: str | None
    request: str | None
    action: str
    objects: list[str]
    status: int | None
    answers: int | None
    times: int
    previous: str
    digest: str


@router.get(
    "/v1/admin/audit-log", response_model=Page[AuditRowView], responses=media_types("application/jsonl")
)
def show_audit_log(
    _: Admin,
    session: SessionDep,
    person: Annotated[SearchText | None, Query(description="Name or id.")] = None,
    action: Annotated[
        SearchText | None, Query(description="Part of an action, such as `download` or `DELETE /v1`.")
    ] = None,
    object: Annotated[SearchText | None, Query(description="Id of an object, or a file name.")] = None,
    since: Annotated[Moment | None, Query()] = None,
    until: Annotated[Moment | None, Query()] = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 50,
    cursor: Cursor = None,
    after: Annotated[int, Query(ge=0, le=2**62, description="With jsonl: rows after this number.")] = 0,
    format: Annotated[
        Literal["json", "jsonl"], Query(description="jsonl: oldest first, up to `limit` rows.")
    ] = "json",
) -> Page[AuditRowView] | Response:
    """Who did, saw or downloaded what, from where and when; newest first."""
    query = _filtered(person=person, action=action, object=object)
    if since is not None:
        query = query.where(AuditRow.at >= since)
    if until is not None:
        query = query.where(AuditRow.at < until)
    if format == "jsonl":
        oldest = query.where(AuditRow.number > after).order_by(AuditRow.number).limit(limit)
        lines = "".join(json.dumps(as_row(row)) + "\n" for row in session.scalars(oldest))
        return Response(lines, media_type="application/jsonl")
    if cursor is not None:
        if not (cursor.isascii() and cursor.isdigit() and len(cursor) < 19):
            raise invalid_cursor()
        query = query.where(AuditRow.number < int(cursor))
    rows = session.scalars(query.order_by(AuditRow.number.desc()).limit(limit + 1)).all()
    shown = [AuditRowView.model_validate(as_row(row)) for row in rows[:limit]]
    return Page(items=shown, next=str(shown[-1].number) if len(rows) > limit else None)


def _filtered(*, person: str | None, action: str | None, object: str | None) -> Select[Any]:
    query = select(AuditRow)
    if person is not None:
        try:
            query = query.where(AuditRow.person_id == uuid.UUID(person))
        except ValueError:
            query = query.where(AuditRow.name == person)
    if action is not None:
        query = query.where(AuditRow.action.contains(action, autoescape=True))
    if object is not None:
        query = query.where(AuditRow.objects.contains([object]))
    return query
