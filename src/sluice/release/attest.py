"""What a bundle consists of, the signed statement about it, and all of it that can be checked without I/O.

Guarantee: a statement is one sequence of bytes; any other, even one of the same meaning, is refused. What
passes `check_release` is the bundle that was approved, with an epsilon that its own event gives and a total
within the budget of its account.
"""

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Protocol

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from sluice.privacy.account import cost_as_epsilon, exceeds
from sluice.privacy.accountant import Accountant, cost, epsilon
from sluice.privacy.events import from_dict
from sluice.privacy.problems import Problem, TooCostlyToAccount
from sluice.privacy.relation import Relation
from sluice.release import owners

STATEMENT_TYPE = "application/vnd.in-toto+json"
REVOCATIONS_TYPE = "application/vnd.sluice.revocations+json"
PREDICATE = "urn:sluice:release:v1"

MANIFEST, PRIVACY, SUMS, ATTESTATION = "manifest.json", "privacy.json", "SHA256SUMS", "attestation.json"
DATA = {"parquet": "data/images.parquet", "npz": "data/images.npz", "png": "data/images.zip"}
ALWAYS = frozenset([MANIFEST, PRIVACY, SUMS, "schema.json", "README.md"])
IMAGES = frozenset(["synthesizer.safetensors", "synthesizer.json", "croissant.json", "preview.png"])
CLASSIFIER = frozenset(["classifier.safetensors", "classifier.json"])
# Two machines may differ in the last digits of a logarithm; what is stated was rounded by neither.
ROUNDING, AGREEMENT = 1e-9, 1e-6
# A list of withdrawn releases is good for so long after it was signed; the publisher signs one every day.
LIST_VALID = timedelta(days=7)
CLOCK_SKEW = timedelta(minutes=10)  # by which the clocks of publisher and verifier may differ


class BadSignature(Problem):
    slug = "bad-signature"
    title = "The statement is not as it was signed"


class NotSigned(Problem):
    slug = "not-signed"
    title = "The bundle is not signed"


class UnknownKey(Problem):
    slug = "unknown-key"
    title = "The statement was signed with a key that is not known"


class BundleAltered(Problem):
    slug = "bundle-altered"
    title = "The files are not those of the statement"


class EpsilonNotReproduced(Problem):
    slug = "epsilon-not-reproduced"
    title = "The stated epsilon does not follow from the event"


class OverBudget(Problem):
    slug = "over-budget"
    title = "The stated total is more than the budget of its account"


class OwnersDiffer(Problem):
    slug = "owners-differ"
    title = "The owners of a relay have different deltas or relations"


class ReleaseWithdrawn(Problem):
    slug = "release-withdrawn"
    title = "The release was withdrawn"


class RevocationsRolledBack(Problem):
    slug = "revocations-rolled-back"
    title = "The list of withdrawn releases is older than one seen before"


class RevocationsExpired(Problem):
    slug = "revocations-expired"
    title = "The list of withdrawn releases is not current"


class Signer(Protocol):
    """An Ed25519 key that signs, wherever it is. `most_bytes` is the longest message it takes, if any is."""

    @property
    def public(self) -> bytes: ...
    @property
    def key_id(self) -> str: ...
    @property
    def most_bytes(self) -> int | None: ...
    def signature(self, message: bytes) -> bytes: ...


class SeedSigner:
    """A key from its 32-byte seed. Signing the same bytes twice gives the same signature."""

    most_bytes = None

    def __init__(self, seed: bytes) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self.public = self._key.public_key().public_bytes_raw()
        self.key_id = key_id(self.public)

    def signature(self, message: bytes) -> bytes:
        return self._key.sign(message)


def key_id(public: bytes) -> str:
    return hashlib.sha256(public).hexdigest()[:16]


def canonical(body: Any) -> bytes:
    """The one way a signed value is written."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.encode() + b"\n"


def sign(payload: Mapping[str, Any], payload_type: str, signer: Signer) -> bytes:
    """A DSSE envelope around the canonical form of a payload."""
    body = canonical(payload)
    message = _encoded(payload_type, body)
    if signer.most_bytes is not None and len(message) > signer.most_bytes:
        message = _digested(message)
    signature = signer.signature(message)
    return canonical(
        {
            "payload": base64.b64encode(body).decode(),
            "payloadType": payload_type,
            "signatures": [{"keyid": signer.key_id, "sig": base64.b64encode(signature).decode()}],
        }
    )


def open_envelope(raw: bytes, payload_type: str, keys: Mapping[str, bytes]) -> dict[str, Any]:
    """The payload, if one of `keys` (id to raw public key) signed it and every byte is as it was written."""
    try:
        envelope = _read(raw)
        [signature] = envelope["signatures"]
        body = base64.b64decode(envelope["payload"], validate=True)
        sig = base64.b64decode(signature["sig"], validate=True)
        # Written again from its parts, it must be the same: this leaves no byte that nobody looked at.
        parts = {
            "payload": base64.b64encode(body).decode(), "payloadType": payload_type,
            "signatures": [{"keyid": signature["keyid"], "sig": base64.b64encode(sig).decode()}],
        }  # fmt: skip
        written, payload = canonical(parts) == raw, _read(body)
    except (ValueError, TypeError, KeyError, RecursionError):
        raise BadSignature("The envelope cannot be read; fetch it again.") from None
    if not written:
        raise BadSignature(f"The envelope is not of type {payload_type} in its one form; fetch it again.")
    public = keys.get(signature["keyid"])
    if public is None or key_id(public) != signature["keyid"]:
        raise UnknownKey(
            f"Key {signature['keyid']} is not among the trusted ones; compare the service's keys with a copy "
            "you got in another way."
        )
    message = _encoded(payload_type, body)
    if not any(_signed(public, sig, form) for form in (message, _digested(message))):
        raise BadSignature("The signature does not fit; do not use what came with it.")
    return payload


def _signed(public: bytes, signature: bytes, message: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def _digested(message: bytes) -> bytes:
    """What a key signs that takes short messages only. No message of ours begins like this."""
    return b"sluice-sha512-v1\0" + hashlib.sha512(message).digest()


def _encoded(payload_type: str, body: bytes) -> bytes:
    """What DSSE signs: the type, too, with lengths so that nothing can shift from one into the other."""
    return b"DSSEv1 %d %s %d %s" % (len(payload_type), payload_type.encode(), len(body), body)


def _read(raw: bytes) -> dict[str, Any]:
    body = json.loads(raw)
    if not isinstance(body, dict) or canonical(body) != raw:
        raise ValueError("not an object in canonical form")
    return body


def sums(hashes: Mapping[str, str]) -> bytes:
    """SHA256SUMS of a bundle, as `sha256sum -c` reads it. The hash of these bytes is the bundle's digest."""
    kept = sorted(path for path in hashes if path not in (SUMS, ATTESTATION))
    return "".join(f"{hashes[path]}  {path}\n" for path in kept).encode()


def paths(formats: Iterable[str]) -> frozenset[str]:
    """Every file of a bundle whose samples come in these formats; the statement is added to them.

    A release without samples is that of a classifier.
    """
    data = {DATA[each] for each in formats}
    return ALWAYS | (IMAGES | data if data else CLASSIFIER)


def release_statement(
    *,
    release: str,
    bundle: str,
    hashes: Mapping[str, str],
    privacy: Mapping[str, Any],
    review: Mapping[str, Any],
    code: Mapping[str, str],
    published_at: str,
) -> dict[str, Any]:
    """An in-toto statement: these files, this cost, approved by these people."""
    subject = [{"name": path, "digest": {"sha256": hashes[path]}} for path in sorted(hashes)]
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": subject,
        "predicateType": PREDICATE,
        "predicate": {
            "release": release, "bundle": bundle, "privacy": dict(privacy), "review": dict(review),
            "code": dict(code), "published_at": published_at,
        },
    }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A release that passed: what it is, and the epsilon its event gives here, by each accountant."""

    release: str
    bundle: str
    published_at: str
    epsilon: dict[str, float | None]
    manifest: dict[str, Any]
    privacy: dict[str, Any]
    review: dict[str, Any]


def check_release(
    envelope: bytes,
    *,
    hashes: Mapping[str, str],
    small: Mapping[str, bytes],
    keys: Mapping[str, bytes],
    revocations: Mapping[str, Any] | None,
) -> Checked:
    """Everything a bundle promises: `hashes` of all its files but the statement, `small` the bytes of
    manifest.json, privacy.json and SHA256SUMS, `revocations` a list that `open_revocations` gave.
    """
    statement = open_envelope(envelope, STATEMENT_TYPE, keys)
    try:
        predicate = statement["predicate"]
        if release_statement(**{**predicate, "hashes": _subjects(statement)}) != statement:
            raise BundleAltered("The statement has parts that are not known here; a newer client may know.")
        manifest = _agreeing(predicate, _subjects(statement), hashes, small)
        again = _owners(predicate["privacy"])
        _refuse_withdrawn(predicate, revocations)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise BundleAltered(
            "The statement or a file is not written as a release is; fetch it again."
        ) from None
    return Checked(
        release=predicate["release"], bundle=predicate["bundle"], published_at=predicate["published_at"],
        epsilon=again, manifest=manifest, privacy=predicate["privacy"], review=predicate["review"],
    )  # fmt: skip


def _subjects(statement: Mapping[str, Any]) -> dict[str, str]:
    return {each["name"]: each["digest"]["sha256"] for each in statement["subject"]}


def _agreeing(
    predicate: Mapping[str, Any],
    stated: Mapping[str, str],
    hashes: Mapping[str, str],
    small: Mapping[str, bytes],
) -> dict[str, Any]:
    """The manifest, if statement, files, sums, manifest, privacy.json and approvals all say the same."""
    if dict(hashes) != stated:
        odd = sorted({path for path, _ in set(hashes.items()) ^ set(stated.items())})
        raise BundleAltered(f"These files are changed, missing or too many: {', '.join(odd)}.", paths=odd)
    for path in (MANIFEST, PRIVACY, SUMS):
        if hashlib.sha256(small[path]).hexdigest() != stated[path]:
            raise BundleAltered(f"{path} is not the file that was signed.", paths=[path])
    if small[SUMS] != sums(stated) or stated[SUMS] != predicate["bundle"]:
        raise BundleAltered("SHA256SUMS is not the list of the files.", paths=[SUMS])
    manifest = json.loads(small[MANIFEST])
    listed = {each["path"]: each["sha256"] for each in manifest["files"]}
    if listed != {path: each for path, each in stated.items() if path not in (MANIFEST, SUMS)}:
        raise BundleAltered("manifest.json lists other files.", paths=[MANIFEST])
    same = ("release", "code")
    if any(manifest[name] != predicate[name] for name in same) or set(stated) != paths(
        manifest["sample"]["formats"]
    ):
        raise BundleAltered("manifest.json is that of another release.", paths=[MANIFEST])
    if json.loads(small[PRIVACY]) != predicate["privacy"]:
        raise BundleAltered("privacy.json is not what was signed.", paths=[PRIVACY])
    if manifest.get("sources", []) != predicate["privacy"].get("sources", []):  # older releases name none
        raise BundleAltered("manifest.json names other sources than privacy.json.", paths=[MANIFEST])
    review = predicate["review"]
    approving = {each["person"] for each in review["approvals"] if each["digest"] == predicate["bundle"]}
    if review["reviewers"] != 1:  # four eyes: the author's own do not count
        approving -= {review["author"]}
    if not approving or manifest["review"] != {"reviewers": review["reviewers"]}:
        raise BundleAltered("Nobody who may approved this bundle; do not use it.", paths=[MANIFEST])
    return dict(manifest)


def _owners(privacy: Mapping[str, Any]) -> dict[str, float | None]:
    """The epsilons of the release's own account, if every owner's numbers follow and can be compared."""
    stated = owners.of(privacy)
    if any((each["relation"], each["delta"]) != (privacy["relation"], privacy["delta"]) for each in stated):
        raise OwnersDiffer(
            "Their epsilons cannot be compared or added; ask the publisher for another release."
        )
    again = [_reproduced(each) for each in stated]
    for each in stated:
        _require_within_budget(each)
    return again[0]


def _require_within_budget(privacy: Mapping[str, Any]) -> None:
    """The total follows from its cost at the account's order, and is no more than the account's epsilon."""
    account = privacy["account"]
    budget, terms = account["epsilon"], {"delta": account["delta"], "order": account["order"]}
    if "total" in privacy:
        total, spent = privacy["total"]["epsilon"], privacy["total"]["cost"]
        again = cost_as_epsilon(spent, **terms)
        if not (isinstance(spent, int) and spent >= privacy["cost"] and _follows(again, total)):
            raise EpsilonNotReproduced(
                "The stated total does not follow from its cost.", stated=total, again=again
            )
        try:
            over = exceeds(spent, epsilon=budget, **terms)
        except Problem as problem:
            raise EpsilonNotReproduced(f"The account has no such budget: {problem.detail}") from None
    else:
        # Statements of older versions have readings of everything paid for, which hold for plans that were
        # chosen in advance and cannot be worked out again.
        total = owners.best(privacy["total_after"])
        over = total is None or total > budget * (1 + ROUNDING)
    if over:
        detail = "The account had promised or spent more than its budget; do not rely on this release."
        raise OverBudget(detail, total=total, budget=budget)


def _reproduced(privacy: Mapping[str, Any]) -> dict[str, float | None]:
    """The epsilons of the event, if they are those stated, and its cost at the account's order."""
    try:
        event, relation = from_dict(privacy["event"]), Relation(privacy["relation"])
        delta, account = privacy["delta"], privacy["account"]
        again = {
            each.value: readable(each, event=event, delta=delta, relation=relation) for each in Accountant
        }
        price = cost(event, order=account["order"], relation=relation)
    except Problem as problem:
        raise EpsilonNotReproduced(f"The event cannot be accounted for here: {problem.detail}") from None
    stated = privacy["epsilon"]
    wrong = [name for name, value in again.items() if not _follows(value, stated[name])]
    if (
        wrong
        or set(stated) != set(again)
        or account["delta"] != delta
        or not _follows(price, privacy["cost"])
    ):
        raise EpsilonNotReproduced(
            "The event gives another epsilon or cost than is stated.", stated=stated, again=again
        )
    return again


def readable(accountant: Accountant, *, event: Any, delta: float, relation: Relation) -> float | None:
    """The epsilon of one or more events, or None where this accountant cannot say."""
    try:
        return epsilon(event, delta=delta, accountant=accountant, relation=relation).epsilon
    except TooCostlyToAccount:
        return None


def _follows(again: float | None, stated: float | None) -> bool:
    if again is None or stated is None:
        return again is stated
    return stated * (1 - AGREEMENT) <= again <= stated * (1 + ROUNDING)


def revocations(number: int, issued_at: datetime, withdrawn: Iterable[Mapping[str, str]]) -> dict[str, Any]:
    """The list of everything withdrawn so far: release, bundle, at, reason of each."""
    issued, expires = (at.isoformat(timespec="seconds") for at in (issued_at, issued_at + LIST_VALID))
    return {
        "kind": "sluice-revocations", "version": 1, "number": number, "issued_at": issued,
        "expires_at": expires, "withdrawn": [dict(each) for each in withdrawn],
    }  # fmt: skip


def open_revocations(
    raw: bytes, keys: Mapping[str, bytes], *, seen: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """A signed list, if it is not older than the one `seen` before and forgets nothing of it."""
    found = open_envelope(raw, REVOCATIONS_TYPE, keys)
    try:
        number, listed = int(found["number"]), {each["bundle"] for each in found["withdrawn"]}
        known = (found["kind"], found["version"]) == ("sluice-revocations", 1)
        before = {each["bundle"] for each in seen["withdrawn"]} if seen else set()
        older = seen is not None and found != seen and number <= seen["number"]
    except (KeyError, TypeError, ValueError):
        known = False
    if not known:
        raise BadSignature("The list is not written as one of withdrawn releases is; fetch it again.")
    if older or not before <= listed:
        raise RevocationsRolledBack(
            f"List {number} is behind one seen before; somebody may be hiding what was withdrawn since."
        )
    return found


def require_current(listed: Mapping[str, Any], now: datetime) -> None:
    """A list that somebody could have held back: what was withdrawn since it expired is not on it.

    Lists of older versions name no expiry: they are good as long after they were signed as others.
    """
    try:
        issued = datetime.fromisoformat(listed["issued_at"])
        expires = (
            datetime.fromisoformat(listed["expires_at"]) if "expires_at" in listed else issued + LIST_VALID
        )
        late, early = now > expires + CLOCK_SKEW, now < issued - CLOCK_SKEW
    except (KeyError, TypeError, ValueError):
        raise BadSignature("The list does not say when it was signed; fetch it again.") from None
    if early:
        raise RevocationsExpired(
            f"It was signed at {listed['issued_at']}, which is in the future: set the clock of this machine.",
            issued_at=listed["issued_at"],
        )
    if late:
        raise RevocationsExpired(
            f"List {listed['number']} was good until {expires.isoformat(timespec='seconds')}; what was "
            "withdrawn since is not on it. Fetch a newer one; if the service has none, its operator has to "
            "start the publisher.",
        )


def _refuse_withdrawn(predicate: Mapping[str, Any], listed: Mapping[str, Any] | None) -> None:
    for each in listed["withdrawn"] if listed else ():
        if predicate["release"] == each["release"] or predicate["bundle"] == each["bundle"]:
            raise ReleaseWithdrawn(f"It was withdrawn at {each['at']}: {each['reason']}", at=each["at"])
