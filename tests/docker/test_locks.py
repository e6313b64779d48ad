"""The locks: what images and ./sluice install, by version and by the hashes of the files."""

import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.docker.compose import DOCKERFILES, ROOT, installs, instructions

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCKS = sorted((ROOT / "locks").glob("*.txt"))


def pins(path):
    """The packages of a lock, and how many files of each may be installed."""
    pinned = {}
    for block in re.split(r"\n(?=\S)", path.read_text().strip()):
        first, *rest = (line.strip() for line in block.replace("\\\n", "\n").splitlines())
        requirement = Requirement(first)
        ((operator, version),) = [(each.operator, each.version) for each in requirement.specifier]
        assert operator == "==", first
        assert rest, f"{first} has no hash"
        assert all(re.fullmatch("--hash=sha256:[0-9a-f]{64}", line) for line in rest), first
        pinned[canonicalize_name(requirement.name)] = version
    return pinned


PINS = {path.stem: pins(path) for path in LOCKS}


def required(extra):
    """What the project file asks for with an extra, and with the extras that this one names."""
    for line in PROJECT["optional-dependencies"][extra]:
        requirement = Requirement(line)
        if requirement.name == "sluice":
            for other in requirement.extras:
                yield from required(other)
        else:
            yield requirement


def test_there_is_a_lock_for_everything_that_is_installed():
    assert set(PINS) == {"service", "worker", "dev", "torch", "torch-cpu"}
    assert set(PINS["torch-cpu"]) == {"torch"}
    assert PINS["torch-cpu"]["torch"] == PINS["torch"]["torch"] + "+cpu"
    # Alone, so that an image or a checkout chooses the build: no other lock may bring it along.
    assert not any("torch" in PINS[name] for name in ("service", "worker", "dev"))


@pytest.mark.parametrize("extra", ["service", "worker", "dev"])
def test_lock_and_project_file_agree(extra):
    pinned = PINS[extra] | ({} if extra == "service" else PINS["torch"])
    for requirement in [*map(Requirement, PROJECT["dependencies"]), *required(extra)]:
        version = pinned.get(canonicalize_name(requirement.name))
        renew = f"{requirement}: run locks/renew.sh"
        assert version, renew
        assert requirement.specifier.contains(version), renew


@pytest.mark.parametrize("extra", ["service", "worker", "dev"])
def test_lock_has_what_its_packages_need_in_turn(extra):
    """As far as this platform and this version of Python need it; nothing is resolved on installation."""
    pinned = set(PINS[extra]) | (set() if extra == "service" else set(PINS["torch"]))
    needed = set()
    for requirement in [*map(Requirement, PROJECT["dependencies"]), *required(extra)]:
        needed |= {canonicalize_name(name) for name, *_ in installs(requirement, set())}
    assert needed <= pinned


def test_service_needs_no_torch_and_the_worker_does():
    assert {"boto3", "celery", "psycopg", "redis"} <= set(PINS["service"]) & set(PINS["worker"])
    assert "torch" not in {requirement.name for requirement in required("service")}
    assert "torch" in {requirement.name for requirement in required("worker")}


def test_locks_have_the_versions_that_were_tested():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    tested = dict(line.split("==") for line in lines if not line.startswith("#"))
    tested = {canonicalize_name(name): version for name, version in tested.items()}
    for name, pinned in PINS.items():
        for package, version in pinned.items():
            assert version.removesuffix("+cpu") == tested.get(package, version.removesuffix("+cpu")), (
                f"{package} in locks/{name}.txt: run locks/renew.sh"
            )


@pytest.mark.parametrize("file", [*DOCKERFILES, ROOT / "sluice"], ids=lambda path: path.stem)
def test_nothing_is_installed_without_a_hash_but_our_own_package(file):
    if file.suffix == ".Dockerfile":
        text = " && ".join(rest for word, rest in instructions(file) if word == "RUN")
    else:
        text = file.read_text().replace("\\\n", " ")
    found = re.findall(r"\bpip\"? install (.*?)(?:&&|;;|>|\n|$)", text)
    assert found
    for arguments in found:
        words = arguments.split()
        assert "--no-deps" in words, arguments
        own = "--no-build-isolation" in words and words[-1] in (".", '"$here"')
        # ./sluice puts the arguments for PyTorch together above; a build of the user's own has no hash.
        assert own or "--require-hashes" in words or words[-1] == '"$@"', arguments
    if file.name == "sluice":
        chosen = [line for line in text.splitlines() if re.search(r"set -- (--require|\"\$torch)", line)]
        unverified = [line.strip() for line in chosen if "--require-hashes" not in line]
        assert unverified == [
            '/* | ./* | ../*) set -- "$torch" --no-index --find-links "$choice" ;;',
            '*) set -- "$torch" --index-url "$choice" ;;',
        ]
    else:
        assert "--only-binary :all:" in text, "a source would be built with packages that are not locked"
