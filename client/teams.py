"""`sluice teams`: who shares datasets, jobs and reviews with whom."""

from typing import TYPE_CHECKING, Annotated

import typer

from client.connection import connected, listing
from client.keys import Who, id_of, show_people
from client.problems import CannotRun

if TYPE_CHECKING:
    from client.api import Json, Sluice

app = typer.Typer(no_args_is_help=True, help="Teams: who shares datasets and reviews (admins).")

Name = Annotated[str, typer.Argument(metavar="TEAM", help="Name of a team.")]


def _found(service: "Sluice", name: str) -> str:
    for one in service.teams():
        if name in (one["name"], one["id"]):
            return str(one["id"])
    raise CannotRun(f"no team is called {name}: sluice teams list shows all")


def show_teams(teams: "list[Json]") -> None:
    listing("team", "name", "people", rows=((one["id"], one["name"], str(one["people"])) for one in teams))


@app.command("add")
@connected(lambda team: show_teams([team]))
def add(service: "Sluice", name: Name) -> "Json":
    """Make a team."""
    return service.add_team(name)


@app.command("list")
@connected(show_teams)
def list_teams(service: "Sluice") -> "list[Json]":
    """All teams."""
    return service.teams()


@app.command("move")
@connected(lambda person: show_people([person]))
def move(
    service: "Sluice",
    person: Who,
    team: Annotated[
        str | None, typer.Argument(metavar="[TEAM]", help="Name of a team; none if left out.")
    ] = None,
    datasets: Annotated[
        bool, typer.Option("--datasets", help="Their datasets that belong to no team go with them.")
    ] = False,
) -> "Json":
    """Put a person into a team, or into none. What they registered in a team stays with that team."""
    id = id_of(service, person)
    return service.move_person(id, _found(service, team) if team else None, datasets=datasets)
