"""Brings uploads from the private bucket to the worker's disk, decrypted and checked.

Plaintext is only ever in a temporary directory of the worker, which goes with the check or the job.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from core.faults import Failure, Fault
from core.stores.private import PrivateStore
from core.tables import Dataset
from core.unwrap import Unwrapper
from sluice.envelope import CannotDecrypt, Source, Stream, upload_context


@dataclass(frozen=True, kw_only=True)
class Opened:
    """Length and hash of a file with records."""

    size: int
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


def fetch(dataset: Dataset, private: PrivateStore, keys: Unwrapper, path: Path) -> Opened:
    """Writes the file that was uploaded, if what is stored is what was sealed; raises Failure otherwise."""
    key = data_key(dataset, keys)
    if key is None:
        private.fetch(dataset.object_key, path)
        return Opened(size=dataset.size or 0, sha256=(dataset.sha256 or b"").hex())
    content, size = hashlib.sha256(), 0
    with private.open(dataset.object_key) as body, path.open("wb") as file:
        source = _Hashed(body)
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
    return Opened(size=size, sha256=content.hexdigest())


class _Hashed:
    """A source that counts and hashes what is read from it."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.digest, self.size = hashlib.sha256(), 0

    def read(self, size: int, /) -> bytes:
        piece = self._source.read(size)
        self.digest.update(piece)
        self.size += len(piece)
        return piece
