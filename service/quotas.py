"""Quotas of a team: bytes, jobs at the same time, seconds per job. A person without a team counts alone.

A team's own quota takes precedence over the site's default. The row of the team or person is locked while its
use is counted, so concurrent requests are counted one after the other.
"""

from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from core.errors import Problem
from core.settings import ServiceSettings
from core.tables import UNFINISHED_JOBS, Dataset, Job, Person, Team


class QuotaExceeded(Problem):
    status, slug, title = 409, "quota-exceeded", "Team quota exceeded"


@dataclass(frozen=True, kw_only=True)
class Quotas:
    """None: no limit."""

    bytes: int | None
    jobs: int | None
    job_seconds: int | None

    @classmethod
    def of(cls, team: Team | None, settings: ServiceSettings) -> "Quotas":
        def quota(name: str) -> int | None:
            own: int | None = getattr(team, f"quota_{name}", None)
            default: int | None = getattr(settings, f"team_{name}")
            return default if own is None else own

        return cls(bytes=quota("bytes"), jobs=quota("jobs"), job_seconds=quota("job_seconds"))


def of_dataset(session: Session, dataset: Dataset, settings: ServiceSettings) -> Quotas:
    return Quotas.of(session.get(Team, dataset.team_id) if dataset.team_id else None, settings)


def _lock(session: Session, dataset: Dataset, settings: ServiceSettings) -> Quotas:
    """The quotas of a dataset; no other transaction counts against them until this one ends."""
    if dataset.team_id is None:
        session.execute(
            select(Person.id).where(Person.id == dataset.owner_id).with_for_update(key_share=True)
        )
        return Quotas.of(None, settings)
    team = select(Team).where(Team.id == dataset.team_id).with_for_update(key_share=True)
    return Quotas.of(session.scalars(team.execution_options(populate_existing=True)).one(), settings)


def _same_quota(dataset: Dataset) -> tuple[Any, ...]:
    """Conditions for the datasets that count against the same quota, including this one."""
    if dataset.team_id is None:
        return Dataset.team_id.is_(None), Dataset.owner_id == dataset.owner_id
    return (Dataset.team_id == dataset.team_id,)


def used_bytes(session: Session, *where: Any) -> int:
    """Sealed or declared bytes of datasets whose bytes are not yet removed from the store."""
    size = func.coalesce(Dataset.size, Dataset.declared_bytes, 0)
    return int(session.scalar(select(func.sum(size)).where(Dataset.removed_at.is_(None), *where)) or 0)


def used_jobs(session: Session, *where: Any) -> int:
    """Number of jobs that are queued or running."""
    datasets = select(Dataset.id).where(*where)
    count = select(func.count()).where(Job.state.in_(UNFINISHED_JOBS), Job.dataset_id.in_(datasets))
    return session.scalars(count).one()


def require_room(session: Session, dataset: Dataset, size: int, settings: ServiceSettings) -> None:
    """Raises if an upload of this size and the team's other datasets exceed its quota of bytes."""
    limit = _lock(session, dataset, settings).bytes
    if limit is None:
        return
    used = used_bytes(session, *_same_quota(dataset), Dataset.id != dataset.id)
    if used + size > limit:
        raise QuotaExceeded(
            f"Your team uses {used:,} of {limit:,} bytes, and this upload has {size:,}. Delete datasets that "
            "are no longer needed, or ask an admin for a larger quota.",
            used=used,
            limit=limit,
        )


def require_free_job(session: Session, dataset: Dataset, settings: ServiceSettings) -> Quotas:
    """Raises if the team has as many queued or running jobs as its quota allows."""
    quotas = _lock(session, dataset, settings)
    if quotas.jobs is not None and (used := used_jobs(session, *_same_quota(dataset))) >= quotas.jobs:
        raise QuotaExceeded(
            f"Your team has {used} of {quotas.jobs} jobs queued or running. Wait for one to finish, cancel "
            "one, or ask an admin for a larger quota. Nothing was charged.",
            used=used,
            limit=quotas.jobs,
        )
    return quotas
