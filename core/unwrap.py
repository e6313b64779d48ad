"""Private halves of key-encryption keys: in a file, or in a KMS that does not export them.

Only the train and publish workers import this; the service has only the public halves.
"""

from typing import TYPE_CHECKING, Any, Protocol

from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_der_public_key,
    load_pem_private_key,
)

from core import kms
from core.settings import KMS
from sluice.envelope import KEY_BYTES, OAEP, CannotDecrypt, WrappingKey

if TYPE_CHECKING:
    from core.settings import PublishSettings, TrainSettings

_END = "-----END PRIVATE KEY-----"


class KeyNotConfigured(Exception):
    """The key-encryption key is not in this worker's settings; the data may be fine."""


class Unwrapper(Protocol):
    """`public` wraps new data keys; `unwrap` decrypts one, given the id of its key-encryption key.

    `require` raises KeyNotConfigured for an id that is not configured.
    """

    @property
    def public(self) -> WrappingKey: ...
    def require(self, id: str) -> None: ...
    def unwrap(self, wrapped: bytes, id: str) -> bytes: ...


class FileKeys:
    """RSA private keys as PEM. The first is the current one; the others decrypt older data."""

    def __init__(self, pem: str) -> None:
        """Raises ValueError for anything else."""
        self._keys: dict[str, RSAPrivateKey] = {}
        publics = []
        for text in filter(str.strip, pem.split(_END)):
            key = load_pem_private_key((text.strip() + "\n" + _END + "\n").encode(), password=None)
            if not isinstance(key, RSAPrivateKey):
                raise ValueError("is not an RSA private key")
            public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
            publics.append(WrappingKey(public.decode()))
            self._keys[publics[-1].id] = key
        if not publics:
            raise ValueError("holds no private key")
        self.public = publics[0]

    def require(self, id: str) -> None:
        if id not in self._keys:
            raise KeyNotConfigured(id)

    def unwrap(self, wrapped: bytes, id: str) -> bytes:
        self.require(id)
        try:
            return _whole(self._keys[id].decrypt(wrapped, OAEP))
        except ValueError:
            raise CannotDecrypt from None


class KmsKey:
    """An asymmetric RSA key of AWS KMS, or of anything that speaks its protocol."""

    def __init__(self, client: Any, key: str) -> None:
        self._client, self._key = client, key
        der = client.get_public_key(KeyId=key)["PublicKey"]
        public = load_der_public_key(der).public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        self.public = WrappingKey(public.decode())

    def require(self, id: str) -> None:
        if id != self.public.id:
            raise KeyNotConfigured(id)

    def unwrap(self, wrapped: bytes, id: str) -> bytes:
        self.require(id)
        try:
            answer = self._client.decrypt(
                KeyId=self._key, CiphertextBlob=wrapped, EncryptionAlgorithm="RSAES_OAEP_SHA_256"
            )
        except self._client.exceptions.InvalidCiphertextException:
            raise CannotDecrypt from None
        return _whole(answer["Plaintext"])


def _whole(key: bytes) -> bytes:
    if len(key) != KEY_BYTES:
        raise CannotDecrypt
    return key


def unwrapper(key: str, settings: "TrainSettings | PublishSettings") -> Unwrapper:
    """From the value of a setting: PEM, or "kms:" and the id of a key there."""
    if key.startswith(KMS):
        return KmsKey(kms.client_for(settings), key.removeprefix(KMS))
    return FileKeys(key)
