"""HTTP for datasets."""

import uuid
from functools import partial
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from starlette.status import HTTP_201_CREATED, HTTP_202_ACCEPTED

from core.queue import wake_worker
from core.stores.uploads import PART_BYTES, SIGNED_SECONDS, UploadStore
from core.tables import Dataset
from service.auth import Admin, Curator, CuratorOrAdmin
from service.datasets import actions
from service.datasets.schemas import (
    DatasetView,
    Decision,
    NewDataset,
    PartNumbers,
    Seal,
    SignedPart,
    SignedParts,
    Text,
    UploadKey,
    UploadKeyView,
    UploadView,
)
from service.deps import Cursor, Limit, Page, SessionDep, page
from service.idempotency import IdempotencyKey, run_idempotent
from service.routing import Route, slow
from sluice.envelope import WrappingKey

router = APIRouter(prefix="/v1/datasets", tags=["datasets"], route_class=Route)
well_known = APIRouter(prefix="/.well-known", tags=["datasets"])
State = Literal["draft", "uploading", "checking", "held", "ready", "rejected", "deleted"]
Reason = Annotated[Text | None, Query(description="Why; an admin has to say it, and the owner is shown it.")]


@router.post("", status_code=HTTP_201_CREATED)
def register(
    body: NewDataset, principal: Curator, session: SessionDep, request: Request, key: IdempotencyKey = None
) -> DatasetView:
    """Declare a dataset: schema, nominal size, relation and budget. Nothing is measured or uploaded yet."""

    def make() -> DatasetView:
        return DatasetView.of(
            actions.register(session, principal, body, request.app.state.settings), principal
        )

    return run_idempotent(session, principal, key, body, DatasetView, make)


@router.get("")
def list_datasets(
    principal: CuratorOrAdmin,
    session: SessionDep,
    state: Annotated[State | None, Query()] = None,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> Page[DatasetView]:
    """Your datasets and those of your team, newest first; an admin sees all. Deleted ones only with
    `state=deleted`."""
    query = actions.visible(principal, deleted=state == "deleted")
    if state is not None:
        query = query.where(Dataset.state == state)
    rows, following = page(session, query, Dataset.created_at, Dataset.id, limit=limit, cursor=cursor)
    return Page(items=actions.viewed(session, principal, rows), next=following)


@router.get("/{id}")
def show(id: uuid.UUID, principal: CuratorOrAdmin, session: SessionDep) -> DatasetView:
    """One dataset, also if it is deleted: `removed_at` says since when the store has no byte of it."""
    return actions.view(session, principal, actions.find(session, principal, id, deleted=True))


@router.delete("/{id}", status_code=HTTP_202_ACCEPTED)
@slow
def delete(
    id: uuid.UUID, principal: CuratorOrAdmin, session: SessionDep, request: Request, reason: Reason = None
) -> DatasetView:
    """Delete a dataset. The private side removes its bytes within seconds, with every version of them; its
    `removed_at` says when that was done. Its budget account stays: what was spent stays spent."""
    return actions.view(session, principal, actions.delete(session, principal, id, _uploads(request), reason))


@well_known.get("/sluice-upload-key.json")
async def upload_key(request: Request) -> UploadKeyView:
    """What uploads are encrypted for: the private side has the other half of it, and this service has not."""
    key: WrappingKey = request.app.state.upload_key
    return UploadKeyView(id=key.id, algorithm="RSA-OAEP-256", public=key.pem)


@router.post("/{id}/upload")
@slow
def begin_upload(
    id: uuid.UUID, principal: Curator, session: SessionDep, request: Request, body: UploadKey | None = None
) -> UploadView:
    """Begin an upload under a key, or find the one begun under it; tells which parts have arrived.

    With another key than before the upload starts over: parts under two keys do not make one file.
    """
    key = request.app.state.upload_key
    return _upload(actions.begin_upload(session, principal, id, _uploads(request), key, body), request)


@router.get("/{id}/upload")
@slow
def show_upload(id: uuid.UUID, principal: Curator, session: SessionDep, request: Request) -> UploadView:
    return _upload(actions.in_upload(actions.find_own(session, principal, id)), request)


@router.post("/{id}/upload/urls")
def sign_parts(
    id: uuid.UUID, body: PartNumbers, principal: Curator, session: SessionDep, request: Request
) -> SignedParts:
    """Signed addresses to PUT parts to. The bytes go straight to the store and never through this service."""
    row = actions.declare_size(session, principal, id, body, request.app.state.settings)
    sign = partial(_uploads(request).sign_part, row.object_key, row.upload_id or "", size=row.declared_bytes)
    signed = [SignedPart(number=n, url=sign(n)) for n in body.numbers]
    return SignedParts(parts=signed, expires_in=SIGNED_SECONDS)


@router.post("/{id}/seal", status_code=HTTP_202_ACCEPTED)
@slow
def seal(id: uuid.UUID, body: Seal, principal: Curator, session: SessionDep, request: Request) -> DatasetView:
    """Fix what was uploaded. A worker reads the records: `ready`, `held` for review, or `rejected`."""
    row = actions.seal(session, principal, id, body, _uploads(request), request.app.state.settings)
    wake_worker(request.app.state.queues["train"], "train.check", row.id)
    return DatasetView.of(row, principal)


@router.post("/{id}/review", status_code=HTTP_202_ACCEPTED)
def review(
    id: uuid.UUID, body: Decision, principal: Admin, session: SessionDep, request: Request
) -> DatasetView:
    """Decide about a held dataset: its own budget, that of another account, or none at all."""
    row = actions.decide(session, principal, id, body)
    wake_worker(request.app.state.queues["train"], "train.check", row.id)
    return actions.view(session, principal, row)


def _uploads(request: Request) -> UploadStore:
    uploads: UploadStore = request.app.state.uploads
    return uploads


def _upload(row: Dataset, request: Request) -> UploadView:
    arrived = _uploads(request).parts(row.object_key, row.upload_id or "")
    most = request.app.state.settings.upload_bytes_max
    return UploadView(part_bytes=PART_BYTES, most_bytes=most, arrived=[part.number for part in arrived])
