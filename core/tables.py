"""The database tables as models. Their constraints and triggers are in migrations/."""

import uuid
from datetime import datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import BigInteger, FetchedValue, Float, ForeignKey, Integer, SmallInteger, Text, func
from sqlalchemy.dialects.postgresql import ARRAY, JSONB, TIMESTAMP
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class DatasetState(StrEnum):
    DRAFT = "draft"
    UPLOADING = "uploading"
    CHECKING = "checking"  # sealed; the train worker checks it
    HELD = "held"  # waits for the decision of a second person
    READY = "ready"
    REJECTED = "rejected"
    DELETED = "deleted"


class JobState(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    TRAINED = "trained"
    FAILED = "failed"
    CANCELLED = "cancelled"


UNFINISHED_JOBS = (JobState.QUEUED, JobState.RUNNING)
ENDED_JOBS = (JobState.TRAINED, JobState.FAILED, JobState.CANCELLED)


class ReleaseState(StrEnum):
    BUILDING = "building"
    IN_REVIEW = "in_review"
    APPROVED = "approved"
    PUBLISHING = "publishing"
    PUBLISHED = "published"
    SUPERSEDED = "superseded"
    WITHDRAWING = "withdrawing"
    WITHDRAWN = "withdrawn"
    DISCARDED = "discarded"
    FAILED = "failed"


class Base(DeclarativeBase):
    type_annotation_map = {  # noqa: RUF012 (SQLAlchemy reads it from the class)
        datetime: TIMESTAMP(timezone=True),
        dict[str, Any]: JSONB(none_as_null=True),
        float: Float(53),
        int: BigInteger,
        str: Text,
    }


def _id() -> Mapped[uuid.UUID]:
    return mapped_column(primary_key=True, default=uuid.uuid4)


def _now() -> Mapped[datetime]:
    return mapped_column(server_default=func.now())


class Team(Base):
    """People who share datasets, jobs and reviews. Without a quota of its own, the site's default applies."""

    __tablename__ = "teams"

    id: Mapped[uuid.UUID] = _id()
    name: Mapped[str]
    quota_bytes: Mapped[int | None]
    quota_jobs: Mapped[int | None]
    quota_job_seconds: Mapped[int | None]
    created_at: Mapped[datetime] = _now()


class Person(Base):
    """A user of the service. `subject` is their id at the single sign-on provider."""

    __tablename__ = "people"

    id: Mapped[uuid.UUID] = _id()
    name: Mapped[str]
    role: Mapped[str]
    subject: Mapped[str | None]
    team_id: Mapped[uuid.UUID | None] = mapped_column(ForeignKey("teams.id"))
    created_at: Mapped[datetime] = _now()
    created_by: Mapped[uuid.UUID | None] = mapped_column(ForeignKey("people.id"))
    disabled_at: Mapped[datetime | None]


class Invitation(Base):
    """Lets a person create a key, once; stored as its SHA-256. No `issued_by`: made by the installation."""

    __tablename__ = "invitations"

    id: Mapped[uuid.UUID] = _id()
    person_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("people.id"))
    digest: Mapped[bytes | None]
    issued_by: Mapped[uuid.UUID | None] = mapped_column(ForeignKey("people.id"))
    confirmed_by: Mapped[uuid.UUID | None] = mapped_column(ForeignKey("people.id"))
    created_at: Mapped[datetime] = _now()
    expires_at: Mapped[datetime]
    used_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]
    refused: Mapped[int] = mapped_column(server_default="0")


class Rules(Base):
    """Rules set by the owner of the tables; the service can only read them."""

    __tablename__ = "rules"

    id: Mapped[int] = mapped_column(SmallInteger, primary_key=True)
    independent_days: Mapped[int] = mapped_column(Integer)


class Key(Base):
    """An API key, stored as its SHA-256. `issued_by`: who invited its owner, or the owner."""

    __tablename__ = "keys"

    id: Mapped[uuid.UUID] = _id()
    person_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("people.id"))
    label: Mapped[str]
    digest: Mapped[bytes]
    created_at: Mapped[datetime] = _now()
    expires_at: Mapped[datetime]
    revoked_at: Mapped[datetime | None]
    issued_by: Mapped[uuid.UUID | None] = mapped_column(ForeignKey("people.id"))
    invitation_id: Mapped[uuid.UUID | None] = mapped_column(ForeignKey("invitations.id"))


class Account(Base):
    """The budget of the people in a dataset; its balance is an integer cost at one fixed Rényi order."""

    __tablename__ = "accounts"

    id: Mapped[uuid.UUID] = _id()
    relation: Mapped[str]
    epsilon: Mapped[float]
    delta: Mapped[float]
    order: Mapped[int] = mapped_column("renyi_order", SmallInteger)
    capacity: Mapped[int]
    held: Mapped[int] = mapped_column(server_default="0")
    settled: Mapped[int] = mapped_column(server_default="0")
    moves: Mapped[int] = mapped_column(server_default="0")
    head: Mapped[bytes]
    created_at: Mapped[datetime] = _now()

    @property
    def left(self) -> int:
        return self.capacity - self.held - self.settled


class Dataset(Base):
    """A dataset as declared by its owner; the records are in the private bucket."""

    __tablename__ = "datasets"

    id: Mapped[uuid.UUID] = _id()
    owner_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("people.id"))
    # Set by the database: the team of the owner when the dataset is registered.
    team_id: Mapped[uuid.UUID | None] = mapped_column(ForeignKey("teams.id"), server_default=FetchedValue())
    name: Mapped[str]
    schema: Mapped[dict[str, Any]]
    nominal_size: Mapped[int]
    relation: Mapped[str]
    epsilon: Mapped[float]
    delta: Mapped[float]
    order: Mapped[int] = mapped_column("renyi_order", SmallInteger)
    parent_id: Mapped[uuid.UUID | None] = mapped_column(ForeignKey("datasets.id"))
    public: Mapped[bool] = mapped_column(server_default="false")
    over_cap: Mapped[bool] = mapped_column(server_default="false")
    causes: Mapped[list[str]] = mapped_column(ARRAY(Text), server_default="{}")
    matches: Mapped[list[Any]] = mapped_column(JSONB, server_default="[]")
    account_id: Mapped[uuid.UUID | None] = mapped_column(ForeignKey("accounts.id"))
    state: Mapped[str]
    fault: Mapped[str | None]
    object_key: Mapped[str]
    upload_id: Mapped[str | None]
    declared_bytes: Mapped[int | None]
    size: Mapped[int | None]
    sha256: Mapped[bytes | None]  # of the object: of ciphertext, except for uploads before encryption
    content_sha256: Mapped[bytes | None]  # of the file before encryption, for public datasets only
    key_id: Mapped[str | None]  # of the key-encryption key; None: uploaded before encryption
    wrapped_key: Mapped[bytes | None]  # None after the dataset is deleted
    report: Mapped[dict[str, Any] | None]
    created_at: Mapped[datetime] = _now()
    sealed_at: Mapped[datetime | None]
    checked_at: Mapped[datetime | None]
    attempts: Mapped[int] = mapped_column(server_default="0")  # to check it
    retry_at: Mapped[datetime | None]
    deleted_at: Mapped[datetime | None]
    deleted_by: Mapped[uuid.UUID | None] = mapped_column(ForeignKey("people.id"))
    deletion_reason: Mapped[str | None]
    removed_at: Mapped[datetime | None]  # when its bytes were removed from the store


class Review(Base):
    """A second person's decision about a held dataset."""

    __tablename__ = "reviews"

    dataset_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("datasets.id"), primary_key=True)
    decision: Mapped[str]
    account_id: Mapped[uuid.UUID | None] = mapped_column(ForeignKey("accounts.id"))
    reason: Mapped[str]
    decided_by: Mapped[uuid.UUID] = mapped_column(ForeignKey("people.id"))
    at: Mapped[datetime] = _now()


class Job(Base):
    """One training. Its plan is fixed and charged when it is created."""

    __tablename__ = "jobs"

    id: Mapped[uuid.UUID] = _id()
    dataset_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("datasets.id"))
    source_id: Mapped[uuid.UUID | None] = mapped_column(ForeignKey("datasets.id"))
    after_id: Mapped[uuid.UUID | None] = mapped_column(ForeignKey("jobs.id"))
    shared: Mapped[bool] = mapped_column(server_default="false")
    account_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("accounts.id"))
    owner_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("people.id"))
    plan: Mapped[dict[str, Any]]
    event: Mapped[dict[str, Any]]
    cost: Mapped[int]
    readings: Mapped[dict[str, Any]]
    state: Mapped[str]
    fault: Mapped[str | None]
    step: Mapped[int] = mapped_column(server_default="0")
    steps: Mapped[int]
    limit_seconds: Mapped[int | None]
    ran_seconds: Mapped[int] = mapped_column(server_default="0")
    fence: Mapped[int] = mapped_column(server_default="0")
    lease_until: Mapped[datetime | None]
    checkpoint: Mapped[int | None]
    synthesizer_key: Mapped[str | None]
    synthesizer_sha256: Mapped[bytes | None]
    created_at: Mapped[datetime] = _now()
    started_at: Mapped[datetime | None]
    opened_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]
    cancel_asked_at: Mapped[datetime | None]
    synthesizer_removed_at: Mapped[datetime | None]


class Entry(Base):
    """One change of an account's balance. Rows are only added."""

    __tablename__ = "entries"

    account_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("accounts.id"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str]
    cost: Mapped[int]
    job_id: Mapped[uuid.UUID | None] = mapped_column(ForeignKey("jobs.id"))
    event: Mapped[dict[str, Any] | None]
    readings: Mapped[dict[str, Any] | None]
    terms: Mapped[dict[str, Any] | None]
    actor: Mapped[str]
    reason: Mapped[str]
    at: Mapped[datetime]
    previous: Mapped[bytes]
    digest: Mapped[bytes]


class Grant(Base):
    """A larger budget, proposed by one person and in force once another confirms it."""

    __tablename__ = "grants"

    id: Mapped[uuid.UUID] = _id()
    account_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("accounts.id"))
    epsilon: Mapped[float]
    reason: Mapped[str]
    proposed_by: Mapped[uuid.UUID] = mapped_column(ForeignKey("people.id"))
    proposed_at: Mapped[datetime] = _now()
    decided_by: Mapped[uuid.UUID | None] = mapped_column(ForeignKey("people.id"))
    decided_at: Mapped[datetime | None]
    state: Mapped[str]


class Reply(Base):
    """The first response to an idempotency key; `status` is NULL while the request is processed."""

    __tablename__ = "replies"

    person_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("people.id"), primary_key=True)
    key: Mapped[str] = mapped_column(primary_key=True)
    request: Mapped[bytes]
    status: Mapped[int | None] = mapped_column(SmallInteger)
    body: Mapped[dict[str, Any] | None]
    created_at: Mapped[datetime] = _now()


class Release(Base):
    """A bundle of samples and synthesizer, from its request to its withdrawal."""

    __tablename__ = "releases"

    id: Mapped[uuid.UUID] = _id()
    job_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("jobs.id"))
    author_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("people.id"))
    name: Mapped[str]
    note: Mapped[str]
    licence: Mapped[str]
    count: Mapped[int]
    seed: Mapped[int]
    formats: Mapped[list[str]] = mapped_column(ARRAY(Text))
    audience: Mapped[str]
    reviewers: Mapped[int] = mapped_column(SmallInteger)
    supersedes: Mapped[uuid.UUID | None] = mapped_column(ForeignKey("releases.id"))
    state: Mapped[str]
    fault: Mapped[str | None]
    build: Mapped[int] = mapped_column(server_default="1")
    fence: Mapped[int] = mapped_column(server_default="0")
    attempts: Mapped[int] = mapped_column(server_default="0")  # at the present step
    lease_until: Mapped[datetime | None]
    done: Mapped[int] = mapped_column(server_default="0")
    digest: Mapped[bytes | None]
    files: Mapped[list[Any] | None] = mapped_column(JSONB(none_as_null=True))
    manifest: Mapped[dict[str, Any] | None]
    privacy: Mapped[dict[str, Any] | None]
    preview: Mapped[bytes | None] = mapped_column(deferred=True)
    attestation: Mapped[str | None] = mapped_column(deferred=True)
    reason: Mapped[str | None]
    created_at: Mapped[datetime] = _now()
    built_at: Mapped[datetime | None]
    published_at: Mapped[datetime | None]
    withdrawn_at: Mapped[datetime | None]


class Approval(Base):
    """One person's approval of one bundle, by its digest. A rebuilt bundle has none."""

    __tablename__ = "approvals"

    release_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("releases.id"), primary_key=True)
    digest: Mapped[bytes] = mapped_column(primary_key=True)
    person_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("people.id"), primary_key=True)
    note: Mapped[str]
    at: Mapped[datetime] = _now()


class Reader(Base):
    """An analyst who may download a release that is not for everyone."""

    __tablename__ = "readers"

    release_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("releases.id"), primary_key=True)
    person_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("people.id"), primary_key=True)
    at: Mapped[datetime] = _now()


class ReviewCopy(Base):
    """A bundle copied to the public bucket for its reviewers; see core.stores.public.review_key."""

    __tablename__ = "review_copies"

    release_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("releases.id"), primary_key=True)
    build: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    digest: Mapped[bytes] = mapped_column(primary_key=True)


class SigningKey(Base):
    """The public half of a present or former signing key."""

    __tablename__ = "signing_keys"

    id: Mapped[str] = mapped_column(primary_key=True)
    public: Mapped[bytes]
    since: Mapped[datetime] = _now()


class Revocations(Base):
    """A signed list of all withdrawn releases; the one with the highest number is in force."""

    __tablename__ = "revocations"

    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    envelope: Mapped[str]
    at: Mapped[datetime] = _now()


class Diagnosis(Base):
    """Losses and norms of a job. They depend on records and are shown to its owner only."""

    __tablename__ = "diagnostics"

    job_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    fence: Mapped[int]
    lines: Mapped[str]
    picture: Mapped[str]
    at: Mapped[datetime] = _now()


class Witness(Base):
    """When the ledger was last compared with its witness, and the result."""

    __tablename__ = "witness"

    id: Mapped[int] = mapped_column(SmallInteger, primary_key=True)
    checked_at: Mapped[datetime | None]
    generation: Mapped[int] = mapped_column(server_default="0")
    behind: Mapped[dict[str, Any] | None]
    acknowledged: Mapped[int] = mapped_column(server_default="0")


class Heartbeat(Base):
    """A running process that is connected to the database and to its queue."""

    __tablename__ = "parts"

    name: Mapped[str] = mapped_column(primary_key=True)
    role: Mapped[str]
    version: Mapped[str]
    seen_at: Mapped[datetime] = _now()


class AuditRow(Base):
    """One action, view or download. Added only by the database function add_audit()."""

    __tablename__ = "audit_log"

    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    at: Mapped[datetime]
    writer: Mapped[str]
    person_id: Mapped[uuid.UUID | None]
    name: Mapped[str | None]
    role: Mapped[str | None]
    key_id: Mapped[uuid.UUID | None]
    address: Mapped[str | None]
    request: Mapped[str | None]
    action: Mapped[str]
    objects: Mapped[list[str]] = mapped_column(ARRAY(Text))
    status: Mapped[int | None] = mapped_column(SmallInteger)
    answers: Mapped[int | None]
    times: Mapped[int]
    previous: Mapped[bytes]
    digest: Mapped[bytes]
