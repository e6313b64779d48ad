"""Who is asking, and may they? Every route names its roles; a route that names none does not start."""

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

from core.errors import Forbidden, NotAuthenticated
from core.ledger import Move
from core.people import PREFIX, Role, person_of
from core.tables import Dataset
from service import audit
from service.limits import TooMany
from service.oidc import SingleSignOn
from service.overload import Ticket

# Open to everybody: they tell nothing of datasets, people or budgets.
OPEN = {
    "/healthz", "/readyz", "/metrics", "/openapi.json", "/docs", "/docs/oauth2-redirect",
    "/.well-known/sluice-keys.json", "/.well-known/sluice-revocations.json",
    "/.well-known/sluice-upload-key.json",
    "/v1/invitations/redeem",  # the invitation itself says who may
}  # fmt: skip

_bearer = HTTPBearer(auto_error=False, description="An API key, or a token of the site's single sign-on.")


@dataclass(frozen=True, kw_only=True)
class Principal:
    """The person behind a request."""

    id: uuid.UUID
    name: str
    role: Role
    team: uuid.UUID | None

    @property
    def is_admin(self) -> bool:
        return self.role is Role.ADMIN

    def works_with_dataset(self) -> ColumnElement[bool]:
        """Which datasets a curator or admin sees; their jobs and releases follow them."""
        if self.is_admin:
            return true()
        own = Dataset.owner_id == self.id
        # Without a team there is nothing to compare: `team_id = NULL` would be written as `IS NULL`.
        return own if self.team is None else or_(own, Dataset.team_id == self.team)

    def move(self, reason: str) -> Move:
        return Move(actor=self.name, reason=reason)


async def authenticate(request: Request) -> Principal:
    """Who sent the request. Called by service.routing.Route before the body is read."""
    given = await _bearer(request)
    if given is None:
        raise _stranger("Send the header Authorization: Bearer KEY.")
    ticket: Ticket = request.state.ticket
    try:
        principal = await to_thread.run_sync(
            admit_principal, request, given.credentials, limiter=ticket.threads
        )
    except NotAuthenticated:
        ticket.refused()
        raise
    except TooMany:
        ticket.accepted()
        raise
    ticket.accepted()
    return principal


def admit_principal(request: Request, credentials: str) -> Principal:
    """Whoever is let in, counted and written into the audit log before anything else is done."""
    state = request.app.state
    try:
        principal, limited = identify(request, credentials)
    except NotAuthenticated:
        audit.refused_sign_in(request)
        raise
    key = limited if limited != principal.id else None
    actor = audit.actor_of(
        request, person=principal.id, name=principal.name, role=principal.role.value, key=key
    )
    request.state.actor = actor
    try:
        state.rates.count(limited)
    except TooMany:
        audit.refused_by_rate(request, actor)
        raise
    audit.record_request(request, actor)
    state.refusals.flush()
    return principal


async def current_principal(
    request: Request, _: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]
) -> Principal:
    principal: Principal = request.state.principal
    return principal


def identify(request: Request, credentials: str) -> tuple[Principal, uuid.UUID]:
    """Whose credentials these are, if they are good right now, and under which id requests are counted."""
    state = request.app.state
    with Session(state.engine) as session:
        if credentials.startswith(PREFIX):
            found = person_of(session, credentials)
            if found is None:
                raise _stranger("The key is unknown, expired or revoked; ask an admin for an invitation.")
            person, key = found
            limited = key.id
        else:
            sign_on: SingleSignOn | None = state.sign_on
            if sign_on is None:
                raise _stranger("The key is unknown, expired or revoked; ask an admin for an invitation.")
            person = sign_on.person(session, credentials)
            limited = person.id
        return Principal(id=person.id, name=person.name, role=Role(person.role), team=person.team_id), limited


def _stranger(detail: str) -> NotAuthenticated:
    return NotAuthenticated(detail, headers={"WWW-Authenticate": "Bearer"})


class RequireRole:
    """Lets only these roles pass."""

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
    """The roles a route lets pass, or None if it asks nobody."""
    if isinstance(dependant.call, RequireRole):
        return dependant.call.roles
    return next(filter(None, map(roles_of, dependant.dependencies)), None)


def permissions(routes: Sequence[BaseRoute]) -> dict[tuple[str, str], frozenset[Role]]:
    """(method, path) → roles. A route that is neither open nor names roles stops the service at its start."""
    table = {}
    for route in iter_route_contexts(routes):
        if route.path in OPEN:
            continue
        # Whatever is no API route (a mount, a socket, a plain route) has no dependencies to ask anybody with.
        roles = roles_of(route.dependant) if isinstance(route.original_route, APIRoute) else None
        if roles is None:
            raise RuntimeError(f"{route.path} names no roles")
        table |= {(method, route.path): roles for method in route.methods or ()}
    return table
