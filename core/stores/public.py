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
    """Where a file of a release lies: under its bundle's digest, so that no other bundle takes its place."""
    return f"releases/{release}/{digest.hex()}/{path}"


def review_key(release: object, build: int, digest: bytes, path: str) -> str:
    """Where a file of a bundle lies while it is reviewed.

    With the number of the build: a new build often has the same digest, and removing the copy of the old one
    must not take the new one away.
    """
    return f"review/{release}/{build}/{digest.hex()}/{path}"


class DownloadSigner:
    def __init__(self, client: "S3Client", bucket: str) -> None:
        self._client, self._bucket = client, bucket

    def sign_download(self, key: str) -> str:
        """An address that gives this one object, for a quarter of an hour."""
        object = {"Bucket": self._bucket, "Key": key}
        return self._client.generate_presigned_url("get_object", Params=object, ExpiresIn=SIGNED_SECONDS)


TOMBSTONE = "WITHDRAWN.json"


class PublicStore:
    def __init__(self, client: "S3Client", bucket: str) -> None:
        self._client, self._bucket = client, bucket

    def put(self, release: object, digest: bytes, path: str, file: Path) -> None:
        """Create-only. What is there already must be the same bytes: then an earlier attempt got this far."""
        key = public_key(release, digest, path)
        if self._put(key, file, IfNoneMatch="*"):
            return
        # The publisher cannot read here, so it asks the server to compare: bytes are put over equal ones or
        # not at all. The ETag of an object put in one piece is its MD5.
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
        """Signed links to it are dead from here on. Nothing there is fine."""
        self._client.delete_object(Bucket=self._bucket, Key=public_key(release, digest, path))

    def put_copy(self, key: str, file: Path) -> None:
        """For reviewers. A key has the digest of its bundle: whoever puts it again puts the same bytes."""
        with file.open("rb") as body:
            self._client.put_object(Bucket=self._bucket, Key=key, Body=body)

    def remove_copy(self, key: str) -> None:
        """Nothing there is fine."""
        self._client.delete_object(Bucket=self._bucket, Key=key)

    def bury(self, release: object, digest: bytes, body: bytes) -> None:
        """Leaves word where a release was."""
        key = public_key(release, digest, TOMBSTONE)
        self._client.put_object(Bucket=self._bucket, Key=key, Body=body, ContentType="application/json")
