"""Single sign-on: bearer tokens of the site's OpenID provider, checked against its published keys."""

import re
import threading
import time

import httpx
import jwt
from sqlalchemy import select
from sqlalchemy.orm import Session

from core.errors import NotAuthenticated
from core.people import NameTaken, Role, add_person
from core.settings import ServiceSettings
from core.tables import Person

# Never a shared secret, never none.
_ALGORITHMS = ("RS256", "RS384", "RS512", "ES256", "ES384", "PS256", "EdDSA")
_KEYS_FOR = 600.0
_ASK_AGAIN_AFTER = 10.0
_SKEW = 10  # seconds by which two honest clocks may differ
_SUBJECT = re.compile(r"[\x20-\x7e]{1,255}")
_REFUSED = "The token was not issued for this service, has expired, or names no role here; sign in again."


class SingleSignOn:
    def __init__(self, settings: ServiceSettings) -> None:
        self._issuer = str(settings.oidc_issuer).rstrip("/")
        self._audience, self._claim = settings.oidc_audience, settings.oidc_role_claim
        self._roles = {name: Role(role) for name, role in settings.oidc_roles.items()}
        self._lock = threading.Lock()
        self._keys: tuple[float, dict[str, jwt.PyJWK]] = (-_KEYS_FOR, {})

    def person(self, session: Session, token: str) -> Person:
        """The person a token speaks for; made on first sight, with the role the token carries now."""
        try:
            key = self._key(str(jwt.get_unverified_header(token).get("kid")))
            claims = jwt.decode(
                token, key, algorithms=_ALGORITHMS, audience=self._audience, leeway=_SKEW,
                issuer=[self._issuer, self._issuer + "/"],  # providers write it either way
                options={"require": ["exp", "iat", "iss", "aud", "sub"]},
            )  # fmt: skip
        except (jwt.PyJWTError, httpx.HTTPError, LookupError, TypeError, ValueError):
            raise _refused() from None
        given = claims.get(self._claim, [])
        names = [given] if isinstance(given, str) else given if isinstance(given, list) else []
        roles = [self._roles[name] for name in names if isinstance(name, str) and name in self._roles]
        if not roles or not _SUBJECT.fullmatch(claims["sub"]):
            raise _refused()
        role = min(roles, key=list(Role).index)
        subject = f"{self._issuer}#{claims['sub']}"
        known = select(Person).where(Person.subject == subject)
        person = session.scalars(known).one_or_none()
        if person is None:
            try:
                person = add_person(session, name=subject, role=role, subject=subject)
            except NameTaken:  # by the same person, a moment ago
                person = session.scalars(known).one()
        if person.disabled_at is not None:
            raise _refused()
        person.role = role
        session.commit()
        session.refresh(person)
        return person

    def _key(self, kid: str) -> jwt.PyJWK:
        """The provider's key of this name; asked again when it is new to us, but not for every guess."""
        with self._lock:
            asked, keys = self._keys
            age = time.monotonic() - asked
            if age > _KEYS_FOR or (kid not in keys and age > _ASK_AGAIN_AFTER):
                # Noted first: a provider that does not answer is not asked by every request, one by one.
                self._keys = (time.monotonic(), keys)
                self._keys = (time.monotonic(), self._fetch())
            return self._keys[1][kid]

    def _fetch(self) -> dict[str, jwt.PyJWK]:
        with httpx.Client(timeout=5, follow_redirects=False) as client:
            found = client.get(self._issuer.rstrip("/") + "/.well-known/openid-configuration")
            found.raise_for_status()
            answer = client.get(found.json()["jwks_uri"])
            answer.raise_for_status()
        return {key.key_id: key for key in jwt.PyJWKSet.from_dict(answer.json()).keys if key.key_id}


def _refused() -> NotAuthenticated:
    return NotAuthenticated(_REFUSED, headers={"WWW-Authenticate": "Bearer"})
