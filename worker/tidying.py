"""Deletes from the vault what ended jobs no longer need, with every version the store kept of it.

Of an ended job the settled synthesizer stays, and the diagnostics of its last attempt. Checkpoints (which
hold discriminators), synthesizers of attempts that were not settled and older versions are deleted: when the
job ends, and in rounds that find what a crash or a late write left behind. docs/guarantees.md#jobs
"""

import threading
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from botocore.exceptions import BotoCoreError, ClientError
from sqlalchemy import Engine, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from core import log
from core.stores.vault import Vault, Version, VersionsNotDeleted
from core.tables import Job

TIDY_SECONDS = 300.0
ENDED = ("trained", "failed", "cancelled")
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


def tidy(engine: Engine, vault: Vault, job: uuid.UUID | None = None) -> int:
    """Deletes what is over, of all jobs or of one; gives how many versions went.

    A job is looked up after its objects were listed: if it has ended by then, its end is final and so is its
    settled synthesizer. Jobs that run keep everything. Objects of jobs that this database does not know are
    left: after a restore they may be all that is left of a paid training.
    """
    deleted = 0
    for page in vault.versions(job):
        kept = _kept(engine, {one.job for one in page if one.job is not None})
        over = [one for one in page if one.job in kept and not kept[one.job].has(one)]
        vault.delete(over)
        deleted += len(over)
    return deleted


def _kept(engine: Engine, jobs: set[uuid.UUID]) -> Mapping[uuid.UUID, Kept]:
    """What stays of each of these jobs that has ended."""
    rows = select(Job.id, Job.fence, Job.synthesizer_key).where(Job.id.in_(jobs), Job.state.in_(ENDED))
    with Session(engine) as session:
        return {
            id: Kept(synthesizer=settled, diagnostics=f"diagnostics/{id}/{fence}.")
            for id, fence, settled in session.execute(rows)
        }


def tidy_until(stopping: threading.Event, engine: Engine, vault: Vault, every: float = TIDY_SECONDS) -> None:
    """Goes round at once and then now and then; a server that is away is tried again in the next round."""
    while True:
        try:
            deleted = tidy(engine, vault)
            if deleted:
                _log.info("vault_tidied", versions=deleted)
        except (SQLAlchemyError, BotoCoreError, ClientError, VersionsNotDeleted) as problem:
            _log.warning("vault_not_tidied", kind=type(problem).__name__)
        if stopping.wait(every):
            return
