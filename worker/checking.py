"""Checks a sealed dataset: rejected with a fault, held for a decision, or ready on its people's account.

Attempts are counted before anything is read, so that a file that kills its worker is counted too. What may
pass is tried again, later and later; after MOST_ATTEMPTS the dataset is rejected with the last fault.
"""

import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

from botocore.exceptions import ClientError
from pydantic import TypeAdapter
from sqlalchemy import Engine, func, or_, select, text, update
from sqlalchemy.orm import Session

from core import audit, binding, log
from core.errors import Problem
from core.faults import Failure, Fault
from core.schema import ImageSchema, Schema, TableSchema
from core.stores.private import PrivateStore
from core.tables import Dataset
from core.unwrap import KeyNotConfigured, Unwrapper
from core.witness import require_ledger_in_sync
from worker import opening, process
from worker.claims import LEASE, MOST_ATTEMPTS, pause
from worker.known import KeyChanged, KnownRecords
from worker.records import Records
from worker.records.fingerprints import Fingerprints, fingerprints
from worker.space import require_space
from worker.validate import convert

_log = log.get("checking")
_SCHEMA: TypeAdapter[ImageSchema | TableSchema] = TypeAdapter(Schema)
# Faults of this machine and moment, not of the file: worth another try. A seal may be said again.
_PASSING = {Fault.OUT_OF_SPACE, Fault.UPLOAD_GONE}
_LOCK = 0x51ECD  # one dataset at a time is compared and bound, over all workers


@dataclass(frozen=True, kw_only=True)
class Checker:
    """What checking needs: the records, what is known of all others, and the key of the fingerprints."""

    engine: Engine
    private: PrivateStore
    keys: Unwrapper
    known: KnownRecords
    key: bytes

    def check(self, dataset_id: uuid.UUID) -> None:
        """Decides a dataset that waits for its check; does nothing for any other."""
        if not self._may_begin(dataset_id):
            return
        dataset = self._claimed(dataset_id)
        if dataset is None:
            _log.info("nothing_to_check")
            return
        said = {"dataset_id": str(dataset_id), "attempt": dataset.attempts}
        fault: Fault | None = None
        try:
            if dataset.attempts > MOST_ATTEMPTS:  # its last attempts did not live to say why
                raise Failure(Fault(dataset.fault) if dataset.fault else Fault.CHECK_FAILED)
            with process.repeating(lambda: self._wait(dataset, LEASE), LEASE.total_seconds() / 4):
                state = self._decided(dataset_id) or self._read(dataset)
            _log.info("dataset_checked", **said, state=state)
            return
        except Failure as failure:
            fault = failure.fault
        except Exception as problem:  # its text may quote a record: kind and place are all that is said
            fault = Fault.CHECK_FAILED
            _log.warning("check_stopped", **said, kind=type(problem).__name__, where=process.where(problem))
        if fault in _PASSING | {Fault.CHECK_FAILED} and dataset.attempts < MOST_ATTEMPTS:
            self._wait(dataset, pause(dataset.attempts), fault=fault.value)
            _log.warning("check_postponed", **said, fault=fault.value)
            return
        with Session(self.engine) as session, session.begin():
            binding.reject(session, dataset_id, fault)
        _log.info("dataset_checked", **said, state="rejected", fault=fault.value)

    def _may_begin(self, dataset_id: uuid.UUID) -> bool:
        """While the ledger may have forgotten something, or the key is not here, nothing is read: that is
        no attempt."""
        try:
            with Session(self.engine) as session:
                require_ledger_in_sync(session)
                key = session.scalar(select(Dataset.key_id).where(Dataset.id == dataset_id))
            if key is not None:
                self.keys.require(key)
            self.known.catch_up()
        except Problem as problem:
            _log.warning("check_postponed", dataset_id=str(dataset_id), why=problem.slug)
            return False
        except KeyNotConfigured as problem:
            why = f"SLUICE_UPLOAD_KEY lacks the key {problem}"
            _log.error("check_postponed", dataset_id=str(dataset_id), why=why)
            return False
        except KeyChanged as problem:
            _log.error("check_postponed", dataset_id=str(dataset_id), why=str(problem))
            return False
        return True

    def _claimed(self, dataset_id: uuid.UUID) -> Dataset | None:
        """Counts an attempt, and keeps others from a second one at the same time."""
        due = or_(Dataset.retry_at.is_(None), Dataset.retry_at < func.now())
        take = update(Dataset).where(Dataset.id == dataset_id, Dataset.state == "checking", due)
        take = take.values(attempts=Dataset.attempts + 1, retry_at=func.now() + LEASE)
        with Session(self.engine, expire_on_commit=False) as session, session.begin():
            return session.scalars(take.returning(Dataset)).one_or_none()

    def _wait(self, dataset: Dataset, time: timedelta, **values: Any) -> None:
        mine = (Dataset.id == dataset.id, Dataset.attempts == dataset.attempts, Dataset.state == "checking")
        with self.engine.begin() as connection:
            connection.execute(update(Dataset).where(*mine).values(retry_at=func.now() + time, **values))

    def remember_bindings(self) -> None:
        """Before bytes are removed: the people in them stay recognisable."""
        with self._alone():
            self._remember_bindings()

    def _decided(self, dataset_id: uuid.UUID) -> str | None:
        with self._alone():
            with Session(self.engine) as session, session.begin():
                state = binding.bind_decided(session, dataset_id)
            self._remember_bindings()
        return state

    def _read(self, dataset: Dataset) -> str | None:
        found, report, content = self._fingerprints(dataset)
        with self._alone():
            unreadable = self._remember_bindings()
            overlaps = dict.fromkeys(unreadable, 0.0) | self._overlaps(dataset.id, found)
            self.known.add(dataset.id, found.sketch())
            with Session(self.engine) as session, session.begin():
                if dataset.public:  # a release that learned from it names it by this hash
                    session.execute(
                        update(Dataset)
                        .where(Dataset.id == dataset.id, Dataset.content_sha256.is_(None))
                        .values(content_sha256=bytes.fromhex(content))
                    )
                state = binding.bind(
                    session, dataset.id, overlaps=overlaps, few=found.few, report=report,
                    accounts=self.known.accounts,
                )  # fmt: skip
            self._remember_bindings()
        return state

    def _fingerprints(self, dataset: Dataset) -> tuple[Fingerprints, dict[str, Any], str]:
        """What the records are known by, the report on them, and the hash of their file."""
        schema = _SCHEMA.validate_python(dataset.schema)
        with tempfile.TemporaryDirectory(prefix="sluice-check-") as directory:
            path, work = Path(directory, "upload"), Path(directory, "records")
            work.mkdir()
            self.private.require(dataset.object_key, dataset.size or 0)
            require_space(dataset.size or 0, directory=work)
            audit.write(self.engine, "records opened for a check", [dataset.id])
            upload = opening.fetch(dataset, self.private, self.keys, path)
            report = convert(path, schema, work, sha256=upload.sha256, size=upload.size)
            return fingerprints(Records(schema, work), self.key), asdict(report), upload.sha256

    def _overlaps(self, dataset_id: uuid.UUID, found: Fingerprints) -> dict[uuid.UUID, float]:
        """Other datasets with a share of these records; not those rejected, or deleted without an account."""
        with Session(self.engine) as session:
            never = Dataset.account_id.is_(None) & Dataset.state.in_(("rejected", "deleted"))
            over = set(session.scalars(select(Dataset.id).where(never)))
        overlaps = {}
        for other, sketch in self.known.sketches():
            if other != dataset_id and other not in over and (share := found.overlap(sketch)):
                overlaps[other] = share
        return overlaps

    def _remember_bindings(self) -> list[uuid.UUID]:
        """Writes down which accounts datasets are on, and the records of datasets bound by an older version.

        Gives those whose records cannot be read: nothing can be compared with them.
        """
        self.known.catch_up()
        with Session(self.engine, expire_on_commit=False) as session:
            bound = session.scalars(select(Dataset).where(Dataset.account_id.is_not(None))).all()
        unreadable = []
        for dataset in bound:
            try:
                if dataset.id not in self.known.datasets:
                    self.known.add(dataset.id, self._fingerprints(dataset)[0].sketch())
            except (Failure, ClientError, KeyNotConfigured):
                unreadable.append(dataset.id)
            self.known.bound(dataset.id, cast(uuid.UUID, dataset.account_id))
        return unreadable

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Two uploads of the same records, compared at the same moment, would both be new."""
        with self.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text(f"SELECT pg_advisory_lock({_LOCK})"))
            try:
                yield
            finally:
                connection.execute(text(f"SELECT pg_advisory_unlock({_LOCK})"))
