"""Rules for people, invitations and keys. The database enforces the same rules: see migrations."""

import uuid
from collections.abc import Sequence
from datetime import UTC, datetime

from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from core import people
from core.errors import Forbidden, NotFound, WrongState
from core.people import require_independent
from core.tables import Invitation, Key, Person
from service.auth import Principal
from service.deps import find_row
from service.people.schemas import (
    AddedPerson,
    FreshInvitation,
    InvitationView,
    KeyView,
    NewPerson,
    PersonView,
)


def add_person(session: Session, principal: Principal, body: NewPerson) -> AddedPerson:
    person = people.add_person(session, name=body.name, role=body.role, by=principal.id)
    invitation = _fresh(*people.invite(session, person, by=principal.id))
    session.commit()
    return AddedPerson(**PersonView.of(person).model_dump(), invitation=invitation)


def disable(session: Session, principal: Principal, id: uuid.UUID) -> PersonView:
    if id == principal.id:
        raise WrongState("You cannot disable yourself; ask another admin.")
    people.withdraw_invitations(
        session, Invitation.person_id == id, Invitation.issued_by == id, Invitation.confirmed_by == id
    )
    disabled_at = func.coalesce(Person.disabled_at, func.now())
    query = update(Person).where(Person.id == id).values(disabled_at=disabled_at).returning(Person)
    person: Person = find_row(session, query, "person")
    session.commit()
    return PersonView.of(person)


def invite(session: Session, principal: Principal, id: uuid.UUID) -> FreshInvitation:
    person = find_row(session, select(Person).where(Person.id == id), "person")
    if person.subject is not None:
        raise WrongState("This person uses single sign-on and has no key.")
    if person.id == principal.id:
        raise WrongState("Add a key of your own with POST /v1/me/keys.")
    invitation = _fresh(*people.invite(session, person, by=principal.id))
    session.commit()
    return invitation


def confirm_invitation(session: Session, principal: Principal, id: uuid.UUID) -> FreshInvitation:
    row = _lock_invitation(session, id)
    if _state(row) != "waiting" or row.issued_by is None:
        raise WrongState("Only a waiting invitation can be confirmed.", state=_state(row))
    if row.person_id == principal.id:
        raise WrongState("You cannot confirm your own invitation; ask another admin.")
    require_independent(session, row.issued_by, principal.id)
    text = people.confirm_invitation(session, row, by=principal.id)
    session.commit()
    return _fresh(row, text)


def withdraw_invitation(session: Session, id: uuid.UUID) -> None:
    _lock_invitation(session, id)
    people.withdraw_invitations(session, Invitation.id == id)
    session.commit()


def view_invitations(rows: Sequence[Invitation]) -> list[InvitationView]:
    return [InvitationView.from_row(row, state=_state(row)) for row in rows]


def add_own_key(session: Session, current: str, *, label: str, days: int) -> tuple[Key, str]:
    made = people.add_own_key(session, current, label=label, days=days)
    if made is None:
        raise Forbidden("Keys are for people who sign in with a key; continue with single sign-on.")
    session.commit()
    return made


def keys_of(session: Session, person: uuid.UUID) -> list[KeyView]:
    rows = session.scalars(select(Key).where(Key.person_id == person).order_by(Key.created_at))
    return [KeyView.from_row(row) for row in rows]


def revoke_key(session: Session, id: uuid.UUID, *, of: uuid.UUID | None = None) -> None:
    if not people.revoke_key(session, id, of=of):
        raise NotFound("No key that you may see has this id.")
    session.commit()


def _fresh(row: Invitation, text: str | None) -> FreshInvitation:
    return FreshInvitation.from_row(row, state=_state(row), invitation=text)


def _lock_invitation(session: Session, id: uuid.UUID) -> Invitation:
    return find_row(session, select(Invitation).where(Invitation.id == id).with_for_update(), "invitation")


def _state(row: Invitation) -> str:
    if row.used_at is not None:
        return "used"
    if row.revoked_at is not None:
        return "revoked"
    if row.expires_at <= datetime.now(UTC):
        return "expired"
    return "waiting" if row.digest is None else "open"
