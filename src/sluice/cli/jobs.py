"""`sluice train` and `sluice jobs`: price a training, start it, follow it, stop it."""

import json
from collections.abc import Iterator
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sluice.cli.connection import bar, connected, output, print_fields, print_table, save_bytes, when
from sluice.cli.datasets import read_json
from sluice.cli.quote import AccountantName
from sluice.client.problems import CannotRun

if TYPE_CHECKING:
    from sluice.client.api import Json, Sluice

app = typer.Typer(no_args_is_help=True, help="Training jobs: price, start, follow, stop.")


class StateName(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    TRAINED = "trained"
    FAILED = "failed"
    CANCELLED = "cancelled"


class DiagnosticsName(StrEnum):
    JSONL = "jsonl"
    SVG = "svg"


Id = Annotated[str, typer.Argument(metavar="JOB", help="Id of a job.")]
DatasetId = Annotated[str, typer.Argument(metavar="DATASET", help="Id of a dataset that is ready.")]
PlanFile = Annotated[
    Path,
    typer.Argument(
        metavar="PLAN", help="JSON of a plan, or the output of `sluice quote METHOD --json`; - reads it."
    ),
]
Epsilon = Annotated[
    float | None,
    typer.Option(help="Use the least noise for this epsilon; by default, the noise of the plan."),
]
Source = Annotated[
    str | None,
    typer.Option(
        metavar="DATASET", help="Public dataset with labels and the same shape, for methods that need one."
    ),
]
Shared = Annotated[bool, typer.Option("--shared", help="Others may continue from its generator.")]
After = Annotated[
    str | None,
    typer.Option(metavar="JOB", help="Shared job whose generator the training starts from."),
]
AccountantOption = Annotated[
    AccountantName, typer.Option(help="The accountant that must read at most --epsilon.")
]
Most = Annotated[int, typer.Option("--limit", min=1, help="At most so many, newest first.")]


def readings(epsilon: "Json") -> str:
    named = {"renyi": "Rényi", "pld": "PLD"}
    return ", ".join(
        f"{epsilon[key]:.4f} by {name}" for key, name in named.items() if epsilon[key] is not None
    )


def show_one(job: "Json") -> None:
    print_fields(
        ("job", job["id"]),
        ("state", _state(job)),
        ("plan", job["plan"].get("kind", "")),
        ("steps", f"{job['progress']['step']:,} of {job['progress']['steps']:,}"),
        ("epsilon", readings(job["epsilon"])),
        ("cost", f"{job['cost'] / 1e9:.9f}"),
        ("dataset", job["dataset"]),
        ("account", job["account"]),
    )


def _state(job: "Json") -> str:
    asked = ", asked to stop" if job["cancel_asked"] and job["finished_at"] is None else ""
    return str(job["state"]) + asked + (f": {job['fault']}" if job["fault"] else "")


def show_many(jobs: "list[Json]") -> None:
    def row(job: "Json") -> tuple[str, ...]:
        steps = f"{job['progress']['step']:,}/{job['progress']['steps']:,}"
        epsilon = job["epsilon"]["renyi"]
        shown = "" if epsilon is None else f"{epsilon:.4f}"
        return job["id"], _state(job), job["plan"].get("kind", ""), steps, shown, when(job["created_at"])

    print_table("job", "state", "plan", "steps", "epsilon", "made", rows=map(row, jobs))


def show_quote(quote: "Json") -> None:
    def worth(left: "Json") -> str:
        return f"{left['cost'] / 1e9:.9f}, worth epsilon {left['epsilon']:.4f}"

    if after := quote["left_after"]:
        room = [("left after it", worth(after)), ("room for", f"{quote['fits']:,} such jobs")]
    else:
        largest = quote["largest_epsilon"]
        room = [("does not fit", "nothing is left" if largest is None else f"epsilon {largest:.4f} would")]
    if paper := quote["published"]:
        room.append(("published", f"{paper['claimed_epsilon']:.4g}; no guarantee: {paper['flaw']}"))
    print_fields(
        ("epsilon", readings(quote["epsilon"])),
        ("total after it", f"{readings(quote['total_after'])}: if all plans were chosen in advance"),
        ("delta, relation", f"{quote['delta']:g}, {quote['relation'].replace('_', '-')}"),
        ("noise multiplier", f"{quote['plan']['noise_multiplier']:g}"),
        ("cost", f"{quote['cost'] / 1e9:.9f} at order {quote['order']}"),
        ("left", worth(quote["left"])),
        *room,
    )


def follow(jobs: "Iterator[Json]") -> None:
    """Shows a progress bar until the job ends, then the job."""
    job = None
    with bar("steps") as update:
        for job in jobs:
            at, charged = job["progress"], f"epsilon {readings(job['epsilon'])}"
            update(_state(job), at["step"], at["steps"], charged)
    if job is not None:
        show_one(job)


def _follow_or_show(started: Any) -> None:
    (follow if isinstance(started, Iterator) else show_one)(started)


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
    """What a plan would cost this dataset's budget, and what would be left. Changes nothing."""
    return service.quote(dataset, _plan(plan), target=_target(epsilon, accountant))


@app.command()
@connected(_follow_or_show)
def start(
    service: "Sluice",
    dataset: DatasetId,
    plan: PlanFile,
    epsilon: Epsilon = None,
    accountant: AccountantOption = AccountantName.RENYI,
    source: Source = None,
    shared: Shared = False,
    after: After = None,
    watch: Annotated[bool, typer.Option("--watch", help="Follow it until it ends.")] = False,
) -> "Json | Iterator[Json]":
    """Charge the budget and enqueue a training."""
    target = _target(epsilon, accountant)
    job = service.start_job(dataset, _plan(plan), target=target, source=source, shared=shared, after=after)
    return _until_trained(service.watch(job["id"])) if watch else job


@connected(_follow_or_show)
def train(
    service: "Sluice",
    dataset: DatasetId,
    epsilon: Annotated[float, typer.Option(help="Epsilon of the training; the least noise for it is used.")],
    method: Annotated[
        str | None, typer.Option(help="A method of `sluice quote --help`; the recommended one by default.")
    ] = None,
    options: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="NAME=VALUE", help="An option of `sluice quote METHOD`, as steps=2000."
        ),
    ] = None,
    accountant: AccountantOption = AccountantName.RENYI,
    source: Source = None,
    shared: Shared = False,
    after: After = None,
    detach: Annotated[bool, typer.Option("--detach", help="Do not wait until it ends.")] = False,
) -> "Json | Iterator[Json]":
    """Train a synthesizer within an epsilon: charge the budget, enqueue, follow it until it ends."""
    numbers = dict(_assignment(text) for text in options or []) or None
    job = service.start_job(
        dataset,
        target=_target(epsilon, accountant),
        method=method,
        options=numbers,
        source=source,
        shared=shared,
        after=after,
    )
    return job if detach else _until_trained(service.watch(job["id"]))


def _assignment(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise CannotRun(f"{text!r} sets nothing: write it like --set steps=2000")
    try:
        return name.replace("-", "_"), json.loads(value, parse_constant=str)
    except ValueError:
        return name.replace("-", "_"), value


@app.command()
@connected(lambda done: output(stderr=True).print(f"{done['bytes']:,} bytes in {done['to']}"))
def diagnostics(
    service: "Sluice",
    id: Id,
    format: Annotated[DiagnosticsName, typer.Option(help="Numbers or a picture.")] = DiagnosticsName.JSONL,
    to: Annotated[Path | None, typer.Option("--out", help="File; standard output by default.")] = None,
) -> "Json | None":
    """Losses and gradient norms of your job, if the site keeps them. They depend on records: private."""
    return save_bytes(service.diagnostics(id, format.value), to)


@app.command("list")
@connected(show_many)
def list_jobs(
    service: "Sluice",
    state: Annotated[StateName | None, typer.Option(help="Only jobs in this state.")] = None,
    dataset: Annotated[str | None, typer.Option(help="Only jobs on this dataset.")] = None,
    limit: Most = 50,
) -> "list[Json]":
    """Your jobs, newest first; an admin sees all."""
    return list(islice(service.jobs(state=state.value if state else None, dataset=dataset), limit))


@app.command()
@connected(show_one)
def show(service: "Sluice", id: Id) -> "Json":
    """Show a job: state, steps, cost."""
    return service.job(id)


@app.command()
@connected(follow)
def watch(service: "Sluice", id: Id) -> "Iterator[Json]":
    """Follow a job until it ends. With --json: one line for each change."""
    return _until_trained(service.watch(id))


@app.command()
@connected(show_one)
def cancel(service: "Sluice", id: Id) -> "Json":
    """Stop a job. Before its records are opened the charge is voided, later it stays."""
    return service.cancel(id)
