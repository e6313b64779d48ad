"""HTTP for releases, and for the public documents needed to verify them."""

import base64
import hashlib
import uuid
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from sqlalchemy import Engine, select
from sqlalchemy.orm import Session
from starlette.status import HTTP_202_ACCEPTED, HTTP_204_NO_CONTENT, HTTP_304_NOT_MODIFIED

from core.errors import NotFound
from core.queue import wake_worker
from core.tables import Release, ReleaseState, Revocations, SigningKey
from service import audit
from service.auth import Anyone, Curator, CuratorOrAdmin, Principal
from service.deps import Paging, SessionDep, media_types
from service.idempotency import IdempotencyKey, run_idempotent
from service.releases import actions
from service.releases.schemas import (
    Approve,
    Downloads,
    KeysView,
    KeyView,
    NewReader,
    NewRelease,
    Paths,
    ReleaseView,
    ReviewView,
    Withdraw,
)
from service.routing import Route
from service.schemas import Page, SearchText

router = APIRouter(prefix="/v1/releases", tags=["releases"], route_class=Route)
well_known = APIRouter(prefix="/.well-known", tags=["releases"])


@router.post("", status_code=HTTP_202_ACCEPTED)
def draft(
    body: NewRelease, principal: Curator, session: SessionDep, request: Request, key: IdempotencyKey = None
) -> ReleaseView:
    """Request a bundle of samples and the synthesizer of a trained job of your team. Costs no budget."""

    def action() -> ReleaseView:
        reviewers = request.app.state.settings.reviewers
        return ReleaseView.of(actions.draft(session, principal, body, reviewers=reviewers), [])

    view = run_idempotent(session, principal, key, body, ReleaseView, action)
    _wake_publisher(request, view.id)
    return view


@router.get("")
def list_releases(
    principal: Anyone,
    session: SessionDep,
    paging: Paging,
    search: Annotated[SearchText | None, Query()] = None,
    state: Annotated[ReleaseState | None, Query()] = None,
    job: Annotated[uuid.UUID | None, Query()] = None,
) -> Page[ReleaseView]:
    """Releases published to you and releases of datasets you work with, newest first."""
    query = actions.visible(principal)
    if search:
        query = actions.search(query, search)
    if state is not None:
        query = query.where(Release.state == state)
    if job is not None:
        query = query.where(Release.job_id == job, actions.works_on(principal))
    return paging.page(session, query, Release, partial(actions.view_all, session, principal))


@router.get("/{id}")
def show(id: uuid.UUID, principal: Anyone, session: SessionDep) -> ReleaseView:
    return _view(session, principal, actions.find(session, principal, id))


@router.get("/{id}/preview", response_class=Response, responses=media_types("image/png"))
def preview(id: uuid.UUID, principal: Anyone, session: SessionDep) -> Response:
    """Some samples of each class, as an image."""
    return Response(actions.preview(session, principal, id), media_type="image/png")


@router.get("/{id}/review")
def review(id: uuid.UUID, principal: CuratorOrAdmin, session: SessionDep) -> ReviewView:
    """For reviewers: the job, its dataset, its source, and for a relay the jobs before it."""
    return actions.review(session, principal, id)


@router.post("/{id}/review/downloads")
def review_downloads(
    id: uuid.UUID, body: Paths, principal: CuratorOrAdmin, session: SessionDep, request: Request
) -> Downloads:
    """Signed URLs of files of the bundle under review, for its author and its reviewers."""
    signed = actions.review_downloads(session, principal, id, body.paths, request.app.state.downloads)
    return _record(request, session, body.paths, signed)


@router.post("/{id}/approve")
def approve(id: uuid.UUID, body: Approve, principal: CuratorOrAdmin, session: SessionDep) -> ReleaseView:
    """Approve the bundle with this digest, as another person than its author. A rebuild voids approvals."""
    return _view(
        session, principal, actions.approve(session, principal, id, digest=body.digest, note=body.note)
    )


@router.post("/{id}/rebuild", status_code=HTTP_202_ACCEPTED)
def rebuild(id: uuid.UUID, principal: Curator, session: SessionDep, request: Request) -> ReleaseView:
    """Build the bundle again; approvals of the old one no longer count."""
    return _wake_and_view(request, session, principal, actions.rebuild(session, principal, id))


@router.post("/{id}/discard")
def discard(id: uuid.UUID, principal: CuratorOrAdmin, session: SessionDep, request: Request) -> ReleaseView:
    """Discard a release that was never published."""
    # The publisher removes the copy for review.
    return _wake_and_view(request, session, principal, actions.discard(session, principal, id))


@router.post("/{id}/publish", status_code=HTTP_202_ACCEPTED)
def publish(id: uuid.UUID, principal: Curator, session: SessionDep, request: Request) -> ReleaseView:
    """Sign an approved bundle and make it available for download."""
    return _wake_and_view(request, session, principal, actions.publish(session, principal, id))


@router.post("/{id}/withdraw", status_code=HTTP_202_ACCEPTED)
def withdraw(
    id: uuid.UUID, body: Withdraw, principal: CuratorOrAdmin, session: SessionDep, request: Request
) -> ReleaseView:
    """Withdraw a release: downloads stop, the revocation list names it, its cost stays spent."""
    row = actions.withdraw(session, principal, id, reason=body.reason)
    return _wake_and_view(request, session, principal, row)


@router.post("/{id}/readers")
def add_reader(id: uuid.UUID, body: NewReader, principal: Curator, session: SessionDep) -> ReleaseView:
    """Let a person see and download a release that is not for everyone. Safe to repeat."""
    return _view(session, principal, actions.add_reader(session, principal, id, body.person))


@router.delete("/{id}/readers/{person}", status_code=HTTP_204_NO_CONTENT)
def remove_reader(id: uuid.UUID, person: uuid.UUID, principal: CuratorOrAdmin, session: SessionDep) -> None:
    actions.remove_reader(session, principal, id, person)


@router.post("/{id}/downloads")
def downloads(
    id: uuid.UUID, body: Paths, principal: Anyone, session: SessionDep, request: Request
) -> Downloads:
    """Signed URLs of these files, valid for 15 minutes. Request new ones when they have expired."""
    signed = actions.downloads(session, principal, id, body.paths, request.app.state.downloads)
    return _record(request, session, body.paths, signed)


@well_known.get("/sluice-keys.json", response_model=KeysView)
async def keys(request: Request) -> Response:
    """All keys that releases were ever signed with, newest first."""
    return _cacheable(request, await request.app.state.signing_keys.get())


def signing_keys(engine: Engine) -> bytes:
    with Session(engine) as session:
        rows = session.scalars(select(SigningKey).order_by(SigningKey.since.desc()))
        public = [
            KeyView(id=row.id, public=base64.b64encode(row.public).decode(), since=row.since) for row in rows
        ]
    return KeysView(keys=public).model_dump_json().encode()


@well_known.get(
    "/sluice-revocations.json", response_class=Response, responses=media_types("application/json")
)
async def revocations(request: Request) -> Response:
    """The signed list of all withdrawn releases."""
    envelope = await request.app.state.revocations.get()
    if envelope is None:
        raise NotFound("No list was signed yet; the publisher signs one at its start.")
    return _cacheable(request, envelope)


def newest_revocations(engine: Engine) -> bytes | None:
    newest = select(Revocations.envelope).order_by(Revocations.number.desc()).limit(1)
    with Session(engine) as session:
        envelope = session.scalars(newest).one_or_none()
    return None if envelope is None else envelope.encode()


def _cacheable(request: Request, content: bytes) -> Response:
    headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "Cache-Control": "public, max-age=5"}
    if headers["ETag"] in request.headers.get("If-None-Match", ""):
        return Response(status_code=HTTP_304_NOT_MODIFIED, headers=headers)
    return Response(content, media_type="application/json", headers=headers)


def _view(session: SessionDep, principal: Principal, row: Release) -> ReleaseView:
    return actions.view_all(session, principal, [row])[0]


def _wake_and_view(request: Request, session: SessionDep, principal: Principal, row: Release) -> ReleaseView:
    _wake_publisher(request, row.id)
    return _view(session, principal, row)


def _record(request: Request, session: SessionDep, paths: list[str], signed: Downloads) -> Downloads:
    """Writes the file names to the audit log before the URLs are sent."""
    session.close()
    audit.record_download(request, paths)
    return signed


def _wake_publisher(request: Request, id: uuid.UUID) -> None:
    wake_worker(request.app.state.queues["publish"], "publish.run", id)
