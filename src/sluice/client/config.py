"""The file in which `sluice login` stores the address of a service and a key."""

import json
import os
import stat
from contextlib import suppress
from pathlib import Path

import typer

from sluice.client.problems import CannotRun


def config_file() -> Path:
    return Path(os.environ.get("SLUICE_HOME") or typer.get_app_dir("sluice")) / "login.json"


def save(url: str, key: str) -> Path:
    path = config_file()
    write_private(path, json.dumps({"url": url, "key": key}))
    return path


def write_private(path: Path, text: str) -> None:
    """Writes a file that only its owner can read (0600), completely or not at all, and syncs it."""
    new = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new.unlink(missing_ok=True)  # left by a process with the same number that was killed
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except OSError as problem:
        with suppress(OSError):
            new.unlink()
        raise CannotRun(f"cannot write {path} ({os.strerror(problem.errno or 0).lower()})") from None


def saved() -> dict[str, str]:
    """The stored `url` and `key`, or nothing before the first login."""
    path = config_file()
    try:
        with path.open() as file:
            if os.name == "posix" and stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
                raise CannotRun(f"others can read the key in {path}: chmod 600 it, or run sluice login again")
            body = json.load(file)
            return {"url": str(body["url"]), "key": str(body["key"])}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError):
        raise CannotRun(f"{path} cannot be read: sluice login replaces it") from None
