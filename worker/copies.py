"""Copies of bundles in the public bucket, for those who review them. The vault keeps what is published.

A copy is listed in the database before its first file is put, and until its last file is removed: no copy is
forgotten, whenever a publisher dies.
"""

import uuid
from collections.abc import Callable
from functools import partial

from botocore.exceptions import BotoCoreError, ClientError
from sqlalchemy import Engine, Select, and_, func, not_, or_, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from core import log
from core.stores.public import PublicStore, review_key
from core.tables import Release, ReviewCopy
from sluice.release import attest

_log = log.get("copies")
_NEEDED = ("building", "in_review", "approved", "publishing")


def begin(engine: Engine, release: Release, digest: bytes) -> Callable[[str], str]:
    """Lists a copy that is about to be put; gives the key of each of its paths."""
    listed = insert(ReviewCopy).values(release_id=release.id, build=release.build, digest=digest)
    with engine.begin() as connection:
        connection.execute(listed.on_conflict_do_nothing())
    return partial(review_key, release.id, release.build, digest)


def unneeded() -> Select[tuple[ReviewCopy, list[str]]]:
    """Copies of releases that are out or given up, and of earlier builds, with the formats of the release.

    Not while a publisher holds the release: it may be about to put a file of the copy.
    """
    current = and_(
        Release.state.in_(_NEEDED),
        ReviewCopy.build == Release.build,
        or_(Release.digest.is_(None), ReviewCopy.digest == Release.digest),
    )
    free = or_(Release.lease_until.is_(None), Release.lease_until < func.now())
    copies = select(ReviewCopy, Release.formats).join(Release, Release.id == ReviewCopy.release_id)
    return copies.where(not_(current), free)


def remove_unneeded(engine: Engine, public: PublicStore, id: uuid.UUID) -> None:
    """A store that does not answer is asked again when the sweeper rings for the copies that are left."""
    with Session(engine) as session, session.begin():
        for copy, formats in session.execute(unneeded().where(ReviewCopy.release_id == id)).all():
            try:
                for path in attest.paths(formats):
                    public.remove_copy(review_key(id, copy.build, copy.digest, path))
            except (BotoCoreError, ClientError) as problem:
                _log.warning("copy_not_removed", release_id=str(id), kind=type(problem).__name__)
                return
            session.delete(copy)
