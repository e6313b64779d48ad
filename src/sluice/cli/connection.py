"""What all commands share: the connection to a service, options, and how results are printed."""

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from sluice.client.config import save, saved
from sluice.client.problems import CannotRun, Refused, UnexpectedAnswer
from sluice.client.terminal import console, dumps, inert

if TYPE_CHECKING:
    from rich.console import Console

    from sluice.client.api import Json, Sluice

Url = Annotated[
    str | None, Option("--url", envvar="SLUICE_URL", help="Address of the service.", show_default=False)
]
Key = Annotated[str | None, Option("--key", envvar="SLUICE_KEY", help="Your API key.", show_default=False)]
AsJson = Annotated[bool, Option("--json", help="Print JSON with stable keys.")]
Out = Annotated[Path | None, Option("--out", help="File to write; standard output by default.")]
Limit = Annotated[int, Option("--limit", min=1, help="Maximum number of rows, newest first.")]

INVITATION_PREFIX = "sli_"

EXIT_CODES = (
    "Exit codes: 0 success; 1 refused, unreachable, or the result is negative (broken ledger, failed job, "
    "rejected file); 2 wrong usage; 3 a release that is altered, forged or signed with an unknown key; "
    "4 a release that was withdrawn; 130 interrupted."
)


def connect(url: str | None, key: str | None) -> "Sluice":
    """Fills in what `sluice login` stored. A stored key is sent to its own address only."""
    from sluice.client.api import Sluice

    if not (url and key):
        stored = saved()
        if url and stored and url.rstrip("/") != stored["url"]:
            stored.pop("key")
        url, key = url or stored.get("url"), key or stored.get("key")
    if not url:
        raise CannotRun(
            "no service is named: run sluice login, or give --url and --key (SLUICE_URL, SLUICE_KEY)"
        )
    if not key:
        raise CannotRun(f"no key for {url}: sluice login --url {url}, or give --key (SLUICE_KEY)")
    return Sluice(url, key)


def output(*, stderr: bool = False) -> "Console":
    return console(stderr=stderr)


def print_fields(*rows: tuple[str, ...]) -> None:
    """Prints one object: a line per field with its name, its value and perhaps a remark."""
    from rich.table import Table

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for _ in rows[0]:
        table.add_column(overflow="fold")  # digests must not be cut short
    for row in rows:
        table.add_row(*(inert(cell, lines=False) for cell in row))
    output().print(table)


def print_table(*columns: str, rows: Iterable[tuple[str, ...]]) -> None:
    from rich.table import Table

    table = Table(*columns)
    for row in rows:
        table.add_row(*(inert(cell, lines=False) for cell in row))
    output().print(table)


def table_of(columns: "Mapping[str, str | Callable[[Json], str]]") -> Callable[[Any], None]:
    """A function that prints one JSON object or a list of them. Columns are its keys, or functions of it."""

    def cell(item: "Json", column: "str | Callable[[Json], str]") -> str:
        return str(item[column]) if isinstance(column, str) else column(item)

    def show(items: Any) -> None:
        listed = items if isinstance(items, list) else [items]
        rows = (tuple(cell(item, column) for column in columns.values()) for item in listed)
        print_table(*columns, rows=rows)

    return show


def when(at: str) -> str:
    from datetime import datetime

    return datetime.fromisoformat(at).astimezone().strftime("%Y-%m-%d %H:%M")


def size(count: int) -> str:
    return f"{count / 1e6:,.1f} MB" if count >= 100_000 else f"{count / 1e3:,.1f} kB"


@contextmanager
def bar(unit: str) -> Iterator[Callable[..., None]]:
    """A progress bar on a terminal; nothing elsewhere.

    Yields a function to call with a description, the amount done, the total and an optional remark.
    """
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    out, shown = output(stderr=True), size if unit == "bytes" else "{:,}".format
    description, amount, remark = (
        TextColumn(f"{{task.{field}}}", markup=False)
        for field in ("description", "fields[amount]", "fields[remark]")
    )
    columns = description, BarColumn(), amount, TimeRemainingColumn(), remark
    with Progress(*columns, console=out, disable=not out.is_terminal) as progress:
        task = progress.add_task("waiting", total=None, amount="", remark="")

        def update(description: str, done: int, total: int, remark: str = "") -> None:
            speed = progress.tasks[0].speed
            rate = (
                shown(round(speed)) if speed and unit == "bytes" else f"{speed:,.1f} {unit}" if speed else ""
            )
            progress.update(
                task,
                description=inert(description, lines=False),
                completed=done,
                total=total,
                amount=f"{shown(done)} of {shown(total)}" + (f", {rate} per second" if rate else ""),
                remark=inert(remark, lines=False),
            )

        yield update


def save_bytes(body: bytes, to: Path | None) -> dict[str, Any] | None:
    """Writes to a file, or to standard output."""
    if to is None:
        write_bytes(body)
        return None
    try:
        to.write_bytes(body)
    except OSError:
        raise CannotRun(f"{to} cannot be written: name another file with --out") from None
    return {"to": str(to), "bytes": len(body)}


def _is_terminal() -> bool:
    return sys.stdout.isatty()


def write_bytes(body: bytes) -> None:
    """Writes to standard output; on a terminal control characters are escaped."""
    if _is_terminal():
        sys.stdout.write(inert(body.decode(errors="replace")))
    else:
        sys.stdout.buffer.write(body)


def write_lines(parts: Iterable[bytes], to: Path | None) -> int:
    """Writes to a file, completely or not at all, or to standard output; returns the number of lines."""
    lines = 0
    new = to.with_name(f".{to.name}.{os.getpid()}") if to else None
    try:
        with new.open("wb") if new else nullcontext() as out:
            for part in parts:
                out.write(part) if out else write_bytes(part)
                lines += part.count(b"\n")
        if new and to:
            new.replace(to)
    except OSError:
        target = to or "standard output"
        raise CannotRun(f"{target} cannot be written: name another file with --out") from None
    finally:
        if new:
            with suppress(OSError):
                new.unlink(missing_ok=True)
    return lines


def json_lines(rows: "Iterable[Json]") -> Iterator[bytes]:
    return (dumps(row).encode() + b"\n" for row in rows)


def show_export(result: "Json") -> None:
    output(stderr=True).print(f"{result['rows']} rows in {result['to']}")


def print_json(value: Any) -> None:
    """Prints one document, or one line per item of an iterator."""
    if isinstance(value, Iterator):
        for item in value:
            print(dumps(item), flush=True)
    else:
        print(dumps(value))


def print_result(result: Any, as_json: bool, show: Callable[[Any], None]) -> None:
    (print_json if as_json else show)(result)


def with_options(command: Callable[..., None], parameters: Iterable[inspect.Parameter]) -> None:
    """Gives a function that takes **options the parameters that typer shows as options."""
    named = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    command.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
    command.__annotations__ = {}


@contextmanager
def explain_unexpected_answers(url: str) -> Iterator[None]:
    """Answers are used without checking their form; any error that causes becomes `UnexpectedAnswer`."""
    try:
        yield
    except (CannotRun, OSError, typer.Abort, typer.Exit, typer.BadParameter):
        raise
    except Exception as problem:
        raise UnexpectedAnswer(url, problem) from None


def connected(
    show: Callable[[Any], None], *, ok: Callable[[Any], bool] = lambda _: True
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Makes a command of a function whose first parameter is the service: adds --url, --key and --json.

    The result, unless None, is printed as JSON or by `show`. The exit code is 1 unless `ok` is true of it.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., None]:
        def command(*, url: str | None, key: str | None, as_json: bool, **options: Any) -> None:
            with connect(url, key) as service, explain_unexpected_answers(service.url):
                result = function(service, **options)
                if result is not None:
                    print_result(result, as_json, show)
            if not ok(result):
                raise typer.Exit(1)

        own = list(inspect.signature(function).parameters.values())[1:]
        common = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
            for name, default, kind in (("url", None, Url), ("key", None, Key), ("as_json", False, AsJson))
        ]
        with_options(command, [*own, *common])
        command.__name__, command.__doc__ = function.__name__, function.__doc__
        return command

    return decorate


def login(url: Url = None, key: Key = None, as_json: AsJson = False) -> None:
    """Store the address of a service and your key in a file that only you can read.

    Without --key you are asked for it, or it is read from standard input: other users can see command lines.
    Instead of a key you can give the invitation that an admin sent you: it creates a key that nobody else has
    seen.
    """
    from sluice.client.api import Sluice
    from sluice.client.trust import pin_signing_keys, upload_key

    url = url or (
        saved_url() or typer.prompt("Address of the service", default="http://127.0.0.1:8000", err=True)
    )
    if not key:
        key = (
            typer.prompt("API key or invitation", hide_input=True, err=True)
            if sys.stdin.isatty()
            else sys.stdin.readline()
        )
    key = key.strip()
    if key.startswith(INVITATION_PREFIX):
        with Sluice(url) as service, explain_unexpected_answers(service.url):
            key = str(service.redeem(key)["key"])
        try:
            save(service.url, key)
        except CannotRun as problem:  # the invitation is used up, so the key must not be lost
            raise CannotRun(f"{problem}; your key, shown only once: {key}") from None
    with Sluice(url, key) as service, explain_unexpected_answers(service.url):
        person = service.me()
        name = f"{person['name']} ({person['role']})"  # before saving: a malformed answer stores nothing
        path = save(service.url, key)
        with suppress(Refused):  # older services do not sign
            pin_signing_keys(service, accept_changes=True)
            upload_key(service, accept_changes=True)
        if as_json:
            print_json({"url": service.url, "file": str(path), **person})
        else:
            output().print(f"{name} at {service.url}; stored in {path}")


def saved_url() -> str | None:
    try:
        return saved().get("url")
    except CannotRun:  # damaged or readable by others: login replaces it
        return None
