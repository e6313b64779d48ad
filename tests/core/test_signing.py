"""What a key in a setting, in a KMS or in a token signed is verified by its public half alone."""

import base64
import json
import shutil
import subprocess
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from core.settings import PublishSettings
from core.signing import KmsSigner, TokenSigner, signer
from sluice.release.canonical import canonical
from sluice.release.statement import STATEMENT_TYPE, BadSignature, SeedSigner, UnknownKey, open_envelope, sign
from tests.fakes_kms import serving

SEED = bytes(range(32))
SHORT, LONG = {"said": "short"}, {"said": "x" * 5000}
MODULES = (
    "/usr/lib/softhsm/libsofthsm2.so",
    "/usr/lib64/pkcs11/libsofthsm2.so",
    "/opt/homebrew/lib/softhsm/libsofthsm2.so",
)


@pytest.fixture
def settings(servers):
    given = {k.removeprefix("SLUICE_").lower(): v for k, v in servers.environments["publish"].items()}
    identity = {"kms_access_key": "AKPUBLISH", "kms_secret_key": "f3Kq9zlonGenough"}
    return lambda **more: PublishSettings(**given | identity | more)


def require_verifiable(key):
    for payload in (SHORT, LONG):
        envelope = sign(payload, STATEMENT_TYPE, key)
        assert open_envelope(envelope, STATEMENT_TYPE, {key.key_id: key.public}) == payload
        with pytest.raises(UnknownKey):
            open_envelope(envelope, STATEMENT_TYPE, {})
        with pytest.raises(BadSignature):
            open_envelope(envelope, "application/other", {key.key_id: key.public})
        parts = json.loads(envelope)
        parts["payload"] = json.loads(sign({"said": "other"}, STATEMENT_TYPE, key))["payload"]
        with pytest.raises(BadSignature, match="signature does not fit"):
            open_envelope(canonical(parts), STATEMENT_TYPE, {key.key_id: key.public})


def test_a_seed_in_a_setting_is_the_default(settings):
    key = signer(settings(signing_key=base64.b64encode(SEED).decode()))
    assert isinstance(key, SeedSigner)
    assert key.public == SeedSigner(SEED).public
    require_verifiable(key)


def test_a_key_in_a_kms_signs(settings):
    """Long statements by their hash: KMS takes 4096 bytes."""
    keys = {
        "release": Ed25519PrivateKey.from_private_bytes(SEED),
        "rsa": rsa.generate_private_key(65537, 3072),
    }
    with serving(keys) as (endpoint, kms):
        key = signer(settings(signing_key="kms:release", kms_endpoint=endpoint))
        assert isinstance(key, KmsSigner)
        assert key.public == SeedSigner(SEED).public
        require_verifiable(key)
        assert {caller for *_, caller in kms.asked} == {"AKPUBLISH"}
        with pytest.raises(ValueError, match="ECC_NIST_EDWARDS25519"):
            signer(settings(signing_key="kms:rsa", kms_endpoint=endpoint))


def test_a_long_statement_is_signed_by_its_hash_only_where_the_key_needs_it():

    class Narrow(SeedSigner):
        most_bytes = 100

    key = Narrow(SEED)
    long = sign(LONG, STATEMENT_TYPE, key)
    assert open_envelope(long, STATEMENT_TYPE, {key.key_id: key.public}) == LONG
    assert sign(LONG, STATEMENT_TYPE, SeedSigner(SEED)) != long
    assert sign(SHORT, STATEMENT_TYPE, SeedSigner(SEED)) == sign(SHORT, STATEMENT_TYPE, key)


@pytest.fixture
def token(tmp_path, monkeypatch):
    """A SoftHSM token with an Ed25519 key pair; gives its URI."""
    module = next((path for path in MODULES if Path(path).exists()), None)
    try:
        import pkcs11
    except ImportError:
        pkcs11 = None
    if not (module and pkcs11 and shutil.which("softhsm2-util")):
        pytest.skip("NOT TESTED: signing by PKCS#11; install softhsm2 and sluice[pkcs11]")
    (tmp_path / "tokens").mkdir()
    (tmp_path / "conf").write_text(f"directories.tokendir = {tmp_path}/tokens\nobjectstore.backend = file\n")
    monkeypatch.setenv("SOFTHSM2_CONF", str(tmp_path / "conf"))
    made = ["--init-token", "--free", "--label", "site a", "--pin", "12345", "--so-pin", "67890"]
    subprocess.run(["softhsm2-util", *made], check=True, capture_output=True)
    library = pkcs11.lib(module)
    library.reinitialize()
    with library.get_token(token_label="site a").open(user_pin="12345", rw=True) as session:
        curve = pkcs11.util.ec.encode_named_curve_parameters("1.3.101.112")
        of_curve = {pkcs11.Attribute.EC_PARAMS: curve}
        parameters = session.create_domain_parameters(pkcs11.KeyType.EC_EDWARDS, of_curve, local=True)
        how = pkcs11.Mechanism.EC_EDWARDS_KEY_PAIR_GEN
        parameters.generate_keypair(mechanism=how, store=True, label="release")
    return f"pkcs11:token=site%20a;object=release?module-path={module}&pin-value=12345"


def test_a_key_in_a_token_signs(settings, token):
    key = signer(settings(signing_key=token))
    assert isinstance(key, TokenSigner)
    require_verifiable(key)
    assert signer(settings(signing_key=token)).key_id == key.key_id


def test_a_uri_that_lacks_something_is_refused(settings):
    with pytest.raises(ValueError, match="lacks 'pin-value'"):
        signer(settings(signing_key="pkcs11:token=a;object=b?module-path=/x"))
    with pytest.raises(ValueError, match="lacks 'object'"):
        signer(settings(signing_key="pkcs11:token=a?module-path=/x&pin-value=1"))
