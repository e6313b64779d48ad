"""People with one role each, their invitations and their API keys."""

import hashlib
import re
import secrets
import uuid
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import NamedTuple

from sqlalchemy import func, or_, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from core.errors import Invalid, Problem, WrongState
from core.tables import Invitation, Key, Person, Rules

PREFIX = "sl_"
INVITATION_PREFIX = "sli_"
INVITATION_DAYS = 7
NAME = r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,99}$"
LONGEST_DAYS = 3650
# Printed beside the invitation when a site is set up.
SECOND_ADMIN = (
    f"invitation of a second admin, for another person, good for {INVITATION_DAYS} days, shown this once"
)


class Role(StrEnum):
    ADMIN = "admin"
    CURATOR = "curator"
    ANALYST = "analyst"


class NameTaken(Problem):
    status, slug, title = 409, "name-taken", "This name is taken"


class InvitationRefused(Problem):
    status, slug, title = 403, "invitation-refused", "The invitation is not valid"


class NotIndependent(Problem):
    status, slug, title = 403, "not-independent", "Two people who are independent of each other are needed"


class FirstAdmin(NamedTuple):
    """The first key of a new site, and an invitation for a second admin."""

    key: str
    second_admin: str


def add_person(
    session: Session, *, name: str, role: Role, subject: str | None = None, by: uuid.UUID | None = None
) -> Person:
    person = Person(id=uuid.uuid4(), name=name, role=role, subject=subject, created_by=by)
    session.add(person)
    try:
        session.flush()
    except IntegrityError:
        session.rollback()
        raise NameTaken("Choose another name; names are never reused, since the ledger keeps them.") from None
    return person


def first_admin(session: Session) -> FirstAdmin | None:
    """Creates the first two admins of a site; nobody invited them, so they are independent."""
    if session.scalars(select(Person.id).where(Person.role == Role.ADMIN).limit(1)).one_or_none():
        return None
    first, second = (
        invite(session, add_person(session, name=name, role=Role.ADMIN), by=None)[1] or ""
        for name in ("admin", "second-admin")
    )
    _, text = redeem(session, first, label="first", days=365)
    return FirstAdmin(text, second)


def invite_admin(session: Session, name: str) -> str:
    """The text of an invitation by the installation, for a new admin or one who lost their key."""
    if not re.match(NAME, name):
        raise Invalid("A name has letters, digits and . _ @ - only, and begins with a letter or digit.")
    person = session.scalars(select(Person).where(Person.name == name)).one_or_none()
    if person is None:
        person = add_person(session, name=name, role=Role.ADMIN)
    elif person.role != Role.ADMIN or person.subject is not None:
        raise WrongState(f"{name} is {person.role} here, or signs in elsewhere; choose another name.")
    return invite(session, person, by=None)[1] or ""


def invite(session: Session, person: Person, *, by: uuid.UUID | None) -> tuple[Invitation, str | None]:
    """An invitation and its text, which is not stored; earlier invitations stop working.

    The invitation of an admin by another admin has no text until an independent admin confirms it.
    """
    withdraw_invitations(session, Invitation.person_id == person.id)
    text = None if by is not None and person.role == Role.ADMIN else _new(INVITATION_PREFIX)
    row = Invitation(
        id=uuid.uuid4(), person_id=person.id, digest=_digest(text) if text else None, issued_by=by,
        expires_at=_in_days(INVITATION_DAYS),
    )  # fmt: skip
    session.add(row)
    session.flush()
    return row, text


def confirm_invitation(session: Session, row: Invitation, *, by: uuid.UUID) -> str:
    """The text of an invitation of an admin, for the second admin. The database checks that they may."""
    text = _new(INVITATION_PREFIX)
    row.digest, row.confirmed_by, row.expires_at = _digest(text), by, _in_days(INVITATION_DAYS)
    session.flush()
    return text


def withdraw_invitations(session: Session, *which: object) -> None:
    """Unused invitations no longer work."""
    unused = (Invitation.used_at.is_(None), Invitation.revoked_at.is_(None))
    session.execute(update(Invitation).where(or_(*which), *unused).values(revoked_at=func.now()))  # type: ignore[arg-type]


def redeem(session: Session, text: str, *, label: str, days: int) -> tuple[Key, str]:
    """A first key and its text for whoever holds an invitation. Revokes the person's other keys."""
    new, id = _new(PREFIX), uuid.uuid4()
    asked = func.redeem_invitation(text, id, _digest(new), label, _in_days(days))
    answer = session.scalars(select(asked)).one()
    if answer != "redeemed":
        session.commit()  # the refusal is counted, for admins to see
        raise InvitationRefused(_REFUSED[answer])
    return session.get_one(Key, id), new


_REFUSED = {
    "unknown": "It is not one of this service; check that you copied all of it.",
    "used": "It was used before. If that was not you, tell another admin than the one who sent it, now.",
    "revoked": "It was withdrawn or replaced; ask an admin for another.",
    "expired": "It has expired; ask an admin for another.",
}


def add_own_key(session: Session, current: str, *, label: str, days: int) -> tuple[Key, str] | None:
    """A further key for the owner of a valid one; None if `current` is not valid."""
    new, id = _new(PREFIX), uuid.uuid4()
    made = session.scalars(select(func.add_own_key(current, id, _digest(new), label, _in_days(days)))).one()
    return (session.get_one(Key, id), new) if made else None


def person_of(session: Session, text: str) -> tuple[Person, Key] | None:
    """The owner of a valid key. Queried on every request, so that revoking takes effect at once."""
    good = (Key.revoked_at.is_(None), Key.expires_at > func.now(), Person.disabled_at.is_(None))
    query = (
        select(Person, Key).join(Key, Key.person_id == Person.id).where(Key.digest == _digest(text), *good)
    )
    found = session.execute(query).one_or_none()
    return (found[0], found[1]) if found else None


def revoke_key(session: Session, key_id: uuid.UUID, *, of: uuid.UUID | None = None) -> bool:
    """Revokes a key; True if it exists and, if `of` is given, is that person's. Safe to repeat."""
    done = update(Key).where(Key.id == key_id, *[Key.person_id == of] if of else [])
    done = done.values(revoked_at=func.coalesce(Key.revoked_at, func.now()))
    return session.scalars(done.returning(Key.id)).one_or_none() is not None


def require_independent(session: Session, one: uuid.UUID, other: uuid.UUID) -> None:
    """Raises unless the database considers the two people independent."""
    if not session.scalars(select(func.independent(one, other))).one():
        days = session.scalars(select(Rules.independent_days)).one()
        raise NotIndependent(
            f"In the last {days} days one of you invited the other, or the same person invited both; "
            "ask somebody else, or wait until then."
        )


def _new(prefix: str) -> str:
    return prefix + secrets.token_urlsafe(32)  # 256 random bits


def _in_days(days: int) -> datetime:
    return datetime.now(UTC) + timedelta(days=days)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
