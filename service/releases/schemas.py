"""Request and response bodies for releases."""

import uuid
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import Field

from core.tables import Account, Dataset, Release, ReleaseState
from service.jobs.schemas import Readings
from service.schemas import Body, Budget, Note, Text, View, Whole
from sluice.privacy.relation import Relation
from sluice.release import owners

Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$", examples=["5e88" * 16])]
Format = Literal["parquet", "npz", "png"]
Audience = Literal["granted", "everyone"]


class NewRelease(Body):
    """All fields are public once the release is published."""

    job: uuid.UUID
    name: Text
    note: Note = ""
    licence: Text = "CC-BY-4.0"
    count: Annotated[
        Whole, Field(ge=1, le=1_000_000, description="Number of samples, equally many of each class.")
    ] = 10_000
    seed: Annotated[Whole, Field(ge=0, le=2**53)] | None = Field(
        default=None, description="Seed of the sample; public. Random if left out."
    )
    formats: Annotated[tuple[Format, ...], Field(min_length=1, max_length=3)] = ("parquet", "npz")
    audience: Audience = "granted"
    supersedes: uuid.UUID | None = None


class Approve(Body):
    digest: Digest = Field(description="Digest of the reviewed bundle; only this bundle is approved.")
    note: Note = ""


class Withdraw(Body):
    reason: Annotated[Note, Field(min_length=1, examples=["A class was misnamed."])] = Field(
        description="Public: it is part of the revocation list."
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
    """URLs that serve one file each, with byte ranges, for `expires_in` seconds."""

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
    """The privacy cost of a release for the records of one owner."""

    epsilon: Readings
    delta: float
    relation: Relation


class Together(View):
    """Of a relay: the sums over its owners, for a person with records at all of them."""

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
    job: uuid.UUID | None = Field(description="Shown to those who work with its dataset.")
    audience: str
    reviewers: int = Field(description="People required: 2, or 1 at a site of one person.")
    count: int
    seed: int
    formats: list[str]
    supersedes: uuid.UUID | None
    progress: Drawn = Field(description="Samples drawn.")
    digest: str | None = Field(description="SHA-256 of the bundle's SHA256SUMS, which is approved.")
    files: list[FileView]
    manifest: dict[str, Any] | None
    privacy: dict[str, Any] | None
    owners: list[OwnerView] = Field(
        description="Privacy cost for the records of each owner, once built. A relay has several owners."
    )
    together: Together | None = Field(
        description="Of a relay: the sums for a person with records at all of its owners."
    )
    approvals: list[ApprovalView] = Field(description="Shown to those who work with its dataset.")
    reason: str | None = Field(description="Why it was withdrawn.")
    created_at: datetime
    built_at: datetime | None
    published_at: datetime | None
    withdrawn_at: datetime | None

    @classmethod
    def of(cls, row: Release, approvals: list[ApprovalView] | None) -> "ReleaseView":
        """`approvals` is None for people who do not work on the release; the job is hidden from them too."""
        withdrawn = row.state in (ReleaseState.WITHDRAWING, ReleaseState.WITHDRAWN)
        together = owners.together(row.privacy) if row.privacy else None
        return cls.from_row(
            row, kind="images" if row.formats else "classifier",
            job=None if approvals is None else row.job_id, progress=Drawn(done=row.done, count=row.count),
            digest=row.digest.hex() if row.digest else None,
            files=[] if withdrawn else [FileView(**file) for file in row.files or ()],
            manifest=None if withdrawn else row.manifest,
            owners=list(map(OwnerView.model_validate, owners.of(row.privacy))) if row.privacy else [],
            together=Together(**together) if together else None, approvals=approvals or [],
        )  # fmt: skip


class DatasetCard(View):
    """The declared facts of a dataset, and the budget of its account."""

    id: uuid.UUID
    name: str
    owner: str = Field(description="Name of the curator who registered it.")
    data_schema: dict[str, Any] = Field(serialization_alias="schema")
    nominal_size: int
    relation: Relation
    budget: Budget = Field(description="Current budget of the account it is charged to.")
    public: bool

    @classmethod
    def of(cls, row: Dataset, account: Account, owner: str) -> "DatasetCard":
        return cls.from_row(
            row, owner=owner, data_schema=row.schema, relation=account.relation,
            budget=Budget.from_row(account),
        )  # fmt: skip


class ReviewedJob(View):
    """One training job of a release: its plan, its cost and its datasets."""

    id: uuid.UUID
    plan: dict[str, Any]
    event: dict[str, Any]
    epsilon: Readings
    cost: int
    state: str
    created_at: datetime
    finished_at: datetime | None
    dataset: DatasetCard
    source: DatasetCard | None = Field(description="The public source of the job, if its method needs one.")


class ReviewView(View):
    """The origin of a release, for its reviewers."""

    release: uuid.UUID
    name: str
    state: str
    author: str
    digest: str | None = Field(description="The digest to approve; null until the bundle is built.")
    job: ReviewedJob
    earlier: list[ReviewedJob] = Field(description="Of a relay: the jobs before it, latest first.")


class KeyView(View):
    id: str
    algorithm: Literal["ed25519"] = "ed25519"
    public: str
    since: datetime


class KeysView(View):
    """All keys that releases were ever signed with."""

    keys: list[KeyView]
