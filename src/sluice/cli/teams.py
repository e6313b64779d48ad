"""`sluice teams`: who shares datasets, jobs and reviews with whom."""

from typing import TYPE_CHECKING, Annotated

import typer

from sluice.cli.connection import connected, print_table
from sluice.cli.keys import Who, id_of, show_people
from sluice.client.problems import CannotRun

if TYPE_CHECKING:
    from sluice.client.api import Json, Sluice

app = typer.Typer(no_args_is_help=True, help="Teams: who shares datasets and reviews (admins).")

Name = Annotated[str, typer.Argument(metavar="TEAM", help="Name of a team.")]


def _found(service: "Sluice", name: str) -> str:
    for one in service.teams():
        if name in (one["name"], one["id"]):
            return str(one["id"])
    raise CannotRun(f"no team is called {name}: sluice teams list shows all")


def show_teams(teams: "list[Json]") -> None:
    def row(one: "Json") -> tuple[str, ...]:
        def of(limit: int | None) -> str:
            return "" if limit is None else f" of {limit:,}"

        quotas = one["quotas"]
        seconds = "" if quotas["job_seconds"] is None else f"{quotas['job_seconds']:,} s"
        held = f"{one['bytes']:,}{of(quotas['bytes'])}", f"{one['jobs']:,}{of(quotas['jobs'])}", seconds
        return one["id"], one["name"], str(one["people"]), *held

    print_table("team", "name", "people", "bytes", "jobs", "longest job", rows=map(row, teams))


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


@app.command("quota")
@connected(lambda team: show_teams([team]))
def quota(
    service: "Sluice",
    team: Name,
    bytes: Annotated[int | None, typer.Option(min=0, help="Of its datasets, until they are removed.")] = None,
    jobs: Annotated[int | None, typer.Option(min=0, help="That wait or run at once.")] = None,
    job_seconds: Annotated[int | None, typer.Option(min=1, help="That one job may run.")] = None,
) -> "Json":
    """Set what a team may use. What is left out is the default of the site."""
    quotas = {"bytes": bytes, "jobs": jobs, "job_seconds": job_seconds}
    return service.set_quotas(_found(service, team), quotas)


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
