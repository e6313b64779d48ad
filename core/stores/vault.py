"""The vault, for the train worker: checkpoints and diagnostics that stay, synthesizers to be published."""

import uuid
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from core.stores.versions import Version, delete_versions, list_versions

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

KINDS = ("checkpoints", "diagnostics", "synthesizers")


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
        for kind in KINDS:
            yield from list_versions(self._client, self._bucket, f"{kind}/{job}/" if job else f"{kind}/")

    def delete(self, versions: Sequence[Version]) -> None:
        delete_versions(self._client, self._bucket, versions)

    def _put(self, key: str, body: bytes) -> None:
        self._client.put_object(Bucket=self._bucket, Key=key, Body=body)

    def _get(self, key: str) -> bytes:
        return self._client.get_object(Bucket=self._bucket, Key=key)["Body"].read()
