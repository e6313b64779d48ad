"""Who may act: people with one role each, and their API keys."""

import hashlib
import secrets
import uuid
from datetime import UTC, datetime, timedelta
from enum import StrEnum

from sqlalchemy import func, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from core.errors import Problem
from core.tables import Key, Person

PREFIX = "sl_"
LONGEST_DAYS = 3650


class Role(StrEnum):
    ADMIN = "admin"
    CURATOR = "curator"
    ANALYST = "analyst"


class NameTaken(Problem):
    status, slug, title = 409, "name-taken", "Somebody has this name already"


def add_person(session: Session, *, name: str, role: Role, subject: str | None = None) -> Person:
    person = Person(id=uuid.uuid4(), name=name, role=role, subject=subject)
    session.add(person)
    try:
        session.flush()
    except IntegrityError:
        session.rollback()
        raise NameTaken("Choose another name; names stay with the ledger for ever.") from None
    return person


def first_admin(session: Session) -> str | None:
    """The text of a first admin's key, in a service that has no admin yet."""
    if session.scalars(select(Person.id).where(Person.role == Role.ADMIN).limit(1)).one_or_none():
        return None
    _, text = issue_key(session, add_person(session, name="admin", role=Role.ADMIN), label="first", days=365)
    return text


def issue_key(session: Session, person: Person, *, label: str, days: int) -> tuple[Key, str]:
    """A new key of 256 random bits and its text, which is shown once and kept nowhere."""
    text = PREFIX + secrets.token_urlsafe(32)
    expires = datetime.now(UTC) + timedelta(days=days)
    key = Key(id=uuid.uuid4(), person_id=person.id, label=label, digest=_digest(text), expires_at=expires)
    session.add(key)
    session.flush()
    return key, text


def person_of(session: Session, text: str) -> tuple[Person, Key] | None:
    """Whose key this is, if it is good right now. Asked on every request, so that revoking acts at once."""
    good = (Key.revoked_at.is_(None), Key.expires_at > func.now(), Person.disabled_at.is_(None))
    query = (
        select(Person, Key).join(Key, Key.person_id == Person.id).where(Key.digest == _digest(text), *good)
    )
    found = session.execute(query).one_or_none()
    return (found[0], found[1]) if found else None


def revoke_key(session: Session, key_id: uuid.UUID) -> bool:
    """True if the key exists; revoking twice is fine."""
    done = update(Key).where(Key.id == key_id).values(revoked_at=func.coalesce(Key.revoked_at, func.now()))
    return session.scalars(done.returning(Key.id)).one_or_none() is not None


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
