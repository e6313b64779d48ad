"""The two neighbouring relations; an epsilon without one means nothing."""

from enum import StrEnum


class Relation(StrEnum):
    """Which pairs of datasets must be hard to tell apart.

    ADD_REMOVE: one record more or less. The number of records is itself protected.
    REPLACE_ONE: one record exchanged for any other. The number of records is public.
    """

    ADD_REMOVE = "add_remove"
    REPLACE_ONE = "replace_one"
