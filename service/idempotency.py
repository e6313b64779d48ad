"""Idempotency keys: a repeated request with the same key and body gets the first response again."""

import hashlib
from collections.abc import Callable
from typing import Annotated, TypeVar

from fastapi import Header
from pydantic import BaseModel
from sqlalchemy import ColumnElement, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from core.errors import Problem
from core.tables import Reply
from service.auth import Principal

IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        pattern=r"^[\x21-\x7e]{1,200}$",
        description="Makes the request safe to repeat: the first response is stored and returned again.",
    ),
]
V = TypeVar("V", bound=BaseModel)


class KeyReused(Problem):
    status, slug, title = 422, "idempotency-key-reused", "Idempotency key already used for another request"


def run_idempotent(
    session: Session,
    principal: Principal,
    key: str | None,
    body: BaseModel,
    view: type[V],
    action: Callable[[], V],
) -> V:
    """Runs the action and stores its response in the same transaction, or returns the stored response.

    A second request with the same key waits on the unique index until the first transaction has ended.
    """
    if key is not None:
        claim = insert(Reply).values(person_id=principal.id, key=key, request=_digest(body))
        claimed = session.execute(claim.on_conflict_do_nothing().returning(Reply.key)).one_or_none()
        if claimed is None:
            stored = stored_reply(session, principal, key, body, view)
            if stored is not None:
                return stored
    response = action()
    if key is not None:
        values = {"status": 200, "body": response.model_dump(mode="json")}
        stored_body = session.scalars(
            update(Reply).where(*_of(principal, key)).values(values).returning(Reply.body)
        )
        # PostgreSQL reorders the keys of an object; the first response must equal the repeated ones.
        response = view.model_validate(stored_body.one())
    session.commit()
    return response


def stored_reply(
    session: Session, principal: Principal, key: str | None, body: BaseModel, view: type[V]
) -> V | None:
    """The response stored for this person and key, if there is one."""
    query = select(Reply.request, Reply.body).where(*_of(principal, key))
    row = session.execute(query).one_or_none()
    if row is None:
        return None
    if row.request != _digest(body):
        raise KeyReused("Use a new key for a new request, or send the first body again.")
    return view.model_validate(row.body)


def _of(principal: Principal, key: str | None) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    return Reply.person_id == principal.id, Reply.key == key


def _digest(body: BaseModel) -> bytes:
    return hashlib.sha256(f"{type(body).__name__} {body.model_dump_json()}".encode()).digest()
