"""Envelope encryption: a stream of AES-256-GCM chunks under a data key, and that key wrapped with RSA-OAEP.

The format is described in docs/api.md#encrypted-uploads, for those who write a client of their own.

Guarantee: without the data key nothing of the plaintext can be read but its length; chunks that were changed,
cut off, reordered or taken from another stream are refused.
"""

import hashlib
import hmac
import io
import secrets
from collections.abc import Callable, Iterator
from typing import Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key

KEY_BYTES = 32
CHUNK = 1 << 20  # of ciphertext: nonce, plaintext, tag. Parts of an upload consist of whole chunks.
_NONCE, _TAG = 12, 16
PLAIN_CHUNK = CHUNK - _NONCE - _TAG
MIN_RSA_BITS = 3072
_MAGIC = b"SLUICE\0\1"  # of a body that comes with its wrapped key
_HEAD = len(_MAGIC) + 16 + 2
MOST_HEAD = _HEAD + 1024
OAEP = padding.OAEP(mgf=padding.MGF1(hashes.SHA256()), algorithm=hashes.SHA256(), label=None)


class CannotDecrypt(Exception):
    """Not encrypted with this key for this purpose, or changed since."""


class Source(Protocol):
    def read(self, size: int, /) -> bytes: ...


def new_key() -> bytes:
    return secrets.token_bytes(KEY_BYTES)


def upload_context(dataset: object) -> str:
    return f"upload/{dataset}"


def encrypted_size(size: int) -> int:
    chunks = max(1, -(-size // PLAIN_CHUNK))
    return size + chunks * (_NONCE + _TAG)


class Stream:
    """The cipher of one stream. `context` says what the stream is; it opens under no other."""

    def __init__(self, key: bytes, context: str) -> None:
        info = b"sluice-stream-v1\0" + context.encode()
        derived = HKDF(hashes.SHA256(), 64, salt=None, info=info).derive(key)
        self._aead, self._nonce_key = AESGCM(derived[:32]), derived[32:]

    def encrypt_chunk(self, number: int, plaintext: bytes, *, last: bool) -> bytes:
        """The same plaintext at the same place gives the same bytes, so that a cut upload can be resumed.

        The nonce is a keyed hash of the plaintext and its place: another plaintext, as of a file that was
        changed between two attempts, gets another nonce.
        """
        place = _place(number, last)
        nonce = hmac.digest(self._nonce_key, place + plaintext, "sha256")[:_NONCE]
        return nonce + self._aead.encrypt(nonce, plaintext, place)

    def decrypt_chunk(self, number: int, chunk: bytes, *, last: bool) -> bytes:
        try:
            return self._aead.decrypt(chunk[:_NONCE], chunk[_NONCE:], _place(number, last))
        except (InvalidTag, ValueError):  # ValueError: too short to have a nonce and a tag
            raise CannotDecrypt from None

    def encrypt(self, body: bytes) -> bytes:
        starts = range(0, max(len(body), 1), PLAIN_CHUNK)
        return b"".join(
            self.encrypt_chunk(number, body[start : start + PLAIN_CHUNK], last=start == starts[-1])
            for number, start in enumerate(starts)
        )

    def decrypted(self, source: Source) -> Iterator[bytes]:
        """The plaintext in pieces. It is complete and as it was written only if the last piece came."""
        number, chunk = 0, _read_exactly(source, CHUNK)
        while True:
            following = _read_exactly(source, CHUNK)
            yield self.decrypt_chunk(number, chunk, last=not following)
            if not following:
                return
            number, chunk = number + 1, following

    def decrypt(self, body: bytes) -> bytes:
        return b"".join(self.decrypted(io.BytesIO(body)))


def _place(number: int, last: bool) -> bytes:
    return number.to_bytes(8, "big") + bytes([last])


def _read_exactly(source: Source, size: int) -> bytes:
    """As many bytes as there are, up to `size`: sockets give fewer at a time."""
    pieces, missing = [], size
    while missing and (piece := source.read(missing)):
        pieces.append(piece)
        missing -= len(piece)
    return b"".join(pieces)


class WrappingKey:
    """The public half of a key-encryption key: wraps data keys for whoever has the private half."""

    def __init__(self, pem: str) -> None:
        """Raises ValueError for anything but an RSA public key of a sufficient length."""
        public = load_pem_public_key(pem.encode())
        if not isinstance(public, RSAPublicKey) or public.key_size < MIN_RSA_BITS:
            raise ValueError(f"is not an RSA public key of at least {MIN_RSA_BITS} bits")
        self._public = public
        self.id = rsa_key_id(public)
        self.wrapped_bytes = public.key_size // 8
        self.pem = public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()

    def wrap(self, key: bytes) -> bytes:
        return self._public.encrypt(key, OAEP)

    def encrypt(self, context: str, body: bytes) -> bytes:
        """A body under a fresh key; in front of it the id of ours and that key, wrapped."""
        key = new_key()
        wrapped = self.wrap(key)
        head = _MAGIC + bytes.fromhex(self.id) + len(wrapped).to_bytes(2, "big") + wrapped
        return head + Stream(key, context).encrypt(body)


def rsa_key_id(public: RSAPublicKey) -> str:
    der = public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(der).hexdigest()[:32]


def decrypt_wrapped(body: bytes, context: str, unwrap: Callable[[bytes, str], bytes]) -> bytes:
    """The reverse of WrappingKey.encrypt; `unwrap` takes a wrapped key and the id of the key it is under."""
    if not body.startswith(_MAGIC):
        raise CannotDecrypt
    id, length = body[len(_MAGIC) : _HEAD - 2], body[_HEAD - 2 : _HEAD]
    end = _HEAD + int.from_bytes(length, "big")
    return Stream(unwrap(body[_HEAD:end], id.hex()), context).decrypt(body[end:])
