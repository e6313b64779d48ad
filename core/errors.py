"""Problems that many parts of the server raise."""

from sluice.problems import Problem

__all__ = ["Forbidden", "Invalid", "NotAuthenticated", "NotFound", "NotReady", "Problem", "WrongState"]


class NotAuthenticated(Problem):
    status, slug, title = 401, "not-authenticated", "Authentication required"


class Forbidden(Problem):
    status, slug, title = 403, "forbidden", "Not allowed for your role"


class NotFound(Problem):
    status, slug, title = 404, "not-found", "Not found, or not visible to you"


class WrongState(Problem):
    status, slug, title = 409, "wrong-state", "Not possible in the present state"


class Invalid(Problem):
    status, slug, title = 422, "invalid-request", "Invalid request"


class NotReady(Problem):
    status, slug, title = 503, "not-ready", "A server this service needs does not respond"
