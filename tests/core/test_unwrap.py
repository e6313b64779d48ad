"""Data keys are opened by private keys in a file or in a KMS, and by nobody else."""

import pytest
from botocore.exceptions import ClientError
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from core.settings import TrainSettings
from core.unwrap import FileKeys, KeyNotConfigured, unwrapper
from sluice.envelope import CannotDecrypt, new_key
from tests.fakes_kms import serving

KEYS = [rsa.generate_private_key(65537, 3072) for _ in range(2)]
PEMS = [key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode() for key in KEYS]
FIRST, SECOND = map(FileKeys, PEMS)


@pytest.fixture
def settings(servers):
    given = {k.removeprefix("SLUICE_").lower(): v for k, v in servers.environments["train"].items()}

    def make(**more):
        identity = {"kms_access_key": "AKTRAIN", "kms_secret_key": "f3Kq9zlonGenough"}
        return TrainSettings(**given | identity | more)

    return make


def test_a_key_in_a_file_opens_what_was_wrapped_for_it():
    secret = new_key()
    wrapped = FIRST.public.wrap(secret)
    assert FIRST.unwrap(wrapped, FIRST.public.id) == secret
    with pytest.raises(KeyNotConfigured, match=FIRST.public.id):
        SECOND.unwrap(wrapped, FIRST.public.id)
    for bad in (SECOND.public.wrap(secret), FIRST.public.wrap(b"too short"), b"", wrapped[:-1]):
        with pytest.raises(CannotDecrypt):
            FIRST.unwrap(bad, FIRST.public.id)


@pytest.mark.parametrize("between", ["", "\n", "\n\n"])
def test_the_first_key_of_a_file_is_for_new_data_and_all_open_old(between):
    both = FileKeys(PEMS[1] + between + PEMS[0])
    assert both.public.id == SECOND.public.id
    for keys in (FIRST, SECOND):
        assert both.unwrap(keys.public.wrap(bytes(32)), keys.public.id) == bytes(32)


def test_what_is_no_key_is_refused():
    for text in ("", "no key", PEMS[0][:-100], FIRST.public.pem):
        with pytest.raises(ValueError):  # noqa: PT011 (of the library)
            FileKeys(text)


def test_a_key_in_a_kms_opens_what_was_wrapped_for_it(settings):
    """Over KMS's own protocol; the private key is with the server alone."""
    with serving({"alias/uploads": KEYS[0]}) as (endpoint, kms):
        keys = unwrapper("kms:alias/uploads", settings(kms_endpoint=endpoint))
        assert keys.public.id == FIRST.public.id
        secret = new_key()
        assert keys.unwrap(keys.public.wrap(secret), keys.public.id) == secret
        with pytest.raises(CannotDecrypt):
            keys.unwrap(SECOND.public.wrap(secret), keys.public.id)
        before = len(kms.asked)
        with pytest.raises(KeyNotConfigured):
            keys.unwrap(SECOND.public.wrap(secret), SECOND.public.id)
        assert len(kms.asked) == before
        # As the identity in the settings, whatever this machine has besides.
        assert {caller for *_, caller in kms.asked} == {"AKTRAIN"}
        with pytest.raises(ClientError, match="NotFound"):
            unwrapper("kms:other", settings(kms_endpoint=endpoint))
