"""The witness object in the vault, for the sweeper alone."""

from typing import TYPE_CHECKING

from botocore.exceptions import ClientError

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

KEY = "witness/ledger.json"


class WitnessShelf:
    def __init__(self, client: "S3Client", bucket: str) -> None:
        self._client, self._bucket = client, bucket

    def create(self, body: bytes) -> bool:
        # Create-only, not "read and see": who may not list is told 403, not 404, for what is not there.
        try:
            self._client.put_object(Bucket=self._bucket, Key=KEY, Body=body, IfNoneMatch="*")
        except ClientError as problem:
            if problem.response["ResponseMetadata"]["HTTPStatusCode"] == 412:
                return False
            raise
        return True

    def read(self) -> bytes:
        return self._client.get_object(Bucket=self._bucket, Key=KEY)["Body"].read()

    def write(self, body: bytes) -> None:
        self._client.put_object(Bucket=self._bucket, Key=KEY, Body=body)
