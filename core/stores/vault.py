"""The vault, for the train worker: checkpoints and diagnostics that stay, synthesizers to be published."""

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

KINDS = ("checkpoints", "diagnostics", "synthesizers")


@dataclass(frozen=True, kw_only=True)
class Version:
    """One version of an object, or a delete marker. An unversioned bucket has one version of each, "null"."""

    key: str
    id: str
    latest: bool

    @property
    def job(self) -> uuid.UUID | None:
        """The job in the key, or None for a key that names none."""
        try:
            return uuid.UUID(self.key.split("/")[1])
        except (IndexError, ValueError):
            return None


class VersionsNotDeleted(Exception):
    """The store refused to delete some versions; carries its error codes."""


class Vault:
    """Keys have the fence of the attempt in them: a worker thought dead overwrites nothing of another."""

    def __init__(self, client: "S3Client", bucket: str) -> None:
        self._client, self._bucket = client, bucket

    def put_checkpoint(self, job: uuid.UUID, fence: int, body: bytes) -> None:
        self._put(f"checkpoints/{job}/{fence}", body)

    def get_checkpoint(self, job: uuid.UUID, fence: int) -> bytes:
        return self._get(f"checkpoints/{job}/{fence}")

    def put_diagnostics(self, job: uuid.UUID, fence: int, files: dict[str, bytes]) -> None:
        for ending, body in files.items():
            self._put(f"diagnostics/{job}/{fence}.{ending}", body)

    def put_synthesizer(self, job: uuid.UUID, fence: int, files: dict[str, bytes]) -> str:
        """The prefix under which the publisher finds the files."""
        prefix = f"synthesizers/{job}/{fence}/"
        for name, body in files.items():
            self._put(prefix + name, body)
        return prefix

    def put_handed_on(self, prefix: str, body: bytes) -> None:
        """Beside a synthesizer, for the next training of a relay. The publisher does not look at it."""
        self._put(prefix + "handed-on.safetensors", body)

    def get_handed_on(self, prefix: str) -> bytes:
        return self._get(prefix + "handed-on.safetensors")

    def versions(self, job: uuid.UUID | None = None) -> Iterator[list[Version]]:
        """Every version and delete marker that jobs left, or one job; in pages of at most 1000."""
        pages = self._client.get_paginator("list_object_versions")
        for kind in KINDS:
            prefix = f"{kind}/{job}/" if job else f"{kind}/"
            for page in pages.paginate(Bucket=self._bucket, Prefix=prefix):
                yield [
                    Version(key=one["Key"], id=one["VersionId"], latest=one["IsLatest"])
                    for one in [*page.get("Versions", []), *page.get("DeleteMarkers", [])]
                ]

    def delete(self, versions: Sequence[Version]) -> None:
        """Deletes versions for good, at most 1000: no delete marker hides them and none is left behind."""
        if not versions:
            return
        objects = [{"Key": one.key, "VersionId": one.id} for one in versions]
        answer = self._client.delete_objects(
            Bucket=self._bucket,
            Delete={"Objects": objects, "Quiet": True},  # type: ignore[typeddict-item]
        )
        if errors := answer.get("Errors"):
            raise VersionsNotDeleted(*{error.get("Code") for error in errors})

    def _put(self, key: str, body: bytes) -> None:
        self._client.put_object(Bucket=self._bucket, Key=key, Body=body)

    def _get(self, key: str) -> bytes:
        return self._client.get_object(Bucket=self._bucket, Key=key)["Body"].read()
