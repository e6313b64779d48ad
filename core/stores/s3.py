"""S3 clients with the identity of a role; listing and deleting object versions."""

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

import boto3
from botocore.config import Config

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

    from core.settings import PublishSettings, ServiceSettings, SweepSettings, TrainSettings, WitnessSettings

    HasIdentity = ServiceSettings | TrainSettings | PublishSettings | SweepSettings | WitnessSettings

ENCRYPTED = "encrypted/"  # ends the prefix of an encrypted synthesizer; older, plain ones lack it


def client_for(settings: "HasIdentity") -> "S3Client":
    """The client of a role, from its settings."""
    return client(
        endpoint=str(settings.s3_endpoint).rstrip("/") if settings.s3_endpoint else None,
        region=settings.s3_region,
        access_key=settings.s3_access_key.get_secret_value(),
        secret_key=settings.s3_secret_key.get_secret_value(),
        ca=settings.s3_ca,
    )


def client(
    *,
    endpoint: str | None,
    region: str,
    access_key: str,
    secret_key: str,
    attempts: int = 5,
    ca: str = "system",
) -> "S3Client":
    """A client that uses these credentials only, never those of the machine."""
    return boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name=region,
        aws_access_key_id=access_key,
        aws_secret_access_key=secret_key,
        verify=None if ca == "system" else ca,
        config=Config(
            signature_version="s3v4",
            # A bucket name as a sub-domain needs DNS that a server on one machine does not have.
            s3={"addressing_style": "path" if endpoint else "auto"},
            retries={"max_attempts": attempts, "mode": "standard"},
            connect_timeout=5,
            read_timeout=60,
        ),
    )


@dataclass(frozen=True, kw_only=True)
class Version:
    """One version of an object, or a delete marker. An unversioned bucket has one version of each, "null"."""

    key: str
    id: str
    latest: bool
    at: datetime

    @property
    def job(self) -> uuid.UUID | None:
        """The job in a key of the vault, or None for a key that names none."""
        try:
            return uuid.UUID(self.key.split("/")[1])
        except (IndexError, ValueError):
            return None

    @property
    def fence(self) -> int | None:
        """The attempt in a key of the vault, or None for a key that names none."""
        try:
            return int(self.key.split("/")[2].split(".")[0])
        except (IndexError, ValueError):
            return None


class VersionsNotDeleted(Exception):
    """The store refused to delete some versions; carries its error codes."""


def list_versions(client: "S3Client", bucket: str, prefix: str) -> Iterator[list[Version]]:
    """Every version and delete marker under a prefix, in pages of at most 1000."""
    for page in client.get_paginator("list_object_versions").paginate(Bucket=bucket, Prefix=prefix):
        yield [
            Version(key=row["Key"], id=row["VersionId"], latest=row["IsLatest"], at=row["LastModified"])
            for row in [*page.get("Versions", []), *page.get("DeleteMarkers", [])]
        ]


def delete_versions(client: "S3Client", bucket: str, versions: Sequence[Version]) -> None:
    """Deletes at most 1000 versions permanently, without leaving delete markers."""
    if not versions:
        return
    objects = [{"Key": version.key, "VersionId": version.id} for version in versions]
    answer = client.delete_objects(
        Bucket=bucket,
        Delete={"Objects": objects, "Quiet": True},  # type: ignore[typeddict-item]
    )
    if errors := answer.get("Errors"):
        raise VersionsNotDeleted(*{error.get("Code") for error in errors})
