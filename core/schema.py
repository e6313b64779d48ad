"""What a curator declares about a dataset. These facts are public and never measured on the records."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

# Names reach filenames, headers and releases, so they are plain: no control characters, no leading = + - @.
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_ .:/()%<>&+-]{0,99}$")]


class _Declared(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ImageSchema(_Declared):
    """Images of one shape with uint8 channels; the label of a record is the index of its class."""

    kind: Literal["image"] = "image"
    height: int = Field(ge=1, le=1024)
    width: int = Field(ge=1, le=1024)
    channels: Literal[1, 3] = 1
    classes: tuple[Name, ...] = Field(min_length=1, max_length=1000)

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        _refuse_repeats(self.classes)
        return self


class NumberColumn(_Declared):
    """A number within declared bounds; values outside are clamped to them."""

    kind: Literal["number"] = "number"
    name: Name
    low: float = Field(allow_inf_nan=False)
    high: float = Field(allow_inf_nan=False)
    integer: bool = False

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if not self.low < self.high:
            raise ValueError("low must be below high")
        return self


class CategoryColumn(_Declared):
    """One of the declared values; anything else becomes `other`, which is always one of them."""

    kind: Literal["category"] = "category"
    name: Name
    categories: tuple[Name, ...] = Field(min_length=1, max_length=10_000)
    other: Name = "other"

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        _refuse_repeats(self.categories)
        return self

    @property
    def domain(self) -> tuple[str, ...]:
        return self.categories if self.other in self.categories else (*self.categories, self.other)


Column = Annotated[NumberColumn | CategoryColumn, Field(discriminator="kind")]


class TableSchema(_Declared):
    """Columns with bounds or categories; `label`, if any, names the category column to condition on."""

    kind: Literal["table"] = "table"
    columns: tuple[Column, ...] = Field(min_length=1, max_length=1000)
    label: Name | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        _refuse_repeats(tuple(column.name for column in self.columns))
        labels = [c.name for c in self.columns if isinstance(c, CategoryColumn)]
        if self.label is not None and self.label not in labels:
            raise ValueError("label must name a category column")
        return self


Schema = Annotated[ImageSchema | TableSchema, Field(discriminator="kind")]


def _refuse_repeats(names: tuple[str, ...]) -> None:
    if len(set(names)) != len(names):
        raise ValueError("names must differ from each other")
