"""Failures with names: what a person did wrong, and faults of a job."""

from typing import Any, ClassVar


class Problem(Exception):
    """Something a caller can act on; `detail` has the way out and quotes nothing private."""

    status: ClassVar[int] = 400
    slug: ClassVar[str] = "bad-request"
    title: ClassVar[str] = "The request cannot be served"

    def __init__(self, detail: str, **fields: Any) -> None:
        super().__init__(detail)
        self.detail = detail
        self.fields = fields


class NotReady(Problem):
    status, slug, title = 503, "not-ready", "A part that is needed does not answer"
