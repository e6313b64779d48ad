"""Request and response bodies for people, invitations and API keys."""

import uuid
from datetime import datetime
from typing import Annotated

from pydantic import Field

from core.people import INVITATION_PREFIX, LONGEST_DAYS, NAME, Role
from core.tables import Person
from service.schemas import Body, Text, View, Whole


class NewPerson(Body):
    name: Annotated[str, Field(pattern=NAME, examples=["ada"])]
    role: Role


class PersonView(View):
    """`created_by` is null for people added by the installation or by single sign-on."""

    id: uuid.UUID
    name: str
    role: Role
    team: uuid.UUID | None
    disabled: bool
    created_by: uuid.UUID | None

    @classmethod
    def of(cls, row: Person) -> "PersonView":
        return cls.from_row(row, disabled=row.disabled_at is not None)


class InvitationView(View):
    """`waiting` until an independent admin confirms it; `refused` counts attempts to use it afterwards."""

    id: uuid.UUID
    person: uuid.UUID
    state: str
    issued_by: uuid.UUID | None
    confirmed_by: uuid.UUID | None
    created_at: datetime
    expires_at: datetime
    used_at: datetime | None
    refused: int


class FreshInvitation(InvitationView):
    """`invitation` is shown in this response only and not stored; null while the invitation is waiting."""

    invitation: str | None


class AddedPerson(PersonView):
    invitation: FreshInvitation


class NewKey(Body):
    label: Text = "key"
    days: Annotated[Whole, Field(ge=1, le=LONGEST_DAYS, description="Days until it expires.")] = 365


class Redeem(NewKey):
    invitation: Annotated[
        str,
        Field(pattern=rf"^{INVITATION_PREFIX}[A-Za-z0-9_-]{{43}}$", examples=[INVITATION_PREFIX + "A" * 43]),
    ]


class KeyView(View):
    """`issued_by`: the admin who invited the owner, or the owner for keys they added themselves."""

    id: uuid.UUID
    person: uuid.UUID
    label: str
    created_at: datetime
    expires_at: datetime
    revoked_at: datetime | None
    issued_by: uuid.UUID | None


class FreshKey(View):
    """`key` is shown in this response only; the service stores its hash."""

    id: uuid.UUID
    key: str
    expires_at: datetime
