"""HTTP for teams, for admins."""

import uuid
from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import Field
from sqlalchemy import func, select, update
from sqlalchemy.exc import IntegrityError
from starlette.status import HTTP_201_CREATED

from core.errors import NotFound
from core.people import NameTaken, require_independent
from core.tables import Dataset, Person, Team
from service import quotas
from service.auth import Admin
from service.datasets.schemas import Whole
from service.deps import Body, SessionDep, View
from service.people.routes import PersonView
from service.routing import Route

router = APIRouter(prefix="/v1/admin", tags=["people"], route_class=Route)


class NewTeam(Body):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,99}$", examples=["radiology"])]


_Count = Annotated[Whole, Field(ge=0, le=2**53)]


class NewQuotas(Body):
    """Null, or left out: the default of the site."""

    bytes: _Count | None = Field(
        default=None, description="Of its datasets, until the store has none of them.", examples=[10**12]
    )
    jobs: _Count | None = Field(default=None, description="That wait or run at once.", examples=[4])
    job_seconds: Annotated[Whole, Field(ge=1, le=2**53)] | None = Field(
        default=None, description="That one job may run. Counts for jobs that are made from now on."
    )


class QuotasView(View):
    """In force; null: no limit."""

    bytes: int | None
    jobs: int | None
    job_seconds: int | None


class TeamView(View):
    id: uuid.UUID
    name: str
    people: int
    bytes: int = Field(description="Of its datasets, until the store has none of them.")
    jobs: int = Field(description="Of its jobs, those that wait or run.")
    quotas: QuotasView


class Membership(Body):
    team: uuid.UUID | None = Field(default=None, description="Null: the person shares with nobody.")
    datasets: bool = Field(
        default=False,
        strict=True,
        description="Their datasets that belong to no team go with them. Those of another team stay there.",
    )


@router.post("/teams", status_code=HTTP_201_CREATED)
def add(body: NewTeam, _: Admin, session: SessionDep, request: Request) -> TeamView:
    team = Team(id=uuid.uuid4(), name=body.name)
    session.add(team)
    try:
        session.commit()
    except IntegrityError:
        session.rollback()
        raise NameTaken("Choose another name; another team has this one.") from None
    return _view(session, request, team)


@router.get("/teams")
def list_teams(_: Admin, session: SessionDep, request: Request) -> list[TeamView]:
    return [_view(session, request, team) for team in session.scalars(select(Team).order_by(Team.name))]


@router.post("/teams/{id}/quotas")
def set_quotas(id: uuid.UUID, body: NewQuotas, _: Admin, session: SessionDep, request: Request) -> TeamView:
    """What a team may use at once. What it holds already stays, however small the quota."""
    values = {f"quota_{name}": value for name, value in body.model_dump().items()}
    team = session.scalars(update(Team).where(Team.id == id).values(values).returning(Team)).one_or_none()
    if team is None:
        raise NotFound("There is no such team.")
    session.commit()
    return _view(session, request, team)


@router.post("/people/{id}/team")
def move(id: uuid.UUID, body: Membership, principal: Admin, session: SessionDep) -> PersonView:
    """Put a person into a team, or into none. What they registered in a team stays with it.

    An admin who invited the person lately leaves that to another one: they could have the person's key.
    """
    if body.team is not None and session.get(Team, body.team) is None:
        raise NotFound("There is no such team.")
    moved = session.scalars(
        update(Person).where(Person.id == id).values(team_id=body.team).returning(Person)
    ).one_or_none()
    if moved is None:
        raise NotFound("There is no such person.")
    if body.team is not None:
        require_independent(session, id, principal.id)
    if body.datasets and body.team is not None:
        alone = (Dataset.owner_id == id, Dataset.team_id.is_(None))
        session.execute(update(Dataset).where(*alone).values(team_id=body.team))
    session.commit()
    return PersonView.of(moved)


def _view(session: SessionDep, request: Request, team: Team) -> TeamView:
    of_team = Dataset.team_id == team.id
    return TeamView(
        id=team.id, name=team.name,
        people=session.scalars(select(func.count()).where(Person.team_id == team.id)).one(),
        bytes=quotas.used_bytes(session, of_team), jobs=quotas.used_jobs(session, of_team),
        quotas=QuotasView(**asdict(quotas.Quotas.of(team, request.app.state.settings))),
    )  # fmt: skip
