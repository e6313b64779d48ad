"""Reads uploads in a second process that has no secrets, no network and little room.

Checking a dataset and opening it for training are the same call of the same reader on the same bytes:
what was validated is what is trained on, and no upload is ever parsed where credentials are.
"""

import contextlib
import errno
import hashlib
import json
import math
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from io import BufferedReader
from pathlib import Path
from typing import IO, Any

from pydantic import TypeAdapter

from core.faults import Failure, Fault
from core.schema import ImageSchema, Schema, TableSchema
from worker.records import CODES, VALUES, Records, Report
from worker.records.confine import close_doors, limit

# -I: no variable, user site or working directory has a say in what is imported.
_ROOT = str(Path(__file__).resolve().parent.parent)
_SERVE = "import sys; sys.path.insert(0, sys.argv[1]); from worker.validate import serve; serve()"
# Nothing of ours; one thread, because each would reserve address space of its own.
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "ARROW_DEFAULT_MEMORY_POOL": "system"}
_ANSWER_MOST = 4096


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Of the reading process. Data larger than `memory_bytes` is fine: it is read in pieces."""

    memory_bytes: int = 2 << 30  # address space; a quarter of a gigabyte of it is libraries
    disk_bytes: int = 256 << 30
    seconds: float = 3600.0


def validate(
    path: Path, schema: ImageSchema | TableSchema, *, sha256: str, size: int, limits: Limits | None = None
) -> Report:
    """Checks an upload as a whole and keeps nothing of it; raises Failure with the fault."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="check-") as work:
        return convert(path, schema, Path(work), sha256=sha256, size=size, limits=limits)


def open_records(
    path: Path,
    schema: ImageSchema | TableSchema,
    work: Path,
    *,
    sha256: str,
    size: int,
    limits: Limits | None = None,
) -> Records:
    """Reads an upload again, as it was validated, and opens what it held for training."""
    convert(path, schema, work, sha256=sha256, size=size, limits=limits)
    return Records(schema, work)


def convert(
    path: Path,
    schema: ImageSchema | TableSchema,
    work: Path,
    *,
    sha256: str,
    size: int,
    limits: Limits | None = None,
) -> Report:
    """Leaves the records of an upload as raw arrays in `work`, a directory of the caller's own."""
    limits = limits or Limits()
    with path.open("rb") as file:
        _check_identity(file, sha256=sha256, size=size)
        try:
            with (
                _fresh(work / VALUES) as values,
                _fresh(work / CODES) as codes,
                tempfile.TemporaryFile(dir=work) as spool,
            ):
                return _ask(file, [values, codes, spool], schema, size, limits)
        except BaseException:
            for name in (VALUES, CODES):  # no half of a dataset is left to be opened by mistake
                (work / name).unlink(missing_ok=True)
            raise


def _check_identity(file: BufferedReader, *, sha256: str, size: int) -> None:
    if os.fstat(file.fileno()).st_size != size:
        raise Failure(Fault.SIZE_MISMATCH)
    if hashlib.file_digest(file, "sha256").hexdigest() != sha256.lower():
        raise Failure(Fault.HASH_MISMATCH)
    file.seek(0)


def _fresh(path: Path) -> IO[bytes]:
    path.unlink(missing_ok=True)  # of an attempt that was cut off
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")


def _ask(
    file: IO[bytes], sinks: list[IO[bytes]], schema: ImageSchema | TableSchema, size: int, limits: Limits
) -> Report:
    handles = [stream.fileno() for stream in (file, *sinks)]
    question = {"schema": schema.model_dump(), "limits": asdict(limits), "size": size, "handles": handles}
    with tempfile.TemporaryFile() as asked:  # not a pipe: a schema may be larger than one holds
        asked.write(json.dumps(question).encode())
        asked.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-I", "-B", "-W", "ignore", "-c", _SERVE, _ROOT],
            stdin=asked,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_ENVIRONMENT,
            cwd="/",
            pass_fds=handles,
            start_new_session=True,
        )
    with process:
        try:
            answer = _listen(process, limits.seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return _understood(answer, process.returncode)


def _listen(process: subprocess.Popen[bytes], seconds: float) -> bytes:
    """All the process says until it ends, up to the length of an answer and the end of its time."""
    assert process.stdout is not None  # noqa: S101  # for the type checker
    heard, until = b"", time.monotonic() + seconds
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while selector.select(max(until - time.monotonic(), 0)):
            said = os.read(process.stdout.fileno(), _ANSWER_MOST)
            heard += said
            if len(heard) > _ANSWER_MOST:
                raise Failure(Fault.UNREADABLE)
            if not said:  # it is about to end; killing it now would hide how
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=max(until - time.monotonic(), 0))
                    return heard
                break
    raise Failure(Fault.TIMED_OUT)


def _understood(answer: bytes, code: int) -> Report:
    """Believes one exact form of answer; every other end of the process is a fault as well."""
    if code == -signal.SIGXCPU:
        raise Failure(Fault.TIMED_OUT)
    if code == -signal.SIGKILL:  # not by us: the kernel ran out of memory
        raise Failure(Fault.OUT_OF_MEMORY)
    try:
        said: Any = json.loads(answer) if code == 0 else None
        match said:
            case {"fault": str(slug), **rest} if not rest:
                raise Failure(Fault(slug))
            case {"clamped": int(clamped), "mapped": int(mapped), **rest} if (
                not rest and min(clamped, mapped) >= 0
            ):
                return Report(clamped=clamped, mapped=mapped)
    except (ValueError, RecursionError):
        pass
    raise Failure(Fault.UNREADABLE)


# The other process.

_OF_SYSTEM = {
    errno.EFBIG: Fault.TOO_LARGE,
    errno.ENOSPC: Fault.OUT_OF_SPACE,
    errno.EDQUOT: Fault.OUT_OF_SPACE,
    errno.EACCES: Fault.UNREADABLE,  # a door we closed on ourselves: not the file's doing
    errno.EPERM: Fault.UNREADABLE,
}


def serve() -> None:
    """Reads one upload from handles it was given and says one line: a slug, or two counts."""
    question = json.load(sys.stdin)
    limits = Limits(**question["limits"])
    limit(memory_bytes=limits.memory_bytes, file_bytes=limits.disk_bytes, seconds=math.ceil(limits.seconds))
    schema = TypeAdapter(Schema).validate_python(question["schema"])
    said = _read(schema, question["handles"], size=question["size"], limits=limits)
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()
    os._exit(0)  # what a parser left behind gets no turn


def _read(
    schema: ImageSchema | TableSchema, handles: list[int], *, size: int, limits: Limits
) -> dict[str, Any]:
    from worker.records.reading import Allowance, Sink

    file, *sinks = (
        os.fdopen(handle, mode) for handle, mode in zip(handles, ("rb", "wb", "wb", "w+b"), strict=True)
    )
    read: Any
    if isinstance(schema, ImageSchema):
        from worker.records.images import read_images as read
    else:
        from worker.records.tables import prepare
        from worker.records.tables import read_table as read

        prepare(file)
    close_doors()
    allowance = Allowance.of(size=size, disk_bytes=limits.disk_bytes)
    try:
        if not size:
            raise Failure(Fault.EMPTY)
        report = read(file, schema=schema, sink=Sink(*sinks), allowance=allowance)
        for sink in sinks:
            sink.close()
        return asdict(report)
    except Failure as failure:
        return {"fault": failure.fault}
    except MemoryError:
        return {"fault": Fault.OUT_OF_MEMORY}
    except OSError as problem:
        return {"fault": _OF_SYSTEM.get(problem.errno or 0, Fault.DAMAGED)}
    except Exception:  # whatever a parser says of a broken file: its words may quote it
        return {"fault": Fault.DAMAGED}
