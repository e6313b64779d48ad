"""The vault, for the train worker: checkpoints and diagnostics that stay, synthesizers to be published."""

import uuid
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from core.stores.bundles import ENCRYPTED
from core.stores.versions import Version, delete_versions, list_versions
from core.unwrap import Unwrapper
from sluice.envelope import Stream, WrappingKey, decrypt_wrapped

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

KINDS = ("checkpoints", "diagnostics", "synthesizers")


class Vault:
    """Keys have the fence of the attempt in them: a worker thought dead overwrites nothing of another.

    What is read back here is encrypted under the data key of the job's dataset (`key`; for a dataset that has
    none, for `own`), and synthesizers for the publisher. An object opens under its own name alone.
    """

    def __init__(self, client: "S3Client", bucket: str, *, own: Unwrapper, publisher: WrappingKey) -> None:
        self._client, self._bucket = client, bucket
        self._own, self._publisher = own, publisher

    def put_checkpoint(self, job: uuid.UUID, fence: int, body: bytes, *, key: bytes | None) -> None:
        self._put_private(f"checkpoints/{job}/{fence}", body, key)

    def get_checkpoint(self, job: uuid.UUID, fence: int, *, key: bytes | None) -> bytes:
        name = f"checkpoints/{job}/{fence}"
        return self._decrypted(name, self._get(name), key)

    def put_diagnostics(
        self, job: uuid.UUID, fence: int, files: dict[str, bytes], *, key: bytes | None
    ) -> None:
        for ending, body in files.items():
            self._put_private(f"diagnostics/{job}/{fence}.{ending}", body, key)

    def put_synthesizer(self, job: uuid.UUID, fence: int, files: dict[str, bytes]) -> str:
        """The prefix under which the publisher finds the files."""
        prefix = f"synthesizers/{job}/{fence}/{ENCRYPTED}"
        for name, body in files.items():
            self._put(prefix + name, self._publisher.encrypt(prefix + name, body))
        return prefix

    def put_handed_on(self, prefix: str, body: bytes) -> None:
        """Beside a synthesizer, for the next training of a relay. The publisher cannot open it.

        Not under a dataset's key: the next owner's training goes on when this owner deletes the dataset.
        """
        self._put_private(prefix + "handed-on.safetensors", body, None)

    def get_handed_on(self, prefix: str) -> bytes:
        name = prefix + "handed-on.safetensors"
        body = self._get(name)
        return self._decrypted(name, body, None) if prefix.endswith(ENCRYPTED) else body

    def versions(self, job: uuid.UUID | None = None) -> Iterator[list[Version]]:
        """Every version and delete marker that jobs left, or one job; in pages of at most 1000."""
        for kind in KINDS:
            yield from list_versions(self._client, self._bucket, f"{kind}/{job}/" if job else f"{kind}/")

    def delete(self, versions: Sequence[Version]) -> None:
        delete_versions(self._client, self._bucket, versions)

    def _put_private(self, name: str, body: bytes, key: bytes | None) -> None:
        self._put(name, Stream(key, name).encrypt(body) if key else self._own.public.encrypt(name, body))

    def _decrypted(self, name: str, body: bytes, key: bytes | None) -> bytes:
        return Stream(key, name).decrypt(body) if key else decrypt_wrapped(body, name, self._own.unwrap)

    def _put(self, key: str, body: bytes) -> None:
        self._client.put_object(Bucket=self._bucket, Key=key, Body=body)

    def _get(self, key: str) -> bytes:
        return self._client.get_object(Bucket=self._bucket, Key=key)["Body"].read()
