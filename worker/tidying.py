"""Deletes from the vault what jobs no longer need, with every version the store kept of it.

Of an ended job the settled synthesizer stays, and the diagnostics of its last attempt. Checkpoints (which
hold discriminators), synthesizers of attempts that were not settled and older versions are deleted: when the
job ends, and in rounds that find what a crash or a late write left behind. Of a job that runs, what attempts
before the present one left is deleted, but for the checkpoint it goes on from. docs/guarantees.md#jobs
"""

import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from botocore.exceptions import BotoCoreError, ClientError
from sqlalchemy import Engine, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from core import log
from core.stores.private import Vault
from core.stores.s3 import Version, VersionsNotDeleted
from core.tables import Job
from worker.known import KeyChanged

REMOVE_SECONDS, TIDY_SECONDS = 10.0, 300.0
ENDED = ("trained", "failed", "cancelled")
CHECKPOINT_KEPT = timedelta(days=30)
_log = log.get("tidying")


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What stays of an ended job: prefixes of keys."""

    synthesizer: str | None
    diagnostics: str

    def has(self, version: Version) -> bool:
        # Diagnostics are written again and again, and the last has all lines. A synthesizer is written once:
        # an older version of it is there because somebody deleted it, and can be brought back.
        settled = self.synthesizer is not None and version.key.startswith(self.synthesizer)
        return settled or (version.latest and version.key.startswith(self.diagnostics))


@dataclass(frozen=True, kw_only=True)
class Running:
    """What stays of a job that has not ended: what its present attempt wrote, and what it goes on from."""

    fence: int
    checkpoint: int | None
    oldest: datetime

    def has(self, version: Version) -> bool:
        if version.key.startswith("diagnostics/") or version.fence is None:
            return True
        if version.key.startswith("checkpoints/") and version.at < self.oldest:
            return False  # nobody finishes this job
        return version.fence >= self.fence or version.key.endswith(f"/{self.checkpoint}")


def tidy(
    engine: Engine, vault: Vault, job: uuid.UUID | None = None, *, checkpoints: timedelta = CHECKPOINT_KEPT
) -> int:
    """Deletes what is over, of all jobs or of one; gives how many versions went.

    A job is looked up after its objects were listed: fences only grow, and if it has ended by then, its end
    is final and so is its settled synthesizer. Objects of jobs that this database does not know are left:
    after a restore they may be all that is left of a paid training.
    """
    deleted = 0
    for page in vault.versions(job):
        kept = _kept(engine, {one.job for one in page if one.job is not None}, checkpoints)
        over = [one for one in page if one.job in kept and not kept[one.job].has(one)]
        vault.delete(over)
        deleted += len(over)
    return deleted


def _kept(
    engine: Engine, jobs: set[uuid.UUID], checkpoints: timedelta
) -> Mapping[uuid.UUID | None, Kept | Running]:
    """What stays of each of these jobs."""
    kept: dict[uuid.UUID | None, Kept | Running] = {}
    oldest = datetime.now(UTC) - checkpoints
    with Session(engine) as session:
        for row in session.scalars(select(Job).where(Job.id.in_(jobs))):
            if row.state in ENDED:
                settled = row.synthesizer_key if row.synthesizer_removed_at is None else None
                kept[row.id] = Kept(synthesizer=settled, diagnostics=f"diagnostics/{row.id}/{row.fence}.")
            else:
                kept[row.id] = Running(fence=row.fence, checkpoint=row.checkpoint, oldest=oldest)
    return kept


def tidy_until(stopping: threading.Event, tidy: Callable[[], object], every: float = TIDY_SECONDS) -> None:
    """Goes round at once and then now and then; a server that is away is tried again in the next round."""
    while True:
        try:
            tidy()
        except (SQLAlchemyError, BotoCoreError, ClientError, VersionsNotDeleted, KeyChanged) as problem:
            _log.warning("not_tidied", kind=type(problem).__name__)
        if stopping.wait(every):
            return
