"""Checks sealed datasets: each is rejected with a fault, held for a decision, or bound to an account.

Attempts are counted before anything is read, so that a file that kills its worker is counted too. Transient
faults are retried with growing delays; after MAX_ATTEMPTS the dataset is rejected with the last fault.
"""

import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

from botocore.exceptions import ClientError
from sqlalchemy import func, select, text, update
from sqlalchemy.orm import Session

from core import audit, binding, log
from core.errors import Problem
from core.faults import Failure, Fault
from core.stores.private import PrivateStore
from core.tables import Dataset, DatasetState
from core.unwrap import KeyNotConfigured, Unwrapper
from core.witness import require_ledger_in_sync
from worker import uploads
from worker.lease import MAX_ATTEMPTS, DatasetLease, LeaseWorker, retry_delay
from worker.record_registry import KeyChanged, RecordRegistry
from worker.records.fingerprints import Fingerprints, fingerprints
from worker.uploads import Opened

_log = log.get("checking")
# Faults of the machine or the moment, not of the file.
_TRANSIENT = {Fault.OUT_OF_SPACE, Fault.UPLOAD_GONE, Fault.CHECK_FAILED}
_LOCK = 0x51ECD  # only one dataset is compared and bound at a time, over all workers


@dataclass(kw_only=True)
class Checker(LeaseWorker[DatasetLease]):
    """Checks datasets against their schema and the registry of all records; `key` keys the fingerprints."""

    LEASE_TYPE, EXHAUSTED = DatasetLease, Fault.CHECK_FAILED

    private: PrivateStore
    keys: Unwrapper
    registry: RecordRegistry
    key: bytes

    def check(self, dataset_id: uuid.UUID) -> None:
        """Checks a dataset that waits for it; does nothing for any other."""
        reason = self._not_ready(dataset_id)
        if reason is None:
            self.run(dataset_id)
        else:
            _log.warning("check_postponed", dataset_id=str(dataset_id), why=reason)

    def _not_ready(self, dataset_id: uuid.UUID) -> str | None:
        """Why nothing can be read now, without counting an attempt: a restored ledger, a missing key."""
        try:
            with Session(self.engine) as session:
                require_ledger_in_sync(session)
                key = session.scalar(select(Dataset.key_id).where(Dataset.id == dataset_id))
            if key is not None:
                self.keys.require(key)
            self.registry.catch_up()
        except Problem as problem:
            return problem.slug
        except KeyNotConfigured as problem:
            return f"SLUICE_UPLOAD_KEY lacks the key {problem}"
        except KeyChanged as problem:
            return str(problem)
        return None

    def _work(self, lease: DatasetLease) -> None:
        dataset = lease.row
        if self._bind_decided(dataset.id) is None:
            self._compare_and_bind(dataset)

    def _fault_of(self, problem: Exception) -> Fault:
        return problem.fault if isinstance(problem, Failure) else Fault.CHECK_FAILED

    def _stopped(self, lease: DatasetLease, fault: Fault | None) -> bool:
        fault = fault or Fault.CHECK_FAILED
        if fault in _TRANSIENT and lease.fence < MAX_ATTEMPTS:
            lease.write(retry_at=func.now() + retry_delay(lease.fence), fault=fault.value)
        else:
            with Session(self.engine) as session, session.begin():
                binding.reject(session, lease.row.id, fault)
        return False

    def register_bindings(self) -> None:
        """Adds all bound datasets to the registry; called before files are removed."""
        with self._exclusive():
            self._register_bindings()

    def _bind_decided(self, dataset_id: uuid.UUID) -> str | None:
        """Binds a dataset about which an admin has decided; its new state, or None."""
        with self._exclusive():
            with Session(self.engine) as session, session.begin():
                state = binding.bind_decided(session, dataset_id)
            self._register_bindings()
        return state

    def _compare_and_bind(self, dataset: Dataset) -> None:
        opened, prints = self._read(dataset)
        with self._exclusive():
            unreadable = self._register_bindings()
            overlaps = dict.fromkeys(unreadable, 0.0) | self._overlaps(dataset.id, prints)
            self.registry.add(dataset.id, prints.sketch())
            with Session(self.engine) as session, session.begin():
                if dataset.public:  # a release that learned from it names it by this hash
                    session.execute(
                        update(Dataset)
                        .where(Dataset.id == dataset.id, Dataset.content_sha256.is_(None))
                        .values(content_sha256=bytes.fromhex(opened.sha256))
                    )
                binding.bind(
                    session, dataset.id, overlaps=overlaps, few=prints.few, report=asdict(opened.report),
                    accounts=self.registry.accounts,
                )  # fmt: skip
            self._register_bindings()

    def _read(self, dataset: Dataset) -> tuple[Opened, Fingerprints]:
        """Parses the upload; the records themselves are gone when this returns."""
        with tempfile.TemporaryDirectory(prefix="sluice-check-") as directory:
            uploads.require_available(self.private, dataset)
            audit.write(self.engine, "records opened for a check", [dataset.id])
            opened = uploads.open_upload(dataset, self.private, self.keys, Path(directory, "records"))
            return opened, fingerprints(opened.records, self.key)

    def _overlaps(self, dataset_id: uuid.UUID, prints: Fingerprints) -> dict[uuid.UUID, float]:
        """Share of common records by dataset, without datasets that were rejected or deleted unbound."""
        with Session(self.engine) as session:
            never_bound = Dataset.account_id.is_(None) & Dataset.state.in_(
                (DatasetState.REJECTED, DatasetState.DELETED)
            )
            ignored = {dataset_id, *session.scalars(select(Dataset.id).where(never_bound))}
        shares = {
            other: prints.overlap(sketch)
            for other, sketch in self.registry.sketches()
            if other not in ignored
        }
        return {other: share for other, share in shares.items() if share}

    def _register_bindings(self) -> list[uuid.UUID]:
        """Adds the account of every bound dataset, and missing fingerprints, to the registry.

        Returns the datasets whose records cannot be read: nothing can be compared with them.
        """
        self.registry.catch_up()
        with Session(self.engine, expire_on_commit=False) as session:
            bound = session.scalars(select(Dataset).where(Dataset.account_id.is_not(None))).all()
        unreadable = []
        for dataset in bound:
            try:
                if dataset.id not in self.registry.datasets:
                    self.registry.add(dataset.id, self._read(dataset)[1].sketch())
            except (Failure, ClientError, KeyNotConfigured):
                unreadable.append(dataset.id)
            self.registry.bind(dataset.id, cast(uuid.UUID, dataset.account_id))
        return unreadable

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Two uploads of the same records, compared at the same moment, would both count as new."""
        with self.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text(f"SELECT pg_advisory_lock({_LOCK})"))
            try:
                yield
            finally:
                connection.execute(text(f"SELECT pg_advisory_unlock({_LOCK})"))
