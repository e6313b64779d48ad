"""Which service, as whom: options, the environment, or the file that `sluice login` wrote."""

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sluice.client.config import save, saved
from sluice.client.problems import CannotRun, Refused, UnexpectedAnswer
from sluice.client.terminal import console, dumps, inert

if TYPE_CHECKING:
    from rich.console import Console

    from sluice.client.api import Sluice

Url = Annotated[
    str | None, typer.Option("--url", envvar="SLUICE_URL", help="Address of the service.", show_default=False)
]
Key = Annotated[
    str | None, typer.Option("--key", envvar="SLUICE_KEY", help="Your API key.", show_default=False)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, stable keys.")]

INVITATION_PREFIX = "sli_"

EXIT_CODES = (
    "Exit codes: 0 done, and what was asked about is well; 1 refused, out of reach, or not well "
    "(a broken ledger, a failed job, a rejected file); 2 wrong usage; 3 a release that is altered, forged "
    "or signed with an unknown key; 4 a release that was withdrawn; 130 interrupted."
)


def connect(url: str | None, key: str | None) -> "Sluice":
    """What is not given is what `sluice login` kept; its key goes to its own address only."""
    from sluice.client.api import Sluice

    if not (url and key):
        kept = saved()
        if url and kept and url.rstrip("/") != kept["url"]:
            kept.pop("key")
        url, key = url or kept.get("url"), key or kept.get("key")
    if not url:
        raise CannotRun("which service? sluice login, or give --url and --key (SLUICE_URL, SLUICE_KEY)")
    if not key:
        raise CannotRun(f"no key for {url}: sluice login --url {url}, or give --key (SLUICE_KEY)")
    return Sluice(url, key)


def output(*, stderr: bool = False) -> "Console":
    """A console that prints what it is given: names in answers are neither markup nor commands."""
    return console(stderr=stderr)


def print_fields(*rows: tuple[str, ...]) -> None:
    """What there is to say about one thing, a line each: its name, its value, perhaps a word on it."""
    from rich.table import Table

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for _ in rows[0]:
        table.add_column(overflow="fold")  # a digest that is cut short is none
    for row in rows:
        table.add_row(*(inert(cell, lines=False) for cell in row))
    output().print(table)


def print_table(*columns: str, rows: Iterable[tuple[str, ...]]) -> None:
    from rich.table import Table

    table = Table(*columns)
    for row in rows:
        table.add_row(*(inert(cell, lines=False) for cell in row))
    output().print(table)


def when(at: str) -> str:
    from datetime import datetime

    return datetime.fromisoformat(at).astimezone().strftime("%Y-%m-%d %H:%M")


def size(count: int) -> str:
    return f"{count / 1e6:,.1f} MB" if count >= 100_000 else f"{count / 1e3:,.1f} kB"


@contextmanager
def bar(unit: str) -> Iterator[Callable[..., None]]:
    """A line on a terminal that says what goes on, how far, how fast and how long still; elsewhere nothing.

    What it gives is called with a description, what is done, of how much, and perhaps another word.
    """
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    out, shown = output(stderr=True), size if unit == "bytes" else "{:,}".format
    description, at, word = (
        TextColumn(f"{{task.{field}}}", markup=False)
        for field in ("description", "fields[at]", "fields[word]")
    )
    columns, more = (description, BarColumn(), at), (TimeRemainingColumn(), word)
    with Progress(*columns, *more, console=out, disable=not out.is_terminal) as progress:
        task = progress.add_task("waiting", total=None, at="", word="")

        def update(description: str, done: int, total: int, word: str = "") -> None:
            speed = progress.tasks[0].speed
            rate = f", {shown(round(speed))} a second" if speed and unit == "bytes" else ""
            rate = f", {speed:,.1f} {unit} a second" if speed and unit != "bytes" else rate
            at = f"{shown(done)} of {shown(total)}{rate}"
            description, word = inert(description, lines=False), inert(word, lines=False)
            progress.update(task, description=description, completed=done, total=total, at=at, word=word)

        yield update


def save_bytes(body: bytes, to: Path | None) -> dict[str, Any] | None:
    """Into a file, or to standard output."""
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
    """To standard output as it is; to a terminal as text that it does not obey."""
    if _is_terminal():
        sys.stdout.write(inert(body.decode(errors="replace")))
    else:
        sys.stdout.buffer.write(body)


def write_lines(parts: Iterable[bytes], to: Path | None) -> int:
    """Into a file, all of it or nothing, or to standard output; gives the number of lines."""
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
        at = to or "standard output"
        raise CannotRun(f"{at} cannot be written: name another file with --out") from None
    finally:
        if new:
            with suppress(OSError):
                new.unlink(missing_ok=True)
    return lines


def print_json(value: Any) -> None:
    """One document; or, of something that goes on, one line whenever there is news."""
    if isinstance(value, Iterator):
        for one in value:
            print(dumps(one), flush=True)
    else:
        print(dumps(value))


def with_options(command: Callable[..., None], parameters: Iterable[inspect.Parameter]) -> None:
    """Gives a function that takes anything by name the options a person sees."""
    named = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]
    command.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
    command.__annotations__ = {}


@contextmanager
def explain_unexpected_answers(url: str) -> Iterator[None]:
    """Answers are read as they should be. One that is not makes a sentence of whatever went wrong."""
    try:
        yield
    except (CannotRun, OSError, typer.Abort, typer.Exit, typer.BadParameter):
        raise
    except Exception as problem:
        raise UnexpectedAnswer(url, problem) from None


def connected(
    show: Callable[[Any], None], *, ok: Callable[[Any], bool] = lambda _: True
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Makes a command of a function that takes the service first: adds --url, --key and --json.

    What the function returns, if anything, is printed as JSON, or by `show` for people. The exit code is 1
    unless `ok` is true of it.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., None]:
        def command(*, url: str | None, key: str | None, as_json: bool, **options: Any) -> None:
            with connect(url, key) as service, explain_unexpected_answers(service.url):
                result = function(service, **options)
                if result is not None:
                    (print_json if as_json else show)(result)
            if not ok(result):
                raise typer.Exit(1)

        own = list(inspect.signature(function).parameters.values())[1:]
        more = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
            for name, default, kind in (("url", None, Url), ("key", None, Key), ("as_json", False, AsJson))
        ]
        with_options(command, [*own, *more])
        command.__name__, command.__doc__ = function.__name__, function.__doc__
        return command

    return decorate


def login(url: Url = None, key: Key = None, as_json: AsJson = False) -> None:
    """Keep the address of a service and your key in a file only you can read.

    Without --key it is asked for, or read from standard input: on a command line others can see it. In place
    of a key give the invitation that an admin sent you: a key that nobody else has seen is made from it.
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
        except CannotRun as problem:  # the invitation is used up: the key must not be lost
            raise CannotRun(f"{problem}; your key, shown this once: {key}") from None
    with Sluice(url, key) as service, explain_unexpected_answers(service.url):
        who = service.me()
        named = f"{who['name']} ({who['role']})"
        path = save(service.url, key)
        with suppress(Refused):  # an older service signs nothing
            pin_signing_keys(service, accept_changes=True)
            upload_key(service, accept_changes=True)
        if as_json:
            print_json({"url": service.url, "file": str(path), **who})
        else:
            output().print(f"{named} at {service.url}; kept in {path}")


def saved_url() -> str | None:
    try:
        return saved().get("url")
    except CannotRun:  # damaged or open to others: about to be written anew
        return None
