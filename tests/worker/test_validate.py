"""No upload does harm: each is refused by a slug, in time, in little memory, and quoted nowhere."""

import hashlib
import io
import json
import os
import re
import socket
import sys
import tempfile
import time
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest

from core.faults import Failure, Fault
from tests.worker import hostile
from tests.worker.hostile import CANARY, CASES, IMAGES, TABLE
from worker import validate as checking
from worker.records import CODES, VALUES, Records, Report
from worker.validate import Limits, convert, parse

MEGABYTE = 1 << 20
# Address space; the libraries that read Parquet map 350 MB of it before they read anything.
TIGHT = Limits(memory_bytes=640 * MEGABYTE, disk_bytes=256 * MEGABYTE, seconds=10)


def validate(path, schema, **more):
    """Parses an upload in the sandbox and keeps nothing of it."""
    with tempfile.TemporaryDirectory(dir=path.parent) as work:
        return convert(path, schema, Path(work), **more)


def open_records(path, schema, work, **more):
    convert(path, schema, work, **more)
    return Records(schema, work)


@pytest.fixture
def upload(tmp_path):
    def put(data):
        path = tmp_path / "upload"
        path.write_bytes(data)
        return path, {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}

    return put


@pytest.fixture
def heard(monkeypatch):
    """All that the reading process ever said, byte for byte."""
    said = []
    listen = checking._read_answer

    def note(process, seconds):
        said.append(listen(process, seconds))
        return said[-1]

    monkeypatch.setattr(checking, "_read_answer", note)
    return said


@pytest.fixture
def peak(monkeypatch, tmp_path_factory):
    """Asks the process for its own high-water mark; what the kernel reports includes this process's."""
    path = tmp_path_factory.mktemp("peak") / "status"
    measured = f"""
import os
status, out, leave = open("/proc/self/status"), open({str(path)!r}, "w"), os._exit
def end(code):
    out.write(status.read())
    out.flush()
    leave(code)
os._exit = end
"""
    monkeypatch.setattr(checking, "_SERVE", measured + checking._SERVE)
    return lambda: int(re.search(r"VmHWM:\s+(\d+) kB", path.read_text())[1]) * 1024


def faulted(call, *args, **kwargs):
    with pytest.raises(Failure) as caught:
        call(*args, **kwargs)
    assert str(caught.value) == caught.value.fault.value
    return caught.value.fault


def test_there_are_many_hostile_files():
    assert len(CASES) >= 140
    assert len({case.fault for case in CASES.values()}) >= 13


# One case of each kind goes through the sandboxed process, and all that only its limits refuse.
SANDBOXED = [
    "program_in_an_npy_header", "npy_header_nested_deep", "npy_header_of_sixty_megabytes",
    "zip_with_a_wrong_checksum", "nothing", "table_as_images", "idx_that_claims_four_billion",
    *[name for name, case in CASES.items() if case.schema is TABLE][::12],
]  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_hostile_upload_is_refused(name, tmp_path, capfd, caplog, monkeypatch):
    """By the reader that the sandboxed process runs, in this process."""
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])  # reading Parquet adds to it
    case, trap = CASES[name], tmp_path / "trap"
    data = case.make(trap)
    sinks = [(tmp_path / sink).open("w+b") for sink in (VALUES, CODES, "spool")]
    Path("/proc/self/clear_refs").write_text("5")  # begins to measure the peak anew
    before, started = memory(), time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as in the sandboxed process
        answer = parse(
            io.BytesIO(data), sinks, case.schema, size=len(data), limits=TIGHT, sandbox=lambda: None
        )
    assert time.process_time() - started < 10
    assert answer == {"fault": case.fault}
    assert memory() - before < 200 * MEGABYTE
    assert not trap.exists()
    assert not any(CANARY in words for words in [caplog.text, *capfd.readouterr()])
    for sink in sinks:
        sink.close()


def memory():
    """The peak of this process's resident memory."""
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


@pytest.mark.parametrize("name", SANDBOXED)
def test_hostile_upload_is_refused_in_the_sandbox(name, upload, heard, peak, tmp_path, capfd, caplog):
    case, trap = CASES[name], tmp_path / "trap"
    path, identity = upload(case.make(trap))
    with pytest.raises(Failure) as caught:
        validate(path, case.schema, **identity, limits=TIGHT)
    assert caught.value.fault is case.fault
    assert heard == [json.dumps({"fault": case.fault}).encode() + b"\n"]
    assert peak() < 200 * MEGABYTE
    assert not trap.exists()
    assert [left.name for left in tmp_path.iterdir()] == ["upload"]
    spoken = [str(caught.value), repr(caught.value), caplog.text, *capfd.readouterr()]
    assert not any(CANARY in words for words in spoken)


GOOD = {
    "npz": (hostile.npz(), IMAGES),
    "fortran": (hostile.npz(x=hostile.npy(np.asfortranarray(hostile.pixels()))), IMAGES),
    "png": (hostile.zipped({f"cat/{CANARY}.png": hostile.png(), "dog/2.png": hostile.png()}), IMAGES),
    "idx": (hostile.idx(), IMAGES),
    "csv": (hostile.csv_of("1,2,rome", f"1e308,2,{CANARY}"), TABLE),
    "parquet": (hostile.parquet_of({"age": [1, 1000], "city": ["rome", CANARY]}), TABLE),
}


@pytest.mark.parametrize("name", GOOD)
def test_good_upload_is_validated_and_opened_by_the_same_reader(name, upload, heard, tmp_path, capfd):
    data, schema = GOOD[name]
    path, identity = upload(data)
    report = validate(path, schema, **identity)
    assert [left.name for left in tmp_path.iterdir()] == ["upload"]
    assert report == (Report(clamped=1, mapped=1) if schema is TABLE else Report())

    work = tmp_path / "work"
    work.mkdir()
    records = open_records(path, schema, work, **identity)
    assert isinstance(records, Records)
    assert len(records) == (2 if name in ("png", "csv", "parquet") else 4)
    assert {left.name: left.stat().st_mode & 0o777 for left in work.iterdir()} == {
        VALUES: 0o600,
        CODES: 0o600,
    }
    assert heard[0] == heard[1]
    spoken = [*capfd.readouterr(), repr(records), str(heard)]
    assert not any(CANARY in words for words in spoken)


def test_data_larger_than_the_memory_limit_is_read(tmp_path, peak):
    rows, limits = 2_700_000, Limits(memory_bytes=160 * MEGABYTE)
    assert rows * 64 > limits.memory_bytes
    path = tmp_path / "upload"
    block = np.random.default_rng(1).integers(0, 2, 64_000, dtype=np.uint8).tobytes()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        with archive.open("x.npy", "w") as x:
            x.write(hostile.raw_npy(hostile.header(shape=f"({rows}, 8, 8)")))
            for _ in range(rows // 1000):
                x.write(block)
        archive.writestr("y.npy", hostile.npy(np.zeros(rows, np.uint8)))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    identity = {"sha256": digest, "size": path.stat().st_size}
    work = tmp_path / "work"
    work.mkdir()
    records = open_records(path, IMAGES, work, **identity, limits=limits)
    assert len(records) == rows
    assert peak() < limits.memory_bytes / 2
    values = np.memmap(work / VALUES, np.uint8, "r")
    assert values[-64_000:].tobytes() == block


def test_other_bytes_than_were_sealed_are_refused_unread(upload, heard):
    path, identity = upload(hostile.npz())
    assert faulted(validate, path, IMAGES, **identity | {"size": identity["size"] + 1}) is Fault.SIZE_MISMATCH
    assert faulted(validate, path, IMAGES, **identity | {"sha256": "0" * 64}) is Fault.HASH_MISMATCH
    assert heard == []


def test_limits_end_what_wants_more(upload, tmp_path):
    path, identity = upload(
        hostile.npz(x=hostile.npy(hostile.pixels(4000)), y=hostile.npy(hostile.labels(4000)))
    )
    small = Limits(disk_bytes=100_000)
    assert faulted(validate, path, IMAGES, **identity, limits=small) is Fault.TOO_LARGE
    path, identity = upload(hostile.csv_of(*["1,2,rome"] * 50_000))
    assert faulted(validate, path, TABLE, **identity, limits=small) is Fault.TOO_LARGE  # by the kernel
    assert faulted(validate, path, TABLE, **identity, limits=Limits(seconds=0.05)) is Fault.TIMED_OUT


@pytest.mark.parametrize(
    ("program", "fault"),
    [
        ("while True: pass", Fault.TIMED_OUT),
        ("import time; time.sleep(60)", Fault.TIMED_OUT),
        ("import os, time; os.close(1); time.sleep(60)", Fault.TIMED_OUT),
        ("import os; os.fork(); import time; time.sleep(60)", Fault.TIMED_OUT),
        ("import os; os.kill(os.getpid(), 9)", Fault.OUT_OF_MEMORY),
        ("import os; os.kill(os.getpid(), 24)", Fault.TIMED_OUT),
        ("import os; os.abort()", Fault.UNREADABLE),
        ("import ctypes; ctypes.string_at(0)", Fault.UNREADABLE),
        ("pass", Fault.UNREADABLE),
        ("raise SystemExit(3)", Fault.UNREADABLE),
        (f"raise ValueError({CANARY!r})", Fault.UNREADABLE),
        (f"print({CANARY!r})", Fault.UNREADABLE),
        ("print('{}')", Fault.UNREADABLE),
        ("print('[' * 4000)", Fault.UNREADABLE),
        ("while True: print('a' * 4096)", Fault.UNREADABLE),
        (f'print(\'{{"fault": "{CANARY}"}}\')', Fault.UNREADABLE),
        ('print(\'{"fault": "damaged", "row": 1}\')', Fault.UNREADABLE),
        ("print('{\"clamped\": 1}')", Fault.UNREADABLE),
        ('print(\'{"clamped": 1, "mapped": "1"}\')', Fault.UNREADABLE),
        ('print(\'{"clamped": 1, "mapped": -1}\')', Fault.UNREADABLE),
        ('print(\'{"clamped": 1, "mapped": 0}\'); raise SystemExit(1)', Fault.UNREADABLE),
        ('print(\'{"fault": "ragged"}\')', Fault.RAGGED),
    ],
)
def test_every_odd_end_of_the_process_is_a_fault(upload, monkeypatch, tmp_path, capfd, program, fault):
    monkeypatch.setattr(checking, "_SERVE", program)
    path, identity = upload(hostile.npz())
    work = tmp_path / "work"
    work.mkdir()
    limits = Limits(seconds=0.5 if fault is Fault.TIMED_OUT else 30)
    assert faulted(convert, path, IMAGES, work, **identity, limits=limits) is fault
    assert list(work.iterdir()) == []
    assert not any(CANARY in words for words in capfd.readouterr())


@pytest.mark.parametrize(
    ("trouble", "fault"),
    [
        ("bytes(1 << 31)", Fault.OUT_OF_MEMORY),
        ("np.zeros(1 << 31, np.uint8).sum()", Fault.OUT_OF_MEMORY),
        ("oops(OSError(errno.ENOSPC, CANARY))", Fault.OUT_OF_SPACE),
        ("oops(OSError(CANARY))", Fault.DAMAGED),
        ("oops(ValueError(CANARY))", Fault.DAMAGED),
        ("open('/etc/hostname')", Fault.UNREADABLE),
        ("oops(SystemExit(CANARY))", Fault.UNREADABLE),
    ],
)
def test_trouble_while_reading_is_a_fault(upload, monkeypatch, heard, trouble, fault):
    program = f"""
import errno, sys
sys.path.insert(0, sys.argv[1])
import numpy as np
from worker import validate
from worker.records import images
CANARY = {CANARY!r}
def oops(problem): raise problem
images.read_images = lambda *_, **__: {trouble}
validate.serve()
"""
    monkeypatch.setattr(checking, "_SERVE", program)
    path, identity = upload(hostile.npz())
    assert faulted(validate, path, IMAGES, **identity, limits=TIGHT) is fault
    assert CANARY.encode() not in heard[0]


def test_what_an_attempt_left_behind_is_replaced(upload, tmp_path):
    path, identity = upload(hostile.npz())
    work = tmp_path / "work"
    work.mkdir()
    (work / VALUES).symlink_to(tmp_path / "elsewhere")
    (work / CODES).write_bytes(b"old")
    assert len(open_records(path, IMAGES, work, **identity)) == 4
    assert not (tmp_path / "elsewhere").exists()


# What the process may do, tried from inside it. It answers with a number in place of a count.

INSIDE = "import os, socket, sys; sys.path.insert(0, sys.argv[1]); from worker.records import confine\n"
ANSWER = '\nos.write(1, b\'{"clamped": %d, "mapped": 0}\' % got); os._exit(0)'
LIMITS = "confine.limit_resources(memory_bytes=1 << 30, file_bytes=1 << 20, seconds=10)\n"


def ask_inside(program, upload, monkeypatch):
    monkeypatch.setattr(checking, "_SERVE", INSIDE + program + ANSWER)
    path, identity = upload(hostile.npz())
    return validate(path, IMAGES, **identity).clamped


def attempt(action):
    return f"try:\n    {action}\n    got = 1\nexcept OSError:\n    got = 0"


def test_the_process_knows_no_secret(upload, monkeypatch):
    monkeypatch.setenv("SLUICE_S3_SECRET_KEY", CANARY)
    program = f"got = sum({CANARY!r} in value or 'SLUICE' in key for key, value in os.environ.items())"
    assert ask_inside(program, upload, monkeypatch) == 0
    assert ask_inside("got = len(os.environ) > 5", upload, monkeypatch) == 0


def test_the_process_inherits_only_the_files_it_needs(upload, monkeypatch, tmp_path):
    with (tmp_path / "other").open("w") as other, socket.create_server(("127.0.0.1", 0)) as listening:
        os.set_inheritable(other.fileno(), True)
        os.set_inheritable(listening.fileno(), True)
        # Three streams, an upload and three sinks; and the directory being listed.
        assert ask_inside("got = len(os.listdir('/proc/self/fd'))", upload, monkeypatch) == 8


def test_the_process_has_no_use_for_torch(upload, monkeypatch):
    program = (
        "import worker.validate, worker.records.images, worker.records.tables\ngot = 'torch' in sys.modules"
    )
    assert ask_inside(program, upload, monkeypatch) == 0


def test_the_process_is_limited(upload, monkeypatch):
    program = LIMITS + (
        "import resource\n"
        "names = ('AS', 'FSIZE', 'CPU', 'NOFILE', 'CORE')\n"
        "most = [resource.getrlimit(getattr(resource, 'RLIMIT_' + name)) for name in names]\n"
        "got = most == [(1 << 30,) * 2, (1 << 20,) * 2, (10, 10), (64, 64), (0, 0)]"
    )
    assert ask_inside(program, upload, monkeypatch) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="the doors are Linux's")
@pytest.mark.parametrize(
    "action",
    [
        "open('/etc/hostname')",
        "open('/proc/%d/environ' % os.getppid())",
        "os.listdir('/')",
        "open(THERE, 'w')",
        "os.mkdir(THERE)",
        "socket.socket(socket.AF_INET)",
        "socket.socket(socket.AF_UNIX)",
        "socket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
        "os.execv('/bin/true', ['true'])",
    ],
)
def test_doors_are_closed(upload, monkeypatch, tmp_path, action):
    program = f"THERE = {str(tmp_path / 'there')!r}\n" + LIMITS + "confine.restrict()\n" + attempt(action)
    assert ask_inside(program, upload, monkeypatch) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="the doors are Linux's")
def test_a_child_of_the_process_cannot_leave_its_group(upload, monkeypatch):
    program = """
if os.fork() == 0:
    try:
        os.setpgid(0, 0)
    except PermissionError:
        os._exit(7)
    os._exit(0)
got = os.waitstatus_to_exitcode(os.wait()[1])
"""
    assert ask_inside(program, upload, monkeypatch) == 0
    assert ask_inside(LIMITS + "confine.restrict()\n" + program, upload, monkeypatch) == 7


@pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")
def test_the_process_reaches_no_server(upload, monkeypatch):
    """By a network of its own, or where a container forbids that, by having no sockets at all."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        connect = attempt(f"socket.create_connection(('127.0.0.1', {listening.getsockname()[1]}), 2)")
        assert ask_inside(connect, upload, monkeypatch) == 1
        assert ask_inside(LIMITS + "confine.restrict()\n" + connect, upload, monkeypatch) == 0


def test_slugs_are_plain():
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", fault.value) for fault in Fault)
