"""HTTP for datasets."""

import uuid
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.status import HTTP_201_CREATED, HTTP_202_ACCEPTED

from core.queue import wake_worker
from core.stores.uploads import PART_BYTES, SIGNED_SECONDS, UploadStore
from core.tables import Dataset, DatasetState
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
    UploadKey,
    UploadKeyView,
    UploadView,
)
from service.deps import Paging, SessionDep
from service.idempotency import IdempotencyKey, run_idempotent
from service.routing import Route, slow
from service.schemas import Page, Text
from sluice.envelope import WrappingKey

router = APIRouter(prefix="/v1/datasets", tags=["datasets"], route_class=Route)
well_known = APIRouter(prefix="/.well-known", tags=["datasets"])
Reason = Annotated[Text | None, Query(description="Required from an admin; shown to the owner.")]


@router.post("", status_code=HTTP_201_CREATED)
def register(
    body: NewDataset, principal: Curator, session: SessionDep, request: Request, key: IdempotencyKey = None
) -> DatasetView:
    """Declare a dataset: schema, nominal size, relation and budget. Nothing is measured or uploaded yet."""

    def action() -> DatasetView:
        row = actions.register(session, principal, body, request.app.state.settings)
        return DatasetView.of(row, principal)

    return run_idempotent(session, principal, key, body, DatasetView, action)


@router.get("")
def list_datasets(
    principal: CuratorOrAdmin,
    session: SessionDep,
    paging: Paging,
    state: Annotated[DatasetState | None, Query()] = None,
) -> Page[DatasetView]:
    """Your datasets and those of your team, newest first; admins see all. Deleted ones only with
    `state=deleted`."""
    query = actions.visible(principal, deleted=state == DatasetState.DELETED)
    if state is not None:
        query = query.where(Dataset.state == state)
    return paging.page(session, query, Dataset, partial(actions.view_all, session, principal))


@router.get("/{id}")
def show(id: uuid.UUID, principal: CuratorOrAdmin, session: SessionDep) -> DatasetView:
    """One dataset, deleted or not; `removed_at` is the time its bytes were removed from the store."""
    return actions.view(session, principal, actions.find(session, principal, id, deleted=True))


@router.delete("/{id}", status_code=HTTP_202_ACCEPTED)
@slow
def delete(
    id: uuid.UUID, principal: CuratorOrAdmin, session: SessionDep, request: Request, reason: Reason = None
) -> DatasetView:
    """Delete a dataset. The train worker removes its bytes, in every version, within seconds and sets
    `removed_at`. The budget account stays, and so does what was spent."""
    row = actions.delete(session, principal, id, _uploads(request), reason)
    return actions.view(session, principal, row)


@well_known.get("/sluice-upload-key.json")
async def upload_key(request: Request) -> UploadKeyView:
    """The public key that uploads are encrypted for; only the train worker has the private key."""
    key: WrappingKey = request.app.state.upload_key
    return UploadKeyView(id=key.id, algorithm="RSA-OAEP-256", public=key.pem)


@router.post("/{id}/upload")
@slow
def begin_upload(
    id: uuid.UUID, principal: Curator, session: SessionDep, request: Request, body: UploadKey | None = None
) -> UploadView:
    """Begin an upload under a key, or continue the one begun under it; lists the parts that have arrived.

    With another key than before the upload starts over, since a file is encrypted with one key.
    """
    key = request.app.state.upload_key
    row = actions.begin_upload(session, principal, id, _uploads(request), current=key, key=body)
    return _upload_view(row, request)


@router.get("/{id}/upload")
@slow
def show_upload(id: uuid.UUID, principal: Curator, session: SessionDep, request: Request) -> UploadView:
    return _upload_view(actions.require_uploading(actions.find_own(session, principal, id)), request)


@router.post("/{id}/upload/urls")
def sign_parts(
    id: uuid.UUID, body: PartNumbers, principal: Curator, session: SessionDep, request: Request
) -> SignedParts:
    """Signed URLs to PUT parts to. The bytes go directly to the store, not through this service."""
    row = actions.declare_size(session, principal, id, body, request.app.state.settings)
    sign = partial(_uploads(request).sign_part, row.object_key, row.upload_id or "", size=row.declared_bytes)
    parts = [SignedPart(number=number, url=sign(number)) for number in body.numbers]
    return SignedParts(parts=parts, expires_in=SIGNED_SECONDS)


@router.post("/{id}/seal", status_code=HTTP_202_ACCEPTED)
@slow
def seal(id: uuid.UUID, body: Seal, principal: Curator, session: SessionDep, request: Request) -> DatasetView:
    """Fix the uploaded content. A worker then checks the records: `ready`, `held` or `rejected`."""
    row = actions.seal(session, principal, id, body, _uploads(request), request.app.state.settings)
    wake_worker(request.app.state.queues["train"], "train.check", row.id)
    return DatasetView.of(row, principal)


@router.post("/{id}/review", status_code=HTTP_202_ACCEPTED)
def review(
    id: uuid.UUID, body: Decision, principal: Admin, session: SessionDep, request: Request
) -> DatasetView:
    """Decide about a held dataset: give it its own budget, charge it to another account, or reject it."""
    row = actions.decide(session, principal, id, body)
    wake_worker(request.app.state.queues["train"], "train.check", row.id)
    return actions.view(session, principal, row)


def _uploads(request: Request) -> UploadStore:
    uploads: UploadStore = request.app.state.uploads
    return uploads


def _upload_view(row: Dataset, request: Request) -> UploadView:
    arrived = _uploads(request).parts(row.object_key, row.upload_id or "")
    most = request.app.state.settings.upload_bytes_max
    return UploadView(part_bytes=PART_BYTES, most_bytes=most, arrived=[part.number for part in arrived])
