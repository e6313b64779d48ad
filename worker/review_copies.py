"""Copies of bundles in the public bucket, for reviewers. What is published comes from the vault.

A copy is listed in the database before its first file is put and until its last file is removed, so that no
copy is forgotten when a publisher dies.
"""

import uuid
from collections.abc import Callable
from functools import partial

from botocore.exceptions import BotoCoreError, ClientError
from sqlalchemy import Engine, Select, and_, not_, or_, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from core import log
from core.stores.public import PublicStore, review_key
from core.tables import Release, ReleaseState, ReviewCopy
from sluice.release.manifest import paths
from worker.lease import expired

_log = log.get("review_copies")
_REVIEWED_STATES = (
    ReleaseState.BUILDING,
    ReleaseState.IN_REVIEW,
    ReleaseState.APPROVED,
    ReleaseState.PUBLISHING,
)


def begin(engine: Engine, release: Release, digest: bytes) -> Callable[[str], str]:
    """Lists a copy that is about to be put; returns a function from its paths to keys."""
    listed = insert(ReviewCopy).values(release_id=release.id, build=release.build, digest=digest)
    with engine.begin() as connection:
        connection.execute(listed.on_conflict_do_nothing())
    return partial(review_key, release.id, release.build, digest)


def unneeded() -> Select[ReviewCopy, list[str]]:
    """Copies of releases that are no longer reviewed, and of earlier builds, with the release's formats.

    Copies of a release under a lease are left out: its holder may be about to put a file of the copy.
    """
    current = and_(
        Release.state.in_(_REVIEWED_STATES),
        ReviewCopy.build == Release.build,
        or_(Release.digest.is_(None), ReviewCopy.digest == Release.digest),
    )
    copies = select(ReviewCopy, Release.formats).join(Release, Release.id == ReviewCopy.release_id)
    return copies.where(not_(current), expired(Release.lease_until))


def remove_unneeded(engine: Engine, public: PublicStore, id: uuid.UUID) -> None:
    """Removes the unneeded copies of a release; what fails is tried again when the sweeper finds it."""
    with Session(engine) as session, session.begin():
        for copy, formats in session.execute(unneeded().where(ReviewCopy.release_id == id)).all():
            try:
                for path in paths(formats):
                    public.remove_copy(review_key(id, copy.build, copy.digest, path))
            except (BotoCoreError, ClientError) as problem:
                _log.warning("copy_not_removed", release_id=str(id), kind=type(problem).__name__)
                return
            session.delete(copy)
