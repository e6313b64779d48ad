"""`sluice up` and `sluice init`: run the local stack and print its state."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

from core.people import SECOND_ADMIN
from local.stack import Stack

console = Console(highlight=False)

_PURPOSE = {
    "database": "PostgreSQL 18: rows and the ledger",
    "queue": "Valkey: task queue",
    "store": "SeaweedFS: private, vault and public buckets",
    "service": "HTTP API and console",
    "train": "reads private records, trains",
    "publish": "samples, signs, publishes",
    "sweep": "recovers the work of processes that died; writes the witness",
}


def up(data: Path, port: int, *, witness: Path | None, lost_witness: bool) -> None:
    stack = Stack(data, port=port, witness=witness, lost_witness=lost_witness)
    with on_signals(stack.stopping.set):
        try:
            with console.status("starting"):
                stack.start()
            _show(stack)
            console.print(f"ready in {stack.timings['all ready']:.1f} s ({_timings(stack)})")
            _show_first_key(stack)
            console.print(
                f"witness in {stack.witness or 'its bucket'}; do not include it in backups", soft_wrap=True
            )
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
    with on_signals(stack.stopping.set):
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
            f"key of the first admin, shown only once: [bold]{stack.first_key}[/bold]", soft_wrap=True
        )
    if stack.invitation:
        console.print(f"{SECOND_ADMIN}: [bold]{stack.invitation}[/bold]", soft_wrap=True)


def _show(stack: Stack) -> None:
    table = Table("part", "state", "what it is")
    for part, state in stack.health().items():
        table.add_row(
            part, f"[green]{state}[/green]" if state == "ok" else f"[red]{state}[/red]", _PURPOSE[part]
        )
    console.print(table)


def _timings(stack: Stack) -> str:
    return ", ".join(
        f"{name} {seconds:.1f}" for name, seconds in stack.timings.items() if name != "all ready"
    )


@contextmanager
def on_signals(handler: Callable[[], None]) -> Iterator[None]:
    """Calls `handler` on Ctrl-C, SIGTERM and SIGHUP instead of what was set before."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda _signal, _frame: handler()) for number in numbers}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
