"""`sluice audit-log`: who did, read or downloaded what, when and from where; whether the log is intact."""

import inspect
import json
from collections.abc import Callable, Iterator
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from sluice.cli.connection import Out, connected, json_lines, output, show_export, table_of, when, write_lines
from sluice.client.problems import CannotRun

if TYPE_CHECKING:
    from sluice.client.api import Json, Sluice

app = typer.Typer(no_args_is_help=True, help="Who did, read or downloaded what (admins).")

_FORMATS = ["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%dT%H:%M:%S%z"]
_FILTERS: "dict[str, Any]" = {
    "person": Annotated[str | None, Option(help="Name or id of a person.")],
    "action": Annotated[str | None, Option(help="Part of an action, such as download or 'DELETE /v1'.")],
    "object": Annotated[str | None, Option(help="Id of the object acted on, or the name of a file.")],
    "since": Annotated[datetime | None, Option(formats=_FORMATS, help="Earliest time, local.")],
    "until": Annotated[datetime | None, Option(formats=_FORMATS, help="Latest time, exclusive, local.")],
}


def filtered(function: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces the second parameter of a command, a dict of filters, by an option for each filter."""

    def command(service: "Sluice", **options: Any) -> Any:
        values = {name: options.pop(name) for name in _FILTERS}
        filters = {
            name: value.astimezone().isoformat() if isinstance(value, datetime) else value
            for name, value in values.items()
        }
        return function(service, filters, **options)

    service, _, *own = inspect.signature(function).parameters.values()
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    options = [inspect.Parameter(name, kind, default=None, annotation=_FILTERS[name]) for name in _FILTERS]
    command.__signature__ = inspect.Signature([service, *options, *own])  # type: ignore[attr-defined]
    command.__name__, command.__doc__ = function.__name__, function.__doc__
    return command


show_rows = table_of({
    "row": "number", "at": lambda row: when(row["at"]),
    "who": lambda row: row["name"] or row["writer"], "from": lambda row: row["address"] or "",
    "action": "action", "objects": lambda row: " ".join(row["objects"]),
    "refused": lambda row: "" if row["status"] is None else str(row["status"]),
    "times": lambda row: "" if row["times"] == 1 else str(row["times"]),
})  # fmt: skip


@app.command()
@connected(show_rows)
@filtered
def show(
    service: "Sluice",
    filters: "Json",
    last: Annotated[int, Option(min=1, help="Maximum number of rows.")] = 50,
) -> "list[Json]":
    """Print rows, newest first."""
    return list(islice(service.audit_log(**filters), last))


@app.command()
@connected(show_export)
@filtered
def export(service: "Sluice", filters: "Json", to: Out = None) -> "Json | None":
    """Write rows as JSON lines, oldest first. A file without filters can be verified."""
    rows = write_lines(json_lines(service.export_audit_log(**filters)), to)
    return {"rows": rows, "to": str(to)} if to else None


def _exported(file: Path) -> Iterator[Any]:
    try:
        with file.open() as lines:
            for line in lines:
                yield json.loads(line)
    except (OSError, ValueError):
        raise CannotRun(
            f"{file} cannot be read as JSON lines: sluice audit-log export --out writes them"
        ) from None


def show_verdict(verdict: "Json") -> None:
    if verdict["ok"]:
        output().print(f"{verdict['rows']} rows verified, the last has digest {verdict['head']}")
    else:
        output().print(f"the audit log is BROKEN: row {verdict['broken_row']} {verdict['why']}")


@app.command()
@connected(show_verdict, ok=lambda verdict: bool(verdict["ok"]))
def verify(
    service: "Sluice",
    file: Annotated[Path | None, Argument(metavar="[FILE]", help="An export; default: the service.")] = None,
    head: Annotated[str | None, Option(help="Digest of an earlier verify; it must be in the log.")] = None,
) -> "Json":
    """Fetch all rows and recompute their hash chain here; exit code 1 names the first broken row."""
    from sluice.release.audit_log import check

    seen = head is None

    def rows() -> Iterator[Any]:
        nonlocal seen
        for row in _exported(file) if file else service.export_audit_log():
            seen = seen or (isinstance(row, dict) and row.get("digest") == head)
            yield row

    count, last, broken = check(rows())
    number, why = (broken.number, broken.why) if broken else (None, None)
    if broken is None and not seen:
        number, why = count, "and all before it do not include the digest that was given"
    return {"ok": why is None, "rows": count, "head": last.hex(), "broken_row": number, "why": why}
