"""A process has what its role needs, no field for the rest, and says by name what is missing."""

import pytest

from core.settings import (
    MigrateSettings,
    PublishSettings,
    ServiceSettings,
    SettingsProblem,
    SweepSettings,
    TrainSettings,
    load,
)
from local.state import rsa_pair

PRIVATE, PUBLIC = rsa_pair()
COMPLETE = {
    "SLUICE_DATABASE_URL": "postgresql://someone:f3Kq9zlonGenough@db:5432/sluice",
    "SLUICE_QUEUE_URL": "redis://someone:f3Kq9zlonGenough@queue:6379/0",
    "SLUICE_S3_ENDPOINT": "http://store:8333",
    "SLUICE_S3_ACCESS_KEY": "SL0123456789",
    "SLUICE_S3_SECRET_KEY": "f3Kq9zlonGenoughToo",
    "SLUICE_SIGNING_KEY": "c29tZXRoaW5nIHRoYXQgaGFzIDMyIGJ5dGVzIGluIGE=",
    "SLUICE_FINGERPRINT_KEY": "YW5vdGhlciAzMiBieXRlcyBvZiBub3RoaW5nIG11Y2g=",
    "SLUICE_UPLOAD_KEY": PRIVATE,
    "SLUICE_UPLOAD_PUBLIC_KEY": PUBLIC,
    "SLUICE_SYNTHESIZER_KEY": PRIVATE,
    "SLUICE_SYNTHESIZER_PUBLIC_KEY": PUBLIC,
    "SLUICE_SERVICE_PASSWORD": "f3Kq9zlonGenough1",
    "SLUICE_TRAIN_PASSWORD": "f3Kq9zlonGenough2",
    "SLUICE_PUBLISH_PASSWORD": "f3Kq9zlonGenough3",
    "SLUICE_SWEEP_PASSWORD": "f3Kq9zlonGenough4",
}
ROLES = [ServiceSettings, TrainSettings, PublishSettings, SweepSettings, MigrateSettings]


@pytest.fixture(autouse=True)
def complete(monkeypatch):
    monkeypatch.delenv("SLUICE_SECRETS_DIR", raising=False)
    for name, value in COMPLETE.items():
        monkeypatch.setenv(name, value)


def secrets_of(kind):
    given = {name.removeprefix("SLUICE_").lower() for name in COMPLETE} - {"s3_endpoint"}
    return sorted(given & set(kind.model_fields))


CASES = [(kind, field) for kind in ROLES for field in secrets_of(kind)]


@pytest.mark.parametrize("kind", ROLES)
def test_a_complete_environment_is_enough(kind):
    load(kind)


@pytest.mark.parametrize(("kind", "field"), CASES)
def test_a_missing_secret_is_named(kind, field, monkeypatch):
    monkeypatch.delenv(f"SLUICE_{field.upper()}")
    with pytest.raises(SettingsProblem, match=rf"SLUICE_{field.upper()} is missing"):
        load(kind)


@pytest.mark.parametrize(("kind", "field"), CASES)
def test_an_empty_secret_counts_as_missing(kind, field, monkeypatch, tmp_path):
    monkeypatch.setenv(f"SLUICE_{field.upper()}", "")
    with pytest.raises(SettingsProblem, match=rf"SLUICE_{field.upper()} is missing"):
        load(kind)
    (tmp_path / f"sluice_{field}").write_text("")
    monkeypatch.setenv("SLUICE_SECRETS_DIR", str(tmp_path))
    with pytest.raises(SettingsProblem, match=rf"SLUICE_{field.upper()} is"):
        load(kind)


@pytest.mark.parametrize(
    "placeholder", ["changeme", "change-me-now", "<secret>", "password", "xxxx", "your-key"]
)
@pytest.mark.parametrize(("kind", "field"), [case for case in CASES if "public" not in case[1]])
def test_a_placeholder_is_refused_by_name_and_not_quoted(kind, field, placeholder, monkeypatch):
    if field.endswith("_url"):
        scheme, rest = COMPLETE[f"SLUICE_{field.upper()}"].split("://")
        placeholder = f"{scheme}://someone:{placeholder}@{rest.split('@')[1]}".replace("<secret>", "todo")
    monkeypatch.setenv(f"SLUICE_{field.upper()}", placeholder)
    with pytest.raises(SettingsProblem, match=rf"SLUICE_{field.upper()} .*placeholder") as problem:
        load(kind)
    if placeholder != "password":
        assert placeholder not in str(problem.value)


def test_a_wrong_value_is_named_and_not_quoted(monkeypatch):
    monkeypatch.setenv("SLUICE_DATABASE_URL", "mysql://u:veryprivate@h/x")
    with pytest.raises(SettingsProblem) as problem:
        load(TrainSettings)
    assert "SLUICE_DATABASE_URL is not valid" in str(problem.value)
    assert "veryprivate" not in str(problem.value)


def test_diagnostics_are_off_by_default(monkeypatch):
    for kind in (ServiceSettings, TrainSettings):
        assert load(kind).diagnostics is False
        with monkeypatch.context() as patched:
            patched.setenv("SLUICE_DIAGNOSTICS", "true")
            assert load(kind).diagnostics is True
    others = (PublishSettings, SweepSettings, MigrateSettings)
    assert not any("diagnostics" in kind.model_fields for kind in others)


def test_a_certificate_and_its_key_are_set_together(monkeypatch, tmp_path):
    assert load(ServiceSettings).tls_cert is None
    for name in ("SLUICE_TLS_CERT", "SLUICE_TLS_KEY"):
        with monkeypatch.context() as patched:
            patched.setenv(name, __file__)
            with pytest.raises(SettingsProblem, match="SLUICE_TLS_CERT and SLUICE_TLS_KEY are set together"):
                load(ServiceSettings)
            patched.setenv(name, str(tmp_path / "missing"))
            with pytest.raises(SettingsProblem, match=f"{name} names no file"):
                load(ServiceSettings)


def test_no_role_has_a_field_of_another():
    buckets = {kind: {f for f in kind.model_fields if f.endswith("_bucket")} for kind in ROLES}
    assert buckets[ServiceSettings] == {"private_bucket", "public_bucket"}
    assert buckets[TrainSettings] == {"private_bucket", "vault_bucket", "witness_bucket"}
    assert buckets[PublishSettings] == {"vault_bucket", "public_bucket"}
    assert buckets[SweepSettings] == {"witness_bucket"}
    assert buckets[MigrateSettings] == set()
    private = {
        kind: {f for f in kind.model_fields if f in ("upload_key", "synthesizer_key")} for kind in ROLES
    }
    assert {kind: keys for kind, keys in private.items() if keys} == {
        TrainSettings: {"upload_key"},
        PublishSettings: {"synthesizer_key"},
    }
    passwords = {kind for kind in ROLES if any(f.endswith("_password") for f in kind.model_fields)}
    assert passwords == {MigrateSettings}


def test_secrets_come_from_files_too(monkeypatch, tmp_path):
    monkeypatch.delenv("SLUICE_S3_SECRET_KEY")
    (tmp_path / "sluice_s3_secret_key").write_text("fromAFile123")
    monkeypatch.setenv("SLUICE_SECRETS_DIR", str(tmp_path))
    assert load(TrainSettings).s3_secret_key.get_secret_value() == "fromAFile123"


def test_a_directory_of_secrets_that_is_not_there_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("SLUICE_SECRETS_DIR", str(tmp_path / "nowhere"))
    with pytest.raises(SettingsProblem, match="SLUICE_SECRETS_DIR names no directory"):
        load(TrainSettings)


@pytest.mark.parametrize("kind", [ServiceSettings, TrainSettings, PublishSettings, SweepSettings])
def test_printing_settings_shows_no_secret_key(kind):
    assert "f3Kq9zlonGenoughToo" not in repr(load(kind))


def test_keys_that_do_not_fit_are_refused(monkeypatch):
    for value in ("no key", PRIVATE):
        monkeypatch.setenv("SLUICE_UPLOAD_PUBLIC_KEY", value)
        with pytest.raises(SettingsProblem, match="SLUICE_UPLOAD_PUBLIC_KEY is not an RSA public key"):
            load(ServiceSettings)
    monkeypatch.setenv("SLUICE_UPLOAD_KEY", PUBLIC)
    with pytest.raises(SettingsProblem, match="SLUICE_UPLOAD_KEY is neither an RSA private key"):
        load(TrainSettings)


def test_a_key_in_a_kms_needs_an_identity_for_it(monkeypatch):
    monkeypatch.setenv("SLUICE_UPLOAD_KEY", "kms:alias/sluice-uploads")
    with pytest.raises(SettingsProblem, match="set SLUICE_KMS_ACCESS_KEY and SLUICE_KMS_SECRET_KEY"):
        load(TrainSettings)
    monkeypatch.setenv("SLUICE_KMS_ACCESS_KEY", "AK0123456789")
    monkeypatch.setenv("SLUICE_KMS_SECRET_KEY", "f3Kq9zlonGenoughToo")
    assert "f3Kq9zlonGenoughToo" not in repr(load(TrainSettings))
