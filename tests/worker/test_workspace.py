"""What a killed worker left on its disk goes when the next one starts; what a live one uses stays."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from worker import workspace

START = """
import sys, tempfile
from pathlib import Path
from worker import workspace
workspace.use("train")
held = tempfile.mkdtemp(prefix="records-")
Path(held, "upload").write_bytes(b"a record")
print("in", held, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)  # looked up anew, and put back after the test
    return tmp_path


@pytest.fixture
def begin():
    begun = []

    def start():
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        process = subprocess.Popen([sys.executable, "-c", START], **pipes)
        begun.append(process)
        said = next(line for line in process.stdout if line.startswith("in "))  # after lines of the log
        return process, Path(said.split()[1])

    yield start
    for process in begun:
        process.kill()
        process.communicate()


def test_records_that_a_killed_worker_left_are_removed_by_the_next(temporary, begin):
    killed, left = begin()
    killed.kill()
    killed.wait()
    assert (left / "upload").read_bytes() == b"a record"
    _, of_the_next = begin()
    assert [path.name for path in temporary.iterdir()] == [of_the_next.parent.name]


def test_a_live_worker_keeps_its_records_and_so_does_another_role(temporary, begin):
    _, live = begin()
    killed, _ = begin()
    killed.kill()
    killed.wait()
    mine = workspace.use("publish")
    assert Path(tempfile.gettempdir()) == mine
    assert len(list(temporary.iterdir())) == 3
    assert mine.stat().st_mode & 0o077 == 0
    _, third = begin()
    assert (live / "upload").exists()
    assert {path.name for path in temporary.iterdir()} == {live.parent.name, third.parent.name, mine.name}


def test_a_directory_of_that_name_that_is_not_a_worker_s_is_left(temporary, begin):
    other = temporary / "sluice-worker-train-other"
    other.mkdir()
    (other / "file").write_text("not ours")
    begin()
    assert (other / "file").exists()
