"""Why a dataset was rejected, a job ended, a release stopped: a closed list of slugs that quote no record."""

from enum import StrEnum


class Fault(StrEnum):
    # A dataset's file.
    UNSUPPORTED_FORMAT = "unsupported-format"  # none of the formats its schema may come in
    NOT_AN_ARCHIVE = "not-an-archive"  # begins like a zip, but has no directory that can be read
    DAMAGED = "damaged"  # cut short, or its parts contradict each other
    UNSAFE_CONTENT = "unsafe-content"  # pickles, links, encryption, odd names, hidden or doubled bytes
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
    CANNOT_DECRYPT = (
        "cannot-decrypt"  # not encrypted with the dataset's key for this dataset, or changed since
    )
    KEY_DESTROYED = "key-destroyed"  # the dataset was deleted
    TIMED_OUT = "timed-out"
    UNREADABLE = "unreadable"  # the reader itself ended without an answer
    NOT_ACCEPTED = "not-accepted"  # by the person who decided about a dataset that was held
    CHECK_FAILED = "check-failed"  # again and again, for reasons of the site and not of the file

    # A job.
    DIVERGED = "diverged"
    SCHEMA_MISMATCH = "schema-mismatch"
    ACCOUNTING_MISMATCH = "accounting-mismatch"
    LOST = "lost"
    TIME_LIMIT = "time-limit"  # it ran longer than its team's jobs may
    CANCELLED = "cancelled"

    # A release.
    UNFIT_SYNTHESIZER = "unfit-synthesizer"  # not exactly one generator of the declared shape, as trained
    BUNDLE_ALTERED = "bundle-altered"  # not the bytes that were built and approved
    NOT_APPROVED = "not-approved"
    NOT_SETTLED = "not-settled"  # its job is not paid for
    UNFIT_RELAY = "unfit-relay"  # its owners have different deltas or relations

    # Either.
    UPLOAD_GONE = "upload-gone"  # not in the store: the upload was not completed, or was removed
    OUT_OF_SPACE = "out-of-space"  # of the worker's disk, at the moment: worth another try
    EXCEEDS_DISK = "exceeds-disk"  # more than the whole disk of the worker holds
    LEDGER_BROKEN = "ledger-broken"  # the rows of an account do not follow, or grant more than its budget
    OUT_OF_MEMORY = "out-of-memory"


class Failure(Exception):
    """Work that ended in a named fault; carries the slug and nothing else."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.value)
        self.fault = fault
