"""Request and response bodies for datasets."""

import base64
import uuid
from datetime import datetime
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, field_validator, model_validator

from core.schema import Schema
from core.tables import Account, Dataset, Review
from service.auth import Principal
from service.schemas import Body, Budget, Text, View, Whole
from sluice.privacy.relation import Relation


class NewDataset(Body):
    """Declared facts, all public. Do not measure any of them on the records."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "name": "Scans 2026",
                    "schema": {"kind": "image", "height": 28, "width": 28, "classes": ["clear", "shadow"]},
                    "nominal_size": 60_000,
                    "relation": "add_remove",
                    "budget": {"epsilon": 10.0, "delta": 1e-6},
                },
                {
                    "name": "Visits",
                    "schema": {
                        "kind": "table",
                        "columns": [
                            {"kind": "number", "name": "age", "low": 0, "high": 120, "integer": True},
                            {"kind": "category", "name": "ward", "categories": ["north", "south"]},
                        ],
                    },
                    "nominal_size": 5_000,
                    "budget": {"epsilon": 3.0, "delta": 1e-6},
                },
            ]
        }
    )
    name: Text
    data_schema: Schema = Field(alias="schema")
    nominal_size: Annotated[
        Whole, Field(ge=1, le=10**10, description="Approximate record count. It is published: round it.")
    ]
    relation: Relation = Relation.ADD_REMOVE
    budget: Budget
    parent: uuid.UUID | None = Field(
        default=None, description="A dataset with records of the same people; both share its budget."
    )
    public: bool = Field(
        default=False,
        strict=True,
        description="Public records: methods with a public source may learn from them without a charge.",
    )


class UploadKey(Body):
    """The key that the file is encrypted with, encrypted for the train worker."""

    key_id: Annotated[
        str,
        Field(
            pattern="^[0-9a-f]{32}$",
            description="`id` in /.well-known/sluice-upload-key.json.",
            examples=["5b1c3f0e9d2a4c6f8e7b0a1d2c3e4f50"],
        ),
    ]
    wrapped_key: Annotated[
        str,
        Field(
            pattern="^[A-Za-z0-9+/]*={0,2}$",
            min_length=512,
            max_length=1368,
            description="32 random bytes, encrypted with that key by RSA-OAEP with SHA-256; base64.",
            examples=[base64.b64encode(bytes(384)).decode()],
        ),
    ]

    @field_validator("wrapped_key")
    @classmethod
    def _base64(cls, text: str) -> str:
        base64.b64decode(text, validate=True)  # raises a ValueError
        return text


class UploadKeyView(View):
    """The public key that data keys of uploads are encrypted with."""

    id: str
    algorithm: Literal["RSA-OAEP-256"]
    public: str = Field(description="PEM.")


class Seal(Body):
    """Length and SHA-256 of the encrypted file as uploaded."""

    size: Annotated[Whole, Field(ge=1, le=10**13, examples=[11_490_434])]
    sha256: Annotated[
        str,
        Field(
            pattern="^[0-9a-f]{64}$",
            examples=["9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"],
        ),
    ]


class PartNumbers(Body):
    numbers: Annotated[
        list[Annotated[Whole, Field(ge=1, le=10_000)]],
        Field(min_length=1, max_length=100, examples=[[1, 2, 3]]),
    ]
    size: Annotated[Whole, Field(ge=1, le=10**13)] | None = Field(
        default=None,
        description="Size of the whole encrypted file. Required if the team has a quota of bytes.",
    )


class Decision(Body):
    """Decision about a held dataset: `accept` with its own budget, `join` an account, or `reject`."""

    decision: Literal["accept", "join", "reject"]
    account: uuid.UUID | None = Field(default=None, description="The account to join.")
    reason: Annotated[Text, Field(examples=["Another hospital's patients; compared by hand."])]

    @model_validator(mode="after")
    def _account_to_join(self) -> Self:
        if (self.decision == "join") != (self.account is not None):
            raise ValueError("give an account if the decision is join, and only then")
        return self


class ReviewView(View):
    decision: str
    reason: str
    at: datetime


class DatasetView(View):
    id: uuid.UUID
    name: str
    data_schema: dict[str, Any] = Field(serialization_alias="schema")
    nominal_size: int
    relation: Relation
    budget: Budget = Field(
        description="In force: the budget of the account, or the declared one while there is none."
    )
    declared: Budget | None = Field(description="The declared budget, if that of the account differs.")
    shared: bool = Field(description="Other datasets use the same account.")
    parent: uuid.UUID | None
    public: bool
    account: uuid.UUID | None = Field(
        description="The account it is charged to; set when its records have been checked."
    )
    state: str
    causes: list[str] = Field(description="Why it is or was held; shown to admins.")
    matches: list[dict[str, Any]] = Field(description="Datasets that share records with it; shown to admins.")
    review: ReviewView | None = Field(description="The decision made while it was held.")
    fault: str | None
    report: dict[str, Any] | None = Field(
        description="Counts of clamped and mapped values; shown to its owner only."
    )
    attempts: int = Field(description="How often its check was started.")
    created_at: datetime
    sealed_at: datetime | None
    deleted_at: datetime | None
    deletion_reason: str | None
    removed_at: datetime | None = Field(description="When its bytes were removed from the store.")

    @classmethod
    def of(
        cls, row: Dataset, principal: Principal, *, account: Account | None = None, shared: bool = False,
        review: Review | None = None,
    ) -> "DatasetView":  # fmt: skip
        declared, in_force = Budget.from_row(row), Budget.from_row(account or row)
        return cls.from_row(
            row, data_schema=row.schema, budget=in_force,
            declared=None if declared == in_force else declared, shared=shared,
            causes=row.causes if principal.is_admin else [],
            matches=row.matches if principal.is_admin else [],
            review=ReviewView.from_row(review) if review else None,
            report=row.report if row.owner_id == principal.id else None, attempts=row.attempts or 0,
        )  # fmt: skip


class UploadView(View):
    """State of an upload. Send the missing parts; all but the last are `part_bytes` long."""

    part_bytes: int
    most_bytes: int = Field(description="Maximum size of a file.")
    arrived: list[int]


class SignedPart(View):
    number: int
    url: str


class SignedParts(View):
    """URLs that accept one part each by PUT, for `expires_in` seconds."""

    parts: list[SignedPart]
    expires_in: int
