"""The private bucket, for the train worker: it reads what was uploaded and can change nothing."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

_PIECE = 8 << 20


class PrivateStore:
    def __init__(self, client: "S3Client", bucket: str) -> None:
        self._client, self._bucket = client, bucket

    def fetch(self, key: str, path: Path) -> None:
        """Copies an upload to a local file, a piece at a time."""
        body = self._client.get_object(Bucket=self._bucket, Key=key)["Body"]
        with path.open("wb") as file:
            for piece in body.iter_chunks(_PIECE):
                file.write(piece)
