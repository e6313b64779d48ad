"""What is said about releases over HTTP."""

import uuid
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import Field

from core.tables import Account, Dataset, Job, Release
from service.datasets.schemas import NOTE, Budget, Text, Whole
from service.deps import Body, View
from service.jobs.schemas import Readings
from sluice.privacy.relation import Relation
from sluice.release import owners

Note = Annotated[str, Field(max_length=2000, pattern=NOTE)]
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$", examples=["5e88" * 16])]
Format = Literal["parquet", "npz", "png"]
Audience = Literal["granted", "everyone"]


class NewRelease(Body):
    """All of it is public once published."""

    job: uuid.UUID
    name: Text
    note: Note = ""
    licence: Text = "CC-BY-4.0"
    count: Annotated[
        Whole, Field(ge=1, le=1_000_000, description="How many samples, in equal parts of each class.")
    ] = 10_000
    seed: Annotated[Whole, Field(ge=0, le=2**53)] | None = Field(
        default=None, description="Of the sample; public. Drawn if not given."
    )
    formats: Annotated[tuple[Format, ...], Field(min_length=1, max_length=3)] = ("parquet", "npz")
    audience: Audience = "granted"
    supersedes: uuid.UUID | None = None


class Approve(Body):
    digest: Digest = Field(description="Of the bundle that was looked at; another one is not approved by it.")
    note: Note = ""


class Withdraw(Body):
    reason: Annotated[Note, Field(min_length=1, examples=["A class was misnamed."])] = Field(
        description="Public: it stands in the revocation list."
    )


class NewReader(Body):
    person: Annotated[uuid.UUID, Field(examples=["0b6f9f4e-6f0e-4d3b-9d3c-2f6d7a1c5e80"])]


class Paths(Body):
    paths: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=200)]],
        Field(min_length=1, max_length=100, examples=[["manifest.json"]]),
    ]


class FileView(View):
    path: str
    size: int
    sha256: str


class Download(FileView):
    url: str


class Downloads(View):
    """Addresses that give one file each, with ranges, for `expires_in` seconds."""

    files: list[Download]
    expires_in: int


class ApprovalView(View):
    person: uuid.UUID
    digest: str
    note: str
    at: datetime


class Drawn(View):
    done: int
    count: int


class OwnerView(View):
    """What a release costs the records of one owner."""

    epsilon: Readings
    delta: float
    relation: Relation


class Together(View):
    """Of a relay: the sums of its owners, for a person whose records are with all of them."""

    epsilon: float | None
    delta: float


class ReleaseView(View):
    id: uuid.UUID
    kind: Literal["images", "classifier"] = Field(
        description="What is released; a classifier has no samples."
    )
    name: str
    note: str
    licence: str
    state: str
    fault: str | None
    author: uuid.UUID
    job: uuid.UUID | None = Field(description="For those who work with its dataset.")
    audience: str
    reviewers: int = Field(description="People it takes: 2, or 1 at a site of one person.")
    count: int
    seed: int
    formats: list[str]
    supersedes: uuid.UUID | None
    progress: Drawn = Field(description="Samples drawn.")
    digest: str | None = Field(description="SHA-256 of the bundle's SHA256SUMS: what is approved.")
    files: list[FileView]
    manifest: dict[str, Any] | None
    privacy: dict[str, Any] | None
    owners: list[OwnerView] = Field(
        description="What it costs the records of each owner, once built: one, but for a relay."
    )
    together: Together | None = Field(
        description="Of a relay: the sums for a person whose records are with all of its owners."
    )
    approvals: list[ApprovalView] = Field(description="For those who work with its dataset.")
    reason: str | None = Field(description="Why it was withdrawn.")
    created_at: datetime
    built_at: datetime | None
    published_at: datetime | None
    withdrawn_at: datetime | None

    @classmethod
    def of(cls, row: Release, approvals: list[ApprovalView] | None) -> "ReleaseView":
        """`approvals` are given to those who work on the release; the job is named to nobody else."""
        shown = row.state not in ("withdrawing", "withdrawn")
        return cls(
            id=row.id, kind="images" if row.formats else "classifier", name=row.name, note=row.note,
            licence=row.licence, state=row.state, fault=row.fault,
            author=row.author_id, job=None if approvals is None else row.job_id, audience=row.audience,
            reviewers=row.reviewers, count=row.count, seed=row.seed, formats=row.formats,
            supersedes=row.supersedes, progress=Drawn(done=row.done, count=row.count),
            digest=row.digest.hex() if row.digest else None,
            files=[FileView(**file) for file in row.files or ()] if shown else [],
            manifest=row.manifest if shown else None, privacy=row.privacy,
            owners=[OwnerView.model_validate(each) for each in owners.of(row.privacy)] if row.privacy else [],
            together=owners.together(row.privacy) if row.privacy else None,
            approvals=approvals or [], reason=row.reason, created_at=row.created_at,
            built_at=row.built_at, published_at=row.published_at, withdrawn_at=row.withdrawn_at,
        )  # fmt: skip


class DatasetCard(View):
    """What was declared about a dataset, and the budget of its people."""

    id: uuid.UUID
    name: str
    owner: str = Field(description="Name of the curator who registered it.")
    data_schema: dict[str, Any] = Field(serialization_alias="schema")
    nominal_size: int
    relation: Relation
    budget: Budget = Field(description="In force now, of the account that the dataset draws on.")
    public: bool

    @classmethod
    def of(cls, row: Dataset, account: Account, owner: str) -> "DatasetCard":
        return cls(
            id=row.id, name=row.name, owner=owner, data_schema=row.schema, nominal_size=row.nominal_size,
            relation=Relation(account.relation), public=row.public,
            budget=Budget(epsilon=account.epsilon, delta=account.delta, order=account.order),
        )  # fmt: skip


class ReviewedJob(View):
    """One training that a release comes from: what it did, what it cost, and on which datasets."""

    id: uuid.UUID
    plan: dict[str, Any]
    event: dict[str, Any]
    epsilon: Readings
    cost: int
    state: str
    created_at: datetime
    finished_at: datetime | None
    dataset: DatasetCard
    source: DatasetCard | None = Field(description="Of an adaptation: the public dataset it learned from.")

    @classmethod
    def of(cls, row: Job, dataset: DatasetCard, source: DatasetCard | None) -> "ReviewedJob":
        return cls(
            id=row.id, plan=row.plan, event=row.event, epsilon=Readings.model_validate(row.readings),
            cost=row.cost, state=row.state, created_at=row.created_at, finished_at=row.finished_at,
            dataset=dataset, source=source,
        )  # fmt: skip


class ReviewView(View):
    """What somebody who approves a release needs to know about where it comes from."""

    release: uuid.UUID
    name: str
    state: str
    author: str
    digest: str | None = Field(description="What is approved; null until the bundle is built.")
    job: ReviewedJob
    earlier: list[ReviewedJob] = Field(description="Of a relay: the jobs before it, the latest first.")


class KeyView(View):
    id: str
    algorithm: Literal["ed25519"] = "ed25519"
    public: str
    since: datetime


class KeysView(View):
    """Every key releases were ever signed with."""

    keys: list[KeyView]
