"""`sluice jobs`: price a training, start it, follow it, stop it."""

from collections.abc import Iterator
from datetime import datetime
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from client.connection import connected, output
from client.datasets import read_json
from client.problems import CannotRun
from client.quote import AccountantName

if TYPE_CHECKING:
    from rich.progress import Task
    from rich.text import Text

    from client.api import Json, Sluice

app = typer.Typer(no_args_is_help=True, help="Training jobs: price, start, follow, stop.")


class StateName(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    TRAINED = "trained"
    FAILED = "failed"
    CANCELLED = "cancelled"


Id = Annotated[str, typer.Argument(metavar="JOB", help="Id of a job.")]
DatasetId = Annotated[str, typer.Argument(metavar="DATASET", help="Id of a dataset that is ready.")]
PlanFile = Annotated[
    Path,
    typer.Argument(
        metavar="PLAN", help="JSON of a plan, or what `sluice quote KIND --json` prints; - reads it."
    ),
]
Epsilon = Annotated[
    float | None,
    typer.Option(help="Find the least noise for this epsilon; else the plan's own noise counts."),
]
AccountantOption = Annotated[AccountantName, typer.Option(help="Which reading meets --epsilon.")]
Most = Annotated[int, typer.Option("--limit", min=1, help="How many at most, newest first.")]


def readings(epsilon: "Json") -> str:
    named = {"renyi": "Rényi", "pld": "PLD"}
    return ", ".join(
        f"{epsilon[key]:.4f} by {name}" for key, name in named.items() if epsilon[key] is not None
    )


def show_one(job: "Json") -> None:
    from rich.table import Table

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_row("job", job["id"])
    table.add_row("state", _state(job))
    table.add_row("plan", job["plan"].get("kind", ""))
    table.add_row("steps", f"{job['progress']['step']:,} of {job['progress']['steps']:,}")
    table.add_row("epsilon", readings(job["epsilon"]))
    table.add_row("cost", f"{job['cost'] / 1e9:.9f}")
    table.add_row("dataset", job["dataset"])
    table.add_row("account", job["account"])
    output().print(table)


def _state(job: "Json") -> str:
    asked = ", asked to stop" if job["cancel_asked"] and job["finished_at"] is None else ""
    return str(job["state"]) + asked + (f": {job['fault']}" if job["fault"] else "")


def show_many(jobs: "list[Json]") -> None:
    from rich.table import Table

    table = Table("job", "state", "plan", "steps", "epsilon", "made")
    for one in jobs:
        steps = f"{one['progress']['step']:,}/{one['progress']['steps']:,}"
        made = datetime.fromisoformat(one["created_at"]).astimezone().strftime("%Y-%m-%d %H:%M")
        epsilon = one["epsilon"]["renyi"]
        shown = "" if epsilon is None else f"{epsilon:.4f}"
        table.add_row(one["id"], _state(one), one["plan"].get("kind", ""), steps, shown, made)
    output().print(table)


def show_quote(quote: "Json") -> None:
    from rich.table import Table

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_row("epsilon", readings(quote["epsilon"]))
    table.add_row("total after it", readings(quote["total_after"]))
    table.add_row("delta, relation", f"{quote['delta']:g}, {quote['relation'].replace('_', '-')}")
    table.add_row("noise multiplier", f"{quote['plan']['noise_multiplier']:g}")
    table.add_row("cost", f"{quote['cost'] / 1e9:.9f} at order {quote['order']}")
    table.add_row("left", f"{quote['left']['cost'] / 1e9:.9f}, worth epsilon {quote['left']['epsilon']:.4f}")
    if quote["left_after"]:
        after = quote["left_after"]
        table.add_row("left after it", f"{after['cost'] / 1e9:.9f}, worth epsilon {after['epsilon']:.4f}")
        table.add_row("room for", f"{quote['fits']:,} such jobs")
    else:
        largest = quote["largest_epsilon"]
        table.add_row(
            "does not fit", "nothing is left" if largest is None else f"epsilon {largest:.4f} would"
        )
    if quote["published"]:
        paper = quote["published"]
        table.add_row("published", f"{paper['claimed_epsilon']:.4g}; no guarantee: {paper['flaw']}")
    output().print(table)


def follow(jobs: "Iterator[Json]") -> None:
    """A bar with steps, rate, time left and epsilon, until the job ends."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.text import Text

    class Rate(TextColumn):
        def render(self, task: "Task") -> "Text":
            return Text("" if task.speed is None else f"{task.speed:,.1f} steps/s")

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        Rate(""),
        TimeRemainingColumn(),
    )
    console, job = output(stderr=True), None
    with Progress(
        *columns, TextColumn("{task.fields[epsilon]}"), console=console, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("waiting", total=None, epsilon="")
        for job in jobs:
            at = job["progress"]
            charged = f"epsilon {readings(job['epsilon'])}"
            bar.update(
                task, description=_state(job), completed=at["step"], total=at["steps"], epsilon=charged
            )
    if job is not None:
        show_one(job)


def _until_trained(jobs: "Iterator[Json]") -> "Iterator[Json]":
    job: Any = None
    for job in jobs:
        yield job
    if job is not None and job["state"] != "trained":
        raise CannotRun(f"job {job['id']} ended as {_state(job)}")


def _plan(file: Path) -> Any:
    body = read_json(file)
    return body["plan"] if isinstance(body, dict) and isinstance(body.get("plan"), dict) else body


def _target(epsilon: float | None, accountant: AccountantName) -> "Json | None":
    return None if epsilon is None else {"epsilon": epsilon, "accountant": accountant.value}


@app.command()
@connected(show_quote)
def quote(
    service: "Sluice",
    dataset: DatasetId,
    plan: PlanFile,
    epsilon: Epsilon = None,
    accountant: AccountantOption = AccountantName.RENYI,
) -> "Json":
    """What a plan would cost this dataset's budget, and what would be left. Writes nothing."""
    return service.quote(dataset, _plan(plan), target=_target(epsilon, accountant))


@app.command()
@connected(lambda started: (follow if isinstance(started, Iterator) else show_one)(started))
def start(
    service: "Sluice",
    dataset: DatasetId,
    plan: PlanFile,
    epsilon: Epsilon = None,
    accountant: AccountantOption = AccountantName.RENYI,
    watch: Annotated[bool, typer.Option("--watch", help="Follow it until it ends.")] = False,
) -> "Json | Iterator[Json]":
    """Charge the budget and enqueue a training."""
    job = service.start_job(dataset, _plan(plan), target=_target(epsilon, accountant))
    return _until_trained(service.watch(job["id"])) if watch else job


@app.command("list")
@connected(show_many)
def list_jobs(
    service: "Sluice",
    state: Annotated[StateName | None, typer.Option(help="Only those in this state.")] = None,
    dataset: Annotated[str | None, typer.Option(help="Only those on this dataset.")] = None,
    limit: Most = 50,
) -> "list[Json]":
    """Your jobs, newest first; an admin sees all."""
    return list(islice(service.jobs(state=state.value if state else None, dataset=dataset), limit))


@app.command()
@connected(show_one)
def show(service: "Sluice", id: Id) -> "Json":
    """One job: state, steps, what it cost."""
    return service.job(id)


@app.command()
@connected(follow)
def watch(service: "Sluice", id: Id) -> "Iterator[Json]":
    """Follow a job until it ends. With --json: one line for each change."""
    return _until_trained(service.watch(id))


@app.command()
@connected(show_one)
def cancel(service: "Sluice", id: Id) -> "Json":
    """Stop a job. Before its records are opened the charge is given back, later it stays."""
    return service.cancel(id)
