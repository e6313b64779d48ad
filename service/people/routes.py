"""HTTP for people, invitations and API keys."""

import uuid
from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Query, Request
from pydantic import Field
from sqlalchemy import func, select, update
from starlette.status import HTTP_201_CREATED, HTTP_204_NO_CONTENT

from core import people
from core.errors import Forbidden, NotFound, WrongState
from core.people import INVITATION_PREFIX, LONGEST_DAYS, NAME, Role, require_independent, revoke_key
from core.tables import Invitation, Key, Person
from service import audit
from service.auth import Admin, Anyone
from service.datasets.schemas import Text, Whole
from service.deps import Body, Cursor, Limit, Page, SessionDep, View, page
from service.routing import Route

router = APIRouter(tags=["people"], route_class=Route)


class NewPerson(Body):
    name: Annotated[str, Field(pattern=NAME, examples=["ada"])]
    role: Role


class PersonView(View):
    """`created_by` is null for people of the installation and of single sign-on."""

    id: uuid.UUID
    name: str
    role: Role
    team: uuid.UUID | None
    disabled: bool
    created_by: uuid.UUID | None

    @classmethod
    def of(cls, row: Person) -> "PersonView":
        return cls(
            id=row.id, name=row.name, role=Role(row.role), team=row.team_id,
            disabled=row.disabled_at is not None, created_by=row.created_by,
        )  # fmt: skip


class InvitationView(View):
    """`waiting` until an independent admin confirms it; `refused` counts attempts to use it after its end."""

    id: uuid.UUID
    person: uuid.UUID
    state: str
    issued_by: uuid.UUID | None
    confirmed_by: uuid.UUID | None
    created_at: datetime
    expires_at: datetime
    used_at: datetime | None
    refused: int

    @classmethod
    def of(cls, row: Invitation) -> "InvitationView":
        return cls.model_validate(_invitation_fields(row))


class FreshInvitation(InvitationView):
    """`invitation` is shown this once and kept nowhere; it is null while the invitation waits."""

    invitation: str | None

    @classmethod
    def made(cls, row: Invitation, text: str | None) -> "FreshInvitation":
        return cls.model_validate(_invitation_fields(row) | {"invitation": text})


class AddedPerson(PersonView):
    invitation: FreshInvitation


class NewKey(Body):
    label: Text = "key"
    days: Annotated[Whole, Field(ge=1, le=LONGEST_DAYS, description="Until it expires.")] = 365


class Redeem(NewKey):
    invitation: Annotated[
        str,
        Field(pattern=rf"^{INVITATION_PREFIX}[A-Za-z0-9_-]{{43}}$", examples=[INVITATION_PREFIX + "A" * 43]),
    ]


class KeyView(View):
    """`issued_by`: who invited the owner, or the owner for keys they added themselves."""

    id: uuid.UUID
    person: uuid.UUID
    label: str
    created_at: datetime
    expires_at: datetime
    revoked_at: datetime | None
    issued_by: uuid.UUID | None

    @classmethod
    def of(cls, row: Key) -> "KeyView":
        return cls(
            id=row.id, person=row.person_id, label=row.label, created_at=row.created_at,
            expires_at=row.expires_at, revoked_at=row.revoked_at, issued_by=row.issued_by,
        )  # fmt: skip


class FreshKey(View):
    """`key` is shown this once and kept nowhere."""

    id: uuid.UUID
    key: str
    expires_at: datetime

    @classmethod
    def made(cls, row: Key, text: str) -> "FreshKey":
        return cls(id=row.id, key=text, expires_at=row.expires_at.astimezone(UTC))


@router.post("/v1/invitations/redeem", status_code=HTTP_201_CREATED)
def redeem(body: Redeem, session: SessionDep, request: Request) -> FreshKey:
    """Make your key from an invitation, which works once. Keys you had before stop working."""
    try:
        key, text = people.redeem(session, body.invitation, label=body.label, days=body.days)
    except people.InvitationRefused:
        session.close()
        audit.refused_sign_in(request)
        raise
    session.commit()
    session.close()
    audit.record_redeemed(request, key)
    return FreshKey.made(key, text)


@router.get("/v1/me")
def me(principal: Anyone, session: SessionDep) -> PersonView:
    """Who you are to this service."""
    return PersonView.of(session.get_one(Person, principal.id))


@router.get("/v1/me/keys")
def own_keys(principal: Anyone, session: SessionDep) -> list[KeyView]:
    return _keys(session, principal.id)


@router.post("/v1/me/keys", status_code=HTTP_201_CREATED)
def add_own_key(body: NewKey, _: Anyone, session: SessionDep, request: Request) -> FreshKey:
    """A further key of your own, shown this once."""
    current = request.headers["Authorization"].partition(" ")[2].strip()
    made = people.add_own_key(session, current, label=body.label, days=body.days)
    if made is None:
        raise Forbidden("Only who signs in with a key has keys; go on with single sign-on.")
    session.commit()
    return FreshKey.made(*made)


@router.delete("/v1/me/keys/{id}", status_code=HTTP_204_NO_CONTENT)
def revoke_own_key(id: uuid.UUID, principal: Anyone, session: SessionDep) -> None:
    """Revoke a key of yours; it stops working with the next request."""
    _revoke(session, id, of=principal.id)


@router.post("/v1/admin/people", status_code=HTTP_201_CREATED)
def add(body: NewPerson, principal: Admin, session: SessionDep) -> AddedPerson:
    """Add a person and invite them. A new admin is invited once an independent admin confirms it."""
    person = people.add_person(session, name=body.name, role=body.role, by=principal.id)
    fresh = FreshInvitation.made(*people.invite(session, person, by=principal.id))
    session.commit()
    return AddedPerson(**PersonView.of(person).model_dump(), invitation=fresh)


@router.get("/v1/admin/people")
def list_people(_: Admin, session: SessionDep, limit: Limit = 50, cursor: Cursor = None) -> Page[PersonView]:
    rows, following = page(session, select(Person), Person.created_at, Person.id, limit=limit, cursor=cursor)
    return Page(items=[PersonView.of(row) for row in rows], next=following)


@router.post("/v1/admin/people/{id}/disable")
def disable(id: uuid.UUID, principal: Admin, session: SessionDep) -> PersonView:
    """Shut a person out at once; invitations by and for them stop working. A new one lets them back."""
    if id == principal.id:
        raise WrongState("You would shut yourself out; ask another admin.")
    people.withdraw_invitations(
        session, Invitation.person_id == id, Invitation.issued_by == id, Invitation.confirmed_by == id
    )
    done = (
        update(Person)
        .where(Person.id == id)
        .values(disabled_at=func.coalesce(Person.disabled_at, func.now()))
    )
    session.execute(done)
    session.commit()
    return PersonView.of(_person(session, id))


@router.post("/v1/admin/people/{id}/invitations", status_code=HTTP_201_CREATED)
def invite(id: uuid.UUID, principal: Admin, session: SessionDep) -> FreshInvitation:
    """Invite somebody again who lost their key or was disabled; redeeming it revokes their other keys."""
    person = _person(session, id)
    if person.subject is not None:
        raise WrongState("This person uses single sign-on and has no key.")
    if person.id == principal.id:
        raise WrongState("Add a key of your own with POST /v1/me/keys.")
    fresh = FreshInvitation.made(*people.invite(session, person, by=principal.id))
    session.commit()
    return fresh


@router.get("/v1/admin/invitations")
def list_invitations(
    _: Admin,
    session: SessionDep,
    person: Annotated[uuid.UUID | None, Query()] = None,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> Page[InvitationView]:
    """Newest first: who invited whom, and whether somebody tried one again."""
    query = select(Invitation) if person is None else select(Invitation).where(Invitation.person_id == person)
    rows, following = page(session, query, Invitation.created_at, Invitation.id, limit=limit, cursor=cursor)
    return Page(items=[InvitationView.of(row) for row in rows], next=following)


@router.post("/v1/admin/invitations/{id}/confirm")
def confirm(id: uuid.UUID, principal: Admin, session: SessionDep) -> FreshInvitation:
    """Confirm that an admin whom another admin invited may come; shows the invitation this once."""
    row = _invitation(session, id)
    if _state(row) != "waiting" or row.issued_by is None:
        raise WrongState("Only an invitation that waits can be confirmed.", state=_state(row))
    if row.person_id == principal.id:
        raise WrongState("It is your own; another admin confirms it.")
    require_independent(session, row.issued_by, principal.id)
    text = people.confirm_invitation(session, row, by=principal.id)
    session.commit()
    return FreshInvitation.made(row, text)


@router.delete("/v1/admin/invitations/{id}", status_code=HTTP_204_NO_CONTENT)
def withdraw(id: uuid.UUID, _: Admin, session: SessionDep) -> None:
    """Withdraw an invitation that nobody used. Safe to repeat."""
    _invitation(session, id)
    people.withdraw_invitations(session, Invitation.id == id)
    session.commit()


@router.get("/v1/admin/people/{id}/keys")
def list_keys(id: uuid.UUID, _: Admin, session: SessionDep) -> list[KeyView]:
    return _keys(session, _person(session, id).id)


@router.delete("/v1/admin/keys/{id}", status_code=HTTP_204_NO_CONTENT)
def revoke(id: uuid.UUID, _: Admin, session: SessionDep) -> None:
    """Revoke a key; it stops working with the next request."""
    _revoke(session, id)


def _invitation_fields(row: Invitation) -> dict[str, object]:
    return {
        "id": row.id, "person": row.person_id, "state": _state(row), "issued_by": row.issued_by,
        "confirmed_by": row.confirmed_by, "created_at": row.created_at, "expires_at": row.expires_at,
        "used_at": row.used_at, "refused": row.refused,
    }  # fmt: skip


def _state(row: Invitation) -> str:
    if row.used_at is not None:
        return "used"
    if row.revoked_at is not None:
        return "revoked"
    if row.expires_at <= datetime.now(UTC):
        return "expired"
    return "waiting" if row.digest is None else "open"


def _keys(session: SessionDep, person: uuid.UUID) -> list[KeyView]:
    rows = session.scalars(select(Key).where(Key.person_id == person).order_by(Key.created_at))
    return [KeyView.of(row) for row in rows]


def _revoke(session: SessionDep, id: uuid.UUID, *, of: uuid.UUID | None = None) -> None:
    if not revoke_key(session, id, of=of):
        raise NotFound("There is no such key.")
    session.commit()


def _invitation(session: SessionDep, id: uuid.UUID) -> Invitation:
    row = session.get(Invitation, id, with_for_update=True)
    if row is None:
        raise NotFound("There is no such invitation.")
    return row


def _person(session: SessionDep, id: uuid.UUID) -> Person:
    person = session.get(Person, id)
    if person is None:
        raise NotFound("There is no such person.")
    return person
