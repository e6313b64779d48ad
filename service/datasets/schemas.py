"""What is said about datasets over HTTP."""

import uuid
from datetime import datetime
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field

from core.schema import Schema
from core.tables import Dataset
from privacy.relation import Relation
from service.auth import Who
from service.deps import Body, View

Text = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]+$")]


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


class Seal(Body):
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


class DatasetView(View):
    id: uuid.UUID
    name: str
    data_schema: dict[str, Any] = Field(serialization_alias="schema")
    nominal_size: int
    relation: Relation
    budget: Budget
    parent: uuid.UUID | None
    public: bool
    account: uuid.UUID | None = Field(description="Whose budget it draws on; known once sealed.")
    state: str
    fault: str | None
    report: dict[str, Any] | None = Field(
        description="Counts of clamped and mapped values; for its owner only."
    )
    created_at: datetime
    sealed_at: datetime | None

    @classmethod
    def of(cls, row: Dataset, who: Who) -> "DatasetView":
        return cls(
            id=row.id, name=row.name, data_schema=row.schema, nominal_size=row.nominal_size,
            relation=Relation(row.relation),
            budget=Budget(epsilon=row.epsilon, delta=row.delta, order=row.order),
            parent=row.parent_id, public=row.public, account=row.account_id, state=row.state, fault=row.fault,
            report=row.report if row.owner_id == who.id else None,
            created_at=row.created_at, sealed_at=row.sealed_at,
        )  # fmt: skip


class UploadView(View):
    """Where an upload stands: send the parts that are missing, each `part_bytes` long but the last."""

    part_bytes: int
    arrived: list[int]


class SignedPart(View):
    number: int
    url: str


class SignedParts(View):
    """Addresses that take one part each by PUT, for `expires_in` seconds."""

    parts: list[SignedPart]
    expires_in: int
