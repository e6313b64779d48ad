"""Single sign-on: checks bearer tokens of the site's OpenID provider against its published keys."""

import re
import time
from typing import Any

import httpx
import jwt
from sqlalchemy import select
from sqlalchemy.orm import Session

from core.errors import NotAuthenticated
from core.people import NameTaken, Role, add_person
from core.settings import ServiceSettings
from core.tables import Person

# Public-key signatures only: never a shared secret, never none.
_ALGORITHMS = ("RS256", "RS384", "RS512", "ES256", "ES384", "PS256", "EdDSA")
_KEYS_LIFETIME = 600.0
_FETCH_INTERVAL = 10.0
_CLOCK_SKEW = 10  # seconds
_SUBJECT = re.compile(r"[\x20-\x7e]{1,255}")


class ProviderKeys(jwt.PyJWKClient):
    """The provider's signing keys, cached. They are fetched again when they expire or a key id is unknown."""

    def __init__(self, issuer: str) -> None:
        # PyJWT's own cooldown starts after a success only; fetch_data limits requests after a failure too.
        super().__init__(issuer, lifespan=_KEYS_LIFETIME, cooldown_duration=0)
        self._fetched_at, self._latest = -_FETCH_INTERVAL, dict[str, Any]()

    def fetch_data(self) -> Any:
        """Asks the provider, or returns the latest keys if it was asked in the last few seconds."""
        if time.monotonic() > self._fetched_at + _FETCH_INTERVAL:
            self._fetched_at = time.monotonic()
            with httpx.Client(timeout=5, follow_redirects=False) as client:
                discovered = client.get(f"{self.uri}/.well-known/openid-configuration").raise_for_status()
                keys = client.get(discovered.json()["jwks_uri"]).raise_for_status()
            self._latest = keys.json()
        return self._latest


class SingleSignOn:
    def __init__(self, settings: ServiceSettings) -> None:
        self._issuer = str(settings.oidc_issuer).rstrip("/")
        self._audience, self._claim = settings.oidc_audience, settings.oidc_role_claim
        self._roles = {name: Role(role) for name, role in settings.oidc_roles.items()}
        self.keys = ProviderKeys(self._issuer)

    def person(self, session: Session, token: str) -> Person:
        """The person a token identifies, with the role in the token; added when they first sign in."""
        claims = self._verified(token)
        subject = f"{self._issuer}#{claims['sub']}"
        names = claims.get(self._claim, [])
        names = [names] if isinstance(names, str) else names if isinstance(names, list) else []
        roles = [self._roles[name] for name in names if isinstance(name, str) and name in self._roles]
        if not roles or not _SUBJECT.fullmatch(claims["sub"]):
            raise _refusal()
        role = min(roles, key=list(Role).index)
        query = select(Person).where(Person.subject == subject)
        person = session.scalars(query).one_or_none()
        if person is None:
            try:
                person = add_person(session, name=subject, role=role, subject=subject)
            except NameTaken:  # a concurrent request of the same person added them
                person = session.scalars(query).one()
        if person.disabled_at is not None:
            raise _refusal()
        person.role = role
        session.commit()
        session.refresh(person)
        return person

    def _verified(self, token: str) -> dict[str, Any]:
        try:
            key = self.keys.get_signing_key(str(jwt.get_unverified_header(token).get("kid")))
            claims: dict[str, Any] = jwt.decode(
                token, key, algorithms=_ALGORITHMS, audience=self._audience, leeway=_CLOCK_SKEW,
                issuer=[self._issuer, self._issuer + "/"],  # providers use either form
                options={"require": ["exp", "iat", "iss", "aud", "sub"]},
            )  # fmt: skip
        except (jwt.PyJWTError, httpx.HTTPError, LookupError, TypeError, ValueError):
            raise _refusal() from None
        return claims


def _refusal() -> NotAuthenticated:
    return NotAuthenticated(
        "The token was not issued for this service, has expired, or has no role here; sign in again.",
        headers={"WWW-Authenticate": "Bearer"},
    )
