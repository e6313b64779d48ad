"""Removes uploads of datasets that are over, with every version the store kept, and says so in their rows.

A dataset that was deleted is removed within seconds, one that was rejected after a while. A round over the
whole bucket finds what came late: an upload that was completed after its dataset was deleted, an upload that
nobody finishes. What stays: the account and its ledger, and in the witness the fingerprints by which these
people are recognised. docs/operations.md#deleting-data
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from sqlalchemy import Engine, and_, delete, exists, func, or_, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session, aliased

from core import audit, log
from core.settings import TrainSettings
from core.stores.private import PrivateStore, Vault
from core.tables import Dataset, Diagnosis, Job, Release

_log = log.get("removing")


@dataclass(frozen=True, kw_only=True)
class Retention:
    """How long things are kept; None: until somebody deletes the dataset."""

    upload: timedelta | None = None
    synthesizer: timedelta | None = None
    rejected_upload: timedelta = timedelta(days=1)
    unfinished_upload: timedelta = timedelta(days=7)
    checkpoint: timedelta = timedelta(days=30)

    @classmethod
    def of(cls, settings: TrainSettings) -> "Retention":
        def optional(days: float) -> timedelta | None:
            return timedelta(days=days) if days else None

        return cls(
            upload=optional(settings.upload_days),
            synthesizer=optional(settings.synthesizer_days),
            rejected_upload=timedelta(days=settings.rejected_upload_days),
            unfinished_upload=timedelta(days=settings.unfinished_upload_days),
            checkpoint=timedelta(days=settings.checkpoint_days),
        )


@dataclass(frozen=True, kw_only=True)
class Remover:
    """What removing needs. `remember` makes sure that the records of bound datasets stay recognisable."""

    engine: Engine
    private: PrivateStore
    vault: Vault
    remember: Callable[[], object]
    retention: Retention = field(default_factory=Retention)

    def remove_due(self) -> int:
        """Removes the bytes of every dataset that is over; gives how many datasets that were."""
        late = func.now() - self.retention.rejected_upload
        over = or_(Dataset.state == "deleted", and_(Dataset.state == "rejected", Dataset.checked_at < late))
        with Session(self.engine, expire_on_commit=False) as session:
            due = session.scalars(select(Dataset).where(over, Dataset.removed_at.is_(None))).all()
        if any(dataset.account_id for dataset in due):
            self.remember()
        for dataset in due:
            self._remove(dataset)
        return len(due)

    def _remove(self, dataset: Dataset) -> None:
        if dataset.upload_id:  # first, so that nothing can be completed after the look below
            self.private.abort(dataset.object_key, dataset.upload_id)
        versions = 0
        for page in self.private.versions(dataset.object_key):
            self.private.delete(page)
            versions += len(page)
        with Session(self.engine) as session, session.begin():
            # What was learned from single records without a charge goes with them.
            jobs = list(session.scalars(select(Job.id).where(Job.dataset_id == dataset.id)))
            session.execute(delete(Diagnosis).where(Diagnosis.job_id.in_(jobs)))
            for job in jobs:
                for page in self.vault.versions(job):
                    self.vault.delete([one for one in page if one.key.startswith("diagnostics/")])
            removed = update(Dataset).where(Dataset.id == dataset.id, Dataset.removed_at.is_(None))
            session.execute(removed.values(removed_at=func.now(), report=None))
        audit.write(self.engine, "dataset removed", [dataset.id])
        _log.info("dataset_removed", dataset_id=str(dataset.id), versions=versions)

    def expire(self) -> None:
        """Deletes datasets that were not used for as long as the site keeps them."""
        if self.retention.upload is None:
            return
        last = func.now() - self.retention.upload
        uses = or_(Job.dataset_id == Dataset.id, Job.source_id == Dataset.id)
        recent = or_(Job.finished_at.is_(None), Job.finished_at > last)
        unused = and_(
            Dataset.state.in_(("ready", "held")),
            func.coalesce(Dataset.checked_at, Dataset.sealed_at) < last,
            ~exists().where(uses, recent),
        )
        reason = f"not used for {self.retention.upload.total_seconds() / 86400:g} days (SLUICE_UPLOAD_DAYS)"
        with Session(self.engine) as session:
            for id in session.scalars(select(Dataset.id).where(unused)).all():
                gone = update(Dataset).where(Dataset.id == id, unused)
                gone = gone.values(state="deleted", deletion_reason=reason)
                try:
                    session.execute(gone.execution_options(synchronize_session=False))
                    session.commit()
                    audit.write(self.engine, f"dataset deleted: {reason}", [id])
                    _log.info("dataset_expired", dataset_id=str(id))
                except IntegrityError:  # a job began just now
                    session.rollback()

    def expire_synthesizers(self) -> None:
        """Marks synthesizers that are kept no longer: tidying deletes them, and no new use of them begins."""
        if self.retention.synthesizer is None:
            return
        last = func.now() - self.retention.synthesizer
        following = aliased(Job)
        drafted = or_(Release.created_at > last, Release.state == "building")
        needed = or_(
            exists().where(Release.job_id == Job.id, drafted),
            exists().where(following.after_id == Job.id, following.state.in_(("queued", "running"))),
        )
        old = and_(Job.state == "trained", Job.synthesizer_removed_at.is_(None), Job.finished_at < last)
        with Session(self.engine) as session:
            for id in session.scalars(select(Job.id).where(old, ~needed)).all():
                # Under the lock that a draft and a following job take; then a second look.
                session.execute(select(Job.id).where(Job.id == id).with_for_update())
                if session.scalars(select(Job.id).where(Job.id == id, old, ~needed)).one_or_none():
                    gone = update(Job).where(Job.id == id).values(synthesizer_removed_at=func.now())
                    session.execute(gone)
                    _log.info("synthesizer_expired", job_id=str(id))
                session.commit()

    def sweep(self) -> None:
        """Looks through the whole bucket for what came late.

        Objects of datasets that this database does not know are left: after a restore they may be needed.
        """
        for page in self.private.versions():
            states = self._datasets({one.key for one in page})
            late = [one for one in page if one.key in states and states[one.key].removed]
            self.private.delete(late)
            if late:
                _log.warning("late_upload_removed", versions=len(late))
        oldest = datetime.now(UTC) - self.retention.unfinished_upload
        for upload in self.private.unfinished():
            state = self._datasets({upload.key}).get(upload.key)
            over = state is not None and state.name not in ("draft", "uploading", "checking")
            if over or upload.begun < oldest:
                self.private.abort(upload.key, upload.id)
                _log.info("upload_aborted")

    def _datasets(self, keys: set[str]) -> "Mapping[str, _State]":
        rows = select(Dataset.object_key, Dataset.state, Dataset.removed_at).where(
            Dataset.object_key.in_(keys)
        )
        with Session(self.engine) as session:
            return {
                key: _State(name=state, removed=state == "deleted" or removed_at is not None)
                for key, state, removed_at in session.execute(rows)
            }


@dataclass(frozen=True, kw_only=True)
class _State:
    name: str
    removed: bool
