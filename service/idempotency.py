"""Idempotency keys: the same key and body get the first answer again, for ever."""

import hashlib
from collections.abc import Callable
from typing import Annotated, TypeVar

from fastapi import Header
from pydantic import BaseModel
from sqlalchemy import select, update
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
        description="Makes a repeated request safe: the first answer is given again, for ever.",
    ),
]
V = TypeVar("V", bound=BaseModel)


class KeyReused(Problem):
    status, slug, title = 422, "idempotency-key-reused", "This key was used for another request"


def run_idempotent(
    session: Session,
    principal: Principal,
    key: str | None,
    body: BaseModel,
    view: type[V],
    make: Callable[[], V],
) -> V:
    """Makes the answer and remembers it in the same transaction, or gives the one remembered.

    A second request with the same key waits on the unique index until the first is committed or rolled back.
    """
    if key is not None:
        first = (
            insert(Reply)
            .values(person_id=principal.id, key=key, request=_digest(body))
            .on_conflict_do_nothing()
        )
        if session.execute(first.returning(Reply.key)).one_or_none() is None:
            told = stored_reply(session, principal, key, body, view)
            if told is not None:
                return told
    answer = make()
    if key is not None:
        mine = (Reply.person_id == principal.id, Reply.key == key)
        values = {"status": 200, "body": answer.model_dump(mode="json")}
        # As stored: PostgreSQL orders the names in an object, and the first answer is to equal the others.
        kept = session.execute(update(Reply).where(*mine).values(values).returning(Reply.body))
        answer = view.model_validate(kept.scalar_one())
    session.commit()
    return answer


def stored_reply(
    session: Session, principal: Principal, key: str | None, body: BaseModel, view: type[V]
) -> V | None:
    """The answer already given to this key, before any work is done for it again."""
    mine = (Reply.person_id == principal.id, Reply.key == key)
    found = session.execute(select(Reply.request, Reply.body).where(*mine)).one_or_none()
    if found is None:
        return None
    if found[0] != _digest(body):
        raise KeyReused("Use a new key for a new request, or send the first body again.")
    return view.model_validate(found[1])


def _digest(body: BaseModel) -> bytes:
    return hashlib.sha256(f"{type(body).__name__} {body.model_dump_json()}".encode()).digest()
