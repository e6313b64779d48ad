"""The signed list of withdrawn releases."""

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any

from sluice.privacy.problems import Problem
from sluice.release.statement import REVOCATIONS_TYPE, BadSignature, open_envelope

# A list is valid for so long after it was signed; the publisher signs one every day.
LIST_VALID = timedelta(days=7)
CLOCK_SKEW = timedelta(minutes=10)  # tolerated between the clocks of publisher and verifier


class ReleaseWithdrawn(Problem):
    slug, title = "release-withdrawn", "The release was withdrawn"


class RevocationsRolledBack(Problem):
    slug, title = "revocations-rolled-back", "The list of withdrawn releases is older than one seen before"


class RevocationsExpired(Problem):
    slug, title = "revocations-expired", "The list of withdrawn releases is not current"


def revocations(number: int, issued_at: datetime, withdrawn: Iterable[Mapping[str, str]]) -> dict[str, Any]:
    """The list of all withdrawn releases; each entry has release, bundle, at and reason."""
    issued, expires = (at.isoformat(timespec="seconds") for at in (issued_at, issued_at + LIST_VALID))
    return {
        "kind": "sluice-revocations", "version": 1, "number": number, "issued_at": issued,
        "expires_at": expires, "withdrawn": [dict(entry) for entry in withdrawn],
    }  # fmt: skip


def open_revocations(
    raw: bytes, keys: Mapping[str, bytes], *, seen: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """A signed list, if it is not older than the list `seen` before and has all of its entries."""
    payload = open_envelope(raw, REVOCATIONS_TYPE, keys)
    try:
        number, listed = int(payload["number"]), {entry["bundle"] for entry in payload["withdrawn"]}
        valid = (payload["kind"], payload["version"]) == ("sluice-revocations", 1)
        before = {entry["bundle"] for entry in seen["withdrawn"]} if seen else set()
        older = seen is not None and payload != seen and number <= seen["number"]
    except (KeyError, TypeError, ValueError):
        valid = False
    if not valid:
        raise BadSignature("This is not a list of withdrawn releases; fetch it again.")
    if older or not before <= listed:
        raise RevocationsRolledBack(
            f"List {number} is older than one seen before; later withdrawals may be hidden from you."
        )
    return payload


def require_current(listed: Mapping[str, Any], now: datetime) -> None:
    """Refuses an expired list: releases may have been withdrawn since, and a newer list held back.

    Lists of older versions state no expiry; they are valid for the same time after signing.
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
            f"List {listed['number']} expired at {expires.isoformat(timespec='seconds')}; later withdrawals "
            "are not on it. Fetch a newer list; if the service has none, its operator has to start the "
            "publisher.",
        )


def refuse_withdrawn(predicate: Mapping[str, Any], listed: Mapping[str, Any] | None) -> None:
    for entry in listed["withdrawn"] if listed else ():
        if predicate["release"] == entry["release"] or predicate["bundle"] == entry["bundle"]:
            raise ReleaseWithdrawn(f"It was withdrawn at {entry['at']}: {entry['reason']}", at=entry["at"])
