"""Settings per role: a process has fields only for what its role needs."""

import base64
import os
import re
from pathlib import Path
from typing import Annotated, Self, TypeVar

from pydantic import (
    AfterValidator,
    Field,
    FilePath,
    HttpUrl,
    PostgresDsn,
    RedisDsn,
    SecretStr,
    ValidationError,
    model_validator,
)
from pydantic_settings import BaseSettings, SettingsConfigDict

from sluice.envelope import WrappingKey

PREFIX = "SLUICE_"

_PLACEHOLDER = re.compile(
    r"^(|<.*>|\$\{.*\}|\.{3}|x{3,}|change[-_ ]?(me|it|this).*|placeholder|example|secret|password|passwd|todo"
    r"|default|admin|test|your[-_ ].*|minioadmin|replace[-_ ]?me.*)$",
    re.IGNORECASE,
)


class SettingsProblem(Exception):
    """A setting is missing or invalid. Names the setting, never its value."""


def _real(secret: SecretStr) -> SecretStr:
    if _PLACEHOLDER.match(secret.get_secret_value().strip()):
        raise ValueError("is empty or a placeholder")
    return secret


def _with_real_password(url: PostgresDsn) -> PostgresDsn:
    for host in url.hosts():
        if host["password"] is not None and _PLACEHOLDER.match(host["password"]):
            raise ValueError("has a placeholder as password")
    return url


def _queue_with_real_password(url: RedisDsn) -> RedisDsn:
    if url.password is not None and _PLACEHOLDER.match(url.password):
        raise ValueError("has a placeholder as password")
    return url


def decoded_seed(text: str) -> bytes:
    """The 32 bytes of a seed; raises ValueError for anything else."""
    try:
        seed = base64.b64decode(text, validate=True)
    except ValueError:
        seed = b""
    if len(seed) != 32:
        raise ValueError("is not 32 bytes as base64")
    return seed


def _seed(secret: SecretStr) -> SecretStr:
    decoded_seed(secret.get_secret_value())
    return secret


def _signing_key(secret: SecretStr) -> SecretStr:
    return secret if secret.get_secret_value().startswith((KMS, PKCS11)) else _seed(secret)


def _certificates(ca: str) -> str:
    if ca != "system" and not Path(ca).is_file():
        raise ValueError("is neither a file nor the word system")
    return ca


def _private_key(secret: SecretStr) -> SecretStr:
    if not secret.get_secret_value().lstrip().startswith(("-----BEGIN PRIVATE KEY-----", KMS)):
        raise ValueError("is neither an RSA private key as PEM (PKCS #8) nor kms: and the id of a key")
    return secret


def _public_key(pem: str) -> str:
    try:
        return WrappingKey(pem).pem
    except ValueError:
        raise ValueError("is not an RSA public key of 3072 bits or more as PEM") from None


KMS, PKCS11 = "kms:", "pkcs11:"  # prefixes of keys that are named, not contained, in a setting
Secret = Annotated[SecretStr, AfterValidator(_real)]
PrivateKey = Annotated[Secret, AfterValidator(_private_key)]
PublicKey = Annotated[str, AfterValidator(_public_key)]
Seed = Annotated[Secret, AfterValidator(_seed)]
SigningKey = Annotated[Secret, AfterValidator(_signing_key)]
DatabaseUrl = Annotated[PostgresDsn, AfterValidator(_with_real_password)]
# Trusted certificate authorities: those in a file, or `system`.
CaFile = Annotated[str, AfterValidator(_certificates)]
QueueUrl = Annotated[RedisDsn, AfterValidator(_queue_with_real_password)]


class _Settings(BaseSettings):
    model_config = SettingsConfigDict(
        env_prefix=PREFIX, extra="ignore", frozen=True, hide_input_in_errors=True, env_ignore_empty=True
    )


class _WithRows(_Settings):
    """Every process uses the database and its task queue."""

    database_url: DatabaseUrl
    queue_url: QueueUrl


class _WithS3(_Settings):
    """One S3 identity per role; core.stores.access says which buckets it may access."""

    s3_endpoint: HttpUrl | None = None  # None: AWS
    s3_region: str = "us-east-1"
    s3_ca: CaFile = "system"
    s3_access_key: Secret
    s3_secret_key: Secret


class _WithObjects(_WithRows, _WithS3):
    pass


class _WithWitness(_Settings):
    """The witness: a directory if one is set, otherwise a separate bucket. Never restore it from a backup."""

    witness_dir: Path | None = None
    witness_bucket: str = "sluice-witness"


class _WithKms(_Settings):
    """The KMS of keys named "kms:ID", and an identity that may only use these keys."""

    kms_endpoint: HttpUrl | None = None  # None: AWS
    kms_region: str = "us-east-1"
    kms_access_key: Secret | None = None
    kms_secret_key: Secret | None = None

    @model_validator(mode="after")
    def _identity_for_kms(self) -> Self:
        used = [value for _, value in self if isinstance(value, SecretStr)]
        in_kms = any(value.get_secret_value().startswith(KMS) for value in used)
        if in_kms and not (self.kms_access_key and self.kms_secret_key):
            raise ValueError("a key is in a KMS: set SLUICE_KMS_ACCESS_KEY and SLUICE_KMS_SECRET_KEY")
        return self


class ServiceSettings(_WithObjects):
    """Signs uploads into the private bucket and downloads out of the public one."""

    upload_public_key: PublicKey  # clients encrypt for the private half, which only train has
    private_bucket: str = "sluice-private"
    public_bucket: str = "sluice-public"
    requests_per_minute: int = 1200  # of one key; these four are per service process
    anonymous_per_minute: Annotated[int, Field(ge=1)] = 1200  # without a valid key, of one address
    anonymous_at_once: Annotated[int, Field(ge=1)] = 250  # under way without a valid key, of one address
    requests_waiting: Annotated[int, Field(ge=1)] = 500  # under way; as many again without a valid key
    # Reverse proxies (addresses or networks, with commas) whose X-Forwarded-For names a client's address.
    trusted_proxies: Annotated[str, Field(pattern=r"^[^*]*$")] | None = None
    # People a release needs: author and approver. A site of one person sets 1, and its releases say so.
    reviewers: Annotated[int, Field(ge=1, le=2)] = 2
    # Budgets above these wait for a second person: epsilon, delta, and delta times the declared records.
    cap_epsilon: Annotated[float, Field(gt=0)] = 10.0
    cap_delta: Annotated[float, Field(gt=0, lt=1)] = 1e-4
    cap_delta_times_records: Annotated[float, Field(gt=0)] = 1.0
    upload_bytes_max: Annotated[int, Field(gt=0)] = 256 << 30  # of one file; train workers need twice that
    # What a team without a quota of its own may use, and a person without a team: bytes of datasets, jobs
    # that wait or run, seconds that one job may run. None: no limit.
    team_bytes: Annotated[int, Field(ge=0)] | None = None
    team_jobs: Annotated[int, Field(ge=0)] | None = None
    team_job_seconds: Annotated[int, Field(ge=1)] | None = None
    diagnostics: bool = False  # show a job's losses and norms to its owner; see TrainSettings
    # Single sign-on, off unless an issuer is named. The map goes from a value of the claim to a role.
    oidc_issuer: HttpUrl | None = None
    oidc_audience: str = "sluice"
    oidc_role_claim: str = "roles"
    oidc_roles: dict[str, str] = {
        "sluice-admin": "admin",
        "sluice-curator": "curator",
        "sluice-analyst": "analyst",
    }
    # Certificate (with its intermediates) and private key, PEM files; without them the API is plain HTTP.
    tls_cert: FilePath | None = None
    tls_key: FilePath | None = None

    @model_validator(mode="after")
    def _both_or_neither(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError(f"{PREFIX}TLS_CERT and {PREFIX}TLS_KEY are set together or not at all")
        return self


Days = Annotated[float, Field(ge=0)]


class TrainSettings(_WithObjects, _WithWitness, _WithKms):
    """Reads private records and the witness; writes synthesizers to the vault."""

    fingerprint_key: Seed
    upload_key: PrivateKey  # opens uploads and checkpoints
    synthesizer_public_key: PublicKey  # synthesizers are encrypted for the publisher
    private_bucket: str = "sluice-private"
    vault_bucket: str = "sluice-vault"
    # How long things are kept, in days. 0: until somebody deletes the dataset.
    upload_days: Days = 0.0  # since its check, and since the last job on it
    synthesizer_days: Days = 0.0  # since its training, and since its last release was drafted
    rejected_upload_days: Annotated[float, Field(gt=0)] = 1.0
    unfinished_upload_days: Annotated[float, Field(gt=0)] = 7.0
    checkpoint_days: Annotated[float, Field(gt=0)] = 30.0  # of a job that is never finished
    # Keep losses, norms and batch sizes of a job for its owner. They depend on records, no budget is charged
    # for them, and the person who chooses the next plan sees them: docs/guarantees.md#diagnostics
    diagnostics: bool = False


class PublishSettings(_WithObjects, _WithKms):
    """Reads synthesizers from the vault; writes signed releases to the public bucket."""

    vault_bucket: str = "sluice-vault"
    public_bucket: str = "sluice-public"
    signing_key: SigningKey  # a seed, kms: and the id of a key, or the URI of a PKCS#11 token
    synthesizer_key: PrivateKey  # opens synthesizers


class SweepSettings(_WithObjects, _WithWitness):
    """Restarts work of dead workers; compares the ledger with its witness; trims the audit log."""

    audit_days: Annotated[int | None, Field(ge=30)] = None  # how long rows are kept; None: no limit


class WitnessSettings(_WithS3, _WithWitness):
    """Settings of the sweep role with which `sluice restore` reads the witness of a site on many machines."""


class RuleSettings(_Settings):
    """Rules that the owner of the tables sets, so that the service cannot change them."""

    # Two people who invited each other are not independent for so long; docs/security.md#people-and-keys
    independent_days: Annotated[int, Field(ge=1, le=365)] = 7


class MigrateSettings(RuleSettings):
    """The owner of the tables, and the passwords it gives the roles that use them."""

    database_url: DatabaseUrl
    service_password: Secret
    train_password: Secret
    publish_password: Secret
    sweep_password: Secret


S = TypeVar("S", bound=_Settings)


def load(kind: type[S]) -> S:
    """Reads one role's settings from the environment, or from files named alike in SLUICE_SECRETS_DIR."""
    directory = os.environ.get(f"{PREFIX}SECRETS_DIR")
    if directory and not Path(directory).is_dir():
        raise SettingsProblem(f"{PREFIX}SECRETS_DIR names no directory: mount the secrets there, or unset it")
    try:
        return kind(_secrets_dir=directory)  # type: ignore[call-arg]  # pydantic-settings' own argument
    except ValidationError as problem:
        wrong = (
            " ".join([*(f"{PREFIX}{at}".upper() for at in e["loc"][:1]), _reason(e["type"], e["msg"])])
            for e in problem.errors()
        )
        raise SettingsProblem(f"{kind.__name__}: {'; '.join(wrong)}") from None


def _reason(kind: str, message: str) -> str:
    if kind == "missing":
        return "is missing"
    if kind == "path_not_file":
        return "names no file"
    return message.removeprefix("Value error, ") if kind == "value_error" else "is not valid"
