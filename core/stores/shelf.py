"""The public bucket, for the service: it signs downloads of what was published or is under review."""

from typing import TYPE_CHECKING

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


class Shelf:
    def __init__(self, client: "S3Client", bucket: str) -> None:
        self._client, self._bucket = client, bucket

    def sign_download(self, key: str) -> str:
        """An address that gives this one object, for a quarter of an hour."""
        object = {"Bucket": self._bucket, "Key": key}
        return self._client.generate_presigned_url("get_object", Params=object, ExpiresIn=SIGNED_SECONDS)
