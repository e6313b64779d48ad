"""Why a dataset was rejected, a job ended or a release stopped: a closed list that quotes no record."""

from enum import StrEnum


class Fault(StrEnum):
    # A dataset's file.
    UNSUPPORTED_FORMAT = "unsupported-format"  # not a format that its schema allows
    NOT_AN_ARCHIVE = "not-an-archive"  # a zip header without a readable directory
    DAMAGED = "damaged"  # truncated or inconsistent
    UNSAFE_CONTENT = "unsafe-content"  # pickles, links, encryption, unusual names, hidden or repeated bytes
    TOO_LARGE = "too-large"  # expands to more than its size justifies, or than the limits allow
    EMPTY = "empty"  # no bytes, or no records
    SHAPE_MISMATCH = "shape-mismatch"
    DTYPE_MISMATCH = "dtype-mismatch"
    LABEL_MISMATCH = "label-mismatch"
    COLUMNS_MISMATCH = "columns-mismatch"
    NOT_FINITE = "not-finite"  # a number is missing, NaN or infinite
    RAGGED = "ragged"  # a row has more or fewer fields than the header
    ENCODING = "encoding"  # text that is not UTF-8, or holds NUL
    HASH_MISMATCH = "hash-mismatch"
    SIZE_MISMATCH = "size-mismatch"
    CANNOT_DECRYPT = "cannot-decrypt"  # encrypted with another key or for another dataset, or changed
    KEY_DESTROYED = "key-destroyed"  # the dataset was deleted
    TIMED_OUT = "timed-out"
    UNREADABLE = "unreadable"  # the parser process ended without a result
    NOT_ACCEPTED = "not-accepted"  # by the review of a held dataset
    CHECK_FAILED = "check-failed"  # repeatedly, because of the site, not of the file

    # A job.
    DIVERGED = "diverged"
    SCHEMA_MISMATCH = "schema-mismatch"
    ACCOUNTING_MISMATCH = "accounting-mismatch"
    LOST = "lost"
    TIME_LIMIT = "time-limit"  # longer than the team's limit
    CANCELLED = "cancelled"

    # A release.
    UNFIT_SYNTHESIZER = "unfit-synthesizer"  # not the trained generator of the declared shape
    BUNDLE_ALTERED = "bundle-altered"  # not the built and approved bytes
    NOT_APPROVED = "not-approved"
    NOT_SETTLED = "not-settled"  # the cost of its job is not settled
    UNFIT_RELAY = "unfit-relay"  # its owners have different deltas or relations

    # Either.
    UPLOAD_GONE = "upload-gone"  # not in the store: the upload was not completed, or was removed
    OUT_OF_SPACE = "out-of-space"  # of the worker's disk at the moment: tried again
    EXCEEDS_DISK = "exceeds-disk"  # more than the worker's whole disk
    LEDGER_BROKEN = "ledger-broken"  # hash chain or balance inconsistent, or grants beyond the budget
    OUT_OF_MEMORY = "out-of-memory"


class Failure(Exception):
    """Work that ended with a fault; carries its slug only."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.value)
        self.fault = fault
