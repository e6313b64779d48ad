"""Single sign-on with valid and forged tokens of an issuer on a local port."""

import base64
import hashlib
import hmac
import json
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from fastapi import FastAPI
from psycopg.errors import RestrictViolation

from service import oidc
from tests.conftest import served
from tests.service.house import opened

SECRET = b"a secret that was published by mistake, 48 bytes"


class Issuer:
    """An OpenID provider as far as a relying service sees it: discovery and a key set."""

    def __init__(self):
        self.keys, self.asked, self.url, self.down = {}, 0, "", threading.Event()
        self.new_key("first")
        self.new_key("steady")
        self.app = FastAPI()
        self.app.get("/.well-known/openid-configuration")(self.discovery)
        self.app.get("/keys")(self.key_set)

    def discovery(self):
        self.asked += 1
        if self.down.is_set():
            raise RuntimeError("down")
        return {"issuer": self.url, "jwks_uri": f"{self.url}/keys"}

    def key_set(self):
        described = []
        for kid, key in self.keys.items():
            public = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(key.public_key()))
            described.append(public | {"kid": kid, "alg": "RS256", "use": "sig"})
        secret = {
            "kty": "oct",
            "k": base64.urlsafe_b64encode(SECRET).decode(),
            "kid": "secret",
            "alg": "HS256",
        }
        return {"keys": [*described, secret]}  # a provider that errs: such a key is none

    def new_key(self, kid):
        self.keys[kid] = rsa.generate_private_key(public_exponent=65537, key_size=2048)

    def token(self, *, kid="first", key=None, algorithm="RS256", headers=None, **claims):
        now = int(time.time())
        body = {"iss": self.url, "aud": "sluice", "sub": "u1", "iat": now, "exp": now + 300}
        body |= {"roles": ["sluice-curator"]} | claims
        body = {name: value for name, value in body.items() if value is not None}
        return jwt.encode(body, key or self.keys[kid], algorithm, headers={"kid": kid} | (headers or {}))


@pytest.fixture(scope="module")
def issuer():
    issuer = Issuer()
    with served(issuer.app) as client:
        issuer.url = str(client.base_url).rstrip("/")
        yield issuer


@pytest.fixture(scope="module")
def signed_on(servers, issuer):
    with opened(servers, oidc_issuer=issuer.url) as house:
        yield house


def me(house, token):
    return house.anonymous.get("/v1/me", headers={"Authorization": f"Bearer {token}"})


@pytest.mark.parametrize("role", ["admin", "curator", "analyst"])
def test_a_good_token_acts_with_its_role(role, signed_on, issuer):
    token = issuer.token(sub=f"good-{role}", roles=[f"sluice-{role}", "something-else"])
    first, again = me(signed_on, token), me(signed_on, token)
    assert (first.status_code, first.json()["role"]) == (200, role)
    assert first.json()["name"] == f"{issuer.url}#good-{role}"
    assert again.json() == first.json()


def test_the_role_is_the_one_the_token_carries_now(signed_on, issuer):
    id = {
        me(signed_on, issuer.token(sub="changing", roles=roles)).json()["id"]
        for roles in (["sluice-analyst"], "sluice-admin", ["sluice-curator", "sluice-admin"])
    }
    assert len(id) == 1
    told = me(signed_on, issuer.token(sub="changing", roles=["sluice-analyst", "sluice-curator"])).json()
    assert told["role"] == "curator"


def test_a_token_works_like_a_key(signed_on, issuer):
    headers = {"Authorization": f"Bearer {issuer.token(sub='worker')}"}
    body = {"name": "d", "schema": {"kind": "image", "height": 1, "width": 1, "classes": ["a"]}}
    body |= {"nominal_size": 1, "budget": {"epsilon": 1.0, "delta": 1e-6}}
    made = signed_on.anonymous.post("/v1/datasets", json=body, headers=headers)
    assert made.status_code == 201
    assert signed_on.curator.get(f"/v1/datasets/{made.json()['id']}").status_code == 404
    assert signed_on.curator.get("/v1/me").status_code == 200  # keys still work


def test_people_of_single_sign_on_have_no_keys_and_no_inviter(signed_on, issuer):
    """The provider alone says who they are: no admin holds a key of theirs, and each is independent."""
    headers = {"Authorization": f"Bearer {issuer.token(sub='keyless')}"}
    who = me(signed_on, issuer.token(sub="keyless")).json()
    assert who["created_by"] is None
    own = signed_on.anonymous.post("/v1/me/keys", json={}, headers=headers)
    assert (own.status_code, own.json()["slug"]) == (403, "forbidden")
    invited = signed_on.admin.post(f"/v1/admin/people/{who['id']}/invitations")
    assert (invited.status_code, invited.json()["slug"]) == (409, "wrong-state")
    with pytest.raises(RestrictViolation, match="have no keys"):
        signed_on.sql(
            "INSERT INTO invitations (id, person_id, digest, issued_by, expires_at)"
            " VALUES (gen_random_uuid(), %s, sha256('x'), %s, now())",
            who["id"], signed_on.admin.id, role="service",
        )  # fmt: skip
    other = me(signed_on, issuer.token(sub="another")).json()
    assert signed_on.sql("SELECT independent(%s, %s)", who["id"], other["id"]) == [(True,)]


def test_an_issuer_may_write_itself_with_a_slash(signed_on, issuer):
    assert me(signed_on, issuer.token(iss=issuer.url + "/")).status_code == 200


def forged(issuer, kind):
    now = int(time.time())
    public = issuer.keys["first"].public_key()
    pem = public.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    stranger = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    part = [
        base64.urlsafe_b64encode(json.dumps(each).encode()).rstrip(b"=").decode()
        for each in (
            {"alg": "none", "kid": "first", "typ": "JWT"},
            {"iss": issuer.url, "aud": "sluice", "sub": "u", "iat": now, "exp": now + 60}
            | {"roles": ["sluice-admin"]},
        )
    ]
    good = issuer.token()
    head, body, signature = good.split(".")
    return {
        "wrong audience": lambda: issuer.token(aud="another service"),
        "no audience": lambda: issuer.token(aud=None),
        "wrong issuer": lambda: issuer.token(iss="https://elsewhere.example"),
        "expired": lambda: issuer.token(exp=now - 60),
        "no expiry": lambda: issuer.token(exp=None),
        "not yet": lambda: issuer.token(nbf=now + 600),
        "issued in the future": lambda: issuer.token(iat=now + 600),
        "no subject": lambda: issuer.token(sub=None),
        "empty subject": lambda: issuer.token(sub=""),
        "subject with a NUL": lambda: issuer.token(sub="a\x00b"),
        "alg none": lambda: f"{part[0]}.{part[1]}.",
        "alg none, signature kept": lambda: f"{part[0]}.{part[1]}.{signature}",
        "HS256 with the public key": lambda: _hmac(issuer, pem),
        "HS256 with a published secret": lambda: issuer.token(key=SECRET, kid="secret", algorithm="HS256"),
        "unknown kid": lambda: issuer.token(headers={"kid": "unheard of"}),
        "another's key under a known kid": lambda: issuer.token(key=stranger),
        "another body": lambda: f"{head}.{part[1]}.{signature}",
        "no role": lambda: issuer.token(roles=[]),
        "no role claim": lambda: issuer.token(roles=None),
        "a role we do not know": lambda: issuer.token(roles=["admin"]),
        "roles that are no list": lambda: issuer.token(roles={"sluice-admin": True}),
        "a jku of its own": lambda: issuer.token(key=stranger, headers={"jku": "http://127.0.0.1:9/keys"}),
        "cut off": lambda: good[:-20],
        "two parts": lambda: f"{head}.{body}",
        "nonsense": lambda: "a.b.c",
    }[kind]()


def _hmac(issuer, pem):
    # By hand: the library refuses to sign with a public key.
    now = int(time.time())
    claims = {"iss": issuer.url, "aud": "sluice", "sub": "u", "iat": now, "exp": now + 60}
    text = b".".join(
        base64.urlsafe_b64encode(json.dumps(each).encode()).rstrip(b"=")
        for each in ({"alg": "HS256", "kid": "first"}, claims | {"roles": ["sluice-admin"]})
    )
    signature = hmac.new(pem, text, hashlib.sha256).digest()
    return (text + b"." + base64.urlsafe_b64encode(signature).rstrip(b"=")).decode()


FORGERIES = (
    "wrong audience", "no audience", "wrong issuer", "expired", "no expiry", "not yet",
    "issued in the future", "no subject", "empty subject", "subject with a NUL", "alg none",
    "alg none, signature kept",
    "HS256 with the public key", "HS256 with a published secret", "unknown kid",
    "another's key under a known kid", "another body", "no role",
    "no role claim", "a role we do not know", "roles that are no list", "a jku of its own", "cut off",
    "two parts", "nonsense",
)  # fmt: skip


@pytest.mark.parametrize("kind", FORGERIES)
def test_nobody_is_let_in_with(kind, signed_on, issuer):
    people = signed_on.sql("SELECT count(*) FROM people")
    answer = me(signed_on, forged(issuer, kind))
    assert (answer.status_code, answer.json()["slug"]) == (401, "not-authenticated")
    assert answer.headers["www-authenticate"] == "Bearer"
    assert signed_on.sql("SELECT count(*) FROM people") == people


def test_without_an_issuer_no_token_is_good(house, issuer):
    assert me(house, issuer.token()).status_code == 401


def test_a_disabled_person_stays_out_whatever_their_token_says(signed_on, issuer):
    token = issuer.token(sub="leaver")
    id = me(signed_on, token).json()["id"]
    assert signed_on.admin.post(f"/v1/admin/people/{id}/disable").status_code == 200
    assert me(signed_on, token).status_code == 401
    assert me(signed_on, issuer.token(sub="leaver", roles=["sluice-admin"])).status_code == 401


def test_a_new_key_of_the_issuer_is_found_and_the_old_one_retired(signed_on, issuer, monkeypatch):
    monkeypatch.setattr(oidc, "_FETCH_INTERVAL", 0.0)
    issuer.new_key("second")
    assert me(signed_on, issuer.token(kid="second")).status_code == 200
    assert me(signed_on, issuer.token(kid="first")).status_code == 200
    old = issuer.keys.pop("first")
    issuer.new_key("third")
    assert me(signed_on, issuer.token(kid="third")).status_code == 200
    assert me(signed_on, issuer.token(kid="first", key=old)).status_code == 401
    issuer.new_key("first")


def test_guesses_do_not_make_the_service_ask_the_issuer_each_time(signed_on, issuer):
    me(signed_on, issuer.token(kid="steady"))
    asked = issuer.asked
    for _ in range(20):
        assert me(signed_on, issuer.token(headers={"kid": uuid.uuid4().hex})).status_code == 401
    assert issuer.asked <= asked + 1


def test_a_silent_issuer_does_not_shut_out_those_it_vouched_for(signed_on, issuer, monkeypatch):
    token = issuer.token(kid="steady")
    assert me(signed_on, token).status_code == 200
    monkeypatch.setattr(oidc, "_FETCH_INTERVAL", 0.0)
    monkeypatch.setattr(signed_on.app.state.sign_on.keys.jwk_set_cache, "lifespan", 0.0)
    issuer.down.set()
    asked = issuer.asked
    assert me(signed_on, token).status_code in (200, 401)  # this request asks the issuer and fails
    monkeypatch.setattr(oidc, "_FETCH_INTERVAL", 10.0)
    assert [me(signed_on, token).status_code for _ in range(5)] == [200] * 5
    assert issuer.asked == asked + 1
    issuer.down.clear()


def test_one_person_arriving_many_times_at_once_is_one_person(signed_on, issuer):
    token = issuer.token(kid="steady", sub="in a hurry")
    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda _: me(signed_on, token), range(20)))
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.json()["id"] for answer in answers}) == 1
