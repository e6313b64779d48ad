"""`sluice teams`: people who share datasets, jobs and reviews."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from sluice.cli.connection import connected, table_of
from sluice.cli.keys import Who, id_of, show_people
from sluice.client.problems import CannotRun

if TYPE_CHECKING:
    from sluice.client.api import Json, Sluice

app = typer.Typer(no_args_is_help=True, help="Teams: people who share datasets and reviews (admins).")

Name = Annotated[str, Argument(metavar="TEAM", help="Name of a team.")]


def _team_id(service: "Sluice", name: str) -> str:
    for team in service.teams():
        if name in (team["name"], team["id"]):
            return str(team["id"])
    raise CannotRun(f"no team is called {name}: sluice teams list shows all")


def _used(name: str) -> "Callable[[Json], str]":
    def cell(team: "Json") -> str:
        quota = team["quotas"][name]
        return f"{team[name]:,}" + ("" if quota is None else f" of {quota:,}")

    return cell


def _longest_job(team: "Json") -> str:
    seconds = team["quotas"]["job_seconds"]
    return "" if seconds is None else f"{seconds:,} s"


show_teams = table_of({
    "team": "id", "name": "name", "people": "people", "bytes": _used("bytes"),
    "jobs": _used("jobs"), "longest job": _longest_job,
})  # fmt: skip


@app.command("add")
@connected(show_teams)
def add(service: "Sluice", name: Name) -> "Json":
    """Create a team."""
    return service.add_team(name)


@app.command("list")
@connected(show_teams)
def list_teams(service: "Sluice") -> "list[Json]":
    """List all teams."""
    return service.teams()


@app.command("quota")
@connected(show_teams)
def quota(
    service: "Sluice",
    team: Name,
    bytes: Annotated[int | None, Option(min=0, help="Total size of its datasets.")] = None,
    jobs: Annotated[int | None, Option(min=0, help="Jobs that wait or run at once.")] = None,
    job_seconds: Annotated[int | None, Option(min=1, help="Longest time one job may run.")] = None,
) -> "Json":
    """Set what a team may use. An option that is left out means the default of the site."""
    quotas = {"bytes": bytes, "jobs": jobs, "job_seconds": job_seconds}
    return service.set_quotas(_team_id(service, team), quotas)


@app.command("move")
@connected(show_people)
def move(
    service: "Sluice",
    person: Who,
    team: Annotated[str | None, Argument(metavar="[TEAM]", help="Name of a team; default: none.")] = None,
    datasets: Annotated[bool, Option("--datasets", help="Also their datasets that have no team.")] = False,
) -> "Json":
    """Put a person into a team or none. What they registered in a team stays with that team."""
    id = id_of(service, person)
    return service.move_person(id, _team_id(service, team) if team else None, datasets=datasets)
