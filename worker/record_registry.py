"""The registry of all records ever checked: their keyed fingerprints, and the accounts of their datasets.

An append-only log in the witness store, outside the database and its backups, so that restoring a backup
does not make people unknown.
"""

import hashlib
import json
import uuid
from collections.abc import Iterator

from core.stores.witness import WitnessStore
from worker.records.fingerprints import Sketch


class KeyChanged(Exception):
    """The log was written under another fingerprint key, so no record in it could be recognised."""


class RecordRegistry:
    def __init__(self, store: WitnessStore, key: bytes) -> None:
        self._store, self._end = store, 0
        self._sketches: dict[uuid.UUID, int] = {}
        self.accounts: dict[uuid.UUID, uuid.UUID] = {}  # by dataset, for those that are bound
        self._key_check = hashlib.blake2b(b"which key", key=key, digest_size=16).hexdigest()

    def catch_up(self) -> None:
        """Reads the entries added since the last call, by this process or another."""
        while (body := self._store.read(_key(self._end + 1))) is not None:
            if body.startswith(b"{"):
                self._read_entry(json.loads(body))
            else:
                self._sketches[uuid.UUID(Sketch.facts_of(body)["dataset"])] = self._end + 1
            self._end += 1
        if not self._end:
            self._append(json.dumps({"key": self._key_check}).encode())
            self.catch_up()

    def _read_entry(self, entry: dict[str, str]) -> None:
        if "key" not in entry:
            self.accounts[uuid.UUID(entry["dataset"])] = uuid.UUID(entry["account"])
        elif entry["key"] != self._key_check:
            raise KeyChanged("SLUICE_FINGERPRINT_KEY is another one than before: restore it from a backup")

    @property
    def datasets(self) -> set[uuid.UUID]:
        """The datasets whose fingerprints are in the log."""
        return set(self._sketches)

    def sketches(self) -> Iterator[tuple[uuid.UUID, Sketch]]:
        """The fingerprints of every dataset, one dataset in memory at a time."""
        for dataset, number in self._sketches.items():
            body = self._store.read(_key(number))
            if body is None:
                raise FileNotFoundError(f"entry {number} of the record fingerprints is gone")
            yield dataset, Sketch.from_bytes(body)

    def add(self, dataset: uuid.UUID, sketch: Sketch) -> None:
        if dataset not in self._sketches:
            self._append(sketch.to_bytes(dataset=str(dataset)))
            self.catch_up()

    def bind(self, dataset: uuid.UUID, account: uuid.UUID) -> None:
        if self.accounts.get(dataset) != account:
            self._append(json.dumps({"dataset": str(dataset), "account": str(account)}).encode())
            self.catch_up()

    def _append(self, body: bytes) -> None:
        while not self._store.create(_key(self._end + 1), body):
            self.catch_up()


def _key(number: int) -> str:
    return f"fingerprints/{number:08d}"
