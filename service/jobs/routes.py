"""HTTP for quotes and jobs."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import StreamingResponse
from sqlalchemy.orm import Session
from starlette.status import HTTP_202_ACCEPTED

from core.errors import NotAuthenticated, NotFound
from core.queue import wake_worker
from core.tables import Job, JobState
from service.auth import Curator, CuratorOrAdmin, credentials_of, identify
from service.deps import Paging, SessionDep, media_types
from service.idempotency import IdempotencyKey, run_idempotent, stored_reply
from service.jobs import actions
from service.jobs.schemas import JobView, NewJob, NewQuote, QuoteView
from service.overload import Slots
from service.routing import Route, slow
from service.schemas import Page

quotes = APIRouter(prefix="/v1/quotes", tags=["jobs"], route_class=Route)
jobs = APIRouter(prefix="/v1/jobs", tags=["jobs"], route_class=Route)

_POLL_SECONDS = 1.0
_EVENT = {
    "type": "object",
    "properties": {
        "event": {"const": "job"},
        "data": {"type": "string", "contentMediaType": "application/json", "description": "A JobView."},
    },
}
_DIAGNOSTICS = media_types("application/jsonl", "image/svg+xml")


@quotes.post("")
@slow
def quote(body: NewQuote, principal: CuratorOrAdmin, session: SessionDep, request: Request) -> QuoteView:
    """What a training would cost: noise, epsilon by each accountant, what would be left. Changes nothing."""
    return actions.quote(session, principal, body, request.app.state.settings)


@jobs.post("", status_code=HTTP_202_ACCEPTED)
@slow
def start_job(
    body: NewJob, principal: Curator, session: SessionDep, request: Request, key: IdempotencyKey = None
) -> JobView:
    """Charge the account and enqueue a training; `budget-exceeded` says what is left and would fit."""
    view = stored_reply(session, principal, key, body, JobView) if key else None
    if view is None:
        offer = actions.offer(session, principal, body)

        def make() -> JobView:
            return JobView.of(actions.start(session, principal, offer, request.app.state.settings))

        view = run_idempotent(session, principal, key, body, JobView, make)
    # Also for a stored reply: the message of the first request may have been lost.
    wake_worker(request.app.state.queues["train"], "train.run", view.id)
    return view


@jobs.get("")
def list_jobs(
    principal: CuratorOrAdmin,
    session: SessionDep,
    paging: Paging,
    state: Annotated[JobState | None, Query()] = None,
    dataset: Annotated[uuid.UUID | None, Query()] = None,
) -> Page[JobView]:
    """Jobs on your datasets and those of your team, newest first; an admin sees all."""
    query = actions.visible(principal)
    if state is not None:
        query = query.where(Job.state == state)
    if dataset is not None:
        query = query.where(Job.dataset_id == dataset)
    return paging.page(session, query, Job, lambda rows: [JobView.of(row) for row in rows])


@jobs.get("/{id}")
def show(id: uuid.UUID, principal: CuratorOrAdmin, session: SessionDep) -> JobView:
    return JobView.of(actions.find(session, principal, id))


@jobs.post("/{id}/cancel", status_code=HTTP_202_ACCEPTED)
def cancel(id: uuid.UUID, principal: CuratorOrAdmin, session: SessionDep) -> JobView:
    """Stop a job. Before its records are opened the charge is voided, later it stays. Safe to repeat."""
    return JobView.of(actions.cancel(session, principal, id))


@jobs.get("/{id}/diagnostics", response_class=Response, responses=_DIAGNOSTICS)
def diagnostics(
    id: uuid.UUID,
    principal: Curator,
    session: SessionDep,
    request: Request,
    format: Annotated[Literal["jsonl", "svg"], Query(description="Numbers, or a picture of them.")] = "jsonl",
) -> Response:
    """Losses and gradient norms of your job, if the site keeps them. They depend on records: for you only."""
    row = actions.diagnosis(session, principal, id, kept=request.app.state.settings.diagnostics)
    kind = "image/svg+xml" if format == "svg" else "application/jsonl"
    return Response(row.picture if format == "svg" else row.lines, media_type=kind)


@jobs.get(
    "/{id}/events",
    response_class=StreamingResponse,
    responses={200: {"content": {"text/event-stream": {"schema": _EVENT}}}},
)
def events(
    id: uuid.UUID, principal: CuratorOrAdmin, session: SessionDep, request: Request
) -> StreamingResponse:
    """The job as server-sent events, whenever it changes, until it ends."""
    actions.find(session, principal, id)  # answers 404 before the stream begins
    request.app.state.streams.require(principal.id)
    return StreamingResponse(_follow(request, principal.id, id), media_type="text/event-stream")


async def _follow(request: Request, person: uuid.UUID, id: uuid.UUID) -> AsyncIterator[str]:
    streams: Slots = request.app.state.streams
    streams.take(person)
    try:
        async for event in _events(request, id):
            yield event
    finally:
        streams.release(person)


async def _events(request: Request, id: uuid.UUID) -> AsyncIterator[str]:
    def look() -> JobView | None:
        try:  # a key revoked meanwhile ends the stream
            principal, _ = identify(request, credentials_of(request))
        except NotAuthenticated:
            return None
        with Session(request.app.state.engine) as session:
            try:
                return JobView.of(actions.find(session, principal, id))
            except NotFound:  # moved to another team meanwhile
                return None

    last = None
    while not await request.is_disconnected():
        view = await run_in_threadpool(look)
        if view is None:
            return
        shown = view.model_dump_json(exclude={"plan": True, "event": True, "progress": {"eta"}})
        if shown != last:
            yield f"event: job\ndata: {view.model_dump_json()}\n\n"
        else:
            yield ": still here\n\n"  # keeps proxies from closing an idle connection
        last = shown
        if view.state in actions.ENDED:
            return
        await asyncio.sleep(_POLL_SECONDS)
