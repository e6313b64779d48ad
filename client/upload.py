"""Sends a file to the store in parts: any size, constant memory, resumable, hashed while it is read."""

import hashlib
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import httpx

from client.api import Json, Sluice
from client.problems import CannotRun

BLOCK = 1 << 20
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

    def run(self) -> Json:
        before = os.fstat(self.file.fileno())
        self.size = before.st_size
        if before.st_size == 0:
            raise CannotRun(f"{self.path} is empty: name a file with records in it")
        begun = self.service.begin_upload(self.dataset)
        part_bytes, arrived = begun["part_bytes"], set(begun["arrived"])
        most = begun.get("most_bytes", before.st_size)
        if before.st_size > most:
            raise CannotRun(
                f"{self.path} has {before.st_size:,} bytes and this site takes {most:,}: divide it, or ask "
                "the operator to raise SLUICE_UPLOAD_BYTES_MAX"
            )
        count = -(-before.st_size // part_bytes)
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
                end = min(start + part_bytes, before.st_size)
                if number in arrived:
                    for _ in self.blocks(start, end):
                        pass
                else:
                    self.send(store, number, start, end)
                self.tell(end)
        after = os.fstat(self.file.fileno())
        if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
            raise CannotRun(
                f"{self.path} changed while it was sent: start over, sluice datasets delete {self.dataset}"
            )
        return self.service.seal(self.dataset, size=before.st_size, sha256=self.digest.hexdigest())

    def blocks(self, start: int, end: int) -> Iterator[bytes]:
        """The bytes of one part, told and hashed on their way; read again they are not hashed twice."""
        self.file.seek(start)
        while start < end:
            block = self.file.read(min(BLOCK, end - start))
            if not block:
                raise CannotRun(f"{self.path} became shorter while it was sent: send it when it is complete")
            fresh = block[max(0, self.hashed - start) :]
            self.digest.update(fresh)
            self.hashed += len(fresh)
            start += len(block)
            yield block
            self.tell(start)

    def send(self, store: httpx.Client, number: int, start: int, end: int) -> None:
        why = ""
        for attempt in range(_ATTEMPTS):
            if attempt:
                self.pause(random.uniform(0.5, 1) * 2 ** (attempt - 1))  # noqa: S311 (spreads retries)
            url = self.service.sign_parts(self.dataset, [number], size=self.size)[number]
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
