"""Parses uploads in a sandboxed process that has no secrets and no network.

Checking a dataset and opening it for training are the same call of the same reader on the same bytes:
what was validated is what is trained on, and no upload is parsed in a process that has credentials.
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
from collections.abc import Callable
from dataclasses import asdict, dataclass
from io import BufferedReader
from pathlib import Path
from typing import IO, Any

from pydantic import TypeAdapter

from core.faults import Failure, Fault
from core.schema import ImageSchema, Schema, TableSchema
from worker.records import CODES, VALUES, Report
from worker.records.confine import limit_resources, restrict
from worker.records.reading import Allowance, Sink

# -I: no variable, user site or working directory changes what is imported.
_ROOT = str(Path(__file__).resolve().parent.parent)
_SERVE = "import sys; sys.path.insert(0, sys.argv[1]); from worker.validate import serve; serve()"
# None of our variables; one thread, because each would reserve address space of its own.
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "ARROW_DEFAULT_MEMORY_POOL": "system"}
_MAX_ANSWER = 4096


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of the parsing process. Data may be larger than `memory_bytes`: it is read in pieces."""

    memory_bytes: int = 2 << 30  # address space; a quarter of a gigabyte of it is libraries
    disk_bytes: int = 256 << 30
    seconds: float = 3600.0


def convert(
    path: Path,
    schema: ImageSchema | TableSchema,
    work: Path,
    *,
    sha256: str,
    size: int,
    limits: Limits | None = None,
) -> Report:
    """Writes the records of an upload as raw arrays into `work`; raises Failure with the fault."""
    limits = limits or Limits()
    with path.open("rb") as file:
        _check_identity(file, sha256=sha256, size=size)
        try:
            with (
                _new_file(work / VALUES) as values,
                _new_file(work / CODES) as codes,
                tempfile.TemporaryFile(dir=work) as spool,
            ):
                return _run_sandbox(file, [values, codes, spool], schema, size, limits)
        except BaseException:
            for name in (VALUES, CODES):  # no part of a dataset is left behind
                (work / name).unlink(missing_ok=True)
            raise


def _check_identity(file: BufferedReader, *, sha256: str, size: int) -> None:
    if os.fstat(file.fileno()).st_size != size:
        raise Failure(Fault.SIZE_MISMATCH)
    if hashlib.file_digest(file, "sha256").hexdigest() != sha256.lower():
        raise Failure(Fault.HASH_MISMATCH)
    file.seek(0)


def _new_file(path: Path) -> IO[bytes]:
    path.unlink(missing_ok=True)  # left by an attempt that was killed
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")


def _run_sandbox(
    file: IO[bytes], sinks: list[IO[bytes]], schema: ImageSchema | TableSchema, size: int, limits: Limits
) -> Report:
    handles = [stream.fileno() for stream in (file, *sinks)]
    request = {"schema": schema.model_dump(), "limits": asdict(limits), "size": size, "handles": handles}
    with tempfile.TemporaryFile() as stdin:  # not a pipe: a schema may be larger than a pipe's buffer
        stdin.write(json.dumps(request).encode())
        stdin.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-I", "-B", "-W", "ignore", "-c", _SERVE, _ROOT],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_ENVIRONMENT,
            cwd="/",
            pass_fds=handles,
            start_new_session=True,
        )
    with process:
        try:
            answer = _read_answer(process, limits.seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return _parse_answer(answer, process.returncode)


def _read_answer(process: subprocess.Popen[bytes], seconds: float) -> bytes:
    """All output of the process until it ends, within the maximal length and time."""
    assert process.stdout is not None  # noqa: S101  # for the type checker
    output, until = b"", time.monotonic() + seconds
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while selector.select(max(until - time.monotonic(), 0)):
            piece = os.read(process.stdout.fileno(), _MAX_ANSWER)
            output += piece
            if len(output) > _MAX_ANSWER:
                raise Failure(Fault.UNREADABLE)
            if not piece:  # it is about to end; killing it now would hide how
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=max(until - time.monotonic(), 0))
                    return output
                break
    raise Failure(Fault.TIMED_OUT)


def _parse_answer(answer: bytes, code: int) -> Report:
    """Accepts one exact form of answer; every other end of the process is a fault as well."""
    if code == -signal.SIGXCPU:
        raise Failure(Fault.TIMED_OUT)
    if code == -signal.SIGKILL:  # not by us: the kernel ran out of memory
        raise Failure(Fault.OUT_OF_MEMORY)
    try:
        parsed: Any = json.loads(answer) if code == 0 else None
        match parsed:
            case {"fault": str(slug), **rest} if not rest:
                raise Failure(Fault(slug))
            case {"clamped": int(clamped), "mapped": int(mapped), **rest} if (
                not rest and min(clamped, mapped) >= 0
            ):
                return Report(clamped=clamped, mapped=mapped)
    except (ValueError, RecursionError):
        pass
    raise Failure(Fault.UNREADABLE)


# The rest runs in the sandboxed process.

_OS_FAULTS = {
    errno.EFBIG: Fault.TOO_LARGE,
    errno.ENOSPC: Fault.OUT_OF_SPACE,
    errno.EDQUOT: Fault.OUT_OF_SPACE,
    errno.EACCES: Fault.UNREADABLE,  # refused by the sandbox: not the file's fault
    errno.EPERM: Fault.UNREADABLE,
}


def serve() -> None:
    """Reads one upload from inherited handles and prints one line: a fault, or the two counts."""
    request = json.load(sys.stdin)
    limits = Limits(**request["limits"])
    limit_resources(
        memory_bytes=limits.memory_bytes, file_bytes=limits.disk_bytes, seconds=math.ceil(limits.seconds)
    )
    schema = TypeAdapter(Schema).validate_python(request["schema"])
    modes = ("rb", "wb", "wb", "w+b")
    file, *sinks = (os.fdopen(handle, mode) for handle, mode in zip(request["handles"], modes, strict=True))
    answer = parse(file, sinks, schema, size=request["size"], limits=limits, sandbox=restrict)
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
    os._exit(0)  # without running what a parser may have left behind


def parse(
    file: IO[bytes],
    sinks: list[IO[bytes]],
    schema: ImageSchema | TableSchema,
    *,
    size: int,
    limits: Limits,
    sandbox: Callable[[], None],
) -> dict[str, Any]:
    """Imports the reader for the schema, calls `sandbox`, and parses the file; the answer of the process."""
    read: Any
    if isinstance(schema, ImageSchema):
        from worker.records.images import read_images as read
    else:
        from worker.records.tables import prepare
        from worker.records.tables import read_table as read

        prepare(file)
    sandbox()
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
        return {"fault": _OS_FAULTS.get(problem.errno or 0, Fault.DAMAGED)}
    except Exception:  # a parser's message may quote the file
        return {"fault": Fault.DAMAGED}
