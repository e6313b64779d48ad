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


class NotAuthenticated(Problem):
    status, slug, title = 401, "not-authenticated", "It is not known who is asking"


class Forbidden(Problem):
    status, slug, title = 403, "forbidden", "This is for another role"


class NotFound(Problem):
    status, slug, title = 404, "not-found", "There is nothing like that here for you"


class WrongState(Problem):
    status, slug, title = 409, "wrong-state", "This cannot be done now"


class Invalid(Problem):
    status, slug, title = 422, "invalid-request", "The request does not fit its description"


class NotReady(Problem):
    status, slug, title = 503, "not-ready", "A part that is needed does not answer"
