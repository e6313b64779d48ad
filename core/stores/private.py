"""The private bucket, for the train worker: it reads what was uploaded and can change nothing."""

from pathlib import Path
from typing import TYPE_CHECKING

from botocore.exceptions import ClientError

from core.faults import Failure, Fault

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

_PIECE = 8 << 20


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

    def fetch(self, key: str, path: Path) -> None:
        """Copies an upload to a local file, a piece at a time."""
        body = self._client.get_object(Bucket=self._bucket, Key=key)["Body"]
        with path.open("wb") as file:
            for piece in body.iter_chunks(_PIECE):
                file.write(piece)
