"""The service's access to the private bucket: it signs uploads and never reads their bytes."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from botocore.exceptions import ClientError

from core.errors import Problem

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

SIGNED_SECONDS = 900
PART_BYTES = 64 << 20
MOST_PARTS = 10_000


class UploadGone(Problem):
    status, slug, title = 409, "upload-gone", "The upload is incomplete or was aborted"


@dataclass(frozen=True, kw_only=True)
class Part:
    number: int
    etag: str
    size: int
    at: datetime


class UploadStore:
    def __init__(self, client: "S3Client", bucket: str) -> None:
        self._client, self._bucket = client, bucket

    def begin(self, key: str) -> str:
        return self._client.create_multipart_upload(Bucket=self._bucket, Key=key)["UploadId"]

    def sign_part(self, key: str, upload_id: str, number: int, *, size: int | None = None) -> str:
        """A URL that accepts this part of this upload, valid for 15 minutes.

        If the size of the whole upload is given, it accepts only the length that follows from it.
        """
        part = {"Bucket": self._bucket, "Key": key, "UploadId": upload_id, "PartNumber": number}
        if size is not None:
            part["ContentLength"] = min(PART_BYTES, size - (number - 1) * PART_BYTES)
        return self._client.generate_presigned_url("upload_part", Params=part, ExpiresIn=SIGNED_SECONDS)

    def parts(self, key: str, upload_id: str) -> list[Part]:
        """The parts that have arrived, one of each number, so that an upload can be resumed."""
        found: list[Part] = []
        marker = 0
        while True:
            try:
                answer = self._client.list_parts(
                    Bucket=self._bucket, Key=key, UploadId=upload_id, PartNumberMarker=marker
                )
            except ClientError as problem:
                raise _named(problem) from None
            found += [
                Part(number=p["PartNumber"], etag=p["ETag"], size=p["Size"], at=p["LastModified"])
                for p in answer.get("Parts", [])
            ]
            if not answer.get("IsTruncated"):
                return _latest(found)
            marker = answer["NextPartNumberMarker"]

    def complete(self, key: str, upload_id: str, parts: list[Part]) -> None:
        """Joins exactly these parts; signed URLs of this upload stop working."""
        joined = [{"PartNumber": part.number, "ETag": part.etag} for part in parts]
        try:
            self._client.complete_multipart_upload(
                Bucket=self._bucket,
                Key=key,
                UploadId=upload_id,
                MultipartUpload={"Parts": joined},  # type: ignore[typeddict-item]
            )
        except ClientError as problem:
            raise _named(problem) from None

    def abandon(self, key: str, upload_id: str) -> None:
        try:
            self._client.abort_multipart_upload(Bucket=self._bucket, Key=key, UploadId=upload_id)
        except ClientError as problem:
            if problem.response["Error"]["Code"] != "NoSuchUpload":
                raise


def _latest(found: Sequence[Part]) -> list[Part]:
    """The part of each number that arrived last. AWS lists only these; SeaweedFS lists all.

    SeaweedFS gives times in whole seconds: if different parts arrived in the same second, none counts, and
    the client sends it again.
    """
    newest: dict[int, datetime] = {}
    for part in found:
        newest[part.number] = max(part.at, newest.get(part.number, part.at))
    last: dict[int, dict[str, Part]] = {}
    for part in found:
        if part.at == newest[part.number]:
            last.setdefault(part.number, {})[part.etag] = part
    return [part for _, same in sorted(last.items()) if len(same) == 1 for part in same.values()]


def _named(problem: ClientError) -> Exception:
    if problem.response["ResponseMetadata"]["HTTPStatusCode"] in (400, 404):
        return UploadGone("Begin the upload again: POST to its /upload address.")
    return problem
