"""The file in which `sluice login` keeps the address of a service and a key."""

import json
import os
import stat
from contextlib import suppress
from pathlib import Path

import click

from sluice.client.problems import CannotRun


def config_file() -> Path:
    return Path(os.environ.get("SLUICE_HOME") or click.get_app_dir("sluice")) / "login.json"


def save(url: str, key: str) -> Path:
    """Keeps address and key where only their owner can read them."""
    path = config_file()
    write_private(path, json.dumps({"url": url, "key": key}))
    return path


def write_private(path: Path, text: str) -> None:
    """A file only its owner can read, whole or not at all."""
    new = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
        new.replace(path)
    except OSError as problem:
        with suppress(OSError):
            new.unlink()
        raise CannotRun(f"cannot write {path} ({os.strerror(problem.errno or 0).lower()})") from None


def saved() -> dict[str, str]:
    path = config_file()
    try:
        with path.open() as file:
            if os.name == "posix" and stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
                raise CannotRun(f"others can read the key in {path}: chmod 600 it, or sluice login again")
            body = json.load(file)
            return {"url": str(body["url"]), "key": str(body["key"])}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError):
        raise CannotRun(f"{path} cannot be read: sluice login writes it anew") from None
