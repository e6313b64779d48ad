"""`sluice people` and `sluice keys`: who may act, and with which keys."""

import uuid
from contextlib import suppress
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from sluice.cli.connection import connected, output, print_table
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


Who = Annotated[str, typer.Argument(metavar="PERSON", help="Name or id of a person.")]
OfWhom = Annotated[str | None, typer.Argument(metavar="[PERSON]", help="Name or id of a person.")]
InvitationId = Annotated[str, typer.Argument(metavar="INVITATION", help="Id of an invitation.")]


def id_of(service: "Sluice", person: str) -> str:
    """The id of a person given by name or id."""
    with suppress(ValueError):
        return str(uuid.UUID(person))
    for one in service.people():
        if person == one["name"]:
            return str(one["id"])
    raise CannotRun(f"nobody here is called {person}: sluice people list shows who is")


def show_people(found: "list[Json]") -> None:
    names = {one["id"]: one["name"] for one in found}

    def row(one: "Json") -> tuple[str, ...]:
        by = one["created_by"] or ""
        return one["id"], one["name"], one["role"], names.get(by, by), "shut out" if one["disabled"] else ""

    print_table("person", "name", "role", "added by", "", rows=map(row, found))


def show_keys(keys: "list[Json]") -> None:
    def row(one: "Json") -> tuple[str, ...]:
        days = one["created_at"][:10], one["expires_at"][:10]
        return one["id"], one["label"], *days, (one["revoked_at"] or "")[:19]

    print_table("key", "label", "made", "expires", "revoked", rows=map(row, keys))


def show_fresh(fresh: "Json") -> None:
    output(stderr=True).print(f"key {fresh['id']}, until {fresh['expires_at'][:10]}; shown this once:")
    print(inert(fresh["key"], lines=False))


def show_invitation(made: "Json") -> None:
    say = output(stderr=True).print
    if made["invitation"] is None:
        say(f"an admin needs two: another admin confirms it with sluice people confirm {made['id']}")
    else:
        say(f"invitation, good once, until {made['expires_at'][:10]}, for sluice login; shown this once:")
        print(inert(made["invitation"], lines=False))


def show_invitations(found: "list[Json]") -> None:
    def row(one: "Json") -> tuple[str, ...]:
        by = ", ".join(one[name] for name in ("issued_by", "confirmed_by") if one[name]) or "installation"
        tried = f"tried again {one['refused']} times" if one["refused"] else ""
        return one["id"], one["person"], one["state"], by, one["created_at"][:10], tried

    print_table("invitation", "person", "state", "by", "made", "", rows=map(row, found))


@people.command("add")
@connected(lambda person: (show_people([person]), show_invitation(person["invitation"])))
def add_person(
    service: "Sluice",
    name: Annotated[str, typer.Argument(help="Letters, digits, . _ @ -; stays with the ledger for ever.")],
    role: Annotated[RoleName, typer.Option(help="What this person may do.")],
) -> "Json":
    """Add a person and print an invitation for them; with it they make a key that only they know."""
    return service.add_person(name=name, role=role.value)


@people.command("invite")
@connected(show_invitation)
def invite(service: "Sluice", person: Who) -> "Json":
    """Invite somebody again who lost their key or was disabled; using it revokes their other keys."""
    return service.invite(id_of(service, person))


@people.command("confirm")
@connected(show_invitation)
def confirm(service: "Sluice", id: InvitationId) -> "Json":
    """Confirm that an admin whom another admin invited may come, and print the invitation."""
    return service.confirm_invitation(id)


@people.command("invitations")
@connected(show_invitations)
def list_invitations(service: "Sluice", person: OfWhom = None) -> "list[Json]":
    """Who invited whom, newest first, and whether an invitation was tried after its end."""
    return list(service.invitations(id_of(service, person) if person else None))


@people.command("withdraw")
@connected(lambda gone: output().print(f"{gone['withdrawn']} no longer works"))
def withdraw(service: "Sluice", id: InvitationId) -> "Json":
    """Withdraw an invitation that nobody used."""
    service.withdraw_invitation(id)
    return {"withdrawn": id}


@people.command("list")
@connected(show_people)
def list_people(service: "Sluice") -> "list[Json]":
    """Everybody, newest first."""
    return list(service.people())


@people.command("disable")
@connected(lambda person: show_people([person]))
def disable(service: "Sluice", person: Who) -> "Json":
    """Shut a person out at once; what they did stays in the ledger."""
    return service.disable_person(id_of(service, person))


@app.command("add")
@connected(show_fresh)
def add_key(
    service: "Sluice",
    label: Annotated[str, typer.Option(help="Where it is used, to know it again.")] = "key",
    days: Annotated[int, typer.Option(min=1, max=3650, help="Until it expires.")] = 365,
) -> "Json":
    """A further key of yours, shown this once."""
    return service.add_key(label=label, days=days)


@app.command("list")
@connected(show_keys)
def list_keys(service: "Sluice", person: OfWhom = None) -> "list[Json]":
    """Your keys, or for an admin those of a person; without their text, which is kept nowhere."""
    return service.keys(id_of(service, person) if person else None)


@app.command("revoke")
@connected(lambda gone: output().print(f"{gone['revoked']} stops working with the next request"))
def revoke(
    service: "Sluice", id: Annotated[str, typer.Argument(metavar="KEY", help="Id of a key.")]
) -> "Json":
    """Revoke a key of yours at once; admins may revoke anybody's."""
    service.revoke_key(id)
    return {"revoked": id}
