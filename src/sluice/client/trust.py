"""What is remembered of each service: the keys it signs with, the key that uploads to it are encrypted for,
and the newest list of withdrawn releases.

Keys are taken at the first meeting and at each `sluice login`, never in between: a service that was broken
into later cannot hand out a key of its own. Whoever wants more than that gives `--key`.
"""

import base64
import json
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sluice.client.api import Json, Sluice
from sluice.client.config import config_file, write_private
from sluice.client.problems import CannotRun, NotVerified
from sluice.envelope import WrappingKey
from sluice.privacy.problems import Problem
from sluice.release.attest import UnknownKey, key_id, open_revocations

Keys = dict[str, bytes]


@dataclass(frozen=True, kw_only=True)
class Trust:
    """Public keys by id, the list of withdrawn releases if one is known, and where both come from."""

    keys: Keys
    keys_from: str
    revocations: Json | None = None
    revocations_from: str = "not checked: no list is known"


def _path() -> Path:
    return config_file().with_name("trust.json")


def remembered() -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(_path().read_text())
        return found
    except FileNotFoundError:
        return {}
    except (OSError, ValueError):
        raise CannotRun(f"{_path()} cannot be read: remove it, and sluice login writes it anew") from None


def _remember(url: str, **news: Any) -> None:
    known = remembered()
    known[url] = known.get(url, {"since": _now()}) | news
    write_private(_path(), json.dumps(known, indent=1))


def pin_signing_keys(service: Sluice, *, again: bool = False) -> None:
    """Takes the keys of a service that is not known yet; `again` also those it has had since."""
    known = remembered().get(service.url, {}).get("keys", {})
    if not known or again:
        now = {one["id"]: one["public"] for one in service.signing_keys()}
        if now.keys() - known.keys():
            _remember(service.url, keys=known | now)


def upload_key(service: Sluice, *, again: bool = False) -> WrappingKey:
    """What uploads are encrypted for; like signing keys, a changed one is taken at `sluice login` only."""
    try:
        key = WrappingKey(service.upload_key()["public"])
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CannotRun(f"{service.url} offers no key to encrypt uploads for: ask its admin") from None
    known = remembered().get(service.url, {}).get("upload_keys", [])
    if key.id not in known:
        if known and not again:
            raise CannotRun(
                f"{service.url} offers another key to encrypt uploads for ({key.id}) than before: ask its "
                "admin whether it was changed; if so, sluice login takes the new one"
            )
        _remember(service.url, upload_keys=[*known, key.id])
    return key


def of_service(url: str, *, online: bool = True, given: bytes | None = None) -> Trust:
    """What is known of a service, with the list `given`, or its newest if in reach, or the last seen."""
    known = remembered().get(url, {})
    if not known.get("keys"):
        raise CannotRun(f"no keys of {url} are known: sluice login --url {url}, or give them with --key")
    keys = {id: base64.b64decode(text) for id, text in known["keys"].items()}
    seen = _opened(known["revocations"].encode(), keys) if "revocations" in known else None
    source = f"of {seen['issued_at']}, fetched {known['fetched']}" if seen else Trust.revocations_from
    raw = given
    if raw is None and online:
        with suppress(CannotRun), Sluice(url) as service:
            raw = service.revocations()
    if raw is not None:
        seen = _opened(raw, keys, seen)
        source = f"of {seen['issued_at']}, " + ("given" if given else "fetched now")
        _remember(url, revocations=raw.decode(), fetched=_now())
    since = f"remembered for {url} since {known['since'][:10]}"
    return Trust(keys=keys, keys_from=since, revocations=seen, revocations_from=source)


def of_file(path: Path, *, given: bytes | None = None) -> Trust:
    """Keys from a file: the JSON a service publishes, PEM, or the base64 of raw keys, one a line."""
    try:
        keys = {key_id(each): each for each in _public_keys(path.read_text())}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise CannotRun(
            f"{path} holds no Ed25519 key: give the service's keys as JSON, PEM or base64"
        ) from None
    known = {"keys": keys, "keys_from": f"in {path}"}
    if given is None:
        return Trust(**known)
    seen = _opened(given, keys)
    return Trust(**known, revocations=seen, revocations_from=f"of {seen['issued_at']}, given")


def for_key(id: str, file: Path | None = None, *, online: bool = True, given: bytes | None = None) -> Trust:
    """What to hold against a statement signed with this key: keys from a file if there is one, else those of
    the service that is remembered to sign with it, which is asked for its newest list unless one is given."""
    url = next((url for url, known in remembered().items() if id in known.get("keys", {})), None)
    if url is None and file is None:
        way_out = "sluice login takes the keys of a service, or give those you trust with --key"
        raise NotVerified(UnknownKey(f"Key {id} is none of a service known here: {way_out}."))
    trust = of_file(file, given=given) if file else None
    if url is None or (trust and given):
        return trust  # type: ignore[return-value]
    known = of_service(url, online=online, given=given)
    if trust is None:
        return known
    return replace(trust, revocations=known.revocations, revocations_from=known.revocations_from)


def _public_keys(text: str) -> list[bytes]:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    if text.lstrip().startswith("-----BEGIN"):
        found = load_pem_public_key(text.encode())
        if not isinstance(found, Ed25519PublicKey):
            raise ValueError("of another kind")
        return [found.public_bytes_raw()]
    if text.lstrip().startswith("{"):
        lines = [one["public"] for one in json.loads(text)["keys"]]
    else:
        lines = text.split()
    keys = [base64.b64decode(line, validate=True) for line in lines]
    if not keys or {len(each) for each in keys} != {32}:
        raise ValueError("not keys of 32 bytes")
    return keys


def _opened(raw: bytes, keys: Keys, seen: Json | None = None) -> Json:
    try:
        return open_revocations(raw, keys, seen=seen)
    except Problem as problem:
        raise NotVerified(problem) from None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
