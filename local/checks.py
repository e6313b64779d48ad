"""`sluice check` and `sluice test`: what a reviewer runs, for those who have a checkout."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

from rich.console import Console

from sluice.client.problems import CannotRun

console = Console(highlight=False)
_STATIC = {
    "lint": ["ruff", "check"],
    "format": ["ruff", "format", "--check"],
    "types": ["mypy"],
    "imports": ["lint-imports", "--no-cache"],
}


def check() -> int:
    failed = [name for name, command in _STATIC.items() if _run(command)]
    console.print(f"[red]failed: {', '.join(failed)}[/red]" if failed else "[green]checks passed[/green]")
    return 1 if failed else 0


def test(arguments: list[str], *, long: bool) -> int:
    """Parallel unless the caller says otherwise; one stack serves the whole run."""
    marks = [] if long else ["-m", "not long"]
    alone = any(a.startswith(("-n", "--pdb")) for a in arguments)
    # By file: the tests of one file share servers that are theirs alone. Long files come first.
    workers = ["-n", str(min(os.cpu_count() or 1, 8)), "--dist", "loadfile", "--no-loadscope-reorder"]
    static = 0 if arguments else check()
    return _run([sys.executable, "-m", "pytest", *([] if alone else workers), *marks, *arguments]) or static


def _run(command: list[str]) -> int:
    root = Path(__file__).resolve().parent.parent
    if not (root / "pyproject.toml").exists():
        raise CannotRun("check and test need a checkout: clone the repository and run ./sluice there")
    tool = Path(sysconfig.get_path("scripts")) / command[0]
    return subprocess.run(
        [str(tool) if tool.exists() else command[0], *command[1:]], cwd=root, check=False
    ).returncode
