"""Every error as application/problem+json (RFC 9457), with a name, a way out, and nothing echoed."""

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from core import log
from core.errors import Problem

_log = log.get("problems")
_PLAIN = {
    404: ("not-found", "There is nothing at this address", "See /docs for the addresses that exist."),
    405: ("method-not-allowed", "This address does not take that method", "See /docs for its methods."),
}


def install(app: FastAPI) -> None:
    app.add_exception_handler(Problem, _named)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _plain)
    app.add_exception_handler(Exception, _unexpected)


def _answer(request: Request, status: int, slug: str, title: str, detail: str, **fields: Any) -> JSONResponse:
    body = {
        "type": f"urn:sluice:problem:{slug}",
        "slug": slug,
        "title": title,
        "status": status,
        "detail": detail,
    }
    body |= {"request_id": getattr(request.state, "request_id", None)} | fields
    return JSONResponse(body, status_code=status, media_type="application/problem+json")


async def _named(request: Request, problem: Problem) -> JSONResponse:
    return _answer(request, problem.status, problem.slug, problem.title, problem.detail, **problem.fields)


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
