"""The data directory: its lock, passwords, keys, ports and layout version."""

import base64
import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
from pathlib import Path
from typing import IO, Any

from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from core.stores.witness import DirectoryWitness
from local import ports
from local.ports import port_is_free
from sluice.client.config import write_private
from sluice.client.problems import CannotRun
from sluice.envelope import MIN_RSA_BITS

VERSION = 1
ROLES = ("service", "train", "publish", "sweep")
ROOM_NEEDED = 400 << 20  # bytes: a new PostgreSQL directory, its first WAL and the store's first volumes


def claim(data: Path) -> IO[str]:
    """Creates the directory (0700) and locks it until the returned file is closed."""
    try:
        data.mkdir(parents=True, exist_ok=True)
        data.chmod(0o700)
        (data / "log").mkdir(exist_ok=True)
        lock = (data / "lock").open("a")
    except OSError as problem:
        raise CannotRun(_not_writable(data, problem)) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise CannotRun(
            f"another sluice is running on {data}: use that one, or choose another directory with --data"
        ) from None
    if shutil.disk_usage(data).free < ROOM_NEEDED:
        lock.close()
        raise CannotRun(
            f"less than {ROOM_NEEDED >> 20} MB are left on the disk of {data}: "
            "free some, or choose a directory on another disk with --data"
        )
    return lock


def _not_writable(data: Path, problem: OSError) -> str:
    if problem.errno == errno.ENOSPC:
        return f"no space is left on the disk of {data}: free some, or choose another directory with --data"
    reason = os.strerror(problem.errno or errno.EIO).lower()
    return f"cannot write to {data} ({reason}): choose a directory of your own with --data"


def read(data: Path) -> dict[str, Any]:
    """The contents of state.json, or nothing if there is none yet."""
    path = data / "state.json"
    try:
        state: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except ValueError:
        raise CannotRun(
            f"{path} is damaged: restore it from a backup; without it the data cannot be opened"
        ) from None
    return state


def site_of(state: dict[str, Any]) -> str:
    """The id of a site, which is also written into its witness.

    Derived from a secret that is created once, so that a backup from before sites had ids gets the same one.
    """
    return state.get("site") or hashlib.sha256(b"site" + state["s3_internal"].encode()).hexdigest()[:32]


def load(data: Path) -> dict[str, Any]:
    """Reads the state and creates what is missing. Ports are reused while they are free."""
    state = read(data)
    if state.get("version", VERSION) > VERSION:
        raise CannotRun(
            f"{data} was written by a newer Sluice (layout {state['version']}, this one knows {VERSION}): "
            "install that version, or choose another directory with --data"
        )
    state["version"] = VERSION
    # Name by name, so that one that an operator removed is created again: that is how to change a password.
    for kind, names, make in (
        ("database", ("owner", *ROLES), _password),
        ("queue", ROLES, _password),
        ("s3", ("admin", *ROLES), _identity),
    ):
        secrets_of_kind = state.setdefault(kind, {})
        for name in names:
            secrets_of_kind.setdefault(name, make())
    state.setdefault("s3_internal", secrets.token_hex(32))
    # Must not change while fingerprints made with it exist: the worker would refuse to check uploads.
    state.setdefault("fingerprint_key", base64.b64encode(secrets.token_bytes(32)).decode())
    # May be removed to get a new one: releases signed with the old one still verify with its public key.
    state.setdefault("signing_key", base64.b64encode(secrets.token_bytes(32)).decode())
    # Must not change while something encrypted for them exists: nothing else decrypts it.
    for name in ("upload_key", "synthesizer_key"):
        if name not in state:
            state |= dict(zip((name, name.replace("_key", "_public_key")), rsa_pair(), strict=True))
    state["site"] = site_of(state)
    if not _usable(state.get("ports", [])):
        try:
            state["ports"] = _server_ports(ports.reserve_block())
        except OSError as problem:
            raise CannotRun(f"{problem}: stop something that listens") from None
    save(data, state)
    return state


def save(data: Path, state: dict[str, Any]) -> None:
    write_private(data / "state.json", json.dumps(state, indent=1))


def witness_directory(data: Path, state: dict[str, Any], chosen: Path | None, *, lost: bool = False) -> Path:
    """The directory of this site's witness: as chosen, as stored, or in the user's state directory.

    It is created once, for a site that has none yet, or if `lost` says that the old one is gone. Afterwards a
    missing one is an error: an empty directory would contain no record of spending.
    """
    stored = state.get("witness")
    directory = (chosen or Path(stored or default_witness(state["site"]))).resolve()
    if directory == data or data in directory.parents:
        raise CannotRun(
            f"{directory} is inside the data directory, so that restoring a backup would also restore an old "
            "witness: choose a directory outside it with --witness"
        )
    try:
        if lost or stored is None:
            _make_witness(directory, state["site"])
        site = DirectoryWitness(directory).read("site")
    except OSError as problem:
        reason = os.strerror(problem.errno).lower() if problem.errno else "no such directory"
        raise CannotRun(f"the witness of this site is not in {directory} ({reason}): {FIND_IT}") from None
    if site != state["site"].encode():
        raise CannotRun(f"{directory} is not the witness of this site: {FIND_IT}")
    return directory


FIND_IT = (
    "name the directory it is in with --witness; if it is lost, see 'A lost witness' in docs/operations.md"
)


def default_witness(site: str) -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "sluice/witness" / site


def _make_witness(directory: Path, site: str) -> None:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not any(directory.iterdir()):
        directory.chmod(0o700)
        DirectoryWitness(directory).create("site", site.encode())


def _password() -> str:
    return secrets.token_urlsafe(24)


def rsa_pair() -> tuple[str, str]:
    """A private key and its public key, as PEM."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=MIN_RSA_BITS)
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return private.decode(), public.decode()


def _identity() -> dict[str, str]:
    return {"access_key": "SL" + secrets.token_hex(9).upper(), "secret_key": secrets.token_urlsafe(30)}


def _server_ports(first: int) -> list[int]:
    """Ports of one block: ten for the servers, SeaweedFS's admin port, and the one it derives from that."""
    return [*range(first, first + 11), first + 10 + ports.OFFSET]


def _usable(kept: list[int]) -> bool:
    if not kept or kept != _server_ports(kept[0]):
        return False
    return ports.reserve(kept[0]) and all(map(port_is_free, kept))
