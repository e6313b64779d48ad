"""The arrows hold, and a breach of any of them is found."""

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("src/sluice", "core", "service", "worker", "local", "migrations")
# contract → (file, planted line)
BREACHES = [
    ("local import core", "src/sluice/privacy/relation.py", "import core.errors"),
    ("local import core", "core/errors.py", "import service.health"),
    ("local import core", "core/errors.py", "import worker.process"),
    ("local import core", "core/errors.py", "import local.ports"),
    ("local import core", "service/health.py", "import worker.process"),
    ("local import core", "worker/process.py", "import service.problems"),
    ("imports point down", "src/sluice/privacy/relation.py", "import sluice.methods.base"),
    ("imports point down", "src/sluice/release/owners.py", "import sluice.client.api"),
    ("imports point down", "src/sluice/client/problems.py", "import sluice.cli.connection"),
    ("the private and the public side", "worker/publish.py", "import worker.train"),
    ("the private and the public side", "worker/train.py", "import worker.publish"),
    ("the private and the public side", "worker/train.py", "import worker.build"),
    ("cannot read records", "worker/publish.py", "import core.stores.private"),
    ("cannot read records", "worker/sweep.py", "import worker.records"),
    ("cannot read records", "service/health.py", "import core.stores.private"),
    ("cannot read records", "worker/build.py", "import worker.uploads"),
    ("have private keys", "service/health.py", "import core.unwrap"),
    ("imports the upload store", "worker/train.py", "import core.stores.uploads"),
    ("do not import torch", "service/health.py", "import torch"),
    ("do not import torch", "core/errors.py", "def late():\n    import torch"),
    ("do not import torch", "src/sluice/privacy/relation.py", "from opacus import validators"),
    ("privacy is arithmetic", "src/sluice/privacy/relation.py", "import sqlalchemy"),
    ("privacy is arithmetic", "src/sluice/release/owners.py", "import boto3"),
    ("none of the server's packages", "src/sluice/client/problems.py", "import service.app"),
    ("none of the server's packages", "src/sluice/cli/main.py", "def late():\n    from worker import train"),
    ("none of the server's packages", "src/sluice/client/release.py", "import worker.trainers"),
    ("none of the server's packages", "src/sluice/generators/image.py", "import worker.records"),
    ("none of the server's packages", "src/sluice/cli/verify.py", "import sqlalchemy"),
    ("none of the server's packages", "src/sluice/cli/quote.py", "import core.settings"),
]


def lint(directory):
    tool = Path(sysconfig.get_path("scripts")) / "lint-imports"
    # The copy first on the path, so that it is what gets looked at.
    command = [
        sys.executable,
        "-c",
        f"import sys; sys.path[:0] = ['src', '.']; exec(open({str(tool)!r}).read())",
    ]
    return subprocess.run(
        [*command, "--no-cache"], cwd=directory, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    directory = tmp_path_factory.mktemp("copy")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, directory / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", directory)
    return directory


def test_the_tree_as_it_is_keeps_every_contract(copy):
    result = lint(copy)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(("contract", "file", "line"), BREACHES)
def test_a_planted_breach_is_found(contract, file, line, copy):
    path = copy / file
    before = path.read_text()
    path.write_text(f"{before}\n{line}\n")
    try:
        result = lint(copy)
    finally:
        path.write_text(before)
    assert result.returncode == 1
    broken = [text for text in result.stdout.splitlines() if " BROKEN" in text]
    assert any(contract in text for text in broken), result.stdout
