"""Every error as application/problem+json (RFC 9457), with a name, a way out, and nothing echoed."""

import re
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
from core.errors import NotReady, Problem
from sluice.privacy.problems import Problem as PrivacyProblem

_log = log.get("problems")
# Our own problems name the number they were given, which suits a command line; here nothing is echoed.
_QUOTED = re.compile(r" is .+?; give")
_PLAIN = {
    400: ("bad-request", "The request cannot be read", "Send JSON as /docs describes it."),
    404: ("not-found", "There is nothing at this address", "See /docs for the addresses that exist."),
    408: ("request-timeout", "The body did not arrive in time", "Send the request again, all of it at once."),
    413: ("body-too-large", "The request is too large", "Describe data here; upload files as parts."),
    405: ("method-not-allowed", "This address does not take that method", "See /docs for its methods."),
}


class ProblemView(BaseModel):
    """RFC 9457. `slug` names the kind of problem, `detail` says what happened and the way out."""

    type: str
    slug: str
    title: str
    status: int
    detail: str
    request_id: str | None


def _documented(status: int, slug: str, text: str) -> dict[str, Any]:
    shown = {
        "type": f"urn:sluice:problem:{slug}", "slug": slug, "title": text, "status": status,
        "detail": "What happened, and the way out.", "request_id": "5b1c3f0e9d2a4c6f8e7b0a1d2c3e4f50",
    }  # fmt: skip
    schema = {"$ref": "#/components/schemas/ProblemView"}
    return {
        "description": text,
        "content": {"application/problem+json": {"schema": schema, "example": shown}},
    }


# What any route may answer; docs/api.md lists the slugs.
DOCUMENTED: dict[int | str, dict[str, Any]] = {
    status: _documented(status, slug, text)
    for status, slug, text in (
        (400, "bad-request", "The request cannot be read"),
        (401, "not-authenticated", "It is not known who is asking"),
        (403, "forbidden", "This is for another role or another person"),
        (404, "not-found", "There is nothing like that here for you"),
        (409, "budget-exceeded", "This cannot be done now, or the budget does not allow it"),
        (410, "release-withdrawn", "The release was withdrawn"),
        (413, "body-too-large", "The request is too large"),
        (422, "invalid-request", "The request or the plan does not fit its description"),
        (429, "rate-limited", "Too many requests; Retry-After says how long to wait"),
        (
            503,
            "not-ready",
            "Too many requests, a part that does not answer, or a ledger behind its witness",
        ),
    )
}


def describe(app: FastAPI) -> None:
    """Adds the form of a problem to the document; as a route's `model` it would claim to be plain JSON."""
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        document = plain()
        document["components"]["schemas"]["ProblemView"] = ProblemView.model_json_schema()
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def install(app: FastAPI) -> None:
    describe(app)
    app.add_exception_handler(Problem, _named)
    app.add_exception_handler(PrivacyProblem, _privacy)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _plain)
    app.add_exception_handler(OperationalError, _lost_database)
    app.add_exception_handler(PoolTimeout, _lost_database)
    app.add_exception_handler(BotoCoreError, _lost_store)
    app.add_exception_handler(ClientError, _lost_store)


def _answer(
    request: Request, status: int, slug: str, title: str, detail: str, /, **fields: Any
) -> JSONResponse:
    headers = fields.pop("headers", None)
    body = {
        "type": f"urn:sluice:problem:{slug}",
        "slug": slug,
        "title": title,
        "status": status,
        "detail": detail,
    }
    body |= {"request_id": getattr(request.state, "request_id", None)} | fields
    return JSONResponse(body, status_code=status, media_type="application/problem+json", headers=headers)


def answer(request: Request, problem: Problem) -> JSONResponse:
    return _answer(request, problem.status, problem.slug, problem.title, problem.detail, **problem.fields)


async def _named(request: Request, problem: Problem) -> JSONResponse:
    return answer(request, problem)


async def _privacy(request: Request, problem: PrivacyProblem) -> JSONResponse:
    detail = _QUOTED.sub(": give", problem.detail)
    return _answer(request, 422, problem.slug, problem.title, detail, **problem.fields)


async def _lost_database(request: Request, problem: Exception) -> JSONResponse:
    _log.error("database_lost", kind=type(problem).__name__)
    return _lost(request, NotReady("The database does not answer; try again shortly."))


async def _lost_store(request: Request, problem: Exception) -> JSONResponse:
    _log.error("store_lost", kind=type(problem).__name__)
    return _lost(request, NotReady("The store does not answer as it should; try again shortly."))


def _lost(request: Request, lost: NotReady) -> JSONResponse:
    return _answer(request, lost.status, lost.slug, lost.title, lost.detail, headers={"Retry-After": "2"})


async def _invalid(request: Request, problem: RequestValidationError) -> JSONResponse:
    found = problem.errors()
    if any(error["type"] == "json_invalid" for error in found):
        return _answer(request, 400, *_PLAIN[400])
    # Pydantic's errors carry `input`, which for a missing field is the whole body: only these three leave.
    errors = [{"loc": _place(e), "type": e["type"], "msg": _told(e)} for e in found]
    return _answer(
        request, 422, "invalid-request", "The request does not fit its description",
        "Correct the fields named in `errors`; /docs describes them.", errors=errors,
    )  # fmt: skip


def _place(error: dict[str, Any]) -> list[Any]:
    """Where it is wrong; the name of a field that should not be there is the caller's own text."""
    place = list(error["loc"])
    return place[:-1] if error["type"] == "extra_forbidden" else place


def _told(error: dict[str, Any]) -> str:
    if error["type"] == "union_tag_invalid":
        return f"Input should have as kind one of: {error['ctx']['expected_tags']}"
    if error["type"] == "uuid_parsing":
        return "Input should be a valid UUID"
    return str(error["msg"])


async def _plain(request: Request, problem: HTTPException) -> JSONResponse:
    fallback = ("http-error", "The request cannot be served", "See /docs.")
    slug, title, detail = _PLAIN.get(problem.status_code, fallback)
    told = _answer(request, problem.status_code, slug, title, detail)
    told.headers.update(problem.headers or {})
    if problem.status_code == 405:
        # A router names the methods of the one route it found; an address may have several.
        path = getattr(request.scope.get("route"), "path", None)
        methods = {method for method, each in request.app.state.permissions if each == path}
        told.headers["Allow"] = ", ".join(sorted(methods)) or told.headers["Allow"]
    return told


def unexpected(request: Request) -> JSONResponse:
    return _answer(
        request, 500, "internal-error", "Something went wrong on our side",
        "Try again; if it stays, tell the operator the request id.",
    )  # fmt: skip
