"""The audit log: a row is written before each request runs, and changes to rows are detected."""

import json
import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import psycopg
import pytest
from psycopg import errors

from core import audit
from core.audit import Actor
from core.database import connect
from service import audit as service_audit
from sluice.release.audit_log import check
from tests.service.house import opened
from worker.sweep import trim_audit_log


def rows(house, **filters):
    """The oldest first."""
    answer = house.admin.get("/v1/admin/audit-log", params={"format": "jsonl", "limit": 10_000, **filters})
    assert answer.headers["content-type"] == "application/jsonl"
    return [json.loads(line) for line in answer.text.splitlines()]


def test_a_request_leaves_who_what_from_where_and_when(house):
    began = datetime.now(UTC)
    dataset = house.register(house.curator)["id"]
    answer = house.curator.get(f"/v1/datasets/{dataset}", headers={"X-Request-Id": "asked-1"})
    assert answer.status_code == 200
    seen = rows(house, object=dataset)[-1]
    assert (seen["person"], seen["name"], seen["role"]) == (str(house.curator.id), "curator", "curator")
    assert (seen["action"], seen["objects"]) == ("GET /v1/datasets/{id}", [dataset])
    assert (seen["address"], seen["request"], seen["writer"]) == ("127.0.0.1", "asked-1", "sluice_service")
    assert (seen["status"], seen["answers"], seen["times"]) == (None, None, 1)
    [(key,)] = house.sql("SELECT id FROM keys WHERE person_id = %s", house.curator.id)
    assert seen["key"] == str(key)
    assert began <= datetime.fromisoformat(seen["at"]) <= datetime.now(UTC)


@pytest.mark.parametrize(
    ("who", "status", "verb", "path"),
    [
        ("analyst", 403, "GET", "/v1/datasets/{id}"),
        ("curator2", 404, "GET", "/v1/datasets/{id}"),
        ("curator2", 404, "DELETE", "/v1/datasets/{id}"),
        ("curator", 409, "POST", "/v1/datasets/{id}/seal"),
        ("curator", 422, "POST", "/v1/datasets/{id}/upload/urls"),
    ],
)
def test_what_is_refused_is_in_the_log_with_its_status(house, who, status, verb, path):
    dataset = house.register(house.curator)["id"]
    body = {"size": 5, "sha256": "0" * 64} if path.endswith("seal") else {}
    given = {} if verb in ("GET", "DELETE") else {"json": body}
    answer = house.people[who].request(verb, path.format(id=dataset), **given)
    assert answer.status_code == status, answer.text
    asked, refused = [row for row in rows(house, object=dataset) if row["name"] == who][-2:]
    assert (asked["action"], asked["status"]) == (f"{verb} {path}", None)
    assert (refused["action"], refused["status"]) == (f"{verb} {path}", status)
    assert refused["answers"] == asked["number"]


def test_a_download_names_its_files(house):
    job = house.trained(house.curator, house.ready(house.curator)["id"])
    release = house.published(house.curator, job, audience="everyone")["id"]
    path = f"/v1/releases/{release}/downloads"
    assert house.analyst.post(path, json={"paths": ["manifest.json"]}).status_code == 200
    asked, download = rows(house, object=release)[-2:]
    assert (asked["action"], download["action"]) == ("POST /v1/releases/{id}/downloads", "download")
    assert (download["name"], download["objects"]) == ("analyst", [release, "manifest.json"])
    assert download["answers"] == asked["number"]
    assert rows(house, object="manifest.json")[-1] == download


def test_a_worker_that_opens_records_says_so(house):
    dataset = house.ready(house.curator)["id"]
    job = house.trained(house.curator, dataset)
    opened = rows(house, object=job, action="records opened")
    assert [(row["writer"], row["person"], row["objects"]) for row in opened] == [
        ("sluice_train", None, [job, dataset])
    ]


def test_what_cannot_be_written_into_the_log_is_not_done(house):
    job = house.trained(house.curator, house.ready(house.curator)["id"])
    release = house.published(house.curator, job, audience="everyone")["id"]
    before = house.curator.get("/v1/datasets?limit=200").json()["items"]
    granted = "EXECUTE ON FUNCTION add_audit"
    house.sql(f"REVOKE {granted} FROM sluice_service")
    try:
        answers = [
            house.curator.post("/v1/datasets", json={"name": "d"}),
            house.analyst.post(f"/v1/releases/{release}/downloads", json={"paths": ["manifest.json"]}),
            house.admin.get("/v1/admin/ledger"),
            house.curator.get("/v1/me"),
        ]
    finally:
        house.sql(f"GRANT {granted} TO sluice_service")
    assert {answer.status_code for answer in answers} == {500}
    assert all("url" not in answer.text for answer in answers)
    assert house.curator.get("/v1/datasets?limit=200").json()["items"] == before


def test_downloads_whose_files_cannot_be_written_down_are_not_signed(house, monkeypatch):
    job = house.trained(house.curator, house.ready(house.curator)["id"])
    release = house.published(house.curator, job, audience="everyone")["id"]
    write = audit.write

    def failing(engine, action, *args, **kwargs):
        if action == "download":
            raise RuntimeError("no room")
        return write(engine, action, *args, **kwargs)

    monkeypatch.setattr(audit, "write", failing)
    answer = house.analyst.post(f"/v1/releases/{release}/downloads", json={"paths": ["manifest.json"]})
    assert answer.status_code == 500
    assert "url" not in answer.text


def test_a_redeemed_invitation_is_in_the_log_with_the_key_it_made(house):
    name = f"new-{uuid.uuid4().hex[:6]}"
    invited = house.admin.post("/v1/admin/people", json={"name": name, "role": "analyst"}).json()
    made = house.anonymous.post(
        "/v1/invitations/redeem", json={"invitation": invited["invitation"]["invitation"]}
    ).json()
    redeemed = rows(house, action="invitation redeemed")[-1]
    assert (redeemed["key"], redeemed["address"]) == (made["id"], "127.0.0.1")
    assert redeemed["objects"] == [redeemed["person"], made["id"]]


def test_nothing_a_person_typed_is_in_the_log(house):
    canary = "canary-5e0c"
    house.register(house.curator, name=canary)
    house.curator.get(f"/v1/datasets/{canary}")
    house.curator.get(f"/v1/releases?search={canary}")
    house.curator.post("/v1/quotes", json={"dataset": canary}, headers={"User-Agent": canary})
    assert canary not in json.dumps(rows(house, person="curator"))


def test_a_flood_of_bad_keys_is_two_rows(house, monkeypatch):
    now = [6_000_000.0]
    monkeypatch.setattr(service_audit.time, "time", lambda: now[0])
    before = len(rows(house, action="sign-in"))
    bad = {"Authorization": "Bearer sl_wrong"}
    for _ in range(30):
        assert house.anonymous.get("/v1/me", headers=bad).status_code == 401
    assert len(rows(house, action="sign-in")) == before + 1
    now[0] += 60
    house.curator.get("/v1/me")
    first, rest = rows(house, action="sign-in")[before:]
    assert (first["status"], first["address"], first["times"], first["name"]) == (401, "127.0.0.1", 1, None)
    assert (rest["status"], rest["times"]) == (401, 29)


def test_sources_of_bad_keys_beyond_a_thousand_are_counted_together(house, monkeypatch):
    monkeypatch.setattr(service_audit, "MAX_SOURCES", 3)
    refusals, written = service_audit.Refusals(house.engine), []
    monkeypatch.setattr(audit, "write", lambda *a, actor, times, **_: written.append((actor.address, times)))
    for address in ("a", "b", "c", "d", "e", "f"):
        refusals.count(service_audit.Refusal("sign-in", 401, Actor(address=address)))
    refusals.flush(all=True)
    assert written == [("a", 1), ("b", 1), ("c", 1), (None, 1), (None, 2)]


def test_requests_above_the_rate_are_counted_with_their_key(servers):
    with opened(servers, requests_per_minute=5) as house:
        who = house.person("analyst")
        told = [who.get("/v1/me").status_code for _ in range(12)]
        found = rows(house, person=str(who.id))
    refused = [row for row in found if row["status"] == 429]
    assert len(found) - len(refused) == told.count(200)
    assert (refused[0]["times"], refused[0]["name"]) == (1, who.name)
    assert len(refused) <= 3  # one a minute and one for the rest; a minute may end meanwhile


def test_pages_and_filters(house):
    dataset = house.register(house.curator)["id"]
    for _ in range(5):
        house.curator.get(f"/v1/datasets/{dataset}")
    query = {"object": dataset, "person": "curator", "action": "GET /v1/datasets", "limit": 2}
    numbers, cursor = [], None
    while True:
        page = house.admin.get(
            "/v1/admin/audit-log", params=query | ({"cursor": cursor} if cursor else {})
        ).json()
        numbers += [row["number"] for row in page["items"]]
        cursor = page["next"]
        if cursor is None:
            break
    assert len(numbers) == 5
    assert numbers == sorted(numbers, reverse=True)
    later = (datetime.now(UTC) + timedelta(minutes=1)).isoformat()
    assert rows(house, since=later) == []
    assert len(rows(house, object=dataset, until=later)) == 5
    assert rows(house, person=str(uuid.uuid4())) == []
    assert house.admin.get("/v1/admin/audit-log?cursor=x").status_code == 422


def test_rows_of_many_writers_at_once_are_one_chain(house):
    engine = connect(house.url("train"), pool_size=8)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: audit.write(engine, f"test {n} ä\n\x1b", [n], durable=False), range(200)))
    engine.dispose()
    found = rows(house)
    count, _, broken = check(found)
    assert (broken, count) == (None, len(found))
    assert sum(row["action"].startswith("test ") for row in found) == 200


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE audit_log SET name = 'somebody else' WHERE number = 3",
        "UPDATE audit_log SET at = at + interval '1 s' WHERE number = 3",
        "UPDATE audit_log SET objects = objects || ARRAY['x'] WHERE number = 3",
        "UPDATE audit_log SET times = 2 WHERE number = 3",
        "UPDATE audit_log SET status = 403 WHERE number = 3",
        "UPDATE audit_log SET digest = sha256(digest) WHERE number = 3",
        "DELETE FROM audit_log WHERE number = 3",
        "DELETE FROM audit_log WHERE number <= 3",
    ],
)
def test_what_the_owner_of_the_database_changes_is_found(house, change):
    engine = connect(house.url("sweep"), pool_size=1)
    for n in range(5):
        audit.write(engine, f"test {n}", actor=Actor(name="n"))
    engine.dispose()
    with psycopg.connect(house.url("owner"), autocommit=False) as connection:
        with pytest.raises(errors.RestrictViolation):
            connection.execute(change)
        connection.rollback()
        connection.execute("SET LOCAL session_replication_role = replica")
        connection.execute(change)
        found = as_rows(connection)
        connection.rollback()
    count, _, broken = check(found)
    assert broken is not None
    assert (count, broken.number) in ((2, 3), (len(found), 3))


def as_rows(connection):
    names = "number", "at", "writer", "person", "name", "role", "key", "address", "request", "action"
    more = "objects", "status", "answers", "times", "previous", "digest"
    query = (
        "SELECT number, at, writer, person_id::text, name, role, key_id::text, address, request, action,"
        " objects, status, answers, times, encode(previous, 'hex'), encode(digest, 'hex') FROM audit_log"
        " ORDER BY number"
    )
    found = [dict(zip(names + more, row, strict=True)) for row in connection.execute(query)]
    return [row | {"at": row["at"].astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")} for row in found]


def test_old_rows_go_from_the_old_end_and_the_rest_still_verifies(servers):
    with opened(servers) as house:
        house.curator.get("/v1/me")
        with psycopg.connect(house.url("owner"), autocommit=True) as owner:
            owner.execute("SET session_replication_role = replica")
            for days in range(100, 40, -10):  # six rows of the past, chained as they were then
                owner.execute(
                    "DO $$ DECLARE one audit_log; BEGIN PERFORM"
                    " add_audit(NULL, 'old', NULL, NULL, NULL, NULL, 'test', '{}', NULL, NULL, 1, true);"
                    " SELECT * INTO one FROM audit_log ORDER BY number DESC LIMIT 1;"
                    f" one.at := now() - interval '{days} days'; one.digest := audit_digest(one);"
                    " UPDATE audit_log SET at = one.at, digest = one.digest WHERE number = one.number; END $$"
                )
            owner.execute("UPDATE audit_log SET at = now() - interval '101 days' WHERE name <> 'old'")
            number, head = 0, bytes(32)
            for (number,) in owner.execute("SELECT number FROM audit_log ORDER BY number").fetchall():
                owner.execute("UPDATE audit_log SET previous = %s WHERE number = %s", [head, number])
                [head] = owner.execute(
                    "UPDATE audit_log SET digest = audit_digest(audit_log) WHERE number = %s"
                    " RETURNING digest",
                    [number],
                ).fetchone()
        house.curator.get("/v1/me")
        engine = connect(house.url("sweep"), pool_size=1)
        assert check(rows(house))[2] is None
        all_rows = len(rows(house))
        assert trim_audit_log(engine, 75) > 0
        left = rows(house)
        assert check(left)[2] is None
        assert [row["action"] for row in left].count("test") == 3
        assert left[0]["number"] > 1
        assert trim_audit_log(engine, 75) == 0
        assert (
            trim_audit_log(engine, 0) == 3
        )  # however few days are asked for, those of the last 30 days stay
        kept = rows(house)
        assert check(kept)[2] is None
        assert kept[0]["at"] > (datetime.now(UTC) - timedelta(days=30)).isoformat()
        assert all_rows > len(kept)
        assert check(kept[1:])[2] is not None  # one more is missing, and no row says so
        engine.dispose()


@pytest.mark.parametrize("role", ["service", "train", "publish", "sweep"])
def test_no_role_writes_or_removes_rows_by_itself(house, role):
    house.curator.get("/v1/me")
    for statement in (
        "INSERT INTO audit_log SELECT * FROM audit_log LIMIT 1",
        "UPDATE audit_log SET name = 'x'",
        "DELETE FROM audit_log",
        "TRUNCATE audit_log",
    ):
        with pytest.raises(errors.InsufficientPrivilege):
            house.sql(statement, role=role)
    if role != "sweep":
        with pytest.raises(errors.InsufficientPrivilege):
            house.sql("SELECT trim_audit_log(now())", role=role)
