"""Is a downloaded release what was approved and signed? Worked out from its files and public keys alone."""

import hashlib
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from client.connection import AsJson, facts, print_json
from client.jobs import readings
from client.problems import CannotRun, NotVerified

if TYPE_CHECKING:
    from client.api import Json

_MOST_FILES = 100


def verify(
    directory: Path,
    *,
    keys: Path | None = None,
    revocations: bytes | None = None,
    online: bool = True,
    allow_expired_list: bool = False,
) -> "Json":
    """What a release states, once every byte of it was checked; else `NotVerified` says why not.

    Trusted are the keys in a file, or of the service that is remembered to sign with this one; while `online`
    it is asked for its newest list of withdrawn releases. A list that has expired is refused unless that is
    allowed.
    """
    from client.trust import for_key
    from privacy import attest, owners
    from privacy.problems import Problem

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


def verify_reviewed(directory: Path, digest: str) -> "Json":
    """Whether a directory holds exactly the bundle of a digest: what an approval of that digest is of."""
    from privacy import attest

    hashes, small = _read(directory)
    sums = small.get(attest.SUMS, b"")
    if hashes.get(attest.SUMS) != digest or sums != attest.sums(hashes) or attest.ATTESTATION in small:
        raise NotVerified(
            attest.BundleAltered(
                f"They are not exactly the bundle {digest}; download into an empty directory."
            )
        )
    return {"directory": str(directory), "bundle": digest, "signed": False, "published": False}


def show_reviewed(result: "Json") -> None:
    facts(
        ("directory", result["directory"]),
        ("files", f"those of bundle {result['bundle']}"),
        ("signed, published", "no: this is the bundle under review"),
    )


def _owner(privacy: "Json") -> "Json":
    """What is stated of one owner's records. Releases of older versions have no total that can be checked."""
    named = {name: privacy[name] for name in ("epsilon", "delta", "relation")}
    return named | {"total": privacy.get("total"), "budget": privacy["account"]["epsilon"]}


def _read(directory: Path) -> tuple[dict[str, str], dict[str, bytes]]:
    """The hash of every file, and the bytes of those that are read. A link is no file."""
    from privacy import attest

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


def protection(
    owners: "list[Json]", together: "Json | None", *, of: str = "", by: str = ""
) -> list[tuple[str, str]]:
    """What a release costs the records of each owner, and what a relay says to a person with several."""
    lines = []
    for i, each in enumerate(owners, 1):
        whose = f", owner {i}" if together else ""
        terms = f"{each['delta']:g}, {each['relation'].replace('_', '-')}{of}"
        lines += [(f"epsilon{whose}", readings(each["epsilon"]) + by), (f"delta, relation{whose}", terms)]
        if total := each.get("total"):
            spent = f"epsilon {total['epsilon']:.4f} of a budget of {each['budget']:g}"
            lines.append((f"total{whose}", f"{spent}, promised or spent by then, however plans were chosen"))
    if together:
        epsilon = "unknown" if together["epsilon"] is None else f"{together['epsilon']:.4f}"
        added = f"with all {len(owners)}, epsilon {epsilon} at delta {together['delta']:g}"
        lines.append(
            ("a person with several owners", f"is covered by the sum of their epsilons and deltas: {added}")
        )
    return lines


def show(result: "Json") -> None:
    people = len({each["person"] for each in result["review"]["approvals"]})
    number, source = result["revocations"]["number"], result["revocations"]["from"]
    facts(
        ("release", f"{result['name']}, {result['release']}"),
        ("files", f"as signed, bundle {result['bundle'][:16]}…, published {result['published_at'][:10]}"),
        *protection(
            result["owners"], result["together"], of=f", for {result['unit']}",
            by=": worked out again here from the event",
        ),
        *(
            ("learned from", f"{each['name']}, declared public, SHA-256 {each['sha256']}")
            for each in result["sources"]
        ),
        ("approved by", f"{people} {'person' if people == 1 else 'people'}"),
        ("key", f"{result['key']}, {result['keys_from']}"),
        ("withdrawn", source if number is None else f"no, by list {number} {source}"),
    )  # fmt: skip


def command(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where a release was downloaded to.")],
    key: Annotated[
        Path | None, typer.Option(help="File with the keys to trust: the service's JSON, PEM or base64.")
    ] = None,
    revocations: Annotated[
        Path | None, typer.Option(help="File with a list of withdrawn releases; not fetched then.")
    ] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Fetch nothing.")] = False,
    allow_expired_list: Annotated[
        bool,
        typer.Option(
            "--allow-expired-list",
            help="Accept a list of withdrawn releases that has expired: later withdrawals are not on it.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check a downloaded release: every byte, the signature, the epsilon, the budget, and that it was not
    withdrawn.

    Exit codes: 0 it holds; 3 altered, forged, over budget, signed with an unknown key, or checked against a
    list of withdrawn releases that has expired; 4 withdrawn.
    """
    try:
        given = revocations.read_bytes() if revocations else None
    except OSError:
        raise CannotRun(f"{revocations} cannot be read: name a list of withdrawn releases") from None
    result = verify(
        directory,
        keys=key,
        revocations=given,
        online=not offline,
        allow_expired_list=allow_expired_list,
    )
    (print_json if as_json else show)(result)
