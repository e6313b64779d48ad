"""HTTP for people and API keys."""

import uuid
from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter
from pydantic import Field
from sqlalchemy import func, select, update
from starlette.status import HTTP_201_CREATED, HTTP_204_NO_CONTENT

from core.errors import NotFound, WrongState
from core.people import LONGEST_DAYS, Role, add_person, issue_key, revoke_key
from core.tables import Key, Person
from service.auth import Admin, Anyone
from service.datasets.schemas import Text, Whole
from service.deps import Body, Cursor, Limit, Page, SessionDep, View, page
from service.routing import Route

router = APIRouter(tags=["people"], route_class=Route)


class NewPerson(Body):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,99}$", examples=["ada"])]
    role: Role


class PersonView(View):
    id: uuid.UUID
    name: str
    role: Role
    team: uuid.UUID | None
    disabled: bool

    @classmethod
    def of(cls, row: Person) -> "PersonView":
        return cls(
            id=row.id, name=row.name, role=Role(row.role), team=row.team_id,
            disabled=row.disabled_at is not None,
        )  # fmt: skip


class NewKey(Body):
    label: Text = "key"
    days: Annotated[Whole, Field(ge=1, le=LONGEST_DAYS, description="Until it expires.")] = 365


class KeyView(View):
    id: uuid.UUID
    person: uuid.UUID
    label: str
    created_at: datetime
    expires_at: datetime
    revoked_at: datetime | None

    @classmethod
    def of(cls, row: Key) -> "KeyView":
        return cls(
            id=row.id, person=row.person_id, label=row.label, created_at=row.created_at,
            expires_at=row.expires_at, revoked_at=row.revoked_at,
        )  # fmt: skip


class FreshKey(View):
    """`key` is shown this once and kept nowhere."""

    id: uuid.UUID
    key: str
    expires_at: datetime


@router.get("/v1/me")
def me(who: Anyone, session: SessionDep) -> PersonView:
    """Who you are to this service."""
    return PersonView.of(session.get_one(Person, who.id))


@router.post("/v1/admin/people", status_code=HTTP_201_CREATED)
def add(body: NewPerson, _: Admin, session: SessionDep) -> PersonView:
    person = add_person(session, name=body.name, role=body.role)
    session.commit()
    return PersonView.of(person)


@router.get("/v1/admin/people")
def list_people(_: Admin, session: SessionDep, limit: Limit = 50, cursor: Cursor = None) -> Page[PersonView]:
    rows, following = page(session, select(Person), Person.created_at, Person.id, limit=limit, cursor=cursor)
    return Page(items=[PersonView.of(row) for row in rows], next=following)


@router.post("/v1/admin/people/{id}/disable")
def disable(id: uuid.UUID, who: Admin, session: SessionDep) -> PersonView:
    """Shut a person out at once; what they did stays in the ledger."""
    if id == who.id:
        raise WrongState("You would shut yourself out; ask another admin.")
    done = (
        update(Person)
        .where(Person.id == id)
        .values(disabled_at=func.coalesce(Person.disabled_at, func.now()))
    )
    session.execute(done)
    session.commit()
    return PersonView.of(_person(session, id))


@router.post("/v1/admin/people/{id}/keys", status_code=HTTP_201_CREATED)
def add_key(id: uuid.UUID, body: NewKey, _: Admin, session: SessionDep) -> FreshKey:
    """A new API key, shown this once."""
    key, text = issue_key(session, _person(session, id), label=body.label, days=body.days)
    session.commit()
    return FreshKey(id=key.id, key=text, expires_at=key.expires_at.astimezone(UTC))


@router.get("/v1/admin/people/{id}/keys")
def list_keys(id: uuid.UUID, _: Admin, session: SessionDep) -> list[KeyView]:
    person = _person(session, id)
    rows = session.scalars(select(Key).where(Key.person_id == person.id).order_by(Key.created_at))
    return [KeyView.of(row) for row in rows]


@router.delete("/v1/admin/keys/{id}", status_code=HTTP_204_NO_CONTENT)
def revoke(id: uuid.UUID, _: Admin, session: SessionDep) -> None:
    """Revoke a key; it stops working with the next request."""
    if not revoke_key(session, id):
        raise NotFound("There is no such key.")
    session.commit()


def _person(session: SessionDep, id: uuid.UUID) -> Person:
    person = session.get(Person, id)
    if person is None:
        raise NotFound("There is no such person.")
    return person
