"""Versions of objects, and deleting them for good: what both buckets of the train worker need."""

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client


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
            Version(key=one["Key"], id=one["VersionId"], latest=one["IsLatest"], at=one["LastModified"])
            for one in [*page.get("Versions", []), *page.get("DeleteMarkers", [])]
        ]


def delete_versions(client: "S3Client", bucket: str, versions: Sequence[Version]) -> None:
    """Deletes versions for good, at most 1000: no delete marker hides them and none is left behind."""
    if not versions:
        return
    objects = [{"Key": one.key, "VersionId": one.id} for one in versions]
    answer = client.delete_objects(
        Bucket=bucket,
        Delete={"Objects": objects, "Quiet": True},  # type: ignore[typeddict-item]
    )
    if errors := answer.get("Errors"):
        raise VersionsNotDeleted(*{error.get("Code") for error in errors})
