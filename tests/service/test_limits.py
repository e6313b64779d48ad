"""Request limits; responses echo no input; logs and metrics contain no names and no keys."""

import io
import json
import logging
import subprocess
import sys
import time
import uuid
from contextlib import contextmanager

import httpx
import psycopg
import pytest
import structlog
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from core import log
from local.ports import free_port
from service import limits
from tests.service.house import BUDGET, IMAGES, PLAN, House, opened

# -- how much


@pytest.fixture(scope="module")
def strict(servers):
    with opened(servers, requests_per_minute=5) as house:
        yield house


def test_the_request_after_the_limit_is_told_when_to_come_back(strict, monkeypatch):
    monkeypatch.setattr(limits.time, "time", lambda: 6_000_015.0)  # 45 s before the minute is over
    who, other = strict.person("analyst"), strict.person("analyst")
    assert [who.get("/v1/me").status_code for _ in range(5)] == [200] * 5
    for _ in range(3):
        late = who.get("/v1/me")
        assert (late.status_code, late.json()["slug"]) == (429, "rate-limited")
        assert late.headers["retry-after"] == "45"
    assert other.get("/v1/me").status_code == 200  # the limit is each key's own
    assert strict.anonymous.get("/healthz").status_code == 200
    monkeypatch.setattr(limits.time, "time", lambda: 6_000_060.0)
    assert who.get("/v1/me").status_code == 200


def test_refused_requests_count_too(strict):
    who = strict.person("analyst")
    told = [who.get("/v1/datasets").status_code for _ in range(12)]
    assert 429 in told
    assert set(told) == {403, 429}


@pytest.mark.parametrize("path", ["/v1/datasets", "/v1/quotes", "/v1/admin/witness/acknowledge"])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_above_the_limit_is_refused_whatever_its_header_says(path, chunked, house):
    def pieces():
        for _ in range(limits.LARGEST_BODY // 65536 + 1):
            yield b"[" + b" " * 65535

    content = pieces() if chunked else b"".join(pieces())
    headers = {"Content-Type": "application/json"}
    answer = house.admin.post(path, content=content, headers=headers)
    assert (answer.status_code, answer.json()["slug"]) == (413, "body-too-large")
    assert answer.headers["content-type"] == "application/problem+json"


def test_a_body_at_the_limit_is_read(house):
    body = json.dumps({"name": "d"}).encode()
    padded = body + b" " * (limits.LARGEST_BODY - len(body))
    answer = house.curator.post("/v1/datasets", content=padded, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["slug"]) == (422, "invalid-request")


# -- what is echoed

CANARY = "canary-7d0f3a"
ODD = 731846.529


def bodies(dataset: str) -> dict[str, tuple[str, dict]]:
    """A good body for each route that takes one."""
    return {
        "POST /v1/datasets": {"name": "d", "schema": IMAGES, "nominal_size": 1, "budget": BUDGET,
                              "relation": "add_remove", "parent": dataset},
        "POST /v1/datasets/{id}/upload": {"key_id": "0" * 32, "wrapped_key": "A" * 512},
        "POST /v1/datasets/{id}/upload/urls": {"numbers": [1], "size": 8},
        "POST /v1/datasets/{id}/seal": {"size": 3, "sha256": "0" * 64},
        "POST /v1/quotes": {"dataset": dataset, "plan": PLAN, "target": {"epsilon": 1.0}},
        "POST /v1/jobs": {"dataset": dataset, "plan": {"kind": "dpgan", "sampling_prob": 0.1, "steps": 5},
                          "target": {"epsilon": 1.0, "accountant": "pld"}},
        "POST /v1/datasets/{id}/review": {"decision": "join", "account": str(uuid.uuid4()), "reason": "r"},
        "POST /v1/admin/ledger/{account}/grants": {"epsilon": 11.0, "reason": "more"},
        "POST /v1/admin/witness/acknowledge": {"generation": 1, "reason": "restored"},
        "POST /v1/admin/people": {"name": "p", "role": "analyst"},
        "POST /v1/admin/people/{id}/team": {"team": str(uuid.uuid4()), "datasets": False},
        "POST /v1/admin/teams": {"name": "t"},
        "POST /v1/admin/teams/{id}/quotas": {"bytes": 1, "jobs": 1, "job_seconds": 1},
        "POST /v1/me/keys": {"label": "l", "days": 1},
        "POST /v1/invitations/redeem": {"invitation": "sli_" + "A" * 43, "label": "l", "days": 1},
        "POST /v1/releases": {"job": str(uuid.uuid4()), "name": "r", "note": "n", "licence": "CC0-1.0",
                              "count": 9, "seed": 1, "formats": ["npz"], "audience": "granted",
                              "supersedes": dataset},
        "POST /v1/releases/{id}/approve": {"digest": "0" * 64, "note": "n"},
        "POST /v1/releases/{id}/withdraw": {"reason": "r"},
        "POST /v1/releases/{id}/readers": {"person": str(uuid.uuid4())},
        "POST /v1/releases/{id}/downloads": {"paths": ["manifest.json"]},
        "POST /v1/releases/{id}/review/downloads": {"paths": ["manifest.json"]},
    }  # fmt: skip


def spoiled(body):
    """The body with something wrong at every place: a value, a number, a field that does not belong."""
    if isinstance(body, dict):
        yield body | {CANARY: 1}
        yield body | {CANARY: CANARY}
        for name, value in body.items():
            yield {k: v for k, v in body.items() if k != name} | {f"{name}{CANARY}": CANARY}
            for inner in spoiled(value):
                yield body | {name: inner}
    elif isinstance(body, list):
        for inner in spoiled(body[0]):
            yield [inner]
    yield from (CANARY + "\n", ODD, -ODD, [CANARY], {CANARY: CANARY}, CANARY * 100, f"\x00{CANARY}")


def test_every_route_with_a_body_is_among_those_spoiled(house):
    document = house.anonymous.get("/openapi.json").json()["paths"]
    taking = {f"{v.upper()} {p}" for p, vs in document.items() for v, o in vs.items() if "requestBody" in o}
    assert taking == set(bodies(""))


def test_no_error_echoes_what_was_sent(house):
    """T24, A4: a canary at every place of every body comes back in no problem."""
    dataset = house.ready(house.curator)
    given = {"id": dataset["id"], "account": dataset["account"]}
    refused = 0
    for operation, body in bodies(dataset["id"]).items():
        path = operation.split(" ")[1]
        people = path.startswith("/v1/admin/people")
        who = house.admin if "/admin/" in path or path.endswith("/datasets/{id}/review") else house.curator
        address = path.format(**given | ({"id": str(house.analyst.id)} if people else {}))
        for wrong in spoiled(body):
            answer = who.post(
                address, content=json.dumps(wrong), headers={"Content-Type": "application/json"}
            )
            if answer.status_code < 400:  # a name or a reason may be anything
                continue
            refused += 1
            assert answer.status_code in (400, 404, 409, 422), answer.text
            assert "canary" not in answer.text, (operation, wrong, answer.text)
            assert str(ODD) not in answer.text, (operation, wrong, answer.text)
            assert "canary" not in str(answer.headers)
    assert refused > 200


@pytest.mark.parametrize(
    "path",
    [
        f"/v1/{CANARY}", f"/v1/datasets/{CANARY}", f"/v1/jobs?state={CANARY}", f"/v1/jobs?cursor={CANARY}",
        f"/v1/jobs?dataset={CANARY}", f"/v1/jobs?limit={CANARY}", f"/v1/datasets?limit=1&cursor={CANARY}%00",
    ],
)  # fmt: skip
def test_no_address_is_echoed(path, house):
    answer = house.curator.get(path)
    assert answer.status_code in (404, 422)
    assert CANARY not in answer.text


# -- what is logged


@contextmanager
def lines():
    """What the service writes, in the form it has in production."""
    root, before = logging.getLogger(), logging.getLogger().handlers[:]
    level, stream = root.level, io.StringIO()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "stderr", stream)
            log.configure("service")
        yield stream
    finally:
        root.handlers[:] = before
        root.setLevel(level)
        structlog.reset_defaults()


def fresh_process(house: House, at, port: int) -> subprocess.Popen:
    environment = house.servers.environments["service"] | {"SLUICE_DATABASE_URL": house.url("service")}
    return subprocess.Popen(
        [sys.executable, "-m", "service", "--port", str(port)], env=environment, stderr=at, stdout=at
    )


def test_logs_and_metrics_hold_ids_and_nothing_a_person_typed(house, tmp_path):
    """A4, U6: a process of its own, whose every line is read; then every table is searched for keys."""
    port = free_port()
    out = tmp_path / "log"
    with out.open("wb") as at:
        process = fresh_process(house, at, port)
        try:
            keys, metrics = busy_day(house, f"http://127.0.0.1:{port}")
        finally:
            process.terminate()
            process.wait(20)
    written = out.read_text()
    records = [json.loads(line) for line in written.splitlines()]
    requests = [record for record in records if record["event"] == "request"]
    assert len(requests) >= 20
    known = {
        "event",
        "level",
        "timestamp",
        "request_id",
        "role",
        "method",
        "route",
        "status",
        "ms",
        "actor",
        "task",
        "kind",
    }
    assert all(set(record) <= known for record in requests)
    assert all(record["request_id"] for record in requests)
    assert any(record["request_id"] == "asked-for-1" for record in requests)
    actors = {record.get("actor") for record in requests if record["route"] and "/v1/" in record["route"]}
    assert {None, str(house.admin.id), str(house.curator.id)} < actors  # None: the key was no good
    for text in (written, metrics):
        assert CANARY not in text
        assert "sl_" not in text
    dumped = everything(house)
    assert CANARY in dumped  # names are kept, where they belong
    for key in keys:
        assert key not in dumped
        assert key.removeprefix("sl_") not in dumped


def busy_day(house: House, url: str) -> tuple[list[str], str]:
    """Requests of every kind with canaries wherever text may go; the keys used, and the metrics after."""
    with httpx.Client(base_url=url, timeout=30) as nobody:
        deadline = time.monotonic() + 60
        while True:
            try:
                if nobody.get("/healthz").status_code == 200:
                    break
            except httpx.TransportError:
                assert time.monotonic() < deadline
                time.sleep(0.1)

        def call(key, verb, path, **others):
            headers = {"Authorization": f"Bearer {key}"} | others.pop("headers", {})
            return nobody.request(verb, path, headers=headers, **others)

        admin, curator = house.admin.key, house.curator.key
        person = call(admin, "POST", "/v1/admin/people", json={"name": CANARY, "role": "curator"}).json()
        invitation = person["invitation"]["invitation"]
        redeem = {"invitation": invitation, "label": CANARY, "days": 1}
        made = nobody.post("/v1/invitations/redeem", json=redeem).json()
        body = {"name": CANARY, "schema": IMAGES | {"classes": [CANARY, "b"]}, "nominal_size": 1}
        body |= {"budget": BUDGET}
        dataset = call(made["key"], "POST", "/v1/datasets", json=body, headers={"Idempotency-Key": CANARY})
        assert dataset.status_code == 201
        id = dataset.json()["id"]
        call(made["key"], "POST", f"/v1/datasets/{id}/upload", headers={"X-Request-Id": "asked-for-1"})
        call(made["key"], "POST", f"/v1/datasets/{id}/seal", json={"size": 5, "sha256": "0" * 64})
        call(made["key"], "POST", "/v1/datasets", json=body | {CANARY: CANARY})
        call(made["key"], "POST", "/v1/quotes", json={"dataset": id, "plan": {"kind": CANARY}})
        account = house.ready(house.curator)["account"]
        path = f"/v1/admin/ledger/{account}/grants"
        grant = call(curator, "POST", path, json={"epsilon": 11.0, "reason": CANARY}).json()["id"]
        assert call(admin, "POST", f"{path}/{grant}/confirm").status_code == 200
        for verb, address in (
            ("GET", f"/v1/{CANARY}"), ("GET", f"/v1/datasets?cursor={CANARY}"), (CANARY, "/v1/datasets"),
            ("GET", f"/v1/datasets/{CANARY}"), ("GET", f"/v1/admin/ledger/{account}?actor={CANARY}"),
            ("GET", f"/v1/admin/ledger/{account}?format=csv"), ("POST", f"/{CANARY}"),
        ):  # fmt: skip
            call(
                admin,
                verb,
                address,
                headers={"User-Agent": CANARY, "Referer": CANARY, "X-Request-Id": f"{CANARY} x"},
            )
        for wrong in (f"Bearer sl_{CANARY}", CANARY, f"Basic {CANARY}"):
            assert nobody.get("/v1/me", headers={"Authorization": wrong}).status_code == 401
        for _ in range(3):
            call(made["key"], "GET", "/v1/me")
        call(admin, "DELETE", f"/v1/admin/keys/{made['id']}")
        assert call(made["key"], "GET", "/v1/me").status_code == 401
        return [made["key"], invitation, admin, curator, house.curator2.key], nobody.get("/metrics").text


def everything(house: House) -> str:
    """Every row of every table, as text."""
    names = house.sql("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
    with psycopg.connect(house.url("owner")) as connection:
        rows = [connection.execute(f"SELECT t::text FROM {name} t").fetchall() for (name,) in names]
    return "\n".join(text for table in rows for (text,) in table)


def test_an_unexpected_error_is_logged_by_its_place_and_answered_with_its_id(house, monkeypatch):
    def broken(*_):
        raise RuntimeError(f"{CANARY} from a record")

    monkeypatch.setattr("service.jobs.actions.find", broken)
    with lines() as written:
        answer = house.curator.get(f"/v1/jobs/{uuid.uuid4()}", headers={"X-Request-Id": "r-77"})
    assert (answer.status_code, answer.json()["slug"]) == (500, "internal-error")
    assert answer.headers["x-request-id"] == answer.json()["request_id"] == "r-77"
    records = [json.loads(line) for line in written.getvalue().splitlines()]
    [failed] = [record for record in records if record["event"] == "request_failed"]
    assert (failed["kind"], failed["request_id"]) == ("RuntimeError", "r-77")
    assert any(place.startswith("routes.py:") for place in failed["where"])
    assert CANARY not in written.getvalue() + answer.text


def test_a_lost_database_is_not_an_error_of_ours(house, monkeypatch):
    def gone(*_):
        raise OperationalError("SELECT", {}, Exception("gone"))

    monkeypatch.setattr(Session, "scalars", gone)
    answer = house.curator.get("/v1/datasets")
    monkeypatch.undo()
    assert (answer.status_code, answer.json()["slug"], answer.headers["retry-after"]) == (
        503, "not-ready", "2",
    )  # fmt: skip


def test_a_key_is_256_random_bits_shown_once(house):
    path = f"/v1/admin/people/{house.analyst.id}/keys"
    made = [house.analyst.post("/v1/me/keys", json={}).json() for _ in range(3)]
    assert len({each["key"] for each in made}) == 3
    assert all(len(each["key"]) == 3 + 43 for each in made)
    listed = house.admin.get(path)
    assert "sl_" not in listed.text
    stored = house.sql("SELECT digest FROM keys WHERE id = %s", made[0]["id"])
    assert len(stored[0][0]) == 32
