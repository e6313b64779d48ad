"""HTTP for teams, for admins."""

import uuid
from typing import Annotated

from fastapi import APIRouter
from pydantic import Field
from sqlalchemy import func, select, update
from sqlalchemy.exc import IntegrityError
from starlette.status import HTTP_201_CREATED

from core.errors import NotFound
from core.people import NameTaken
from core.tables import Dataset, Person, Team
from service.auth import Admin
from service.deps import Body, SessionDep, View
from service.people.routes import PersonView
from service.routing import Route

router = APIRouter(prefix="/v1/admin", tags=["people"], route_class=Route)


class NewTeam(Body):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,99}$", examples=["radiology"])]


class TeamView(View):
    id: uuid.UUID
    name: str
    people: int


class Membership(Body):
    team: uuid.UUID | None = Field(default=None, description="Null: the person shares with nobody.")
    datasets: bool = Field(
        default=False,
        strict=True,
        description="Their datasets that belong to no team go with them. Those of another team stay there.",
    )


@router.post("/teams", status_code=HTTP_201_CREATED)
def add(body: NewTeam, _: Admin, session: SessionDep) -> TeamView:
    team = Team(id=uuid.uuid4(), name=body.name)
    session.add(team)
    try:
        session.commit()
    except IntegrityError:
        session.rollback()
        raise NameTaken("Choose another name; another team has this one.") from None
    return _views(session, team.id)[0]


@router.get("/teams")
def list_teams(_: Admin, session: SessionDep) -> list[TeamView]:
    return _views(session)


@router.post("/people/{id}/team")
def move(id: uuid.UUID, body: Membership, _: Admin, session: SessionDep) -> PersonView:
    """Put a person into a team, or into none. What they registered in a team stays with it."""
    if body.team is not None and session.get(Team, body.team) is None:
        raise NotFound("There is no such team.")
    moved = session.scalars(
        update(Person).where(Person.id == id).values(team_id=body.team).returning(Person)
    ).one_or_none()
    if moved is None:
        raise NotFound("There is no such person.")
    if body.datasets and body.team is not None:
        alone = (Dataset.owner_id == id, Dataset.team_id.is_(None))
        session.execute(update(Dataset).where(*alone).values(team_id=body.team))
    session.commit()
    return PersonView.of(moved)


def _views(session: SessionDep, id: uuid.UUID | None = None) -> list[TeamView]:
    members = select(func.count()).where(Person.team_id == Team.id).scalar_subquery()
    query = select(Team, members).order_by(Team.name)
    if id is not None:
        query = query.where(Team.id == id)
    return [TeamView(id=team.id, name=team.name, people=people) for team, people in session.execute(query)]
