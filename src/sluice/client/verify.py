"""Verifies a downloaded release: that it is what was approved and signed, with public keys alone."""

import hashlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sluice.client.http import Json
from sluice.client.problems import CannotRun, NotVerified
from sluice.client.trust import trust_for
from sluice.privacy.problems import Problem
from sluice.release import owners
from sluice.release.manifest import ATTESTATION, MANIFEST, PRIVACY, SUMS, sums
from sluice.release.revocations import require_current
from sluice.release.statement import BadSignature, NotSigned
from sluice.release.verify import BundleAltered, check_release

_MAX_FILES = 100


def verify(
    directory: str | Path,
    *,
    keys: str | Path | None = None,
    revocations: bytes | None = None,
    online: bool = True,
    allow_expired_list: bool = False,
) -> Json:
    """Checks every byte, signature, epsilon and budget of a release, and that it was not withdrawn.

    Returns what the release states; raises `NotVerified` otherwise. Trusted are the keys in the file `keys`,
    or those stored for the service that signed. With `online`, that service is asked for its newest list of
    withdrawn releases. An expired list is refused unless `allow_expired_list`.
    """
    directory = Path(directory)
    hashes, contents = _read(directory)
    if ATTESTATION not in contents:
        raise NotVerified(
            NotSigned(
                "There is no attestation.json. A bundle that was downloaded for review is neither signed nor "
                "published yet; download the release once it is."
            )
        )
    envelope = contents.pop(ATTESTATION)
    try:
        [signature] = json.loads(envelope)["signatures"]
        key = str(signature["keyid"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise NotVerified(BadSignature("There is no statement in attestation.json.")) from None
    trust = trust_for(key, Path(keys) if keys else None, online=online, revocations=revocations)
    try:
        checked = check_release(
            envelope, hashes=hashes, small=contents, keys=trust.keys, revocations=trust.revocations
        )
        if trust.revocations is not None and not allow_expired_list:
            require_current(trust.revocations, datetime.now(UTC))
    except Problem as problem:
        raise NotVerified(problem) from None
    return {
        "directory": str(directory),
        "ok": True,
        "release": checked.release,
        "name": checked.manifest["name"],
        "bundle": checked.bundle,
        "published_at": checked.published_at,
        "epsilon": checked.epsilon,
        **{name: checked.privacy[name] for name in ("delta", "relation", "unit")},
        "owners": [_owner(privacy) for privacy in owners.of(checked.privacy)],
        "together": owners.together(checked.privacy),
        "sources": checked.privacy.get("sources", []),
        "review": checked.review,
        "key": key,
        "keys_from": trust.keys_from,
        "revocations": {
            "number": trust.revocations["number"] if trust.revocations else None,
            "expires_at": trust.revocations.get("expires_at") if trust.revocations else None,
            "from": trust.revocations_from,
        },
    }


def verify_reviewed(directory: Path, digest: str) -> Json:
    """Checks that a directory holds exactly the bundle with this digest, which is what an approval covers."""
    hashes, contents = _read(directory)
    listed = contents.get(SUMS, b"")
    if hashes.get(SUMS) != digest or listed != sums(hashes) or ATTESTATION in contents:
        raise NotVerified(
            BundleAltered(f"They are not exactly the bundle {digest}; download into an empty directory.")
        )
    return {"directory": str(directory), "bundle": digest, "signed": False, "published": False}


def _owner(privacy: Mapping[str, Any]) -> Json:
    """What is stated about one owner's records. Releases of older versions state no total."""
    stated = {name: privacy[name] for name in ("epsilon", "delta", "relation")}
    return stated | {"total": privacy.get("total"), "budget": privacy["account"]["epsilon"]}


def _read(directory: Path) -> tuple[dict[str, str], dict[str, bytes]]:
    """The hash of every file except the attestation, and the contents of those that are parsed.

    Symbolic links and special files are refused.
    """
    if not directory.is_dir():
        raise CannotRun(f"{directory} is not a directory: name the one a release was downloaded to")
    hashes, contents = {}, {}
    try:
        paths = [path for path in sorted(directory.rglob("*")) if path.is_symlink() or not path.is_dir()]
        for path in paths[:_MAX_FILES]:
            name = path.relative_to(directory).as_posix()
            if path.is_symlink() or not path.is_file():
                raise NotVerified(BundleAltered(f"{name} is not a file.", paths=[name]))
            if name in (ATTESTATION, MANIFEST, PRIVACY, SUMS):
                contents[name] = path.read_bytes()
            if name != ATTESTATION:
                with path.open("rb") as file:
                    hashes[name] = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as problem:
        raise CannotRun(f"{problem.filename} cannot be read") from None
    return hashes, contents
