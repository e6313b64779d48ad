"""What this machine stores about each service: its signing keys, the key that uploads are encrypted for, and
the newest list of withdrawn releases.

Keys are stored at first contact and at each `sluice login`, never in between, so a service that is
compromised later cannot introduce a key of its own. `sluice verify --key` trusts the keys in a file instead.
"""

import base64
import json
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sluice.client.api import Sluice
from sluice.client.config import config_file, write_private
from sluice.client.http import Json
from sluice.client.problems import CannotRun, NotVerified
from sluice.envelope import WrappingKey
from sluice.privacy.problems import Problem
from sluice.release.revocations import open_revocations
from sluice.release.statement import UnknownKey, key_id

Keys = dict[str, bytes]


@dataclass(frozen=True, kw_only=True)
class Trust:
    """Public keys by id, the list of withdrawn releases if there is one, and where both come from."""

    keys: Keys
    keys_from: str
    revocations: Json | None = None
    revocations_from: str = "not checked: no list is known"


def _path() -> Path:
    return config_file().with_name("trust.json")


def stored() -> dict[str, Any]:
    """What is stored about every service, by address."""
    try:
        services: dict[str, Any] = json.loads(_path().read_text())
        return services
    except FileNotFoundError:
        return {}
    except (OSError, ValueError):
        raise CannotRun(f"{_path()} cannot be read: remove it and run sluice login") from None


def _store(url: str, **changes: Any) -> None:
    services = stored()
    services[url] = services.get(url, {"since": _now()}) | changes
    write_private(_path(), json.dumps(services, indent=1))


def pin_signing_keys(service: Sluice, *, accept_changes: bool = False) -> None:
    """Stores the keys of a service at first contact; later only with `accept_changes`, as at login."""
    pinned = stored().get(service.url, {}).get("keys", {})
    if not pinned or accept_changes:
        current = {key["id"]: key["public"] for key in service.signing_keys()}
        if current.keys() - pinned.keys():
            _store(service.url, keys=pinned | current)


def upload_key(service: Sluice, *, accept_changes: bool = False) -> WrappingKey:
    """The key that uploads are encrypted for. A changed key is refused without `accept_changes`."""
    try:
        key = WrappingKey(service.upload_key()["public"])
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CannotRun(f"{service.url} offers no key to encrypt uploads for: ask its admin") from None
    pinned = stored().get(service.url, {}).get("upload_keys", [])
    if key.id not in pinned:
        if pinned and not accept_changes:
            raise CannotRun(
                f"{service.url} offers another key to encrypt uploads for ({key.id}) than before: ask its "
                "admin whether it was changed; if so, sluice login accepts the new one"
            )
        _store(service.url, upload_keys=[*pinned, key.id])
    return key


def trust_for(
    signing_key: str, key_file: Path | None = None, *, online: bool = True, revocations: bytes | None = None
) -> Trust:
    """What to check a statement with that was signed with this key.

    Keys come from `key_file`, or else from the service that is stored with this key. The list of withdrawn
    releases is the one passed in, or else the service's newest, or else the last one seen.
    """
    url = next((url for url, service in stored().items() if signing_key in service.get("keys", {})), None)
    if key_file is None:
        if url is None:
            advice = "sluice login stores the keys of a service, or give those you trust with --key"
            raise NotVerified(UnknownKey(f"Key {signing_key} is of no service known here: {advice}."))
        return _of_service(url, online=online, revocations=revocations)
    trust = _of_file(key_file, revocations=revocations)
    if url is None or revocations:
        return trust
    service = _of_service(url, online=online)
    return replace(trust, revocations=service.revocations, revocations_from=service.revocations_from)


def _of_service(url: str, *, online: bool, revocations: bytes | None = None) -> Trust:
    service = stored()[url]
    keys = {id: base64.b64decode(text) for id, text in service["keys"].items()}
    seen = _opened(service["revocations"].encode(), keys) if "revocations" in service else None
    source = f"of {seen['issued_at']}, fetched {service['fetched']}" if seen else Trust.revocations_from
    newest = revocations
    if newest is None and online:
        with suppress(CannotRun), Sluice(url) as client:
            newest = client.revocations()
    if newest is not None:
        seen = _opened(newest, keys, seen)
        source = f"of {seen['issued_at']}, " + ("given" if revocations else "fetched now")
        _store(url, revocations=newest.decode(), fetched=_now())
    since = f"remembered for {url} since {service['since'][:10]}"
    return Trust(keys=keys, keys_from=since, revocations=seen, revocations_from=source)


def _of_file(path: Path, *, revocations: bytes | None) -> Trust:
    """Keys from a file: the JSON that a service publishes, PEM, or base64 of raw keys, one per line."""
    try:
        keys = {key_id(key): key for key in _public_keys(path.read_text())}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise CannotRun(
            f"{path} holds no Ed25519 key: give the service's keys as JSON, PEM or base64"
        ) from None
    trust = Trust(keys=keys, keys_from=f"in {path}")
    if revocations is None:
        return trust
    seen = _opened(revocations, keys)
    return replace(trust, revocations=seen, revocations_from=f"of {seen['issued_at']}, given")


def _public_keys(text: str) -> list[bytes]:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    if text.lstrip().startswith("-----BEGIN"):
        key = load_pem_public_key(text.encode())
        if not isinstance(key, Ed25519PublicKey):
            raise ValueError("not an Ed25519 key")
        return [key.public_bytes_raw()]
    if text.lstrip().startswith("{"):
        lines = [key["public"] for key in json.loads(text)["keys"]]
    else:
        lines = text.split()
    keys = [base64.b64decode(line, validate=True) for line in lines]
    if not keys or {len(key) for key in keys} != {32}:
        raise ValueError("a key does not have 32 bytes")
    return keys


def _opened(envelope: bytes, keys: Keys, seen: Json | None = None) -> Json:
    try:
        return open_revocations(envelope, keys, seen=seen)
    except Problem as problem:
        raise NotVerified(problem) from None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
