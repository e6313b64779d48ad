"""The directory for decrypted records while a worker uses them.

Guarantee: the files of a killed worker are removed when the next worker of its role starts on that machine.
docs/security.md#deletion-and-uploads
"""

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from core import log

_log = log.get("workspace")
_LOCK = "lock"


def use(role: str) -> Path:
    """Makes a directory for the temporary files of this process, after removing those of ended processes."""
    prefix = f"sluice-worker-{role}-"
    for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        _remove_if_left(left)
    directory = Path(tempfile.mkdtemp(prefix=prefix))
    # Locked under another name first: a process that starts at the same time finds no lock, or a held one.
    lock = os.open(directory / "new", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.rename(directory / "new", directory / _LOCK)
    tempfile.tempdir = str(directory)
    return directory


def _remove_if_left(directory: Path) -> None:
    try:
        if directory.lstat().st_uid != os.geteuid():
            return
        lock = os.open(directory / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:  # of another user, or just being made or removed
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    else:
        shutil.rmtree(directory, ignore_errors=True)
        _log.info("workspace_removed", directory=directory.name)
    finally:
        os.close(lock)
