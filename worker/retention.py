"""Deletes what is no longer needed, with every version the store kept: uploads, and objects in the vault.

Deleted datasets are removed within seconds, rejected ones after a while, unused ones where a setting says so.
Rounds over the buckets find what was left by a crash or written late. What stays: the account and its ledger,
the record fingerprints in the witness, and of an ended job the settled synthesizer and the diagnostics of its
last attempt. docs/operations.md#deleting-data, docs/guarantees.md#jobs
"""

import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from botocore.exceptions import BotoCoreError, ClientError
from sqlalchemy import Engine, and_, delete, exists, func, or_, select, update
from sqlalchemy.exc import IntegrityError, SQLAlchemyError
from sqlalchemy.orm import Session, aliased

from core import audit, log
from core.settings import TrainSettings
from core.stores.private import PrivateStore, Vault
from core.stores.s3 import Version, VersionsNotDeleted
from core.tables import (
    ENDED_JOBS,
    UNFINISHED_JOBS,
    Dataset,
    DatasetState,
    Diagnosis,
    Job,
    JobState,
    Release,
    ReleaseState,
)
from worker.record_registry import KeyChanged

REMOVE_SECONDS, CLEAN_SECONDS = 10.0, 300.0
CHECKPOINT_AGE = timedelta(days=30)
_log = log.get("retention")


@dataclass(frozen=True, kw_only=True)
class Retention:
    """How long things are kept; None: until somebody deletes the dataset."""

    upload: timedelta | None = None
    synthesizer: timedelta | None = None
    rejected_upload: timedelta = timedelta(days=1)
    unfinished_upload: timedelta = timedelta(days=7)
    checkpoint: timedelta = CHECKPOINT_AGE

    @classmethod
    def of(cls, settings: TrainSettings) -> "Retention":
        return cls(
            upload=timedelta(days=settings.upload_days) or None,
            synthesizer=timedelta(days=settings.synthesizer_days) or None,
            rejected_upload=timedelta(days=settings.rejected_upload_days),
            unfinished_upload=timedelta(days=settings.unfinished_upload_days),
            checkpoint=timedelta(days=settings.checkpoint_days),
        )


def clean_vault(
    engine: Engine, vault: Vault, job: uuid.UUID | None = None, *, checkpoints: timedelta = CHECKPOINT_AGE
) -> int:
    """Deletes what all jobs, or one job, no longer need; returns the number of deleted versions.

    A job is looked up after its objects were listed: fences only grow, and a job that has ended by then has
    ended for good. Objects of jobs that this database does not know are left, because after a restore they
    may be all that is left of a paid training.
    """
    deleted, oldest = 0, datetime.now(UTC) - checkpoints
    for page in vault.versions(job):
        with Session(engine) as session:
            known = select(Job).where(Job.id.in_({version.job for version in page if version.job}))
            jobs = {row.id: row for row in session.scalars(known)}
        over = [
            version for version in page
            if version.job in jobs and not _is_needed(version, jobs[version.job], oldest)
        ]  # fmt: skip
        vault.delete(over)
        deleted += len(over)
    return deleted


def _is_needed(version: Version, job: Job, oldest: datetime) -> bool:
    kind = version.key.split("/")[0]
    if job.state in ENDED_JOBS:
        # A synthesizer is written once: an older version of it is there because somebody deleted it, and
        # can be brought back. Diagnostics are written repeatedly, and the last version has all lines.
        settled = job.synthesizer_key if job.synthesizer_removed_at is None else None
        if settled and version.key.startswith(settled):
            return True
        return version.latest and version.key.startswith(f"diagnostics/{job.id}/{job.fence}.")
    if kind == "diagnostics" or version.fence is None:
        return True
    if kind == "checkpoints" and version.at < oldest:
        return False  # the job was abandoned
    return version.fence >= job.fence or version.key.endswith(f"/{job.checkpoint}")


def repeat_until(stopping: threading.Event, action: Callable[[], object], every: float) -> None:
    """Calls `action` at once and then at intervals; errors of a server are logged and retried."""
    while True:
        try:
            action()
        except (SQLAlchemyError, BotoCoreError, ClientError, VersionsNotDeleted, KeyChanged) as problem:
            _log.warning("cleaning_failed", kind=type(problem).__name__)
        if stopping.wait(every):
            return


@dataclass(frozen=True, kw_only=True)
class Remover:
    """Removes uploads. `register` makes sure that the records of bound datasets stay recognisable."""

    engine: Engine
    private: PrivateStore
    vault: Vault
    register: Callable[[], object]
    retention: Retention = field(default_factory=Retention)

    def clean(self) -> None:
        """One round over everything whose time is over."""
        self.expire_datasets()
        self.expire_synthesizers()
        clean_vault(self.engine, self.vault, checkpoints=self.retention.checkpoint)
        self.remove_late_uploads()

    def remove_due(self) -> int:
        """Removes the files of every dataset that was deleted or rejected; returns the number of datasets."""
        late = func.now() - self.retention.rejected_upload
        over = or_(
            Dataset.state == DatasetState.DELETED,
            and_(Dataset.state == DatasetState.REJECTED, Dataset.checked_at < late),
        )
        with Session(self.engine, expire_on_commit=False) as session:
            due = session.scalars(select(Dataset).where(over, Dataset.removed_at.is_(None))).all()
        if any(dataset.account_id for dataset in due):
            self.register()
        for dataset in due:
            self._remove(dataset)
        return len(due)

    def _remove(self, dataset: Dataset) -> None:
        if dataset.upload_id:  # first, so that it cannot be completed after the versions were listed
            self.private.abort(dataset.object_key, dataset.upload_id)
        versions = 0
        for page in self.private.versions(dataset.object_key):
            self.private.delete(page)
            versions += len(page)
        with Session(self.engine) as session, session.begin():
            # Diagnostics were computed from single records without a charge, so they go with the records.
            jobs = list(session.scalars(select(Job.id).where(Job.dataset_id == dataset.id)))
            session.execute(delete(Diagnosis).where(Diagnosis.job_id.in_(jobs)))
            for job in jobs:
                for page in self.vault.versions(job):
                    self.vault.delete([item for item in page if item.key.startswith("diagnostics/")])
            removed = update(Dataset).where(Dataset.id == dataset.id, Dataset.removed_at.is_(None))
            session.execute(removed.values(removed_at=func.now(), report=None))
        audit.write(self.engine, "dataset removed", [dataset.id])
        _log.info("dataset_removed", dataset_id=str(dataset.id), versions=versions)

    def expire_datasets(self) -> None:
        """Deletes datasets that were not used for as long as the site keeps them."""
        if self.retention.upload is None:
            return
        last = func.now() - self.retention.upload
        uses = or_(Job.dataset_id == Dataset.id, Job.source_id == Dataset.id)
        recent = or_(Job.finished_at.is_(None), Job.finished_at > last)
        unused = and_(
            Dataset.state.in_((DatasetState.READY, DatasetState.HELD)),
            func.coalesce(Dataset.checked_at, Dataset.sealed_at) < last,
            ~exists().where(uses, recent),
        )
        reason = f"not used for {self.retention.upload.total_seconds() / 86400:g} days (SLUICE_UPLOAD_DAYS)"
        with Session(self.engine) as session:
            for id in session.scalars(select(Dataset.id).where(unused)).all():
                gone = update(Dataset).where(Dataset.id == id, unused)
                gone = gone.values(state=DatasetState.DELETED, deletion_reason=reason)
                try:
                    session.execute(gone.execution_options(synchronize_session=False))
                    session.commit()
                    audit.write(self.engine, f"dataset deleted: {reason}", [id])
                    _log.info("dataset_expired", dataset_id=str(id))
                except IntegrityError:  # a job was created just now
                    session.rollback()

    def expire_synthesizers(self) -> None:
        """Marks synthesizers whose time is over: `clean_vault` deletes them, and no new use begins."""
        if self.retention.synthesizer is None:
            return
        last = func.now() - self.retention.synthesizer
        following = aliased(Job)
        drafted = or_(Release.created_at > last, Release.state == ReleaseState.BUILDING)
        needed = or_(
            exists().where(Release.job_id == Job.id, drafted),
            exists().where(following.after_id == Job.id, following.state.in_(UNFINISHED_JOBS)),
        )
        old = and_(
            Job.state == JobState.TRAINED, Job.synthesizer_removed_at.is_(None), Job.finished_at < last
        )
        with Session(self.engine) as session:
            for id in session.scalars(select(Job.id).where(old, ~needed)).all():
                # Checked again under the lock that a draft release and a following job take.
                session.execute(select(Job.id).where(Job.id == id).with_for_update())
                if session.scalars(select(Job.id).where(Job.id == id, old, ~needed)).one_or_none():
                    gone = update(Job).where(Job.id == id).values(synthesizer_removed_at=func.now())
                    session.execute(gone)
                    _log.info("synthesizer_expired", job_id=str(id))
                session.commit()

    def remove_late_uploads(self) -> None:
        """Removes uploads that were completed after their dataset was deleted, or that nobody finishes.

        Objects of datasets that this database does not know are left: after a restore they may be needed.
        """
        for page in self.private.versions():
            datasets = self._states({version.key for version in page})
            late = [version for version in page if datasets.get(version.key, ("", False))[1]]
            self.private.delete(late)
            if late:
                _log.warning("late_upload_removed", versions=len(late))
        oldest = datetime.now(UTC) - self.retention.unfinished_upload
        for upload in self.private.unfinished():
            state, _ = self._states({upload.key}).get(upload.key, (DatasetState.DRAFT, False))
            if (
                state not in (DatasetState.DRAFT, DatasetState.UPLOADING, DatasetState.CHECKING)
                or upload.begun < oldest
            ):
                self.private.abort(upload.key, upload.id)
                _log.info("upload_aborted")

    def _states(self, keys: set[str]) -> dict[str, tuple[str, bool]]:
        """State of the datasets with these objects, and whether the files are to be removed."""
        removed = or_(Dataset.state == DatasetState.DELETED, Dataset.removed_at.is_not(None))
        rows = select(Dataset.object_key, Dataset.state, removed).where(Dataset.object_key.in_(keys))
        with Session(self.engine) as session:
            return {key: (state, over) for key, state, over in session.execute(rows)}
