"""What the tests of the containers read: the compose file, the Dockerfiles, and the secrets of a new site."""

import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import yaml
from packaging.requirements import Requirement

from core.settings import (
    MigrateSettings,
    PublishSettings,
    ServiceSettings,
    SweepSettings,
    TrainSettings,
)

ROOT = Path(__file__).parents[2]
CA = "/etc/sluice/ca.crt"
COMPOSE = ROOT / "docker-compose.yml"
DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
TOOLS = Path(sys.executable).parent
VARIABLE = re.compile(r"\$\{(?P<name>\w+)(?::-(?P<default>[^}]*))?\}")

KINDS = {
    "migrate": MigrateSettings,
    "api": ServiceSettings,
    "train": TrainSettings,
    "train-cpu": TrainSettings,
    "publish": PublishSettings,
    "sweep": SweepSettings,
}
ROLE = {"migrate": "migrate", "api": "service", "train": "train", "train-cpu": "train"} | {
    name: name for name in ("publish", "sweep")
}


def interpolated(node):
    """The file as Compose reads it when no variable is set."""
    if isinstance(node, dict):
        return {key: interpolated(value) for key, value in node.items()}
    if isinstance(node, list):
        return [interpolated(value) for value in node]
    if isinstance(node, str):
        return VARIABLE.sub(lambda found: found["default"] or "", node)
    return node


FILE = interpolated(yaml.safe_load(COMPOSE.read_text()))
SERVICES = FILE["services"]


def secrets_of(service):
    """Where each of a service's secrets comes from, by the name of the file it sees."""
    entries = [{"source": s} if isinstance(s, str) else s for s in service.get("secrets", [])]
    return {entry.get("target", entry["source"]): entry["source"] for entry in entries}


def dockerfile_of(service):
    return ROOT / service["build"]["dockerfile"] if "build" in service else None


def instructions(dockerfile):
    joined = re.sub(r"\\\n(\s*#.*\n)*", " ", dockerfile.read_text())
    return [line.split(maxsplit=1) for line in joined.splitlines() if line and not line.startswith("#")]


def copied(dockerfile):
    """What a Dockerfile takes from the repository."""
    return [
        source
        for word, rest in instructions(dockerfile)
        if word == "COPY" and not rest.startswith("--from")
        for source in rest.split()[:-1]
    ]


def installs(requirement, seen):
    """Every distribution that comes with a requirement, by the metadata of what is installed here."""
    if (requirement.name, *sorted(requirement.extras)) in seen:
        return seen
    seen.add((requirement.name, *sorted(requirement.extras)))
    try:
        needs = [Requirement(need) for need in metadata.requires(requirement.name) or []]
    except metadata.PackageNotFoundError:  # for another platform or version of Python
        return seen
    for need in needs:
        if not need.marker or any(need.marker.evaluate({"extra": e}) for e in requirement.extras or {""}):
            installs(need, seen)
    return seen


def make_secrets(base):
    """Secrets as an operator makes them."""
    command = ["sh", ROOT / "docker/secrets.sh", base / "secrets", base / "data"]
    subprocess.run(command, check=True, capture_output=True)
    for path in [base / "secrets", *(base / "secrets").iterdir()]:
        os.chown(path, os.geteuid(), os.getegid())  # run by root, the script gives them to another user
    return base / "secrets"
