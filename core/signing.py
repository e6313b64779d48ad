"""Signers of releases: an Ed25519 key in a setting, in a KMS, or in a PKCS#11 token."""

from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote, urlsplit

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_der_public_key

from core import kms
from core.settings import KMS, PKCS11, decoded_seed
from sluice.release.statement import SeedSigner, Signer, key_id

if TYPE_CHECKING:
    from core.settings import PublishSettings


class KmsSigner:
    """A key of AWS KMS with the key spec ECC_NIST_EDWARDS25519."""

    most_bytes = 4096  # that KMS signs at once

    def __init__(self, client: Any, key: str) -> None:
        self._client, self._key = client, key
        public = load_der_public_key(client.get_public_key(KeyId=key)["PublicKey"])
        if not isinstance(public, Ed25519PublicKey):
            raise ValueError(f"the key {key} in the KMS is not of the kind ECC_NIST_EDWARDS25519")
        self.public = public.public_bytes_raw()
        self.key_id = key_id(self.public)

    def signature(self, message: bytes) -> bytes:
        answer = self._client.sign(
            KeyId=self._key, Message=message, MessageType="RAW", SigningAlgorithm="ED25519_SHA_512"
        )
        signature: bytes = answer["Signature"]
        return signature


class TokenSigner:
    """A key pair in a PKCS#11 token, named by a URI of RFC 7512 with module-path and pin-value."""

    most_bytes = None

    def __init__(self, uri: str) -> None:
        """Raises ValueError for a URI that lacks something."""
        at = urlsplit(uri)
        path = dict(part.split("=", 1) for part in at.path.split(";") if "=" in part)
        query = parse_qs(at.query)
        try:
            self._token, self._label = unquote(path["token"]), unquote(path["object"])
            self._module, self._pin = query["module-path"][0], query["pin-value"][0]
        except KeyError as missing:
            raise ValueError(f"the PKCS#11 URI lacks {missing}") from None
        with self._session() as session:
            from pkcs11 import Attribute, ObjectClass

            public = session.get_key(object_class=ObjectClass.PUBLIC_KEY, label=self._label)
            point: bytes = public[Attribute.EC_POINT]
        if point[:-32] not in (b"", b"\x04\x20"):  # an octet string of 32 bytes, by the standard as DER
            raise ValueError(f"the key {self._label} in the token is not an Ed25519 key")
        self.public = point[-32:]
        self.key_id = key_id(self.public)

    def _session(self) -> Any:
        """Opens a new session: tokens close sessions by themselves, and releases are signed rarely."""
        import pkcs11  # only where it is used: `pip install sluice[pkcs11]`

        return pkcs11.lib(self._module).get_token(token_label=self._token).open(user_pin=self._pin)

    def signature(self, message: bytes) -> bytes:
        with self._session() as session:
            from pkcs11 import Mechanism, ObjectClass

            key = session.get_key(object_class=ObjectClass.PRIVATE_KEY, label=self._label)
            signature: bytes = key.sign(message, mechanism=Mechanism.EDDSA)
            return signature


def signer(settings: "PublishSettings") -> Signer:
    """From the value of a setting: a seed as base64, "kms:" and the id of a key there, or a PKCS#11 URI."""
    key = settings.signing_key.get_secret_value().strip()
    if key.startswith(KMS):
        return KmsSigner(kms.client_for(settings), key.removeprefix(KMS))
    if key.startswith(PKCS11):
        return TokenSigner(key)
    return SeedSigner(decoded_seed(key))
