"""Turns every error into application/problem+json (RFC 9457): slug, status and detail of its class, never a
value of the request."""

from typing import Any

from botocore.exceptions import BotoCoreError, ClientError
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from sqlalchemy.exc import OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from starlette.exceptions import HTTPException

from core import log
from core.errors import Invalid, NotReady, Problem

_log = log.get("problems")


class BadRequest(Problem):
    status, slug, title = 400, "bad-request", "The request cannot be parsed"


class NoSuchRoute(Problem):
    status, slug, title = 404, "not-found", "No such route"


class MethodNotAllowed(Problem):
    status, slug, title = 405, "method-not-allowed", "Method not allowed"


class RequestTimeout(Problem):
    status, slug, title = 408, "request-timeout", "The request body did not arrive in time"


class BodyTooLarge(Problem):
    status, slug, title = 413, "body-too-large", "The request body is too large"


class InternalError(Problem):
    status, slug, title = 500, "internal-error", "Internal error"


# What the framework and the middleware raise as HTTPException, by status.
_BY_STATUS: dict[int, Problem] = {
    problem.status: problem
    for problem in (
        BadRequest("Send JSON as described at /docs."),
        NoSuchRoute("/docs lists the routes."),
        MethodNotAllowed("/docs lists the methods of each route."),
        RequestTimeout("Send the whole request again."),
        BodyTooLarge("Describe data in the body; upload files as parts."),
    )
}


class ProblemView(BaseModel):
    """RFC 9457. `slug` names the kind of problem, `detail` says what happened and what to do."""

    type: str
    slug: str
    title: str
    status: int
    detail: str
    request_id: str | None


def _documented(status: int, slug: str, text: str) -> dict[str, Any]:
    example = {
        "type": f"urn:sluice:problem:{slug}", "slug": slug, "title": text, "status": status,
        "detail": "What happened, and what to do.", "request_id": "5b1c3f0e9d2a4c6f8e7b0a1d2c3e4f50",
    }  # fmt: skip
    schema = {"$ref": "#/components/schemas/ProblemView"}
    return {
        "description": text,
        "content": {"application/problem+json": {"schema": schema, "example": example}},
    }


# What any route may answer; docs/api.md lists the slugs.
DOCUMENTED: dict[int | str, dict[str, Any]] = {
    status: _documented(status, slug, text)
    for status, slug, text in (
        (400, "bad-request", "The request cannot be parsed"),
        (401, "not-authenticated", "Authentication required"),
        (403, "forbidden", "Not allowed for your role, or for you"),
        (404, "not-found", "Not found, or not visible to you"),
        (409, "budget-exceeded", "Not possible in the present state, or beyond the budget"),
        (410, "release-withdrawn", "The release was withdrawn"),
        (413, "body-too-large", "The request body is too large"),
        (422, "invalid-request", "Invalid request or plan"),
        (429, "rate-limited", "Too many requests; Retry-After says how long to wait"),
        (503, "not-ready", "Overloaded, a server that does not respond, or a ledger behind its witness"),
    )
}


def describe(app: FastAPI) -> None:
    """Adds ProblemView to the document; as a route's `model` it would be described as plain JSON."""
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        document = plain()
        document["components"]["schemas"]["ProblemView"] = ProblemView.model_json_schema()
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def install(app: FastAPI) -> None:
    """Registers a handler for each type of exception; Starlette picks by the class of what was raised."""
    describe(app)
    handlers: dict[type[Exception], Any] = {
        Problem: _refused, RequestValidationError: _invalid, HTTPException: _http,
        OperationalError: _database_error, PoolTimeout: _database_error,
        BotoCoreError: _store_error, ClientError: _store_error,
    }  # fmt: skip
    for error, handler in handlers.items():
        app.add_exception_handler(error, handler)


def answer(request: Request, problem: Problem, *, status: int | None = None) -> JSONResponse:
    """The response to a problem; `given`, a value of the request, is not part of it."""
    fields = dict(problem.fields)
    headers, code = fields.pop("headers", None), status or problem.status
    body = {
        "type": f"urn:sluice:problem:{problem.slug}",
        "slug": problem.slug,
        "title": problem.title,
        "status": code,
        "detail": problem.detail,
        "request_id": getattr(request.state, "request_id", None),
    }
    return JSONResponse(
        body | fields, status_code=code, media_type="application/problem+json", headers=headers
    )


async def _refused(request: Request, problem: Problem) -> JSONResponse:
    return answer(request, problem)


async def _database_error(request: Request, error: Exception) -> JSONResponse:
    _log.error("database_lost", kind=type(error).__name__)
    return answer(request, NotReady("The database does not respond; try again shortly.", headers=_RETRY))


async def _store_error(request: Request, error: Exception) -> JSONResponse:
    _log.error("store_lost", kind=type(error).__name__)
    return answer(request, NotReady("The object store does not respond; try again shortly.", headers=_RETRY))


_RETRY = {"Retry-After": "2"}


async def _invalid(request: Request, error: RequestValidationError) -> JSONResponse:
    errors = error.errors()
    if any(item["type"] == "json_invalid" for item in errors):
        return answer(request, _BY_STATUS[400])
    # Pydantic's errors carry `input`, which for a missing field is the whole body: only these three leave.
    shown = [{"loc": _location(item), "type": item["type"], "msg": _message(item)} for item in errors]
    return answer(request, Invalid("Correct the fields named in `errors`; see /docs.", errors=shown))


def _location(error: dict[str, Any]) -> list[Any]:
    """Where it is wrong, without the name of an unknown field: that is text of the request."""
    place = list(error["loc"])
    return place[:-1] if error["type"] == "extra_forbidden" else place


def _message(error: dict[str, Any]) -> str:
    if error["type"] == "union_tag_invalid":
        return f"Input should have as kind one of: {error['ctx']['expected_tags']}"
    if error["type"] == "uuid_parsing":
        return "Input should be a valid UUID"
    return str(error["msg"])


class _OtherHttpError(Problem):
    slug = "http-error"


async def _http(request: Request, error: HTTPException) -> JSONResponse:
    problem = _BY_STATUS.get(error.status_code, _OtherHttpError("See /docs."))
    response = answer(request, problem, status=error.status_code)
    response.headers.update(error.headers or {})
    if error.status_code == 405:
        # The router names the methods of one matching route; a path may have several.
        path = getattr(request.scope.get("route"), "path", None)
        methods = {method for method, known in request.app.state.permissions if known == path}
        response.headers["Allow"] = ", ".join(sorted(methods)) or response.headers["Allow"]
    return response


def unexpected(request: Request) -> JSONResponse:
    return answer(request, InternalError("Try again; if it persists, tell the operator the request id."))
