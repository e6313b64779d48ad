"""What can go wrong at the start says so in one sentence, with a way out."""

import json
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from tests.e2e.driving import PATIENCE, SLUICE, plain_environment

ROOT = Path(__file__).resolve().parents[2]


def sluice(*arguments, prefix=()):
    done = subprocess.run(
        [*prefix, *SLUICE, *arguments],
        capture_output=True,
        text=True,
        env=plain_environment(),
        timeout=PATIENCE,
        check=False,
    )
    return done.returncode, done.stderr.strip()


def sentence(result):
    """The one line on standard error of a command that refused."""
    code, text = result
    assert code == 1, text
    assert "Traceback" not in text
    [line] = text.splitlines()
    assert line.startswith("sluice: ")
    return line


@pytest.fixture
def in_small_place(tmp_path):
    """Runs a command where the directory is a tiny or read-only file system of its own."""

    def prefix(options):
        mount = f'mount -t tmpfs -o {options} tmpfs {tmp_path} && exec "$@"'
        command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, "sh"]
        if subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
            pytest.skip("this system does not let an ordinary process mount")
        return command

    return prefix


def test_port_in_use(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = str(held.getsockname()[1])
        line = sentence(sluice("up", "--data", str(tmp_path), "--port", port))
    assert f"port {port} is in use" in line
    assert "--port" in line


def test_data_directory_of_a_newer_version(tmp_path):
    (tmp_path / "state.json").write_text(json.dumps({"version": 99}))
    line = sentence(sluice("up", "--data", str(tmp_path)))
    assert "written by a newer Sluice" in line
    assert "--data" in line
    assert json.loads((tmp_path / "state.json").read_text()) == {"version": 99}


def test_data_directory_of_another_postgres(tmp_path):
    (tmp_path / "postgres").mkdir()
    (tmp_path / "postgres/PG_VERSION").write_text("17\n")
    line = sentence(sluice("init", "--data", str(tmp_path)))
    assert "belongs to PostgreSQL 17" in line
    assert "pg_dump" in line


def test_damaged_state(tmp_path):
    (tmp_path / "state.json").write_text("{")
    assert "is damaged: restore it from a backup" in sentence(sluice("up", "--data", str(tmp_path)))


def test_data_directory_is_a_file(tmp_path):
    (tmp_path / "file").touch()
    assert "cannot write to" in sentence(sluice("up", "--data", str(tmp_path / "file")))


def test_read_only_directory(tmp_path, in_small_place):
    line = sentence(sluice("up", "--data", str(tmp_path / "data"), prefix=in_small_place("ro")))
    assert "cannot write to" in line
    assert "read-only" in line
    assert "--data" in line


@pytest.mark.parametrize("size", ["size=64k,nr_inodes=2", "size=100m"])
def test_no_disk_left(tmp_path, size, in_small_place):
    line = sentence(sluice("up", "--data", str(tmp_path / "data"), prefix=in_small_place(size)))
    assert "left on the disk" in line
    assert "--data" in line


def test_wrong_python(tmp_path):
    old = tmp_path / "old-python"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    done = launch(ROOT, SLUICE_PYTHON=str(old))
    assert done.returncode == 1
    assert done.stderr.startswith("sluice: Python 3.11 or newer is needed")
    assert "SLUICE_PYTHON" in done.stderr


def test_no_torch_to_be_had(tmp_path):
    for name in ("sluice", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "locks", tmp_path / "locks")
    done = launch(
        tmp_path, SLUICE_TORCH=str(tmp_path), PIP_NO_INDEX="1", PIP_FIND_LINKS="", PIP_CONFIG_FILE="/dev/null"
    )
    assert done.returncode == 1
    assert "no PyTorch (torch==" in done.stderr
    assert "SLUICE_TORCH=" in done.stderr
    assert not (tmp_path / ".venv/stamp").exists()


def launch(directory, **environment):
    return subprocess.run(
        [str(directory / "sluice"), "--help"],
        capture_output=True,
        text=True,
        env=plain_environment(**environment),
        timeout=PATIENCE,
        check=False,
    )
