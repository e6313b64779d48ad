"""`sluice audit-log`: who did, saw or downloaded what, from where, when; and whether the log is whole."""

import json
from collections.abc import Iterator
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sluice.cli.connection import connected, output, print_table, when, write_lines
from sluice.client.problems import CannotRun
from sluice.client.terminal import dumps

if TYPE_CHECKING:
    from sluice.client.api import Json, Sluice

app = typer.Typer(no_args_is_help=True, help="Who did, saw or downloaded what. For admins.")

Person = Annotated[str | None, typer.Option(help="Name or id of a person.")]
Action = Annotated[str | None, typer.Option(help="Part of an action, as download or 'DELETE /v1/datasets'.")]
Object = Annotated[str | None, typer.Option(help="Id of what was acted on, or the name of a file.")]
Formats = ["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%dT%H:%M:%S%z"]
Since = Annotated[datetime | None, typer.Option(formats=Formats, help="Not before; local time.")]
Until = Annotated[datetime | None, typer.Option(formats=Formats, help="Before; local time.")]


def _filters(since: datetime | None, until: datetime | None, **words: str | None) -> "Json":
    moments = {"since": since, "until": until}
    return words | {name: at and at.astimezone().isoformat() for name, at in moments.items()}


def show_rows(rows: "list[Json]") -> None:
    def row(one: "Json") -> tuple[str, ...]:
        who = one["name"] or one["writer"]
        answer = "" if one["status"] is None else str(one["status"])
        times = "" if one["times"] == 1 else str(one["times"])
        what = one["action"], " ".join(one["objects"])
        return str(one["number"]), when(one["at"]), who, one["address"] or "", *what, answer, times

    print_table("row", "at", "who", "from", "action", "objects", "refused", "times", rows=map(row, rows))


@app.command()
@connected(show_rows)
def show(
    service: "Sluice",
    person: Person = None,
    action: Action = None,
    object: Object = None,
    since: Since = None,
    until: Until = None,
    last: Annotated[int, typer.Option(min=1, help="How many rows at most.")] = 50,
) -> "list[Json]":
    """The newest rows first."""
    filters = _filters(since, until, person=person, action=action, object=object)
    return list(islice(service.audit_log(**filters), last))


@app.command()
@connected(lambda done: output(stderr=True).print(f"{done['rows']} rows in {done['to']}"))
def export(
    service: "Sluice",
    person: Person = None,
    action: Action = None,
    object: Object = None,
    since: Since = None,
    until: Until = None,
    to: Annotated[
        Path | None, typer.Option("--out", help="File to write; standard output by default.")
    ] = None,
) -> "Json | None":
    """Rows as JSON lines, the oldest first. Without filters the file can be verified."""
    filters = _filters(since, until, person=person, action=action, object=object)
    rows = write_lines((dumps(row).encode() + b"\n" for row in service.export_audit_log(**filters)), to)
    return {"rows": rows, "to": str(to)} if to else None


def _kept(file: Path) -> Iterator[Any]:
    try:
        with file.open() as lines:
            for line in lines:
                yield json.loads(line)
    except (OSError, ValueError):
        way_out = "sluice audit-log export --out writes them"
        raise CannotRun(f"{file} cannot be read as JSON lines: {way_out}") from None


def show_verdict(verdict: "Json") -> None:
    if verdict["ok"]:
        output().print(f"{verdict['rows']} rows verified, the last has digest {verdict['head']}")
    else:
        output().print(f"the audit log is BROKEN: row {verdict['broken_row']} {verdict['why']}")


@app.command()
@connected(show_verdict, ok=lambda verdict: bool(verdict["ok"]))
def verify(
    service: "Sluice",
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="An export; default: the service.")
    ] = None,
    head: Annotated[
        str | None, typer.Option(help="A digest that an earlier verify gave: must still be in the log.")
    ] = None,
) -> "Json":
    """Fetch all rows and recompute their chain here; exit code 1 names the first row that is broken."""
    from sluice.release.audit_log import check

    seen = head is None

    def walk() -> Iterator[Any]:
        nonlocal seen
        for row in _kept(file) if file else service.export_audit_log():
            seen = seen or (isinstance(row, dict) and row.get("digest") == head)
            yield row

    rows, last, broken = check(walk())
    number, why = (broken.number, broken.why) if broken else (None, None)
    if broken is None and not seen:
        number, why = rows, "and all before it do not include the digest that was given"
    return {"ok": why is None, "rows": rows, "head": last.hex(), "broken_row": number, "why": why}
