"""What the private side remembers of all records it was ever given: fingerprints, and their accounts.

An append-only log in the witness store, outside the database and its backups: restoring one forgets nothing.
"""

import hashlib
import json
import uuid
from collections.abc import Iterator

from core.stores.witness import WitnessStore
from worker.records.fingerprints import Sketch


class KeyChanged(Exception):
    """The fingerprint key is not the one these records were remembered under: nothing could be recognised."""


class KnownRecords:
    def __init__(self, store: WitnessStore, key: bytes) -> None:
        self._store, self._end = store, 0
        self._sketches: dict[uuid.UUID, int] = {}
        self.accounts: dict[uuid.UUID, uuid.UUID] = {}  # of datasets, as far as they were bound
        self._mark = hashlib.blake2b(b"which key", key=key, digest_size=16).hexdigest()

    def catch_up(self) -> None:
        """Reads what was added since, by this process or another."""
        while (body := self._store.read(_key(self._end + 1))) is not None:
            if body.startswith(b"{"):
                self._take(json.loads(body))
            else:
                self._sketches[uuid.UUID(Sketch.facts_of(body)["dataset"])] = self._end + 1
            self._end += 1
        if not self._end:
            self._append(json.dumps({"key": self._mark}).encode())
            self.catch_up()

    def _take(self, said: dict[str, str]) -> None:
        if "key" in said:
            if said["key"] != self._mark:
                raise KeyChanged(
                    "SLUICE_FINGERPRINT_KEY is another one than before: restore it from a backup"
                )
        else:
            self.accounts[uuid.UUID(said["dataset"])] = uuid.UUID(said["account"])

    @property
    def datasets(self) -> set[uuid.UUID]:
        """Those whose records were remembered."""
        return set(self._sketches)

    def sketches(self) -> Iterator[tuple[uuid.UUID, Sketch]]:
        """All of them, one in memory at a time."""
        for dataset, number in self._sketches.items():
            body = self._store.read(_key(number))
            if body is None:
                raise FileNotFoundError(f"entry {number} of the record fingerprints is gone")
            yield dataset, Sketch.from_bytes(body)

    def add(self, dataset: uuid.UUID, sketch: Sketch) -> None:
        if dataset not in self._sketches:
            self._append(sketch.to_bytes(dataset=str(dataset)))
            self.catch_up()

    def bound(self, dataset: uuid.UUID, account: uuid.UUID) -> None:
        if self.accounts.get(dataset) != account:
            self._append(json.dumps({"dataset": str(dataset), "account": str(account)}).encode())
            self.catch_up()

    def _append(self, body: bytes) -> None:
        while not self._store.create(_key(self._end + 1), body):
            self.catch_up()


def _key(number: int) -> str:
    return f"fingerprints/{number:08d}"
