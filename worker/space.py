"""Whether this machine's disk holds an upload, asked before a byte of it is fetched."""

import shutil
import tempfile
from pathlib import Path

from core.faults import Failure, Fault

# The upload, and the arrays made of it. What a compressed file expands to beyond that is known only
# by reading it: the reader then ends with OUT_OF_SPACE.
_COPIES = 2


def require_space(*sizes: int, directory: Path | None = None) -> None:
    """Uploads of these sizes can be fetched and converted here; the fault says whether waiting may help."""
    disk = shutil.disk_usage(directory or tempfile.gettempdir())
    needed = _COPIES * sum(sizes)
    if needed > disk.total:
        raise Failure(Fault.EXCEEDS_DISK)
    if needed > disk.free:
        raise Failure(Fault.OUT_OF_SPACE)
