"""What is encrypted opens with its key, in its place, as a whole and unchanged; or not at all."""

import io

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from sluice.envelope import (
    CHUNK,
    OAEP,
    PLAIN_CHUNK,
    CannotDecrypt,
    Stream,
    WrappingKey,
    decrypt_wrapped,
    encrypted_size,
    new_key,
)

KEY = bytes(range(32))
SIZES = [0, 1, PLAIN_CHUNK - 1, PLAIN_CHUNK, PLAIN_CHUNK + 1, 2 * PLAIN_CHUNK, 2 * PLAIN_CHUNK + 77]


def body(size):
    return (b"0123456789abcdef" * (size // 16 + 1))[:size]


def pem(key):
    return key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()


class Dribble(io.BytesIO):
    """Gives less than was asked for, as a socket does."""

    def read(self, size=-1, /):
        return super().read(min(size, 100_003))


@pytest.mark.parametrize("size", SIZES)
def test_a_stream_of_any_length_comes_back_and_is_as_long_as_foretold(size):
    sealed = Stream(KEY, "a").encrypt(body(size))
    assert len(sealed) == encrypted_size(size)
    assert b"".join(Stream(KEY, "a").decrypted(Dribble(sealed))) == body(size)


def test_the_format_is_the_documented_one():
    """By the words of docs/api.md alone, with no help of ours."""
    key = HKDF(hashes.SHA256(), 32, salt=None, info=b"sluice-stream-v1\0upload/d").derive(KEY)
    first, second = body(PLAIN_CHUNK), b"rest"
    sealed = b""
    for number, (plain, last) in enumerate([(first, 0), (second, 1)]):
        nonce = bytes([number] * 12)
        sealed += nonce + AESGCM(key).encrypt(nonce, plain, number.to_bytes(8, "big") + bytes([last]))
    assert Stream(KEY, "upload/d").decrypt(sealed) == first + second


def test_encrypting_again_gives_the_same_bytes_and_another_text_another_nonce():
    one, two = Stream(KEY, "a"), Stream(KEY, "a")
    assert one.encrypt_chunk(3, b"text", last=False) == two.encrypt_chunk(3, b"text", last=False)
    nonces = {
        one.encrypt_chunk(number, text, last=last)[:12]
        for number in (3, 4) for text in (b"text", b"tex", b"") for last in (False, True)
    }  # fmt: skip
    assert len(nonces) == 12


def chunks(sealed):
    return [sealed[at : at + CHUNK] for at in range(0, len(sealed), CHUNK)]


ALTERED = {
    "a bit": lambda c: [c[0][:50] + bytes([c[0][50] ^ 1]) + c[0][51:], *c[1:]],
    "the nonce": lambda c: [bytes([c[0][0] ^ 1]) + c[0][1:], *c[1:]],
    "cut after a chunk": lambda c: c[:-1],
    "cut within a chunk": lambda c: [*c[:-1], c[-1][:-1]],
    "nothing": lambda _: [],
    "a few bytes": lambda c: [c[0][:20]],
    "exchanged": lambda c: [c[1], c[0], c[2]],
    "doubled": lambda c: [c[0], c[0], *c[1:]],
    "left out": lambda c: [c[0], c[2]],
    "more behind it": lambda c: [*c, b"more"],
    "a second stream behind it": lambda c: [*c, *c],
    "a chunk of another stream": lambda c: [
        c[0],
        chunks(Stream(KEY, "b").encrypt(body(3 * PLAIN_CHUNK)))[1],
        c[2],
    ],
}


@pytest.mark.parametrize("how", ALTERED)
def test_what_was_altered_is_refused(how):
    sealed = chunks(Stream(KEY, "a").encrypt(body(3 * PLAIN_CHUNK)))
    assert Stream(KEY, "a").decrypt(b"".join(sealed))
    with pytest.raises(CannotDecrypt):
        Stream(KEY, "a").decrypt(b"".join(ALTERED[how](sealed)))


@pytest.mark.parametrize(
    ("key", "context"), [(new_key(), "a"), (KEY, "b"), (KEY, "")], ids=["key", "purpose", "none"]
)
def test_another_key_or_purpose_does_not_open_it(key, context):
    sealed = Stream(KEY, "a").encrypt(b"text")
    with pytest.raises(CannotDecrypt):
        Stream(key, context).decrypt(sealed)


def test_a_wrapped_body_opens_for_the_private_half_under_its_name():
    private = rsa.generate_private_key(65537, 3072)
    public = WrappingKey(pem(private))
    sealed = public.encrypt("name", b"text")
    asked = []

    def unwrap(wrapped, id):
        asked.append(id)
        return private.decrypt(wrapped, OAEP)

    assert decrypt_wrapped(sealed, "name", unwrap) == b"text"
    assert asked == [public.id]
    assert public.encrypt("name", b"text") != sealed
    with pytest.raises(CannotDecrypt):
        decrypt_wrapped(sealed, "other", unwrap)
    for bad in (b"", b"text", sealed[1:], sealed[:-1]):
        with pytest.raises(CannotDecrypt):
            decrypt_wrapped(bad, "name", unwrap)


def test_short_keys_and_other_kinds_are_refused():
    for key in (rsa.generate_private_key(65537, 2048), ec.generate_private_key(ec.SECP256R1())):
        with pytest.raises(ValueError, match="3072"):
            WrappingKey(pem(key))
    with pytest.raises(ValueError):  # noqa: PT011 (of the library)
        WrappingKey("no key")
