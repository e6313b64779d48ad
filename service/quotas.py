"""What a team may use at once: bytes, jobs, seconds of a job. Whoever has no team is counted alone.

A team's own quota counts before the site's default. The row of the team, or of the person, is locked while it
is counted: requests that come at the same moment are counted one after the other.
"""

from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from core.errors import Problem
from core.settings import ServiceSettings
from core.tables import Dataset, Job, Person, Team

UNFINISHED = ("queued", "running")


class QuotaExceeded(Problem):
    status, slug, title = 409, "quota-exceeded", "This is more than the team may use"


@dataclass(frozen=True, kw_only=True)
class Quotas:
    """None: no limit."""

    bytes: int | None
    jobs: int | None
    job_seconds: int | None

    @classmethod
    def of(cls, team: Team | None, settings: ServiceSettings) -> "Quotas":
        def first(own: int | None, site: int | None) -> int | None:
            return site if own is None else own

        return cls(
            bytes=first(team and team.quota_bytes, settings.team_bytes),
            jobs=first(team and team.quota_jobs, settings.team_jobs),
            job_seconds=first(team and team.quota_job_seconds, settings.team_job_seconds),
        )


def of_dataset(session: Session, dataset: Dataset, settings: ServiceSettings) -> Quotas:
    return Quotas.of(session.get(Team, dataset.team_id) if dataset.team_id else None, settings)


def _locked(session: Session, dataset: Dataset, settings: ServiceSettings) -> Quotas:
    """The quotas that a dataset falls under; until this transaction ends nobody else counts for them."""
    if dataset.team_id is None:
        session.execute(
            select(Person.id).where(Person.id == dataset.owner_id).with_for_update(key_share=True)
        )
        return Quotas.of(None, settings)
    team = select(Team).where(Team.id == dataset.team_id).with_for_update(key_share=True)
    return Quotas.of(session.scalars(team.execution_options(populate_existing=True)).one(), settings)


def _beside(dataset: Dataset) -> tuple[Any, ...]:
    """The datasets that count for the same quota, this one among them."""
    if dataset.team_id is None:
        return Dataset.team_id.is_(None), Dataset.owner_id == dataset.owner_id
    return (Dataset.team_id == dataset.team_id,)


def used_bytes(session: Session, *which: Any) -> int:
    """Declared or sealed bytes of datasets, until the store has none of them any more."""
    held = func.coalesce(Dataset.size, Dataset.declared_bytes, 0)
    return int(session.scalar(select(func.sum(held)).where(Dataset.removed_at.is_(None), *which)) or 0)


def used_jobs(session: Session, *which: Any) -> int:
    """Jobs that wait or run."""
    those = select(Dataset.id).where(*which)
    found = select(func.count()).where(Job.state.in_(UNFINISHED), Job.dataset_id.in_(those))
    return session.scalars(found).one()


def require_room(session: Session, dataset: Dataset, size: int, settings: ServiceSettings) -> None:
    """That an upload of this size fits beside the other datasets of the team."""
    limit = _locked(session, dataset, settings).bytes
    if limit is None:
        return
    used = used_bytes(session, *_beside(dataset), Dataset.id != dataset.id)
    if used + size > limit:
        raise QuotaExceeded(
            f"Your team holds {used:,} of {limit:,} bytes, this upload has {size:,}. Delete datasets that "
            "are no longer needed, or ask an admin for a larger quota.",
            used=used,
            limit=limit,
        )


def require_free_job(session: Session, dataset: Dataset, settings: ServiceSettings) -> Quotas:
    """That the team may have one more job that waits or runs."""
    quotas = _locked(session, dataset, settings)
    if quotas.jobs is not None and (used := used_jobs(session, *_beside(dataset))) >= quotas.jobs:
        raise QuotaExceeded(
            f"Your team has {used} jobs that wait or run, and may have {quotas.jobs}. Wait for one to end or "
            "cancel one, or ask an admin for a larger quota. Nothing was charged.",
            used=used,
            limit=quotas.jobs,
        )
    return quotas
