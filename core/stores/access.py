"""Who may do what in which bucket: one table behind the local identities and the AWS policies."""

from dataclasses import dataclass
from typing import Any

ROLES = ("service", "train", "publish", "sweep")

PUT = ("s3:PutObject", "s3:AbortMultipartUpload", "s3:ListMultipartUploadParts")
GET = ("s3:GetObject",)


@dataclass(frozen=True, kw_only=True)
class Buckets:
    private: str = "sluice-private"
    vault: str = "sluice-vault"
    public: str = "sluice-public"


@dataclass(frozen=True, kw_only=True)
class Right:
    bucket: str
    prefix: str = ""
    actions: tuple[str, ...]


# A signed URL carries the signer's rights, so the service may put what it signs uploads for and get what it
# signs downloads for. Nobody lists, nobody can both read private records and publish, and the one thing
# anybody deletes is a release that was withdrawn: its signed links must be dead at once.
ACCESS: dict[str, tuple[Right, ...]] = {
    "service": (Right(bucket="private", actions=PUT), Right(bucket="public", actions=GET)),
    "train": (
        Right(bucket="private", actions=GET),
        *(Right(bucket="vault", prefix=f"{kept}/", actions=GET + PUT)
          for kept in ("checkpoints", "diagnostics", "synthesizers")),
        Right(bucket="vault", prefix="witness/", actions=GET),
    ),
    "publish": (
        Right(bucket="vault", prefix="synthesizers/", actions=GET),
        Right(bucket="vault", prefix="bundles/", actions=GET + PUT),
        Right(bucket="public", actions=(*PUT, "s3:DeleteObject")),
    ),
    "sweep": (Right(bucket="vault", prefix="witness/", actions=GET + PUT),),
}  # fmt: skip


def policy(role: str, buckets: Buckets | None = None) -> dict[str, Any]:
    """The IAM policy document of a role, as AWS and the local server both read it."""
    names = buckets or Buckets()
    return {
        "Version": "2012-10-17",
        "Statement": [
            {
                "Effect": "Allow",
                "Action": list(right.actions),
                "Resource": [f"arn:aws:s3:::{getattr(names, right.bucket)}/{right.prefix}*"],
            }
            for right in ACCESS[role]
        ],
    }
