"""The private bucket, for the train worker: it reads what was uploaded, and removes it for good."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from botocore.exceptions import ClientError

from core.faults import Failure, Fault
from core.stores.versions import Version, delete_versions, list_versions
from sluice.envelope import Source

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
        """The object is there, and as long as was sealed. Nothing of it is fetched."""
        try:
            found = self._client.head_object(Bucket=self._bucket, Key=key)["ContentLength"]
        except ClientError as problem:
            # Whoever may not list the bucket is told 403 for a key that does not exist.
            if problem.response["ResponseMetadata"]["HTTPStatusCode"] in (403, 404):
                raise Failure(Fault.UPLOAD_GONE) from None
            raise
        if found != size:
            raise Failure(Fault.SIZE_MISMATCH)

    def open(self, key: str) -> AbstractContextManager[Source]:
        """An upload, to be read a piece at a time."""
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
            for one in page.get("Uploads", []):
                yield Unfinished(key=one["Key"], id=one["UploadId"], begun=one["Initiated"])

    def abort(self, key: str, upload_id: str) -> None:
        """From here on no signed address of this upload works, and it cannot be completed."""
        try:
            self._client.abort_multipart_upload(Bucket=self._bucket, Key=key, UploadId=upload_id)
        except ClientError as problem:
            if problem.response["Error"]["Code"] != "NoSuchUpload":
                raise
