"""Published files: signed downloads for the service, and the publisher's bucket."""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from botocore.exceptions import ClientError

from core.faults import Failure, Fault

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

SIGNED_SECONDS = 900


def public_key(release: object, digest: bytes, path: str) -> str:
    """Key of a published file; it contains the bundle's digest, so that no other bundle replaces it."""
    return f"releases/{release}/{digest.hex()}/{path}"


def review_key(release: object, build: int, digest: bytes, path: str) -> str:
    """Key of a file of a bundle under review.

    It contains the build number: a rebuild often has the same digest, and removing the old copy must not
    remove the new one.
    """
    return f"review/{release}/{build}/{digest.hex()}/{path}"


class DownloadSigner:
    def __init__(self, client: "S3Client", bucket: str) -> None:
        self._client, self._bucket = client, bucket

    def sign_download(self, key: str) -> str:
        """A URL of this object, valid for 15 minutes."""
        object = {"Bucket": self._bucket, "Key": key}
        return self._client.generate_presigned_url("get_object", Params=object, ExpiresIn=SIGNED_SECONDS)


TOMBSTONE = "WITHDRAWN.json"


class PublicStore:
    def __init__(self, client: "S3Client", bucket: str) -> None:
        self._client, self._bucket = client, bucket

    def put(self, release: object, digest: bytes, path: str, file: Path) -> None:
        """Creates the object. If it exists it must have the same bytes, from an earlier attempt."""
        key = public_key(release, digest, path)
        if self._put(key, file, IfNoneMatch="*"):
            return
        # The publisher cannot read this bucket, so the server compares: it replaces only equal bytes. The
        # ETag of an object that was put in one piece is its MD5.
        with file.open("rb") as body:
            etag = hashlib.file_digest(body, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
        if not self._put(key, file, IfMatch=f'"{etag}"'):
            raise Failure(Fault.BUNDLE_ALTERED)

    def _put(self, key: str, file: Path, **condition: str) -> bool:
        try:
            with file.open("rb") as body:
                self._client.put_object(Bucket=self._bucket, Key=key, Body=body, **condition)  # type: ignore[arg-type]
        except ClientError as problem:
            if problem.response["ResponseMetadata"]["HTTPStatusCode"] == 412:
                return False
            raise
        return True

    def remove(self, release: object, digest: bytes, path: str) -> None:
        """Removes the object, so that its signed URLs stop working. It may be missing."""
        self._client.delete_object(Bucket=self._bucket, Key=public_key(release, digest, path))

    def put_copy(self, key: str, file: Path) -> None:
        """Puts a file for reviewers. The key contains the digest, so repeated writes put the same bytes."""
        with file.open("rb") as body:
            self._client.put_object(Bucket=self._bucket, Key=key, Body=body)

    def remove_copy(self, key: str) -> None:
        """Removes the object if it exists."""
        self._client.delete_object(Bucket=self._bucket, Key=key)

    def bury(self, release: object, digest: bytes, body: bytes) -> None:
        """Stores a notice in place of a withdrawn release."""
        key = public_key(release, digest, TOMBSTONE)
        self._client.put_object(Bucket=self._bucket, Key=key, Body=body, ContentType="application/json")
