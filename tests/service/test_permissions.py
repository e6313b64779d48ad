"""Permissions: the response to every role at every route; a route missing in the table fails."""

import base64
import hashlib
import os
import uuid
from types import SimpleNamespace
from typing import Annotated

import pytest
from fastapi import APIRouter, Depends
from fastapi.staticfiles import StaticFiles
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route, WebSocketRoute

from service.app import create_app
from service.auth import OPEN, current_principal
from tests.service.house import BUDGET, IMAGES, PLAN, House

# Each row: what an analyst, a curator of another team, an admin and the owner are told, in this order.
# Whoever has no good key is told 401 everywhere but at the open routes.
TABLE: dict[str, tuple[int, int, int, int]] = {
    "GET /healthz": (200, 200, 200, 200),
    "GET /readyz": (200, 200, 200, 200),
    "GET /metrics": (200, 200, 200, 200),
    "POST /v1/invitations/redeem": (403, 403, 403, 403),  # an invitation nobody gave out
    "GET /v1/me": (200, 200, 200, 200),
    "GET /v1/me/keys": (200, 200, 200, 200),
    "POST /v1/me/keys": (201, 201, 201, 201),
    "DELETE /v1/me/keys/{id}": (404, 404, 404, 204),
    "POST /v1/datasets": (403, 201, 403, 201),
    "GET /v1/datasets": (403, 200, 200, 200),
    "GET /v1/datasets/{id}": (403, 404, 200, 200),
    "DELETE /v1/datasets/{id}": (403, 404, 422, 202),  # an admin says why
    "POST /v1/datasets/{id}/upload": (403, 404, 403, 200),
    "GET /v1/datasets/{id}/upload": (403, 404, 403, 200),
    "POST /v1/datasets/{id}/upload/urls": (403, 404, 403, 200),
    "POST /v1/datasets/{id}/seal": (403, 404, 403, 202),
    "POST /v1/datasets/{id}/review": (403, 403, 202, 403),
    "GET /v1/datasets/{id}/budget": (403, 404, 200, 200),
    "POST /v1/quotes": (403, 404, 200, 200),
    "POST /v1/jobs": (403, 404, 403, 202),
    "GET /v1/jobs": (403, 200, 200, 200),
    "GET /v1/jobs/{id}": (403, 404, 200, 200),
    "GET /v1/jobs/{id}/events": (403, 404, 200, 200),
    "POST /v1/jobs/{id}/cancel": (403, 404, 202, 202),
    "GET /v1/jobs/{id}/diagnostics": (403, 404, 403, 200),
    "POST /v1/releases": (403, 404, 403, 202),
    "GET /v1/releases": (200, 200, 200, 200),
    "GET /v1/releases/{id}": (404, 404, 200, 200),  # granted to neither
    "GET /v1/releases/{id}/preview": (404, 404, 200, 200),
    "GET /v1/releases/{id}/review": (403, 404, 200, 200),
    "POST /v1/releases/{id}/review/downloads": (403, 404, 200, 200),
    "POST /v1/releases/{id}/approve": (403, 404, 200, 403),  # the owner is its author
    "POST /v1/releases/{id}/rebuild": (403, 404, 403, 202),
    "POST /v1/releases/{id}/discard": (403, 404, 200, 409),
    "POST /v1/releases/{id}/publish": (403, 404, 403, 202),
    "POST /v1/releases/{id}/withdraw": (403, 404, 202, 202),
    "POST /v1/releases/{id}/readers": (403, 404, 403, 200),
    "DELETE /v1/releases/{id}/readers/{person}": (403, 404, 204, 204),
    "POST /v1/releases/{id}/downloads": (404, 404, 200, 200),
    "GET /.well-known/sluice-keys.json": (200, 200, 200, 200),
    "GET /.well-known/sluice-revocations.json": (200, 200, 200, 200),
    "GET /.well-known/sluice-upload-key.json": (200, 200, 200, 200),
    "GET /v1/admin/ledger": (403, 403, 200, 403),
    "GET /v1/admin/ledger/{account}": (403, 403, 200, 403),
    "GET /v1/admin/ledger/{account}/recompute": (403, 403, 200, 403),
    "GET /v1/admin/ledger/{account}/grants": (403, 404, 200, 200),
    "POST /v1/admin/ledger/{account}/grants": (403, 404, 201, 409),  # one is open by then
    "POST /v1/admin/ledger/{account}/grants/{grant}/confirm": (403, 404, 200, 403),  # the owner proposed it
    "POST /v1/admin/ledger/{account}/grants/{grant}/withdraw": (403, 404, 200, 200),
    "GET /v1/admin/witness": (403, 403, 200, 403),
    "POST /v1/admin/witness/acknowledge": (403, 403, 409, 403),  # nothing to acknowledge
    "GET /v1/admin/audit-log": (403, 403, 200, 403),
    "GET /v1/admin/people": (403, 403, 200, 403),
    "POST /v1/admin/people": (403, 403, 201, 403),
    "POST /v1/admin/people/{id}/disable": (403, 403, 200, 403),
    "GET /v1/admin/people/{id}/keys": (403, 403, 200, 403),
    "POST /v1/admin/people/{id}/invitations": (403, 403, 201, 403),
    "GET /v1/admin/invitations": (403, 403, 200, 403),
    "POST /v1/admin/invitations/{id}/confirm": (403, 403, 200, 403),
    "DELETE /v1/admin/invitations/{id}": (403, 403, 204, 403),
    "DELETE /v1/admin/keys/{id}": (403, 403, 204, 403),
    "GET /v1/admin/teams": (403, 403, 200, 403),
    "POST /v1/admin/teams": (403, 403, 201, 403),
    "POST /v1/admin/people/{id}/team": (403, 403, 200, 403),
    "POST /v1/admin/teams/{id}/quotas": (403, 403, 200, 403),
}
# What a curator of the owner's team is told, where it differs from a curator of another team.
MATES: dict[str, int] = {
    "GET /v1/datasets/{id}": 200,
    "DELETE /v1/datasets/{id}": 403,
    "POST /v1/datasets/{id}/upload": 403,
    "GET /v1/datasets/{id}/upload": 403,
    "POST /v1/datasets/{id}/upload/urls": 403,
    "POST /v1/datasets/{id}/seal": 403,
    "GET /v1/datasets/{id}/budget": 200,
    "POST /v1/quotes": 200,
    "POST /v1/jobs": 202,
    "GET /v1/jobs/{id}": 200,
    "GET /v1/jobs/{id}/events": 200,
    "POST /v1/jobs/{id}/cancel": 403,
    "GET /v1/jobs/{id}/diagnostics": 403,
    "POST /v1/releases": 202,
    "GET /v1/releases/{id}": 200,
    "GET /v1/releases/{id}/preview": 200,
    "GET /v1/releases/{id}/review": 200,
    "POST /v1/releases/{id}/review/downloads": 200,
    "POST /v1/releases/{id}/approve": 200,
    "POST /v1/releases/{id}/rebuild": 403,
    "POST /v1/releases/{id}/discard": 403,
    "POST /v1/releases/{id}/publish": 403,
    "POST /v1/releases/{id}/withdraw": 403,
    "POST /v1/releases/{id}/readers": 403,
    "DELETE /v1/releases/{id}/readers/{person}": 403,
    "POST /v1/releases/{id}/downloads": 200,
    "GET /v1/admin/ledger/{account}/grants": 200,
    "POST /v1/admin/ledger/{account}/grants": 409,  # the admin's is open by then
    "POST /v1/admin/ledger/{account}/grants/{grant}/confirm": 409,  # the admin did by then
    "POST /v1/admin/ledger/{account}/grants/{grant}/withdraw": 200,
}
OPEN_ROUTES = {
    "GET /healthz", "GET /readyz", "GET /metrics", "GET /.well-known/sluice-keys.json",
    "GET /.well-known/sluice-revocations.json", "GET /.well-known/sluice-upload-key.json",
    "POST /v1/invitations/redeem",
}  # fmt: skip
# A route whose parameters cannot be told from the table's name alone gets them here.
UPLOADING = {"/v1/datasets/{id}/upload", "/v1/datasets/{id}/upload/urls", "/v1/datasets/{id}/seal"}


def operations(house: House) -> set[str]:
    paths = house.anonymous.get("/openapi.json").json()["paths"]
    return {f"{verb.upper()} {path}" for path, verbs in paths.items() for verb in verbs}


def test_the_table_lists_every_route_and_no_other(house):
    assert operations(house) == set(TABLE)
    assert {f"{verb} {path}" for verb, path in house.app.state.permissions} == set(TABLE) - OPEN_ROUTES


def test_the_table_says_what_the_routes_declare(house):
    for (verb, path), roles in house.app.state.permissions.items():
        analyst, _, admin, owner = TABLE[f"{verb} {path}"]
        told = {"analyst": analyst, "admin": admin, "curator": owner}
        if path.endswith(("{grant}/confirm", "/approve")):  # 403 for another reason than the role
            told["curator"] = 200
        assert {role for role, status in told.items() if status != 403} == roles, path


def test_open_routes_need_no_key_and_are_few(house, ready):
    assert {route.split(" ")[1] for route in OPEN_ROUTES} | {
        "/openapi.json", "/docs", "/docs/oauth2-redirect",
    } == OPEN  # fmt: skip
    for path in OPEN - {"/v1/invitations/redeem"}:
        assert house.anonymous.get(path).status_code == 200


@pytest.fixture(scope="module")
def ready(shared_house):
    shared_house.witnessed()
    shared_house.sql("INSERT INTO revocations VALUES (1, '{}') ON CONFLICT DO NOTHING")
    return shared_house.ready(shared_house.curator)


@pytest.mark.parametrize("operation", TABLE)
def test_every_role_at(operation, house, ready):
    verb, path = operation.split(" ")
    address, body = concrete(house, verb, path, ready)

    def told(client) -> int:
        # Only the answer's beginning: a stream of events goes on.
        with client.stream(verb, address, json=body) as answer:
            if answer.status_code >= 400:
                answer.read()
                assert answer.headers["content-type"] == "application/problem+json"
                if answer.status_code == 401:
                    assert answer.headers["www-authenticate"] == "Bearer"
            return answer.status_code

    strangers = (house.anonymous, house.revoked, house.expired, house.disabled)
    for_anyone = TABLE[operation][0] if operation in OPEN_ROUTES else 401
    assert [told(who) for who in strangers] == [for_anyone] * 4
    # Those who may not come first, so that what they tried would show in what the others are told.
    expected = dict(zip(("analyst", "curator2", "admin", "curator"), TABLE[operation], strict=True))
    expected["mate"] = MATES.get(operation, expected["curator2"])
    order = sorted(expected, key=lambda name: expected[name] not in (403, 404))
    assert {name: told(house.people[name]) for name in order} == expected


def concrete(house: House, verb: str, path: str, ready: dict) -> tuple[str, dict | None]:
    """A request that would succeed for whoever may make it; what it works on belongs to `curator`."""
    curator, body, given = house.curator, None, {}
    content = os.urandom(8)
    if path == "/v1/datasets" and verb == "POST":
        body = {"name": "d", "schema": IMAGES, "nominal_size": 1, "budget": BUDGET}
    elif path in UPLOADING or (path, verb) == ("/v1/datasets/{id}", "DELETE"):
        given["id"] = house.register(curator)["id"]
        house.upload(curator, given["id"], content)
        if path.endswith("/seal"):
            body = {"size": 8, "sha256": hashlib.sha256(content).hexdigest()}
        elif path.endswith("/urls"):
            body = {"numbers": [1]}
        elif (path, verb) == ("/v1/datasets/{id}/upload", "POST"):
            key = base64.b64encode(bytes(384)).decode()
            body = {"key_id": house.app.state.upload_key.id, "wrapped_key": key}
    elif path.endswith("/datasets/{id}/review"):
        given["id"] = house.sealed(curator)["id"]
        house.checked(given["id"], few=True)
        body = {"decision": "accept", "reason": "few, but other people"}
    elif path.startswith("/v1/datasets/{id}"):
        given["id"] = ready["id"]
    elif path == "/v1/quotes" or (path, verb) == ("/v1/jobs", "POST"):
        body = {"dataset": ready["id"], "plan": PLAN, "target": {"epsilon": 1.0}}
    elif path.startswith("/v1/jobs/{id}"):
        given["id"] = house.job(curator, ready["id"]).json()["id"]
        if path.endswith("/diagnostics"):
            house.sql("INSERT INTO diagnostics VALUES (%s, 1, '{}', '<svg/>')", given["id"], role="train")
    elif (path.startswith("/v1/releases") and verb != "GET") or ("{id}" in path and "/releases/" in path):
        body, given = release(house, path, house.trained(curator, ready["id"]))
    elif "{account}" in path:
        given["account"] = ready["account"]
        if "/grants" in path and verb == "POST":
            given["account"] = house.ready(curator)["account"]
            body = {"epsilon": 11.0, "reason": "more people"}
        if "{grant}" in path:
            proposed = curator.post(f"/v1/admin/ledger/{given['account']}/grants", json=body)
            given["grant"], body = proposed.json()["id"], None
    elif path.endswith("/acknowledge"):
        body = {"generation": 1, "reason": "restored"}
    elif path.endswith("/quotas"):
        given["id"], body = house.team(), {"jobs": 1}
    elif path == "/v1/admin/teams":
        body = {"name": f"t{uuid.uuid4().hex}"} if verb == "POST" else None
    elif path.endswith("/team"):
        given["id"] = str(house.person("curator").id)
        body = {"team": house.team()}
    elif path == "/v1/admin/people":
        body = {"name": f"p{uuid.uuid4().hex}", "role": "analyst"} if verb == "POST" else None
    elif path.startswith("/v1/admin/people/{id}"):
        given["id"] = str(house.person("analyst").id)
    elif path == "/v1/invitations/redeem":
        body = {"invitation": "sli_" + "A" * 43}
    elif path == "/v1/me/keys" and verb == "POST":
        body = {}
    elif path == "/v1/me/keys/{id}":
        given["id"] = curator.post("/v1/me/keys", json={}).json()["id"]
    elif path.startswith("/v1/admin/invitations/{id}"):
        new = {"name": f"p{uuid.uuid4().hex}", "role": "admin"}
        given["id"] = house.admin2.post("/v1/admin/people", json=new).json()["invitation"]["id"]
    elif path == "/v1/admin/keys/{id}":
        [(given["id"],)] = house.sql("SELECT id FROM keys WHERE person_id = %s", house.person("analyst").id)
    query = "?accountant=renyi" if path.endswith("/recompute") else ""
    return path.format(**given) + query, body


def release(house: House, path: str, job: str) -> tuple[dict | None, dict]:
    """A release in the state this route is for, and a body for it."""
    if path == "/v1/releases":
        return {"job": job, "name": "r"}, {}
    if path.endswith(("/{id}/downloads", "/withdraw")):
        id = house.published(house.curator, job)["id"]
        body = {"paths": ["manifest.json"]} if path.endswith("/downloads") else {"reason": "a mistake"}
        return body, {"id": id}
    id, body = house.draft(house.curator, job)["id"], None
    digest = house.built(id)
    if path.endswith("/approve"):
        body = {"digest": digest}
    elif path.endswith("/review/downloads"):
        body = {"paths": ["manifest.json"]}
    elif path.endswith("/publish"):
        assert house.admin.post(f"/v1/releases/{id}/approve", json={"digest": digest}).status_code == 200
    elif path.endswith("/readers"):
        body = {"person": str(house.curator2.id)}
    return body, {"id": id, "person": str(house.curator2.id)}


def test_a_revoked_key_and_a_disabled_person_are_out_with_the_next_request(house):
    who = house.person("curator")
    path = f"/v1/admin/people/{who.id}/keys"
    second = who.post("/v1/me/keys", json={"label": "laptop", "days": 1}).json()
    other = house.caller("again", who.id, second["key"])
    assert (who.get("/v1/me").status_code, other.get("/v1/me").status_code) == (200, 200)
    [first] = [key["id"] for key in house.admin.get(path).json() if key["id"] != second["id"]]
    for _ in range(2):  # safe to repeat
        assert house.admin.delete(f"/v1/admin/keys/{first}").status_code == 204
    assert (who.get("/v1/me").status_code, other.get("/v1/me").status_code) == (401, 200)
    assert house.admin.post(f"/v1/admin/people/{who.id}/disable").json()["disabled"] is True
    assert other.get("/v1/me").status_code == 401
    assert house.admin.get(path).json()[0]["revoked_at"] is not None
    assert house.admin.delete(f"/v1/admin/keys/{uuid.uuid4()}").status_code == 404


def test_an_admin_does_not_shut_themselves_out(house):
    answer = house.admin.post(f"/v1/admin/people/{house.admin.id}/disable")
    assert (answer.status_code, answer.json()["slug"]) == (409, "wrong-state")
    assert house.admin.get("/v1/me").json()["disabled"] is False


def test_names_are_given_once(house):
    body = {"name": "ada", "role": "curator"}
    assert house.admin.post("/v1/admin/people", json=body).status_code == 201
    again = house.admin.post("/v1/admin/people", json=body)
    assert (again.status_code, again.json()["slug"]) == (409, "name-taken")
    for name in ("=ada", "-ada", "a da", "a\nb", "", "x" * 101):
        assert house.admin.post("/v1/admin/people", json=body | {"name": name}).status_code == 422


@pytest.mark.parametrize(
    "header",
    [
        "Basic dTpw", "Bearer", "sl_x", "Bearer sl_", "Bearer sl_" + "A" * 43, "bearer nothing",
        "Bearer a.b.c", "Bearer " + "x" * 5000, b"Bearer sl_\xff\xfe",
    ],
)  # fmt: skip
def test_odd_credentials_are_nobodys(header, house):
    answer = house.anonymous.get("/v1/me", headers={"Authorization": header})
    assert (answer.status_code, answer.json()["slug"]) == (401, "not-authenticated")


async def _leak(*_: object) -> PlainTextResponse:
    return PlainTextResponse("leak")


def _anyone_known(_: Annotated[object, Depends(current_principal)]) -> None: ...


def _bare() -> APIRouter:
    return APIRouter()


def _planted(kind: str) -> APIRouter:
    router = _bare()
    if kind == "no roles":
        router.add_api_route("/v1/leak", lambda: None)
    if kind == "known but no roles":
        router.add_api_route("/v1/leak", _anyone_known)
    if kind == "a plain route":
        router.routes.append(Route("/v1/leak", _leak))
    if kind == "a mount":
        router.routes.append(Mount("/v1/leak", StaticFiles(directory=os.path.dirname(__file__))))
    if kind == "a socket":
        router.routes.append(WebSocketRoute("/v1/leak", _leak))
    if kind == "inside another router":
        inner = _bare()
        inner.add_api_route("/leak", lambda: None)
        router.include_router(inner, prefix="/v1")
    if kind == "hidden from the document":
        router.add_api_route("/v1/leak", lambda: None, include_in_schema=False)
    return router


@pytest.mark.parametrize(
    "kind",
    [
        "no roles", "known but no roles", "a plain route", "a mount", "a socket", "inside another router",
        "hidden from the document",
    ],
)  # fmt: skip
def test_a_route_that_names_no_roles_stops_the_service_at_its_start(kind, house, monkeypatch):
    monkeypatch.setattr("service.app.people", SimpleNamespace(router=_planted(kind)))
    with pytest.raises(RuntimeError, match="/v1/leak names no roles"):
        create_app(house.settings)
