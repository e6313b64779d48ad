"""Every error as application/problem+json (RFC 9457), with a name, a way out, and nothing echoed."""

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from sqlalchemy.exc import OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from starlette.exceptions import HTTPException

from core import log
from core.errors import NotReady, Problem
from privacy.problems import Problem as PrivacyProblem

_log = log.get("problems")
_PLAIN = {
    400: ("bad-request", "The request cannot be read", "Send JSON as /docs describes it."),
    404: ("not-found", "There is nothing at this address", "See /docs for the addresses that exist."),
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


_SCHEMA = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/ProblemView"}}}
# What any route may answer; docs/api.md lists the slugs.
DOCUMENTED: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "model": ProblemView, "content": _SCHEMA}
    for status, text in {
        400: "The request cannot be read",
        401: "It is not known who is asking",
        403: "This is for another role or another person",
        404: "There is nothing like that here for you",
        409: "This cannot be done now, or the budget does not allow it",
        413: "The request is too large",
        422: "The request or the plan does not fit its description",
        429: "Too many requests; Retry-After says how long to wait",
        503: "A part that is needed does not answer, or the ledger is behind its witness",
    }.items()
}


def install(app: FastAPI) -> None:
    app.add_exception_handler(Problem, _named)
    app.add_exception_handler(PrivacyProblem, _privacy)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _plain)
    app.add_exception_handler(OperationalError, _lost_database)
    app.add_exception_handler(PoolTimeout, _lost_database)
    app.add_exception_handler(Exception, _unexpected)


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


async def _named(request: Request, problem: Problem) -> JSONResponse:
    return _answer(request, problem.status, problem.slug, problem.title, problem.detail, **problem.fields)


async def _privacy(request: Request, problem: PrivacyProblem) -> JSONResponse:
    return _answer(request, 422, problem.slug, problem.title, problem.detail, **problem.fields)


async def _lost_database(request: Request, problem: Exception) -> JSONResponse:
    _log.error("database_lost", kind=type(problem).__name__)
    lost = NotReady("The database does not answer; try again shortly.")
    return _answer(request, lost.status, lost.slug, lost.title, lost.detail, headers={"Retry-After": "2"})


async def _invalid(request: Request, problem: RequestValidationError) -> JSONResponse:
    # Pydantic's errors carry `input`, which for a missing field is the whole body: only these three leave.
    errors = [{"loc": e["loc"], "type": e["type"], "msg": e["msg"]} for e in problem.errors()]
    return _answer(
        request, 422, "invalid-request", "The request does not fit its description",
        "Correct the fields named in `errors`; /docs describes them.", errors=errors,
    )  # fmt: skip


async def _plain(request: Request, problem: HTTPException) -> JSONResponse:
    fallback = ("http-error", "The request cannot be served", "See /docs.")
    slug, title, detail = _PLAIN.get(problem.status_code, fallback)
    answer = _answer(request, problem.status_code, slug, title, detail)
    answer.headers.update(problem.headers or {})
    return answer


async def _unexpected(request: Request, problem: Exception) -> JSONResponse:
    _log.error("request_failed", kind=type(problem).__name__)
    return _answer(
        request, 500, "internal-error", "Something went wrong on our side",
        "Try again; if it stays, tell the operator the request id.",
    )  # fmt: skip
