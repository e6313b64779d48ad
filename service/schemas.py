"""Base classes and field types of request and response bodies."""

import re
from typing import Annotated, Any, Generic, Self, TypeVar

from pydantic import AwareDatetime, BaseModel, BeforeValidator, ConfigDict, Field

T = TypeVar("T")
# No control characters and no marks that change the writing direction: a terminal or a page may obey them.
_ACTIVE = r"\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
Text = Annotated[str, Field(min_length=1, max_length=200, pattern=rf"^[^\x00-\x1f{_ACTIVE}]+$")]
Note = Annotated[str, Field(max_length=2000, pattern=rf"^[^\x00-\x08\x0b-\x1f{_ACTIVE}]*$")]
SearchText = Annotated[str, Field(max_length=200, pattern=r"^[^\x00-\x1f]*$")]


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _dated(value: Any) -> Any:
    if isinstance(value, str) and not re.match(r"\d{4}-\d\d-\d\d", value):
        # Pydantic would read "1700000000" as seconds since 1970.
        raise ValueError("write a date and time as in 2026-11-16T09:30:00Z")
    return value


# JSON numbers only: 5.0 is accepted as a whole number; "5" and true are not.
Whole = Annotated[int, BeforeValidator(_whole), Field(strict=True)]
Finite = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Moment = Annotated[AwareDatetime, BeforeValidator(_dated)]


class _Model(BaseModel):
    @classmethod
    def from_row(cls, row: Any, **computed: Any) -> Self:
        """Copies columns of a table row; the field `person` is read from `person` or `person_id`."""
        copied = {
            name: getattr(row, name if hasattr(row, name) else f"{name}_id")
            for name in cls.model_fields.keys() - computed.keys()
        }
        return cls(**copied, **computed)


class Body(_Model):
    """A request body; unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class View(_Model):
    """A response body."""

    model_config = ConfigDict(frozen=True)


class Page(View, Generic[T]):
    items: list[T]
    next: str | None = None


class Budget(Body):
    epsilon: Annotated[Finite, Field(ge=1e-6, le=1e6)]
    delta: Annotated[Finite, Field(ge=1e-10, le=0.1)]
    order: Annotated[Whole, Field(ge=2, le=1024)] | None = Field(
        default=None, description="Rényi order of the account; chosen from epsilon and delta if left out."
    )
