"""What is said about datasets over HTTP."""

import base64
import uuid
from datetime import datetime
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, field_validator, model_validator

from core.schema import Schema
from core.tables import Account, Dataset, Review
from service.auth import Principal
from service.deps import Body, View
from sluice.privacy.relation import Relation

# Neither controls nor marks that turn the direction of writing: a terminal or a page may obey them.
_ACTIVE = r"\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
NOTE = rf"^[^\x00-\x08\x0b-\x1f{_ACTIVE}]*$"
Text = Annotated[str, Field(min_length=1, max_length=200, pattern=rf"^[^\x00-\x1f{_ACTIVE}]+$")]


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


# Numbers are numbers: 5.0 is a whole one, neither "5" nor true is any.
Whole = Annotated[int, BeforeValidator(_whole), Field(strict=True)]
Finite = Annotated[float, Field(strict=True, allow_inf_nan=False)]


class Budget(Body):
    epsilon: Annotated[Finite, Field(ge=1e-6, le=1e6)]
    delta: Annotated[Finite, Field(ge=1e-10, le=0.1)]
    order: Annotated[Whole, Field(ge=2, le=1024)] | None = Field(
        default=None, description="Rényi order of the account; chosen by the budget if not given."
    )


class NewDataset(Body):
    """Nothing here may be measured on the rows: declare what is known of the kind of data."""

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
    nominal_size: Annotated[Whole, Field(ge=1, le=10**10, description="Roughly how many records; public.")]
    relation: Relation = Relation.ADD_REMOVE
    budget: Budget
    parent: uuid.UUID | None = Field(
        default=None, description="A dataset with the same people in it; they share its budget."
    )
    public: bool = Field(
        default=False,
        strict=True,
        description="Anybody may know these records: an adaptation may learn from them without a charge.",
    )


class UploadKey(Body):
    """The key that the file is encrypted with, itself encrypted for the private side."""

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
    """What uploads are encrypted for."""

    id: str
    algorithm: Literal["RSA-OAEP-256"]
    public: str = Field(description="PEM.")


class Seal(Body):
    """Length and hash of what was sent: of the ciphertext, so that they tell nothing of the records."""

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
        default=None, description="Of the whole encrypted file. Needed where the team has a quota of bytes."
    )


class Decision(Body):
    """About a dataset that is held: other people (`accept`), people of an account (`join`), or neither."""

    decision: Literal["accept", "join", "reject"]
    account: uuid.UUID | None = Field(default=None, description="The account to join.")
    reason: Annotated[Text, Field(examples=["Another hospital's patients; compared by hand."])]

    @model_validator(mode="after")
    def _account_to_join(self) -> Self:
        if (self.decision == "join") != (self.account is not None):
            raise ValueError("name an account to join, and only then")
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
    budget: Budget = Field(description="In force: that of the account, or as declared while there is none.")
    declared: Budget | None = Field(description="What was declared, where the account has other terms.")
    shared: bool = Field(description="Other datasets draw on the same account.")
    parent: uuid.UUID | None
    public: bool
    account: uuid.UUID | None = Field(
        description="Whose budget it draws on; known once its records were read."
    )
    state: str
    causes: list[str] = Field(description="Why it is or was held; for admins.")
    matches: list[dict[str, Any]] = Field(description="Datasets with some of the same records; for admins.")
    review: ReviewView | None = Field(description="What was decided about it when it was held.")
    fault: str | None
    report: dict[str, Any] | None = Field(
        description="Counts of clamped and mapped values; for its owner only."
    )
    attempts: int = Field(description="How often its check was begun.")
    created_at: datetime
    sealed_at: datetime | None
    deleted_at: datetime | None
    deletion_reason: str | None
    removed_at: datetime | None = Field(description="Since when the store has no byte of it.")

    @classmethod
    def of(
        cls, row: Dataset, principal: Principal, *, account: Account | None = None, shared: bool = False,
        review: Review | None = None,
    ) -> "DatasetView":  # fmt: skip
        declared, terms = (
            Budget(epsilon=held.epsilon, delta=held.delta, order=held.order) for held in (row, account or row)
        )
        return cls(
            id=row.id, name=row.name, data_schema=row.schema, nominal_size=row.nominal_size,
            relation=Relation(row.relation), budget=terms, declared=None if declared == terms else declared,
            shared=shared, parent=row.parent_id, public=row.public, account=row.account_id, state=row.state,
            causes=row.causes if principal.is_admin else [],
            matches=row.matches if principal.is_admin else [],
            review=review and ReviewView(decision=review.decision, reason=review.reason, at=review.at),
            fault=row.fault, report=row.report if row.owner_id == principal.id else None,
            attempts=row.attempts or 0, created_at=row.created_at, sealed_at=row.sealed_at,
            deleted_at=row.deleted_at, deletion_reason=row.deletion_reason, removed_at=row.removed_at,
        )  # fmt: skip


class UploadView(View):
    """Where an upload stands: send the parts that are missing, each `part_bytes` long but the last."""

    part_bytes: int
    most_bytes: int = Field(description="A longer file cannot be sealed here.")
    arrived: list[int]


class SignedPart(View):
    number: int
    url: str


class SignedParts(View):
    """Addresses that take one part each by PUT, for `expires_in` seconds."""

    parts: list[SignedPart]
    expires_in: int
