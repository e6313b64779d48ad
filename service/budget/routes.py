"""HTTP for budgets: the ledger, proposals to raise a budget, the witness."""

import uuid
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from fastapi.responses import StreamingResponse
from sqlalchemy import select
from starlette.status import HTTP_201_CREATED

from core.ledger import as_row
from core.tables import Account, Entry, Grant, Witness
from service.auth import Admin, CuratorOrAdmin
from service.budget import actions, schemas
from service.datasets.actions import find as find_dataset
from service.datasets.actions import ready
from service.deps import Paging, SessionDep, media_types
from service.routing import Route, slow
from service.schemas import Moment, Page, SearchText
from sluice.privacy.accountant import Accountant

router = APIRouter(tags=["budget"], route_class=Route)
Kind = Literal["grant", "reserve", "settle", "void"]


@router.get("/v1/admin/ledger")
@slow
def list_accounts(
    principal: Admin,
    session: SessionDep,
    paging: Paging,
    pld: Annotated[bool, Query(description="Also compute PLD, which takes seconds the first time.")] = False,
) -> Page[schemas.AccountView]:
    """Every account: granted, held, settled, left, spent by each accountant, last entry."""
    query = actions.visible(principal)
    return paging.page(
        session, query, Account, lambda rows: [actions.view(session, row, pld=pld) for row in rows]
    )


@router.get(
    "/v1/admin/ledger/{account}",
    response_model=schemas.LedgerView,
    responses=media_types("text/csv"),
)
def show_account(
    account: uuid.UUID,
    principal: Admin,
    session: SessionDep,
    kind: Annotated[Kind | None, Query()] = None,
    actor: Annotated[SearchText | None, Query()] = None,
    since: Annotated[Moment | None, Query()] = None,
    after: Annotated[int, Query(ge=0, le=2**62, description="`next` of the previous page.")] = 0,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 100,
    format: Annotated[Literal["json", "csv"], Query(description="csv: all rows as a file.")] = "json",
) -> schemas.LedgerView | StreamingResponse:
    """The balance of an account, its rows, and whether its hash chain is consistent."""
    row = actions.find(session, principal, account)
    if format == "csv":
        name = f'attachment; filename="ledger-{account}.csv"'
        lines = list(actions.export_csv(session, row))
        return StreamingResponse(iter(lines), media_type="text/csv", headers={"Content-Disposition": name})
    query = select(Entry).where(Entry.account_id == account, Entry.number > after).order_by(Entry.number)
    if kind is not None:
        query = query.where(Entry.kind == kind)
    if actor is not None:
        query = query.where(Entry.actor == actor)
    if since is not None:
        query = query.where(Entry.at >= since)
    entries = session.scalars(query.limit(limit + 1)).all()
    shown = [schemas.EntryView.model_validate(as_row(entry)) for entry in entries[:limit]]
    return schemas.LedgerView(
        account=actions.view(session, row, pld=True), chain=actions.chain(session, row), entries=shown,
        next=shown[-1].number if len(entries) > limit else None,
    )  # fmt: skip


@router.get("/v1/admin/ledger/{account}/recompute")
@slow
def recompute(
    account: uuid.UUID, principal: Admin, session: SessionDep, accountant: Annotated[Accountant, Query()]
) -> schemas.Recomputed:
    """Compute the epsilon of all entries again with an accountant and compare it with the stored values."""
    return actions.recompute(session, actions.find(session, principal, account), accountant)


@router.get("/v1/admin/ledger/{account}/grants")
def list_grants(
    account: uuid.UUID, principal: CuratorOrAdmin, session: SessionDep
) -> list[schemas.GrantView]:
    actions.find(session, principal, account)
    query = select(Grant).where(Grant.account_id == account).order_by(Grant.proposed_at)
    return [schemas.GrantView.from_row(row) for row in session.scalars(query)]


@router.post("/v1/admin/ledger/{account}/grants", status_code=HTTP_201_CREATED)
def propose_grant(
    account: uuid.UUID, body: schemas.NewGrant, principal: CuratorOrAdmin, session: SessionDep
) -> schemas.GrantView:
    """Propose a larger budget, which another person has to confirm."""
    return schemas.GrantView.from_row(actions.propose(session, principal, account, body))


@router.post("/v1/admin/ledger/{account}/grants/{grant}/confirm")
def confirm_grant(
    account: uuid.UUID, grant: uuid.UUID, principal: CuratorOrAdmin, session: SessionDep
) -> schemas.GrantView:
    """Confirm another person's proposal."""
    return schemas.GrantView.from_row(actions.confirm(session, principal, account, grant))


@router.post("/v1/admin/ledger/{account}/grants/{grant}/withdraw")
def withdraw_grant(
    account: uuid.UUID, grant: uuid.UUID, principal: CuratorOrAdmin, session: SessionDep
) -> schemas.GrantView:
    return schemas.GrantView.from_row(actions.withdraw(session, principal, account, grant))


@router.get("/v1/datasets/{id}/budget")
def dataset_budget(id: uuid.UUID, principal: CuratorOrAdmin, session: SessionDep) -> schemas.AccountView:
    """The account a dataset is charged to, with epsilon by both accountants."""
    account = session.get_one(Account, ready(find_dataset(session, principal, id)).account_id)
    return actions.view(session, account, pld=True)


@router.get("/v1/admin/witness")
def show_witness(_: Admin, session: SessionDep) -> schemas.WitnessView:
    """When the ledger was last compared with its witness, and whether it lacks entries."""
    return schemas.WitnessView.from_row(session.scalars(select(Witness)).one())


@router.post("/v1/admin/witness/acknowledge")
def acknowledge(body: schemas.Acknowledgement, principal: Admin, session: SessionDep) -> schemas.WitnessView:
    """After restoring a backup: charge the spending that the witness recorded and the database lacks."""
    return schemas.WitnessView.from_row(actions.acknowledge(session, principal, body))
