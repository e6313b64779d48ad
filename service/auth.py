"""Authentication and roles. Every route declares its roles; the service does not start otherwise."""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from anyio import to_thread
from fastapi import Depends, Request
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute, iter_route_contexts
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from sqlalchemy import ColumnElement, or_, true
from sqlalchemy.orm import Session
from starlette.routing import BaseRoute

from core.errors import Forbidden, NotAuthenticated, Problem
from core.ledger import Move
from core.people import PREFIX, Role, person_of, require_independent
from core.tables import Dataset
from service import audit
from service.limits import TooMany
from service.oidc import SingleSignOn
from service.overload import Ticket

# Open to everybody: they reveal nothing about datasets, people or budgets.
OPEN = {
    "/healthz", "/readyz", "/metrics", "/openapi.json", "/docs", "/docs/oauth2-redirect",
    "/.well-known/sluice-keys.json", "/.well-known/sluice-revocations.json",
    "/.well-known/sluice-upload-key.json",
    "/v1/invitations/redeem",  # authenticated by the invitation
}  # fmt: skip

_bearer = HTTPBearer(auto_error=False, description="An API key, or a token of the site's single sign-on.")


@dataclass(frozen=True, kw_only=True)
class Principal:
    """The authenticated person who sent a request."""

    id: uuid.UUID
    name: str
    role: Role
    team: uuid.UUID | None

    @property
    def is_admin(self) -> bool:
        return self.role is Role.ADMIN

    def works_with_dataset(self) -> ColumnElement[bool]:
        """Condition for the datasets a curator or admin may see; jobs and releases follow their dataset."""
        if self.is_admin:
            return true()
        own = Dataset.owner_id == self.id
        # SQLAlchemy would write `team_id = NULL` as `IS NULL` and match all datasets without a team.
        return own if self.team is None else or_(own, Dataset.team_id == self.team)

    def move(self, reason: str) -> Move:
        return Move(actor=self.name, reason=reason)

    def require_second_person(self, session: Session, first: uuid.UUID, refusal: Problem) -> None:
        """Raises unless this is another person than `first`, and independent of them."""
        if first == self.id:
            raise refusal
        require_independent(session, first, self.id)


async def authenticate(request: Request) -> Principal:
    """Identifies the sender. service.routing.Route calls it before the body is read."""
    bearer = await _bearer(request)
    if bearer is None:
        raise _unauthenticated("Send the header Authorization: Bearer KEY.")
    ticket: Ticket = request.state.ticket
    try:
        principal = await to_thread.run_sync(_admit, request, bearer.credentials, limiter=ticket.threads)
    except NotAuthenticated:
        ticket.refused()
        raise
    except TooMany:
        ticket.accepted()
        raise
    ticket.accepted()
    return principal


def _admit(request: Request, credentials: str) -> Principal:
    """Checks credentials and rate limit, and writes the audit log before anything else is done."""
    state = request.app.state
    try:
        principal, counted_as = identify(request, credentials)
    except NotAuthenticated:
        audit.count_refused_sign_in(request)
        raise
    actor = audit.actor_of(
        request, person=principal.id, name=principal.name, role=principal.role.value,
        key=counted_as if counted_as != principal.id else None,
    )  # fmt: skip
    request.state.actor = actor
    try:
        state.rates.count(counted_as)
    except TooMany:
        audit.count_rate_limited(request, actor)
        raise
    audit.record_request(request, actor)
    state.refusals.flush()
    return principal


async def current_principal(
    request: Request, _: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]
) -> Principal:
    principal: Principal = request.state.principal
    return principal


def credentials_of(request: Request) -> str:
    """The bearer credentials of an authenticated request."""
    return request.headers["Authorization"].partition(" ")[2].strip()


def identify(request: Request, credentials: str) -> tuple[Principal, uuid.UUID]:
    """The owner of valid credentials, and the id their requests are counted under: key or person."""
    state = request.app.state
    sign_on: SingleSignOn | None = state.sign_on
    with Session(state.engine) as session:
        if credentials.startswith(PREFIX) or sign_on is None:
            owner = person_of(session, credentials) if credentials.startswith(PREFIX) else None
            if owner is None:
                raise _unauthenticated(
                    "The key is unknown, expired or revoked; ask an admin for an invitation."
                )
            person, counted_as = owner[0], owner[1].id
        else:
            person = sign_on.person(session, credentials)
            counted_as = person.id
        principal = Principal(id=person.id, name=person.name, role=Role(person.role), team=person.team_id)
        return principal, counted_as


def _unauthenticated(detail: str) -> NotAuthenticated:
    return NotAuthenticated(detail, headers={"WWW-Authenticate": "Bearer"})


class RequireRole:
    """Dependency of a route that admits these roles only."""

    def __init__(self, *roles: Role) -> None:
        self.roles = frozenset(roles)

    async def __call__(self, principal: Annotated[Principal, Depends(current_principal)]) -> Principal:
        if principal.role not in self.roles:
            raise Forbidden(f"This needs one of the roles: {', '.join(sorted(self.roles))}.")
        return principal


Curator = Annotated[Principal, Depends(RequireRole(Role.CURATOR))]
CuratorOrAdmin = Annotated[Principal, Depends(RequireRole(Role.CURATOR, Role.ADMIN))]
Admin = Annotated[Principal, Depends(RequireRole(Role.ADMIN))]
Anyone = Annotated[Principal, Depends(RequireRole(*Role))]


def roles_of(dependant: Dependant) -> frozenset[Role] | None:
    """The roles a route admits, or None if it does not authenticate."""
    if isinstance(dependant.call, RequireRole):
        return dependant.call.roles
    return next(filter(None, map(roles_of, dependant.dependencies)), None)


def permissions(routes: Sequence[BaseRoute]) -> dict[tuple[str, str], frozenset[Role]]:
    """(method, path) → roles. Raises, so that the service does not start, for a route with neither."""
    table: dict[tuple[str, str], frozenset[Role]] = {}
    for route in iter_route_contexts(routes):
        if route.path in OPEN:
            continue
        # Mounts, sockets and plain routes have no dependencies, so nothing could authenticate there.
        roles = roles_of(route.dependant) if isinstance(route.original_route, APIRoute) else None
        if roles is None:
            raise RuntimeError(f"{route.path} names no roles")
        table |= {(method, route.path or ""): roles for method in route.methods or ()}
    return table
