"""`sluice check` and `sluice test`: static checks and tests of a checkout."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

from rich.console import Console

console = Console(highlight=False)
_ROOT = Path(__file__).resolve().parent.parent
_STATIC = {
    "lint": ["ruff", "check"],
    "format": ["ruff", "format", "--check"],
    "types": ["mypy"],
    "imports": ["lint-imports", "--no-cache"],
}


def check() -> int:
    return _finish(_start_static())


def test(arguments: list[str], *, long: bool, fast: bool) -> int:
    """Runs pytest on all cores unless the caller chose otherwise, and beside it the static checks.

    With arguments for pytest, the static checks are left out.
    """
    marks = [f"not {mark}" for mark, skipped in (("long", not long), ("server", fast)) if skipped]
    command = [sys.executable, "-m", "pytest", "-m", " and ".join(marks)]
    if "--pdb" not in arguments:
        # By file, since tests of one file share fixtures. tests/conftest.py puts long files first.
        command += ["-n", str(min(os.cpu_count() or 1, 8)), "--dist", "loadfile", "--no-loadscope-reorder"]
    static = {} if arguments else _start_static()
    # Bytecode is kept, also where the caller turned that off: rewriting assertions takes pytest many seconds.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    tests = subprocess.run([*command, *arguments], cwd=_ROOT, env=environment, check=False).returncode
    return _finish(static) or tests


def _start_static() -> dict[str, subprocess.Popen[str]]:
    scripts = Path(sysconfig.get_path("scripts"))
    return {
        name: subprocess.Popen(
            [str(scripts / tool), *options],
            cwd=_ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name, (tool, *options) in _STATIC.items()
    }


def _finish(started: dict[str, subprocess.Popen[str]]) -> int:
    """Waits for static checks and prints what they found; 1 if any failed."""
    failed = []
    for name, process in started.items():
        output = process.communicate()[0]
        if process.returncode:
            failed.append(name)
            console.print(f"[red]{name} failed[/red]")
            console.print(output, markup=False)
    if started:
        passed = f"[green]checks passed: {', '.join(started)}[/green]"
        console.print(f"[red]checks failed: {', '.join(failed)}[/red]" if failed else passed)
    return 1 if failed else 0
