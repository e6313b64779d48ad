"""HTTP for teams, for admins."""

import uuid
from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import Field
from sqlalchemy import func, select, update
from starlette.status import HTTP_201_CREATED

from core.people import NAME, NameTaken, require_independent
from core.tables import Dataset, Person, Team
from service import quotas
from service.auth import Admin
from service.deps import SessionDep, commit_new, find_row
from service.people.schemas import PersonView
from service.routing import Route
from service.schemas import Body, View, Whole

router = APIRouter(prefix="/v1/admin", tags=["people"], route_class=Route)
_Count = Annotated[Whole, Field(ge=0, le=2**53)]
_BYTES = "Size of its datasets, including deleted ones whose bytes are still in the store."


class NewTeam(Body):
    name: Annotated[str, Field(pattern=NAME, examples=["radiology"])]


class NewQuotas(Body):
    """Null or left out: the site's default applies."""

    bytes: _Count | None = Field(default=None, description=_BYTES, examples=[10**12])
    jobs: _Count | None = Field(
        default=None, description="Jobs queued or running at the same time.", examples=[4]
    )
    job_seconds: Annotated[Whole, Field(ge=1, le=2**53)] | None = Field(
        default=None, description="Maximum run time of one job. Applies to jobs created from now on."
    )


class QuotasView(View):
    """Quotas in force; null: no limit."""

    bytes: int | None
    jobs: int | None
    job_seconds: int | None


class TeamView(View):
    id: uuid.UUID
    name: str
    people: int
    bytes: int = Field(description=_BYTES)
    jobs: int = Field(description="Its jobs that are queued or running.")
    quotas: QuotasView


class Membership(Body):
    team: uuid.UUID | None = Field(default=None, description="Null: the person is in no team.")
    datasets: bool = Field(
        default=False,
        strict=True,
        description="Move the person's datasets that belong to no team. Datasets of another team stay there.",
    )


@router.post("/teams", status_code=HTTP_201_CREATED)
def add(body: NewTeam, _: Admin, session: SessionDep, request: Request) -> TeamView:
    team = Team(id=uuid.uuid4(), name=body.name)
    commit_new(session, team, NameTaken("Another team has this name; choose another one."))
    return _view(session, request, team)


@router.get("/teams")
def list_teams(_: Admin, session: SessionDep, request: Request) -> list[TeamView]:
    return [_view(session, request, team) for team in session.scalars(select(Team).order_by(Team.name))]


@router.post("/teams/{id}/quotas")
def set_quotas(id: uuid.UUID, body: NewQuotas, _: Admin, session: SessionDep, request: Request) -> TeamView:
    """Set what a team may use at the same time. What it uses already stays, even above the quota."""
    values = {f"quota_{name}": value for name, value in body.model_dump().items()}
    query = update(Team).where(Team.id == id).values(values).returning(Team)
    team: Team = find_row(session, query, "team")
    session.commit()
    return _view(session, request, team)


@router.post("/people/{id}/team")
def move(id: uuid.UUID, body: Membership, principal: Admin, session: SessionDep) -> PersonView:
    """Put a person into a team, or into none. Datasets they registered in a team stay with that team.

    An admin who invited the person recently cannot do this, since they could hold the person's key.
    """
    if body.team is not None:
        find_row(session, select(Team).where(Team.id == body.team), "team")
    query = update(Person).where(Person.id == id).values(team_id=body.team).returning(Person)
    person: Person = find_row(session, query, "person")
    if body.team is not None:
        require_independent(session, id, principal.id)
        if body.datasets:
            without_team = (Dataset.owner_id == id, Dataset.team_id.is_(None))
            session.execute(update(Dataset).where(*without_team).values(team_id=body.team))
    session.commit()
    return PersonView.of(person)


def _view(session: SessionDep, request: Request, team: Team) -> TeamView:
    of_team = Dataset.team_id == team.id
    return TeamView(
        id=team.id, name=team.name,
        people=session.scalars(select(func.count()).where(Person.team_id == team.id)).one(),
        bytes=quotas.used_bytes(session, of_team), jobs=quotas.used_jobs(session, of_team),
        quotas=QuotasView(**asdict(quotas.Quotas.of(team, request.app.state.settings))),
    )  # fmt: skip
