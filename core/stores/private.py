"""Stores of the train worker: uploads, and the vault with checkpoints and synthesizers."""

import uuid
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from botocore.exceptions import ClientError

from core.faults import Failure, Fault
from core.stores.s3 import ENCRYPTED, Version, delete_versions, list_versions
from core.unwrap import Unwrapper
from sluice.envelope import Source, Stream, WrappingKey, decrypt_wrapped

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

_PIECE = 8 << 20


@dataclass(frozen=True, kw_only=True)
class Unfinished:
    """An upload in parts that was neither completed nor aborted."""

    key: str
    id: str
    begun: datetime


class PrivateStore:
    def __init__(self, client: "S3Client", bucket: str) -> None:
        self._client, self._bucket = client, bucket

    def require(self, key: str, size: int) -> None:
        """Raises unless the object exists with this size. Nothing is fetched."""
        try:
            found = self._client.head_object(Bucket=self._bucket, Key=key)["ContentLength"]
        except ClientError as problem:
            # Without the right to list, S3 answers 403 for a missing key.
            if problem.response["ResponseMetadata"]["HTTPStatusCode"] in (403, 404):
                raise Failure(Fault.UPLOAD_GONE) from None
            raise
        if found != size:
            raise Failure(Fault.SIZE_MISMATCH)

    def open(self, key: str) -> AbstractContextManager[Source]:
        """Opens an upload for reading in pieces."""
        return closing(self._client.get_object(Bucket=self._bucket, Key=key)["Body"])

    def fetch(self, key: str, path: Path) -> None:
        """Copies an upload to a local file, a piece at a time."""
        with self.open(key) as body, path.open("wb") as file:
            while piece := body.read(_PIECE):
                file.write(piece)

    def versions(self, key: str = "datasets/") -> Iterator[list[Version]]:
        """Every version and delete marker of all uploads, or of one; in pages of at most 1000."""
        return list_versions(self._client, self._bucket, key)

    def delete(self, versions: Sequence[Version]) -> None:
        delete_versions(self._client, self._bucket, versions)

    def unfinished(self) -> Iterator[Unfinished]:
        for page in self._client.get_paginator("list_multipart_uploads").paginate(Bucket=self._bucket):
            for upload in page.get("Uploads", []):
                yield Unfinished(key=upload["Key"], id=upload["UploadId"], begun=upload["Initiated"])

    def abort(self, key: str, upload_id: str) -> None:
        """Aborts an upload: its signed URLs stop working, and it cannot be completed."""
        try:
            self._client.abort_multipart_upload(Bucket=self._bucket, Key=key, UploadId=upload_id)
        except ClientError as problem:
            if problem.response["Error"]["Code"] != "NoSuchUpload":
                raise


KINDS = ("checkpoints", "diagnostics", "synthesizers")


class Vault:
    """Keys contain the fence of the attempt, so that a worker presumed dead overwrites nothing of another.

    Checkpoints and diagnostics are encrypted under the data key of the job's dataset (`key`; for a dataset
    without one, for `own`), synthesizers for the publisher. Each object decrypts only under its own name.
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
        """Stores the files and returns their prefix, for the publisher."""
        prefix = f"synthesizers/{job}/{fence}/{ENCRYPTED}"
        for name, body in files.items():
            self._put(prefix + name, self._publisher.encrypt(prefix + name, body))
        return prefix

    def put_handed_on(self, prefix: str, body: bytes) -> None:
        """Stores a generator for the next training of a relay. The publisher cannot decrypt it.

        It is not under the dataset's key, since the next owner may continue after this dataset is deleted.
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
