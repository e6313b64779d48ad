"""Who is asking, and may they? Every route names its roles; a route that names none does not start."""

import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from sqlalchemy.orm import Session
from starlette.routing import BaseRoute

from core.errors import Forbidden, NotAuthenticated
from core.ledger import Move
from core.people import PREFIX, Role, person_of
from service.oidc import SingleSignOn

# Open to everybody: they tell nothing of datasets, people or budgets.
OPEN = {"/healthz", "/readyz", "/metrics", "/openapi.json", "/docs", "/docs/oauth2-redirect"}

_bearer = HTTPBearer(auto_error=False, description="An API key, or a token of the site's single sign-on.")


@dataclass(frozen=True, kw_only=True)
class Who:
    """The person behind a request."""

    id: uuid.UUID
    name: str
    role: Role

    def move(self, reason: str) -> Move:
        return Move(actor=self.name, reason=reason)


def authenticated(
    request: Request, given: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]
) -> Who:
    if given is None:
        raise _stranger("Send the header Authorization: Bearer KEY.")
    state = request.app.state
    with Session(state.engine) as session:
        if given.credentials.startswith(PREFIX):
            found = person_of(session, given.credentials)
            if found is None:
                raise _stranger("The key is unknown, expired or revoked; ask an admin for another.")
            person, key = found
            limited = key.id
        else:
            sign_on: SingleSignOn | None = state.sign_on
            if sign_on is None:
                raise _stranger("The key is unknown, expired or revoked; ask an admin for another.")
            person = sign_on.person(session, given.credentials)
            limited = person.id
        who = Who(id=person.id, name=person.name, role=Role(person.role))
    state.rates.count(limited)
    return who


def _stranger(detail: str) -> NotAuthenticated:
    return NotAuthenticated(detail, headers={"WWW-Authenticate": "Bearer"})


class May:
    """Lets only these roles pass."""

    def __init__(self, *roles: Role) -> None:
        self.roles = frozenset(roles)

    def __call__(self, who: Annotated[Who, Depends(authenticated)]) -> Who:
        if who.role not in self.roles:
            raise Forbidden(f"This needs one of the roles: {', '.join(sorted(self.roles))}.")
        return who


Curator = Annotated[Who, Depends(May(Role.CURATOR))]
CuratorOrAdmin = Annotated[Who, Depends(May(Role.CURATOR, Role.ADMIN))]
Admin = Annotated[Who, Depends(May(Role.ADMIN))]
Anyone = Annotated[Who, Depends(May(*Role))]


def roles_of(route: APIRoute) -> frozenset[Role] | None:
    """The roles a route lets pass, or None if it asks nobody."""

    def find(dependant: Dependant) -> frozenset[Role] | None:
        if isinstance(dependant.call, May):
            return dependant.call.roles
        return next(filter(None, map(find, dependant.dependencies)), None)

    return find(route.dependant)


def permissions(routes: Iterable[BaseRoute]) -> dict[tuple[str, str], frozenset[Role]]:
    """(method, path) → roles. A route that is neither open nor names roles stops the service at its start."""
    table = {}
    for route in routes:
        if isinstance(route, APIRoute) and route.path not in OPEN:
            roles = roles_of(route)
            if roles is None:
                raise RuntimeError(f"{route.path} names no roles")
            table |= {(method, route.path): roles for method in route.methods}
    return table
