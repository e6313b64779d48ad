"""Storage of the witness: objects outside the database that are created once and never changed."""

import os
import re
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from botocore.exceptions import ClientError

from core.stores import s3

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

    from core.settings import SweepSettings, TrainSettings, WitnessSettings

_KEY = re.compile(r"[a-z0-9-]+(/[a-z0-9-]+)*(\.json)?")


class WitnessStore(Protocol):
    """Objects that can be created and read, but not changed or deleted."""

    def create(self, key: str, body: bytes) -> bool:
        """Creates an object; False, without a change, if the key exists. Durable when it returns True."""
        ...

    def read(self, key: str) -> bytes | None:
        """None only if there is no such object; errors of the store are raised."""
        ...


def witness_store(settings: "TrainSettings | SweepSettings | WitnessSettings") -> WitnessStore:
    """The directory, if one is set; otherwise the bucket."""
    if settings.witness_dir is not None:
        return DirectoryWitness(settings.witness_dir)
    return S3Witness(s3.client_for(settings), settings.witness_bucket)


class S3Witness:
    """A separate bucket. The identity needs s3:ListBucket: without it S3 answers 403 for a missing key."""

    def __init__(self, client: "S3Client", bucket: str) -> None:
        self._client, self._bucket = client, bucket

    def create(self, key: str, body: bytes) -> bool:
        try:
            self._client.put_object(Bucket=self._bucket, Key=_checked(key), Body=body, IfNoneMatch="*")
        except ClientError as problem:
            if problem.response["ResponseMetadata"]["HTTPStatusCode"] == 412:
                return False
            raise
        return True

    def read(self, key: str) -> bytes | None:
        try:
            return self._client.get_object(Bucket=self._bucket, Key=_checked(key))["Body"].read()
        except ClientError as problem:
            # AWS answers NoSuchKey for a delete marker too, but then the object existed and was removed.
            deleted = problem.response["ResponseMetadata"].get("HTTPHeaders", {}).get("x-amz-delete-marker")
            if problem.response["Error"]["Code"] == "NoSuchKey" and deleted != "true":
                return None
            raise


class DirectoryWitness:
    """A directory, which must exist: an unmounted one is an error, not an empty witness."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def create(self, key: str, body: bytes) -> bool:
        path = self._path(key)
        if not path.parent.is_dir():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _sync(self._root)
        # Written under a temporary name, then linked. A link fails if the name exists, so nothing is replaced
        # and no incomplete file is visible.
        new = path.with_name(f".{uuid.uuid4().hex}")
        try:
            with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(body)
                file.flush()
                os.fsync(file.fileno())
            try:
                os.link(new, path)
            except FileExistsError:
                return False
        finally:
            new.unlink(missing_ok=True)
        _sync(path.parent)
        return True

    def read(self, key: str) -> bytes | None:
        path = self._path(key)
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None

    def _path(self, key: str) -> Path:
        if not self._root.is_dir():
            raise FileNotFoundError(f"the witness directory {self._root} does not exist")
        return self._root / _checked(key)


def _checked(key: str) -> str:
    if not _KEY.fullmatch(key):
        raise ValueError(f"{key} is not a key of the witness")
    return key


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
