"""Brings uploads from the private bucket to the worker's disk: checked, decrypted and parsed.

Plaintext is only ever in a temporary directory of the worker, which is removed after the check or the job.
"""

import hashlib
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from core.faults import Failure, Fault
from core.schema import ImageSchema, Schema, TableSchema
from core.stores.private import PrivateStore
from core.tables import Dataset
from core.unwrap import Unwrapper
from sluice.envelope import CannotDecrypt, Source, Stream, upload_context
from worker.records import Records, Report
from worker.validate import convert

_SCHEMA: TypeAdapter[ImageSchema | TableSchema] = TypeAdapter(Schema)
# The upload, and the arrays made of it. How far a compressed file expands beyond that is known only
# by reading it: the reader then ends with OUT_OF_SPACE.
_COPIES = 2


@dataclass(frozen=True, kw_only=True)
class Opened:
    """The records of an upload, the report on reading them, and the hash of the file."""

    records: Records
    report: Report
    sha256: str


def data_key(dataset: Dataset, keys: Unwrapper) -> bytes | None:
    """The key of a dataset, or None for one from before uploads were encrypted."""
    if dataset.key_id is None:
        return None
    if dataset.wrapped_key is None:  # deleted
        raise Failure(Fault.KEY_DESTROYED)
    try:
        return keys.unwrap(dataset.wrapped_key, dataset.key_id)
    except CannotDecrypt:
        raise Failure(Fault.CANNOT_DECRYPT) from None


def require_available(private: PrivateStore, *datasets: Dataset) -> None:
    """The uploads are in the store, as large as was sealed, and fit on this disk. Fetches nothing."""
    for dataset in datasets:
        private.require(dataset.object_key, dataset.size or 0)
    disk = shutil.disk_usage(tempfile.gettempdir())
    needed = _COPIES * sum(dataset.size or 0 for dataset in datasets)
    if needed > disk.total:
        raise Failure(Fault.EXCEEDS_DISK)
    if needed > disk.free:
        raise Failure(Fault.OUT_OF_SPACE)


def open_upload(dataset: Dataset, private: PrivateStore, keys: Unwrapper, directory: Path) -> Opened:
    """Fetches an upload and parses it in the sandbox; leaves nothing but its records in `directory`."""
    schema = _SCHEMA.validate_python(dataset.schema)
    directory.mkdir()
    path = directory / "upload"
    size, sha256 = fetch(dataset, private, keys, path)
    report = convert(path, schema, directory, sha256=sha256, size=size)
    path.unlink()
    return Opened(records=Records(schema, directory), report=report, sha256=sha256)


def fetch(dataset: Dataset, private: PrivateStore, keys: Unwrapper, path: Path) -> tuple[int, str]:
    """Writes the decrypted upload to `path`, if what is stored is what was sealed; its size and hash."""
    key = data_key(dataset, keys)
    if key is None:
        private.fetch(dataset.object_key, path)
        return dataset.size or 0, (dataset.sha256 or b"").hex()
    content, size = hashlib.sha256(), 0
    with private.open(dataset.object_key) as body, path.open("wb") as file:
        source = _HashedSource(body)
        try:
            for piece in Stream(key, upload_context(dataset.id)).decrypted(source):
                content.update(piece)
                size += file.write(piece)
        except CannotDecrypt:
            raise Failure(Fault.CANNOT_DECRYPT) from None
    if source.size != dataset.size:
        raise Failure(Fault.SIZE_MISMATCH)
    if source.digest.digest() != dataset.sha256:
        raise Failure(Fault.HASH_MISMATCH)
    return size, content.hexdigest()


class _HashedSource:
    """Counts and hashes what is read from a source."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.digest, self.size = hashlib.sha256(), 0

    def read(self, size: int, /) -> bytes:
        piece = self._source.read(size)
        self.digest.update(piece)
        self.size += len(piece)
        return piece
