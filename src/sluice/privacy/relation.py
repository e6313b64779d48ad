"""The two neighbouring relations. Every epsilon refers to one of them."""

from enum import StrEnum


class Relation(StrEnum):
    """Which pairs of datasets are neighbours.

    ADD_REMOVE: one record more or less. The number of records is protected, too.
    REPLACE_ONE: one record replaced by any other. The number of records is public.
    """

    ADD_REMOVE = "add_remove"
    REPLACE_ONE = "replace_one"
