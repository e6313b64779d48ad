"""`sluice up` and `init`: the local stack as a person sees it."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.table import Table

from core.people import SECOND_ADMIN
from local.stack import Stack

console = Console(highlight=False)

_WHAT = {
    "database": "PostgreSQL 18: rows and the ledger",
    "queue": "Valkey: task queue",
    "store": "SeaweedFS: private, vault and public buckets",
    "service": "the HTTP service",
    "train": "the private side: reads records, trains",
    "publish": "the public side: samples, publishes",
    "sweep": "puts right what a dead process left behind",
}


def up(data: Path, port: int, *, witness: Path | None, lost_witness: bool) -> None:
    stack = Stack(data, port=port, witness=witness, lost_witness=lost_witness)
    with _stopped_by_signals(stack):
        try:
            with console.status("starting"):
                stack.start()
            _show(stack)
            console.print(f"ready in {stack.timings['all ready']:.1f} s ({_timings(stack)})")
            _show_first_key(stack)
            console.print(f"witness in {stack.witness or 'its bucket'}, no part of a backup", soft_wrap=True)
            console.print(f"[bold]{stack.url}[/bold]  data in {stack.data}  Ctrl-C stops")
            stack.watch(console.print)
        except KeyboardInterrupt:
            pass
        finally:
            with console.status("stopping"):
                stack.stop()
        console.print(f"stopped in {stack.timings['all stopped']:.1f} s")


def init(data: Path, *, witness: Path | None, invite: str | None = None) -> None:
    stack = Stack(data, witness=witness, invite=invite)
    with _stopped_by_signals(stack):
        try:
            stack.start_servers()
            stack.prepare()
        finally:
            stack.stop()
    _show_first_key(stack)
    console.print(f"{stack.data} is ready: sluice up --data {data}")


def _show_first_key(stack: Stack) -> None:
    if stack.first_key:
        console.print(
            f"key of the first admin, shown this once: [bold]{stack.first_key}[/bold]", soft_wrap=True
        )
    if stack.invitation:
        console.print(f"{SECOND_ADMIN}: [bold]{stack.invitation}[/bold]", soft_wrap=True)


def _show(stack: Stack) -> None:
    table = Table("part", "state", "what it is")
    for part, state in stack.health().items():
        table.add_row(
            part, f"[green]{state}[/green]" if state == "ok" else f"[red]{state}[/red]", _WHAT[part]
        )
    console.print(table)


def _timings(stack: Stack) -> str:
    return ", ".join(
        f"{name} {seconds:.1f}" for name, seconds in stack.timings.items() if name != "all ready"
    )


@contextmanager
def _stopped_by_signals(stack: Stack) -> Iterator[None]:
    """Ctrl-C and SIGTERM ask for an orderly end, at any moment and however often."""

    def ask(_signal: int, _frame: FrameType | None) -> None:
        stack.stopping.set()

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
