"""Encrypts a file and sends it to the store in parts: any size, constant memory, resumable.

The data key is new for each upload and kept on this machine until the upload is sealed, so that one that was
cut can be resumed. The service gets it encrypted for the private side.
"""

import base64
import hashlib
import json
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import httpx

from sluice.client.api import Json, Sluice
from sluice.client.config import config_file, write_private
from sluice.client.problems import CannotRun, Refused
from sluice.client.trust import upload_key
from sluice.envelope import CHUNK, PLAIN_CHUNK, Stream, encrypted_size, new_key, upload_context

MOST_PARTS = 10_000

_ATTEMPTS = 6
# A signature that ran out gives 403; a new attempt brings a new one.
_WORTH_ANOTHER = {403, 408, 429, 500, 502, 503, 504}
_PATIENCE = httpx.Timeout(120, connect=10)

Tell = Callable[[int], None]


def upload(
    service: Sluice,
    dataset: str,
    path: Path,
    *,
    tell: Tell = lambda _: None,
    pause: Callable[[float], None] = time.sleep,
) -> Json:
    """Sends the parts that have not arrived and seals; `tell` hears how many bytes are done."""
    try:
        with path.open("rb", buffering=0) as file:
            return _Upload(service, dataset, path, file, tell, pause).run()
    except OSError as problem:
        raise CannotRun(f"{path} cannot be read ({os.strerror(problem.errno or 0).lower()})") from None


class _Upload:
    def __init__(
        self,
        service: Sluice,
        dataset: str,
        path: Path,
        file: BinaryIO,
        tell: Tell,
        pause: Callable[[float], None],
    ) -> None:
        self.service, self.dataset, self.path, self.file = service, dataset, path, file
        self.tell, self.pause = tell, pause
        self.digest, self.hashed = hashlib.sha256(), 0
        self.size = self.total = 0  # of the file, and of what is sent

    def run(self) -> Json:
        before = os.fstat(self.file.fileno())
        if before.st_size == 0:
            raise CannotRun(f"{self.path} is empty: name a file with records in it")
        self.size = before.st_size
        self.total = total = encrypted_size(self.size)
        key, begun = self.begin()
        self.stream = Stream(key.key, upload_context(self.dataset))
        part_bytes, arrived = begun["part_bytes"], set(begun["arrived"])
        most = begun.get("most_bytes", total)
        if total > most:
            raise CannotRun(
                f"{self.path} has {before.st_size:,} bytes and this site takes {most:,}: divide it, or ask "
                "the operator to raise SLUICE_UPLOAD_BYTES_MAX"
            )
        count = -(-total // part_bytes)
        if count > MOST_PARTS:
            raise CannotRun(f"{self.path} is larger than {MOST_PARTS * part_bytes >> 30} GiB: divide it")
        if arrived and max(arrived) > count:
            raise CannotRun(
                f"{self.path} is shorter than what arrived before: name the file that was begun with, "
                f"or start over with sluice datasets delete {self.dataset}"
            )
        # No key of ours goes to the store: the address itself is the permission.
        with httpx.Client(timeout=_PATIENCE) as store:
            for number in range(1, count + 1):
                start = (number - 1) * part_bytes
                end = min(start + part_bytes, total)
                if number in arrived:
                    for _ in self.blocks(start, end):
                        pass
                else:
                    self.send(store, number, start, end)
                self.tell(min(end, self.size))
        after = os.fstat(self.file.fileno())
        if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
            raise CannotRun(
                f"{self.path} changed while it was sent: start over, sluice datasets delete {self.dataset}"
            )
        sealed = self.service.seal(self.dataset, size=total, sha256=self.digest.hexdigest())
        key.forget()
        return sealed

    def begin(self) -> "tuple[_UploadKey, Json]":
        while True:
            key = _UploadKey(self.service, self.dataset)
            try:
                return key, self.service.begin_upload(self.dataset, key_id=key.id, wrapped_key=key.wrapped)
            except Refused as problem:
                if problem.slug != "wrong-upload-key" or key.new:
                    raise
                key.forget()  # the service has another key-encryption key by now

    def blocks(self, start: int, end: int) -> Iterator[bytes]:
        """The encrypted bytes of one part, hashed on their way; sent again they are not hashed twice."""
        while start < end:
            number, offset = divmod(start, CHUNK)
            block = self.chunk(number)[offset : offset + end - start]
            fresh = block[max(0, self.hashed - start) :]
            self.digest.update(fresh)
            self.hashed += len(fresh)
            start += len(block)
            yield block
            self.tell(min(start, self.size))

    def chunk(self, number: int) -> bytes:
        start = number * PLAIN_CHUNK
        end = min(start + PLAIN_CHUNK, self.size)
        self.file.seek(start)
        plaintext = bytearray()
        while piece := self.file.read(end - start - len(plaintext)):
            plaintext += piece
        if len(plaintext) < end - start:
            raise CannotRun(f"{self.path} became shorter while it was sent: send it when it is complete")
        return self.stream.encrypt_chunk(number, bytes(plaintext), last=end == self.size)

    def send(self, store: httpx.Client, number: int, start: int, end: int) -> None:
        why = ""
        for attempt in range(_ATTEMPTS):
            if attempt:
                self.pause(random.uniform(0.5, 1) * 2 ** (attempt - 1))  # noqa: S311 (spreads retries)
            url = self.service.sign_parts(self.dataset, [number], size=self.total)[number]
            length = {"Content-Length": str(end - start)}
            try:
                answer = store.put(url, content=self.blocks(start, end), headers=length)
            except httpx.TransportError as problem:
                why = type(problem).__name__
                continue
            if answer.is_success:
                return
            why = f"HTTP {answer.status_code}"
            if answer.status_code not in _WORTH_ANOTHER:
                break
        raise CannotRun(
            f"part {number} of {self.path} did not reach the store ({why}): what arrived is kept; go on with "
            f"sluice datasets upload {self.dataset} {self.path}"
        )


class _UploadKey:
    """The data key of one upload: that of an earlier attempt from here, or a new one.

    Where an earlier attempt was made from another machine, the service starts the upload over.
    """

    def __init__(self, service: Sluice, dataset: str) -> None:
        # A name of our own making: what a service calls a dataset never becomes part of a path.
        name = hashlib.sha256(f"{service.url}\n{dataset}".encode()).hexdigest()[:32]
        self._path = config_file().with_name("uploads") / f"{name}.json"
        kept = self._kept()
        self.new = kept is None
        if kept is None:
            current, key = upload_key(service), new_key()
            kept = {
                "key": base64.b64encode(key).decode(),
                "key_id": current.id,
                "wrapped_key": base64.b64encode(current.wrap(key)).decode(),
            }
            write_private(self._path, json.dumps(kept))
        self.key, self.id, self.wrapped = base64.b64decode(kept["key"]), kept["key_id"], kept["wrapped_key"]

    def _kept(self) -> dict[str, str] | None:
        try:
            kept = json.loads(self._path.read_text())
            return kept if kept.keys() == {"key", "key_id", "wrapped_key"} else None
        except (OSError, ValueError, AttributeError):
            return None

    def forget(self) -> None:
        self._path.unlink(missing_ok=True)
