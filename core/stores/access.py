"""The S3 rights of each role: one table for the local identities and the AWS policies."""

from dataclasses import dataclass
from typing import Any

ROLES = ("service", "train", "publish", "sweep")

PUT = ("s3:PutObject", "s3:AbortMultipartUpload", "s3:ListMultipartUploadParts")
GET = ("s3:GetObject",)
PUT_WHOLE = ("s3:PutObject",)
DELETE = ("s3:DeleteObject", "s3:DeleteObjectVersion")  # AWS wants both to delete a version


@dataclass(frozen=True, kw_only=True)
class Buckets:
    private: str = "sluice-private"
    vault: str = "sluice-vault"
    public: str = "sluice-public"
    witness: str = "sluice-witness"


@dataclass(frozen=True, kw_only=True)
class Right:
    """Actions on the objects of a bucket under a prefix; or, with `of_bucket`, on the bucket as a whole."""

    bucket: str
    prefix: str = ""
    actions: tuple[str, ...]
    of_bucket: bool = False

    def statement(self, names: Buckets) -> dict[str, Any]:
        bucket = f"arn:aws:s3:::{getattr(names, self.bucket)}"
        statement: dict[str, Any] = {"Effect": "Allow", "Action": list(self.actions)}
        if not self.of_bucket:
            return statement | {"Resource": [f"{bucket}/{self.prefix}*"]}
        statement["Resource"] = [bucket]
        if self.prefix:
            statement["Condition"] = {"StringLike": {"s3:prefix": [f"{self.prefix}*"]}}
        return statement


def _vault_rights(prefix: str) -> tuple[Right, Right]:
    """Rights on what training writes to the vault: it is also read, and deleted with all its versions."""
    return (
        Right(bucket="vault", prefix=prefix, actions=GET + PUT + DELETE),
        Right(bucket="vault", prefix=prefix, actions=("s3:ListBucketVersions",), of_bucket=True),
    )


# Without this right S3 answers 403 for a missing key; the witness must tell missing from forbidden.
_LIST_WITNESS = Right(bucket="witness", actions=("s3:ListBucket",), of_bucket=True)

# A signed URL has the rights of its signer, so the service may put where it signs uploads and get where it
# signs downloads. No role can both read private records and publish. Two roles delete: publish removes
# withdrawn releases, so that signed links stop working at once; train removes what its jobs no longer need
# and uploads of deleted datasets. It may not write to the private bucket.
# S3 has no right to create without the right to overwrite; docs/deploy.md says how the witness is protected.
ACCESS: dict[str, tuple[Right, ...]] = {
    "service": (Right(bucket="private", actions=PUT), Right(bucket="public", actions=GET)),
    "train": (
        Right(bucket="private", actions=GET + DELETE + ("s3:AbortMultipartUpload",)),
        Right(bucket="private", prefix="datasets/", actions=("s3:ListBucketVersions",), of_bucket=True),
        Right(bucket="private", actions=("s3:ListBucketMultipartUploads",), of_bucket=True),
        *_vault_rights("checkpoints/"), *_vault_rights("diagnostics/"), *_vault_rights("synthesizers/"),
        Right(bucket="witness", actions=GET),
        Right(bucket="witness", prefix="fingerprints/", actions=PUT_WHOLE),
        _LIST_WITNESS,
    ),
    "publish": (
        Right(bucket="vault", prefix="synthesizers/", actions=GET),
        Right(bucket="vault", prefix="bundles/", actions=GET + PUT),
        Right(bucket="public", actions=(*PUT, "s3:DeleteObject")),
    ),
    "sweep": (Right(bucket="witness", prefix="ledger/", actions=GET + PUT_WHOLE), _LIST_WITNESS),
}  # fmt: skip


def policy(role: str, buckets: Buckets | None = None) -> dict[str, Any]:
    """The IAM policy document of a role, as AWS and the local server both read it."""
    names = buckets or Buckets()
    return {"Version": "2012-10-17", "Statement": [right.statement(names) for right in ACCESS[role]]}
