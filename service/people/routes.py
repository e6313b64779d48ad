"""HTTP for people, invitations and API keys."""

import uuid
from datetime import UTC
from typing import Annotated

from fastapi import APIRouter, Query, Request
from sqlalchemy import select
from starlette.status import HTTP_201_CREATED, HTTP_204_NO_CONTENT

from core import people
from core.tables import Invitation, Key, Person
from service import audit
from service.auth import Admin, Anyone, credentials_of
from service.deps import Paging, SessionDep, find_row
from service.people import actions, schemas
from service.routing import Route
from service.schemas import Page

router = APIRouter(tags=["people"], route_class=Route)


@router.post("/v1/invitations/redeem", status_code=HTTP_201_CREATED)
def redeem(body: schemas.Redeem, session: SessionDep, request: Request) -> schemas.FreshKey:
    """Redeem an invitation for a key. It works once; keys you had before are revoked."""
    try:
        key, text = people.redeem(session, body.invitation, label=body.label, days=body.days)
    except people.InvitationRefused:
        session.close()
        audit.count_refused_sign_in(request)
        raise
    session.commit()
    session.close()
    audit.record_redeemed(request, key)
    return _fresh_key(key, text)


@router.get("/v1/me")
def me(principal: Anyone, session: SessionDep) -> schemas.PersonView:
    """The person you are signed in as."""
    return schemas.PersonView.of(session.get_one(Person, principal.id))


@router.get("/v1/me/keys")
def own_keys(principal: Anyone, session: SessionDep) -> list[schemas.KeyView]:
    return actions.keys_of(session, principal.id)


@router.post("/v1/me/keys", status_code=HTTP_201_CREATED)
def add_own_key(body: schemas.NewKey, _: Anyone, session: SessionDep, request: Request) -> schemas.FreshKey:
    """Add a key of your own. It is shown in this response only."""
    return _fresh_key(
        *actions.add_own_key(session, credentials_of(request), label=body.label, days=body.days)
    )


@router.delete("/v1/me/keys/{id}", status_code=HTTP_204_NO_CONTENT)
def revoke_own_key(id: uuid.UUID, principal: Anyone, session: SessionDep) -> None:
    """Revoke a key of yours, effective with the next request."""
    actions.revoke_key(session, id, of=principal.id)


@router.post("/v1/admin/people", status_code=HTTP_201_CREATED)
def add(body: schemas.NewPerson, principal: Admin, session: SessionDep) -> schemas.AddedPerson:
    """Add and invite a person. The invitation of an admin has to be confirmed by an independent admin."""
    return actions.add_person(session, principal, body)


@router.get("/v1/admin/people")
def list_people(_: Admin, session: SessionDep, paging: Paging) -> Page[schemas.PersonView]:
    return paging.page(
        session, select(Person), Person, lambda rows: [schemas.PersonView.of(row) for row in rows]
    )


@router.post("/v1/admin/people/{id}/disable")
def disable(id: uuid.UUID, principal: Admin, session: SessionDep) -> schemas.PersonView:
    """Disable a person, and revoke invitations by and for them. A new invitation enables them again."""
    return actions.disable(session, principal, id)


@router.post("/v1/admin/people/{id}/invitations", status_code=HTTP_201_CREATED)
def invite(id: uuid.UUID, principal: Admin, session: SessionDep) -> schemas.FreshInvitation:
    """Invite a person again who lost their key or was disabled. Redeeming it revokes their other keys."""
    return actions.invite(session, principal, id)


@router.get("/v1/admin/invitations")
def list_invitations(
    _: Admin, session: SessionDep, paging: Paging, person: Annotated[uuid.UUID | None, Query()] = None
) -> Page[schemas.InvitationView]:
    """Newest first: who invited whom, and how often a used invitation was tried again."""
    query = select(Invitation) if person is None else select(Invitation).where(Invitation.person_id == person)
    return paging.page(session, query, Invitation, actions.view_invitations)


@router.post("/v1/admin/invitations/{id}/confirm")
def confirm(id: uuid.UUID, principal: Admin, session: SessionDep) -> schemas.FreshInvitation:
    """Confirm another admin's invitation of an admin. The invitation is shown in this response only."""
    return actions.confirm_invitation(session, principal, id)


@router.delete("/v1/admin/invitations/{id}", status_code=HTTP_204_NO_CONTENT)
def withdraw(id: uuid.UUID, _: Admin, session: SessionDep) -> None:
    """Revoke an unused invitation. Safe to repeat."""
    actions.withdraw_invitation(session, id)


@router.get("/v1/admin/people/{id}/keys")
def list_keys(id: uuid.UUID, _: Admin, session: SessionDep) -> list[schemas.KeyView]:
    return actions.keys_of(session, find_row(session, select(Person).where(Person.id == id), "person").id)


@router.delete("/v1/admin/keys/{id}", status_code=HTTP_204_NO_CONTENT)
def revoke(id: uuid.UUID, _: Admin, session: SessionDep) -> None:
    """Revoke a key, effective with the next request."""
    actions.revoke_key(session, id)


def _fresh_key(row: Key, text: str) -> schemas.FreshKey:
    return schemas.FreshKey(id=row.id, key=text, expires_at=row.expires_at.astimezone(UTC))
