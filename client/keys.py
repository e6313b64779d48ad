"""`sluice people` and `sluice keys`: who may act, and with which keys."""

import uuid
from contextlib import suppress
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from client.connection import connected, listing, output
from client.problems import CannotRun

if TYPE_CHECKING:
    from client.api import Json, Sluice

app = typer.Typer(no_args_is_help=True, help="API keys: give out, list, revoke (admins).")
people = typer.Typer(no_args_is_help=True, help="People and their roles (admins).")


class RoleName(StrEnum):
    ADMIN = "admin"
    CURATOR = "curator"
    ANALYST = "analyst"


Who = Annotated[str, typer.Argument(metavar="PERSON", help="Name or id of a person.")]


def id_of(service: "Sluice", person: str) -> str:
    """The id of a person given by name or id."""
    with suppress(ValueError):
        return str(uuid.UUID(person))
    for one in service.people():
        if person == one["name"]:
            return str(one["id"])
    raise CannotRun(f"nobody here is called {person}: sluice people list shows who is")


def show_people(found: "list[Json]") -> None:
    rows = ((one["id"], one["name"], one["role"], "shut out" if one["disabled"] else "") for one in found)
    listing("person", "name", "role", "", rows=rows)


def show_keys(keys: "list[Json]") -> None:
    def row(one: "Json") -> tuple[str, ...]:
        days = one["created_at"][:10], one["expires_at"][:10]
        return one["id"], one["label"], *days, (one["revoked_at"] or "")[:19]

    listing("key", "label", "made", "expires", "revoked", rows=map(row, keys))


def show_fresh(fresh: "Json") -> None:
    output(stderr=True).print(f"key {fresh['id']}, until {fresh['expires_at'][:10]}; shown this once:")
    print(fresh["key"])


@people.command("add")
@connected(lambda person: show_people([person]))
def add_person(
    service: "Sluice",
    name: Annotated[str, typer.Argument(help="Letters, digits, . _ @ -; stays with the ledger for ever.")],
    role: Annotated[RoleName, typer.Option(help="What this person may do.")],
) -> "Json":
    """Add a person; they need a key to act."""
    return service.add_person(name=name, role=role.value)


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
    person: Who,
    label: Annotated[str, typer.Option(help="Where it is used, to know it again.")] = "key",
    days: Annotated[int, typer.Option(min=1, max=3650, help="Until it expires.")] = 365,
) -> "Json":
    """A new key for a person, shown this once."""
    return service.add_key(id_of(service, person), label=label, days=days)


@app.command("list")
@connected(show_keys)
def list_keys(service: "Sluice", person: Who) -> "list[Json]":
    """The keys of a person, without their text, which nobody has."""
    return service.keys(id_of(service, person))


@app.command("revoke")
@connected(lambda gone: output().print(f"{gone['revoked']} stops working with the next request"))
def revoke(
    service: "Sluice", id: Annotated[str, typer.Argument(metavar="KEY", help="Id of a key.")]
) -> "Json":
    """Revoke a key at once."""
    service.revoke_key(id)
    return {"revoked": id}
