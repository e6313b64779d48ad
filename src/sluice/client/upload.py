"""Encrypts a file and sends it to the store in parts: any size, constant memory, resumable.

Each upload has a new data key, which is stored on this machine until the upload is sealed, so that an
interrupted upload can be resumed. The service gets it encrypted for the train worker.
"""

import base64
import hashlib
import json
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import httpx

from sluice.client.api import Sluice
from sluice.client.config import config_file, write_private
from sluice.client.http import Json
from sluice.client.problems import CannotRun, Refused
from sluice.client.trust import upload_key
from sluice.envelope import CHUNK, PLAIN_CHUNK, Stream, encrypted_size, new_key, upload_context

MAX_PARTS = 10_000

_ATTEMPTS = 6
# An expired signature gives 403; the next attempt gets a new one.
_RETRIED_STATUSES = {403, 408, 429, 500, 502, 503, 504}
_TIMEOUT = httpx.Timeout(120, connect=10)


def upload(
    service: Sluice,
    dataset: str,
    path: Path,
    *,
    on_progress: Callable[[int], None] = lambda _: None,
    sleep: Callable[[float], None] = time.sleep,
) -> Json:
    """Sends the parts that have not arrived and seals the dataset; `on_progress` gets the bytes done."""
    try:
        with path.open("rb", buffering=0) as file:
            return _Upload(service, dataset, path, file, on_progress, sleep).run()
    except OSError as problem:
        raise CannotRun(f"{path} cannot be read ({os.strerror(problem.errno or 0).lower()})") from None


@dataclass
class _Upload:
    service: Sluice
    dataset: str
    path: Path
    file: BinaryIO
    on_progress: Callable[[int], None]
    sleep: Callable[[float], None]
    size: int = 0  # bytes of the file
    total: int = 0  # bytes of its encrypted form
    hashed: int = 0  # bytes that the digest covers so far

    def __post_init__(self) -> None:
        self.digest = hashlib.sha256()

    def run(self) -> Json:
        before = os.fstat(self.file.fileno())
        if before.st_size == 0:
            raise CannotRun(f"{self.path} is empty: name a file with records in it")
        self.size = before.st_size
        self.total = encrypted_size(self.size)
        key, begun = self.begin()
        self.stream = Stream(key.key, upload_context(self.dataset))
        part_bytes, arrived = begun["part_bytes"], set(begun["arrived"])
        count = -(-self.total // part_bytes)
        self.check_size(begun.get("most_bytes", self.total), part_bytes, count, arrived)
        # The API key is not sent to the store: a signed address is permission enough.
        with httpx.Client(timeout=_TIMEOUT) as store:
            for number in range(1, count + 1):
                start = (number - 1) * part_bytes
                end = min(start + part_bytes, self.total)
                if number in arrived:
                    for _ in self.blocks(start, end):  # hashes it
                        pass
                else:
                    self.send(store, number, start, end)
                self.on_progress(min(end, self.size))
        after = os.fstat(self.file.fileno())
        if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
            raise CannotRun(
                f"{self.path} changed while it was sent: start over, sluice datasets delete {self.dataset}"
            )
        sealed = self.service.seal(self.dataset, size=self.total, sha256=self.digest.hexdigest())
        key.delete()
        return sealed

    def begin(self) -> "tuple[_UploadKey, Json]":
        while True:
            key = _UploadKey(self.service, self.dataset)
            try:
                return key, self.service.begin_upload(self.dataset, key_id=key.id, wrapped_key=key.wrapped)
            except Refused as problem:
                if problem.slug != "wrong-upload-key" or key.new:
                    raise
                key.delete()  # the service has changed its upload key since

    def check_size(self, max_bytes: int, part_bytes: int, count: int, arrived: set[int]) -> None:
        if self.total > max_bytes:
            raise CannotRun(
                f"{self.path} has {self.size:,} bytes and this site accepts {max_bytes:,}: divide it, or ask "
                "the operator to raise SLUICE_UPLOAD_BYTES_MAX"
            )
        if count > MAX_PARTS:
            raise CannotRun(f"{self.path} is larger than {MAX_PARTS * part_bytes >> 30} GiB: divide it")
        if arrived and max(arrived) > count:
            raise CannotRun(
                f"{self.path} is shorter than what arrived before: name the file that was begun with, "
                f"or start over with sluice datasets delete {self.dataset}"
            )

    def blocks(self, start: int, end: int) -> Iterator[bytes]:
        """The encrypted bytes of one part. Each byte is hashed once, also when a part is sent again."""
        while start < end:
            number, offset = divmod(start, CHUNK)
            block = self.chunk(number)[offset : offset + end - start]
            unhashed = block[max(0, self.hashed - start) :]
            self.digest.update(unhashed)
            self.hashed += len(unhashed)
            start += len(block)
            yield block
            self.on_progress(min(start, self.size))

    def chunk(self, number: int) -> bytes:
        start = number * PLAIN_CHUNK
        end = min(start + PLAIN_CHUNK, self.size)
        self.file.seek(start)
        plaintext = bytearray()
        while data := self.file.read(end - start - len(plaintext)):
            plaintext += data
        if len(plaintext) < end - start:
            raise CannotRun(f"{self.path} became shorter while it was sent: send it when it is complete")
        return self.stream.encrypt_chunk(number, bytes(plaintext), last=end == self.size)

    def send(self, store: httpx.Client, number: int, start: int, end: int) -> None:
        reason = ""
        for attempt in range(_ATTEMPTS):
            if attempt:
                self.sleep(random.uniform(0.5, 1) * 2 ** (attempt - 1))  # noqa: S311 (spreads retries)
            url = self.service.sign_parts(self.dataset, [number], size=self.total)[number]
            length = {"Content-Length": str(end - start)}
            try:
                answer = store.put(url, content=self.blocks(start, end), headers=length)
            except httpx.TransportError as problem:
                reason = type(problem).__name__
                continue
            if answer.is_success:
                return
            reason = f"HTTP {answer.status_code}"
            if answer.status_code not in _RETRIED_STATUSES:
                break
        raise CannotRun(
            f"part {number} of {self.path} did not reach the store ({reason}): resume with "
            f"sluice datasets upload {self.dataset} {self.path}"
        )


class _UploadKey:
    """The data key of one upload: the stored one of an interrupted upload, or a new one.

    If the upload was begun on another machine, the service starts it over with the new key.
    """

    def __init__(self, service: Sluice, dataset: str) -> None:
        # The file name is a hash: an id that a service chose never becomes part of a path.
        name = hashlib.sha256(f"{service.url}\n{dataset}".encode()).hexdigest()[:32]
        self._path = config_file().with_name("uploads") / f"{name}.json"
        stored = self._stored()
        self.new = stored is None
        if stored is None:
            current, key = upload_key(service), new_key()
            stored = {
                "key": base64.b64encode(key).decode(),
                "key_id": current.id,
                "wrapped_key": base64.b64encode(current.wrap(key)).decode(),
            }
            write_private(self._path, json.dumps(stored))
        self.key, self.id, self.wrapped = (
            base64.b64decode(stored["key"]),
            stored["key_id"],
            stored["wrapped_key"],
        )

    def _stored(self) -> dict[str, str] | None:
        try:
            stored = json.loads(self._path.read_text())
            return stored if stored.keys() == {"key", "key_id", "wrapped_key"} else None
        except (OSError, ValueError, AttributeError):
            return None

    def delete(self) -> None:
        self._path.unlink(missing_ok=True)
