"""HTTP for budgets: the admin's ledger, proposals for larger budgets, the witness."""

import re
import uuid
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from fastapi.responses import StreamingResponse
from pydantic import AwareDatetime, BeforeValidator
from sqlalchemy import select
from starlette.status import HTTP_201_CREATED

from core.ledger import as_row
from core.tables import Account, Entry, Grant, Witness
from service.auth import Admin, CuratorOrAdmin
from service.budget import actions
from service.budget.schemas import (
    AccountView,
    Acknowledgement,
    EntryView,
    GrantView,
    LedgerView,
    NewGrant,
    Recomputed,
    WitnessView,
)
from service.datasets.actions import find as find_dataset
from service.datasets.actions import ready
from service.deps import Cursor, Limit, Page, SessionDep, page
from service.routing import Route, slow
from sluice.privacy.accountant import Accountant

router = APIRouter(tags=["budget"], route_class=Route)
Kind = Literal["grant", "reserve", "settle", "void"]


def _dated(value: Any) -> Any:
    if isinstance(value, str) and not re.match(r"\d{4}-\d\d-\d\d", value):
        raise ValueError("write a date and time as in 2026-11-16T09:30:00Z")  # seconds since 1970 are neither
    return value


Moment = Annotated[AwareDatetime, BeforeValidator(_dated)]


@router.get("/v1/admin/ledger")
@slow
def list_accounts(
    principal: Admin,
    session: SessionDep,
    pld: Annotated[bool, Query(description="Also read by PLD, which takes seconds the first time.")] = False,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> Page[AccountView]:
    """Every account: granted, held, settled, left, spent by each accountant, last move."""
    rows, following = page(
        session, actions.visible(principal), Account.created_at, Account.id, limit=limit, cursor=cursor
    )
    return Page(items=[actions.view(session, row, pld=pld) for row in rows], next=following)


@router.get(
    "/v1/admin/ledger/{account}",
    response_model=LedgerView,
    responses={200: {"content": {"text/csv": {"schema": {"type": "string"}}}}},
)
def show_account(
    account: uuid.UUID,
    principal: Admin,
    session: SessionDep,
    kind: Annotated[Kind | None, Query()] = None,
    actor: Annotated[str | None, Query(max_length=200, pattern=r"^[^\x00-\x1f]*$")] = None,
    since: Annotated[Moment | None, Query()] = None,
    after: Annotated[int, Query(ge=0, le=2**62, description="`next` of the page before.")] = 0,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 100,
    format: Annotated[Literal["json", "csv"], Query(description="csv: all rows, as a file.")] = "json",
) -> LedgerView | StreamingResponse:
    """All rows of an account, whether its chain holds, and its balance."""
    found = actions.find(session, principal, account)
    if format == "csv":
        name = f'attachment; filename="ledger-{account}.csv"'
        lines = list(actions.exported(session, found))
        return StreamingResponse(iter(lines), media_type="text/csv", headers={"Content-Disposition": name})
    query = select(Entry).where(Entry.account_id == account, Entry.number > after).order_by(Entry.number)
    if kind is not None:
        query = query.where(Entry.kind == kind)
    if actor is not None:
        query = query.where(Entry.actor == actor)
    if since is not None:
        query = query.where(Entry.at >= since)
    entries = session.scalars(query.limit(limit + 1)).all()
    shown = [EntryView.model_validate(as_row(entry)) for entry in entries[:limit]]
    following = shown[-1].number if len(entries) > limit else None
    return LedgerView(
        account=actions.view(session, found, pld=True), chain=actions.chain(session, found), entries=shown,
        next=following,
    )  # fmt: skip


@router.get("/v1/admin/ledger/{account}/recompute")
@slow
def recompute(
    account: uuid.UUID, principal: Admin, session: SessionDep, accountant: Annotated[Accountant, Query()]
) -> Recomputed:
    """Read all history again with an accountant and compare with what was written then."""
    return actions.recompute(session, actions.find(session, principal, account), accountant)


@router.get("/v1/admin/ledger/{account}/grants")
def list_grants(account: uuid.UUID, principal: CuratorOrAdmin, session: SessionDep) -> list[GrantView]:
    actions.find(session, principal, account)
    query = select(Grant).where(Grant.account_id == account).order_by(Grant.proposed_at)
    return [GrantView.of(row) for row in session.scalars(query)]


@router.post("/v1/admin/ledger/{account}/grants", status_code=HTTP_201_CREATED)
def propose_grant(
    account: uuid.UUID, body: NewGrant, principal: CuratorOrAdmin, session: SessionDep
) -> GrantView:
    """Propose a larger budget; it is in force once another person confirms it."""
    return GrantView.of(actions.propose(session, principal, account, body))


@router.post("/v1/admin/ledger/{account}/grants/{grant}/confirm")
def confirm_grant(
    account: uuid.UUID, grant: uuid.UUID, principal: CuratorOrAdmin, session: SessionDep
) -> GrantView:
    """Confirm what another person proposed."""
    return GrantView.of(actions.confirm(session, principal, account, grant))


@router.post("/v1/admin/ledger/{account}/grants/{grant}/withdraw")
def withdraw_grant(
    account: uuid.UUID, grant: uuid.UUID, principal: CuratorOrAdmin, session: SessionDep
) -> GrantView:
    return GrantView.of(actions.withdraw(session, principal, account, grant))


@router.get("/v1/datasets/{id}/budget")
def dataset_budget(id: uuid.UUID, principal: CuratorOrAdmin, session: SessionDep) -> AccountView:
    """The budget a dataset draws on, with both readings."""
    account = session.get_one(Account, ready(find_dataset(session, principal, id)).account_id)
    return actions.view(session, account, pld=True)


@router.get("/v1/admin/witness")
def show_witness(_: Admin, session: SessionDep) -> WitnessView:
    """When the ledger was last compared with its witness, and whether it is behind it."""
    return _witness(session.scalars(select(Witness)).one())


@router.post("/v1/admin/witness/acknowledge")
def acknowledge(body: Acknowledgement, principal: Admin, session: SessionDep) -> WitnessView:
    """After restoring a backup: accept that what the witness knows was spent counts as spent."""
    return _witness(actions.acknowledge(session, principal, body))


def _witness(row: Witness) -> WitnessView:
    return WitnessView(
        checked_at=row.checked_at, generation=row.generation, behind=row.behind, acknowledged=row.acknowledged
    )
