"""The three things done to records before anything leaves: drawn into batches, clipped, noised."""

from typing import ClassVar


class MechanismFault(Exception):
    """A step that must not be taken. The slug is all a job says of it; the text quotes no record."""

    slug: ClassVar[str]


class AccountingMismatch(MechanismFault):
    """What was done to the records is not what was paid for."""

    slug = "accounting-mismatch"
