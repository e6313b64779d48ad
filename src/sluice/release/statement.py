"""Signed statements: a DSSE envelope around canonical JSON, signed with Ed25519.

Guarantee: a statement is one sequence of bytes; any other, even one of the same meaning, is refused.
"""

import base64
import hashlib
from collections.abc import Mapping
from typing import Any, Protocol

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from sluice.privacy.problems import Problem
from sluice.release.canonical import canonical, read_canonical

STATEMENT_TYPE = "application/vnd.in-toto+json"
REVOCATIONS_TYPE = "application/vnd.sluice.revocations+json"


class BadSignature(Problem):
    slug, title = "bad-signature", "The statement is not the one that was signed"


class NotSigned(Problem):
    slug, title = "not-signed", "The bundle is not signed"


class UnknownKey(Problem):
    slug, title = "unknown-key", "The statement was signed with an unknown key"


class Signer(Protocol):
    """An Ed25519 key in this process or a token. `most_bytes` is the longest message it signs, if limited."""

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
    """The payload, if one of `keys` (id to raw public key) signed it and the bytes are the canonical form."""
    try:
        envelope = read_canonical(raw)
        [signature] = envelope["signatures"]
        body = base64.b64decode(envelope["payload"], validate=True)
        sig = base64.b64decode(signature["sig"], validate=True)
        # The envelope is written again from its parts and compared, so that every byte of it is verified.
        parts = {
            "payload": base64.b64encode(body).decode(), "payloadType": payload_type,
            "signatures": [{"keyid": signature["keyid"], "sig": base64.b64encode(sig).decode()}],
        }  # fmt: skip
        written, payload = canonical(parts) == raw, read_canonical(body)
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
    """What a key signs that takes only short messages. No DSSE message begins with this prefix."""
    return b"sluice-sha512-v1\0" + hashlib.sha512(message).digest()


def _encoded(payload_type: str, body: bytes) -> bytes:
    """The message DSSE signs: type and body with their lengths, so that no byte can belong to either."""
    return b"DSSEv1 %d %s %d %s" % (len(payload_type), payload_type.encode(), len(body), body)
