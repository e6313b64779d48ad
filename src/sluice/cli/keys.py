"""`sluice people` and `sluice keys`: people, their roles, invitations and API keys."""

import uuid
from contextlib import suppress
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from sluice.cli.connection import connected, output, table_of
from sluice.client.problems import CannotRun
from sluice.client.terminal import inert

if TYPE_CHECKING:
    from sluice.client.api import Json, Sluice

app = typer.Typer(no_args_is_help=True, help="Your API keys: add, list, revoke (admins: anybody's).")
people = typer.Typer(no_args_is_help=True, help="People, their roles and invitations (admins).")


class RoleName(StrEnum):
    ADMIN = "admin"
    CURATOR = "curator"
    ANALYST = "analyst"


Who = Annotated[str, Argument(metavar="PERSON", help="Name or id of a person.")]
OptionalPerson = Annotated[str | None, Argument(metavar="[PERSON]", help="Name or id of a person.")]
InvitationId = Annotated[str, Argument(metavar="INVITATION", help="Id of an invitation.")]


def id_of(service: "Sluice", name: str) -> str:
    """The id of a person given by name or id."""
    with suppress(ValueError):
        return str(uuid.UUID(name))
    for person in service.people():
        if name == person["name"]:
            return str(person["id"])
    raise CannotRun(f"nobody is called {name}: sluice people list shows everybody")


def show_people(people: "Json | list[Json]") -> None:
    listed = people if isinstance(people, list) else [people]
    names = {person["id"]: person["name"] for person in listed}
    table_of({
        "person": "id", "name": "name", "role": "role",
        "added by": lambda person: str(names.get(person["created_by"], person["created_by"] or "")),
        "": lambda person: "disabled" if person["disabled"] else "",
    })(listed)  # fmt: skip


show_keys = table_of({
    "key": "id", "label": "label", "created": lambda key: key["created_at"][:10],
    "expires": lambda key: key["expires_at"][:10],
    "revoked": lambda key: (key["revoked_at"] or "")[:19],
})  # fmt: skip


def _invited_by(invitation: "Json") -> str:
    people = (invitation[name] for name in ("issued_by", "confirmed_by"))
    return ", ".join(person for person in people if person) or "installation"


show_invitations = table_of({
    "invitation": "id", "person": "person", "state": "state", "by": _invited_by,
    "created": lambda invitation: invitation["created_at"][:10],
    "": lambda invitation: f"refused {invitation['refused']} times" if invitation["refused"] else "",
})  # fmt: skip


def _print_secret(remark: str, secret: str) -> None:
    output(stderr=True).print(f"{remark}; shown only once:")
    print(inert(secret, lines=False))


def show_new_key(key: "Json") -> None:
    _print_secret(f"key {key['id']}, valid until {key['expires_at'][:10]}", key["key"])


def show_invitation(made: "Json") -> None:
    if made["invitation"] is None:
        output(stderr=True).print(
            f"inviting an admin takes two: another admin runs sluice people confirm {made['id']}"
        )
    else:
        until = made["expires_at"][:10]
        _print_secret(f"invitation for sluice login, works once, valid until {until}", made["invitation"])


def show_added(person: "Json") -> None:
    show_people(person)
    show_invitation(person["invitation"])


@people.command("add")
@connected(show_added)
def add_person(
    service: "Sluice",
    name: Annotated[str, Argument(help="Letters, digits, . _ @ -; stays in the ledger permanently.")],
    role: Annotated[RoleName, Option(help="What this person may do.")],
) -> "Json":
    """Add a person and print an invitation, from which they create a key that only they know."""
    return service.add_person(name=name, role=role.value)


@people.command("invite")
@connected(show_invitation)
def invite(service: "Sluice", person: Who) -> "Json":
    """Invite a person again who lost their key or was disabled; using it revokes their other keys."""
    return service.invite(id_of(service, person))


@people.command("confirm")
@connected(show_invitation)
def confirm(service: "Sluice", id: InvitationId) -> "Json":
    """Confirm the invitation of an admin that another admin proposed, and print it."""
    return service.confirm_invitation(id)


@people.command("invitations")
@connected(show_invitations)
def list_invitations(service: "Sluice", person: OptionalPerson = None) -> "list[Json]":
    """List who invited whom, newest first, and how often an invitation was refused after its end."""
    return list(service.invitations(id_of(service, person) if person else None))


@people.command("withdraw")
@connected(lambda result: output().print(f"invitation {result['withdrawn']} withdrawn"))
def withdraw(service: "Sluice", id: InvitationId) -> "Json":
    """Withdraw an invitation that nobody used."""
    service.withdraw_invitation(id)
    return {"withdrawn": id}


@people.command("list")
@connected(show_people)
def list_people(service: "Sluice") -> "list[Json]":
    """List everybody, newest first."""
    return list(service.people())


@people.command("disable")
@connected(show_people)
def disable(service: "Sluice", person: Who) -> "Json":
    """Disable a person at once; the ledger keeps what they did."""
    return service.disable_person(id_of(service, person))


@app.command("add")
@connected(show_new_key)
def add_key(
    service: "Sluice",
    label: Annotated[str, Option(help="Where it is used, to recognise it later.")] = "key",
    days: Annotated[int, Option(min=1, max=3650, help="Days until it expires.")] = 365,
) -> "Json":
    """Create another key for you; it is shown only once."""
    return service.add_key(label=label, days=days)


@app.command("list")
@connected(show_keys)
def list_keys(service: "Sluice", person: OptionalPerson = None) -> "list[Json]":
    """List your keys or, for an admin, those of a person; without their text, which is not stored."""
    return service.keys(id_of(service, person) if person else None)


@app.command("revoke")
@connected(lambda result: output().print(f"key {result['revoked']} revoked"))
def revoke(service: "Sluice", id: Annotated[str, Argument(metavar="KEY", help="Id of a key.")]) -> "Json":
    """Revoke a key of yours at once; admins may revoke anybody's."""
    service.revoke_key(id)
    return {"revoked": id}
