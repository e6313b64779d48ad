"""Checks a downloaded release against public keys: that it is what was approved and signed."""

import hashlib
import json
from datetime import UTC, datetime
from pathlib import Path

from sluice.client.api import Json
from sluice.client.problems import CannotRun, NotVerified
from sluice.client.trust import for_key
from sluice.privacy.problems import Problem
from sluice.release import attest, owners

_MOST_FILES = 100


def verify(
    directory: Path,
    *,
    keys: Path | None = None,
    revocations: bytes | None = None,
    online: bool = True,
    allow_expired_list: bool = False,
) -> Json:
    """What a release states, once every byte of it was checked; else `NotVerified` says why not.

    Trusted are the keys in a file, or of the service that is remembered to sign with this one; while `online`
    it is asked for its newest list of withdrawn releases. A list that has expired is refused unless that is
    allowed.
    """
    hashes, small = _read(directory)
    if attest.ATTESTATION not in small:
        raise NotVerified(
            attest.NotSigned(
                "There is no attestation.json. A bundle that was fetched for review is neither signed nor "
                "published yet; download the release once it is."
            )
        )
    envelope = small.pop(attest.ATTESTATION)
    try:
        [signature] = json.loads(envelope)["signatures"]
        key = str(signature["keyid"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise NotVerified(attest.BadSignature("There is no statement in attestation.json.")) from None
    trust = for_key(key, keys, online=online, given=revocations)
    try:
        checked = attest.check_release(
            envelope, hashes=hashes, small=small, keys=trust.keys, revocations=trust.revocations
        )
        if trust.revocations is not None and not allow_expired_list:
            attest.require_current(trust.revocations, datetime.now(UTC))
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
        "owners": [_owner(each) for each in owners.of(checked.privacy)],
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
    """Whether a directory holds exactly the bundle of a digest: what an approval of that digest is of."""
    hashes, small = _read(directory)
    sums = small.get(attest.SUMS, b"")
    if hashes.get(attest.SUMS) != digest or sums != attest.sums(hashes) or attest.ATTESTATION in small:
        raise NotVerified(
            attest.BundleAltered(
                f"They are not exactly the bundle {digest}; download into an empty directory."
            )
        )
    return {"directory": str(directory), "bundle": digest, "signed": False, "published": False}


def _owner(privacy: Json) -> Json:
    """What is stated of one owner's records. Releases of older versions have no total that can be checked."""
    named = {name: privacy[name] for name in ("epsilon", "delta", "relation")}
    return named | {"total": privacy.get("total"), "budget": privacy["account"]["epsilon"]}


def _read(directory: Path) -> tuple[dict[str, str], dict[str, bytes]]:
    """The hash of every file, and the bytes of those that are read. A link is no file."""
    if not directory.is_dir():
        raise CannotRun(f"{directory} is not a directory: name the one a release was downloaded to")
    hashes, small = {}, {}
    try:
        found = [each for each in sorted(directory.rglob("*")) if each.is_symlink() or not each.is_dir()]
        for path in found[:_MOST_FILES]:
            name = path.relative_to(directory).as_posix()
            if path.is_symlink() or not path.is_file():
                raise NotVerified(attest.BundleAltered(f"{name} is not a file.", paths=[name]))
            if name in (attest.ATTESTATION, attest.MANIFEST, attest.PRIVACY, attest.SUMS):
                small[name] = path.read_bytes()
            if name != attest.ATTESTATION:
                with path.open("rb") as file:
                    hashes[name] = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as problem:
        raise CannotRun(f"{problem.filename} cannot be read") from None
    return hashes, small
