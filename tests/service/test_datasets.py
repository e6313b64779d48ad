"""Datasets: registration, upload to the store, sealing, deletion, and one budget per content."""

import base64
import hashlib
import os
import uuid
from contextlib import closing
from datetime import datetime
from typing import TYPE_CHECKING

import httpx
import psycopg
import pytest

from core.stores import s3
from core.stores.uploads import UploadGone
from core.unwrap import FileKeys
from sluice.envelope import WrappingKey
from tests.service.house import BUDGET, IMAGES, House

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

PART = 5 << 20  # the least a part may have on AWS, but the last


def stored(house: House, id: str) -> bytes:
    """Reads the private bucket as the train worker does."""
    with closing(_reader(house)) as client:
        [(key,)] = house.sql("SELECT object_key FROM datasets WHERE id = %s", id)
        return client.get_object(Bucket="sluice-private", Key=key)["Body"].read()


def _reader(house: House) -> "S3Client":
    environment = house.servers.environments["train"]
    return s3.client(
        endpoint=house.servers.s3_endpoint,
        region="us-east-1",
        access_key=environment["SLUICE_S3_ACCESS_KEY"],
        secret_key=environment["SLUICE_S3_SECRET_KEY"],
    )


def test_from_declared_to_ready(house):
    curator, content = house.curator, os.urandom(PART) + b"the end"
    dataset = house.register(curator, name="Scans", nominal_size=60_000)
    assert (dataset["state"], dataset["account"], dataset["sealed_at"]) == ("draft", None, None)
    assert dataset["schema"] == IMAGES | {"channels": 1}
    assert dataset["budget"] == BUDGET | {"order": 4}  # the order with most room at (10, 1e-6)
    id = dataset["id"]

    begun = house.begin(curator, id).json()
    assert begun == {"part_bytes": 64 << 20, "most_bytes": 256 << 30, "arrived": []}
    signed = curator.post(f"/v1/datasets/{id}/upload/urls", json={"numbers": [1, 2]}).json()
    assert signed["expires_in"] == 900
    assert [part["number"] for part in signed["parts"]] == [1, 2]
    first, second = (part["url"] for part in signed["parts"])

    # The second part is lost; a client that comes back learns what arrived and sends the rest.
    assert httpx.put(first, content=content[:PART]).status_code == 200
    assert curator.get(f"/v1/datasets/{id}/upload").json()["arrived"] == [1]
    short = house.seal(curator, id, content)
    assert (short.status_code, short.json()["slug"], short.json()["arrived"]) == (409, "size-mismatch", PART)
    assert house.begin(curator, id).json()["arrived"] == [1]
    assert httpx.put(second, content=content[PART:]).status_code == 200
    assert curator.get(f"/v1/datasets/{id}/upload").json()["arrived"] == [1, 2]

    long = curator.post(
        f"/v1/datasets/{id}/seal",
        json={"size": len(content) + 1, "sha256": hashlib.sha256(content).hexdigest()},
    )
    assert (long.status_code, long.json()["arrived"]) == (409, len(content))

    sealed = house.seal(curator, id, content)
    assert (sealed.status_code, sealed.json()["state"], sealed.json()["account"]) == (202, "checking", None)
    assert stored(house, id) == content
    house.checked(id, report={"clamped": 3})
    seen = curator.get(f"/v1/datasets/{id}").json()
    assert (seen["state"], seen["report"], seen["shared"]) == ("ready", {"clamped": 3}, False)
    budget = curator.get(f"/v1/datasets/{id}/budget").json()
    assert budget["id"] == seen["account"]
    assert (budget["granted"], budget["held"], budget["settled"]) == (6144610006, 0, 0)
    assert budget["left"] == {"cost": 6144610006, "epsilon": pytest.approx(10, rel=1e-6)}
    assert budget["spent"] == {"renyi": 0.0, "pld": 0.0}


def test_sealing_again_is_the_same_and_otherwise_refused(house):
    content = os.urandom(10)
    id = house.sealed(house.curator, content)["id"]
    again = house.seal(house.curator, id, content)
    assert (again.status_code, again.json()["state"]) == (202, "checking")
    other = house.seal(house.curator, id, os.urandom(10))
    assert (other.status_code, other.json()["slug"], other.json()["state"]) == (
        409,
        "wrong-state",
        "checking",
    )
    for after in (
        house.curator.post(f"/v1/datasets/{id}/upload"),
        house.curator.get(f"/v1/datasets/{id}/upload"),
    ):
        assert (after.status_code, after.json()["slug"]) == (409, "wrong-state")


def test_a_seal_cut_off_before_the_parts_were_joined_is_finished_by_saying_it_again(house, monkeypatch):
    content = os.urandom(10)
    id = house.register(house.curator)["id"]
    house.upload(house.curator, id, content)
    inbox = house.app.state.uploads
    with monkeypatch.context() as cut:
        cut.setattr(inbox, "complete", _power_cut)
        assert house.seal(house.curator, id, content).status_code == 500
    assert house.curator.get(f"/v1/datasets/{id}").json()["state"] == "checking"
    assert house.seal(house.curator, id, content).status_code == 202
    assert stored(house, id) == content


def _power_cut(*_: object) -> None:
    raise RuntimeError("cut")


def test_nothing_is_signed_or_sealed_before_an_upload_begins(house):
    id = house.register(house.curator)["id"]
    for answer in (
        house.curator.get(f"/v1/datasets/{id}/upload"),
        house.curator.post(f"/v1/datasets/{id}/upload/urls", json={"numbers": [1]}),
        house.seal(house.curator, id, b"x"),
    ):
        assert (answer.status_code, answer.json()["slug"], answer.json()["state"]) == (
            409,
            "wrong-state",
            "draft",
        )
    assert "POST to /upload" in answer.json()["detail"]


def test_an_upload_the_store_gave_up_can_begin_again(house):
    content = os.urandom(10)
    id = house.register(house.curator)["id"]
    house.upload(house.curator, id, content)
    [(key, upload)] = house.sql("SELECT object_key, upload_id FROM datasets WHERE id = %s", id)
    house.app.state.uploads.abandon(key, upload)
    gone = house.seal(house.curator, id, content)
    assert (gone.status_code, gone.json()["slug"]) == (409, "upload-gone")
    assert house.curator.get(f"/v1/datasets/{id}/upload").json()["slug"] == "upload-gone"
    house.upload(house.curator, id, content)  # the way out that was named
    assert house.seal(house.curator, id, content).status_code == 202


def test_a_curator_cannot_tell_others_datasets_from_none(house):
    id = house.register(house.curator)["id"]
    missing = house.curator2.get(f"/v1/datasets/{uuid.uuid4()}").json()
    for answer in (
        house.curator2.get(f"/v1/datasets/{id}"),
        house.curator2.delete(f"/v1/datasets/{id}"),
        house.curator2.post(f"/v1/datasets/{id}/upload"),
        house.begin(house.curator2, id),
        house.curator2.get(f"/v1/datasets/{id}/budget"),
        house.seal(house.curator2, id, b"x"),
    ):
        assert answer.status_code == 404
        assert {k: v for k, v in answer.json().items() if k != "request_id"} == {
            k: v for k, v in missing.items() if k != "request_id"
        }
    assert house.admin.get(f"/v1/datasets/{id}").status_code == 200
    assert id not in [d["id"] for d in house.curator2.get("/v1/datasets?limit=200").json()["items"]]


@pytest.mark.parametrize(
    "again",
    ["re-upload", "rename", "delete and register anew", "declared child", "grandchild"],
)
def test_the_same_people_never_get_a_fresh_budget(again, house):
    content = os.urandom(32)
    first = house.ready(house.curator, content, budget={"epsilon": 2.0, "delta": 1e-6})
    spent = house.job(house.curator, first["id"], target={"epsilon": 0.5}).json()["cost"]
    accounts = house.sql("SELECT count(*) FROM accounts")
    who, others = house.curator, {"budget": {"epsilon": 50.0, "delta": 1e-6}}
    if again == "rename":
        others |= {"name": "something else", "schema": IMAGES | {"classes": ["a", "b"]}}
    if again == "delete and register anew":
        [job] = house.curator.get(f"/v1/jobs?dataset={first['id']}").json()["items"]
        busy = house.curator.delete(f"/v1/datasets/{first['id']}")
        assert (busy.status_code, busy.json()["slug"]) == (409, "wrong-state")
        assert busy.json()["jobs"] == [job["id"]]
        house.job_row(job["id"], state="failed", fault="lost")
        assert house.curator.delete(f"/v1/datasets/{first['id']}").status_code == 202
        gone = house.curator.get(f"/v1/datasets/{first['id']}").json()
        assert (gone["state"], gone["account"]) == ("deleted", first["account"])
        assert house.admin.get(f"/v1/admin/ledger/{first['account']}").json()["account"]["held"] == spent
    if again in ("declared child", "grandchild"):
        content, others = os.urandom(32), others | {"parent": first["id"]}
    second = house.ready(who, content, **others)
    if again == "grandchild":
        others |= {"parent": second["id"]}
        second = house.ready(who, os.urandom(32), **others)
    assert second["account"] == first["account"]
    assert house.sql("SELECT count(*) FROM accounts") == accounts
    budget = who.get(f"/v1/datasets/{second['id']}/budget").json()
    assert (budget["held"], budget["epsilon"]) == (spent, 2.0)


def test_a_parent_must_be_ones_own_and_ready_first(house):
    theirs = house.register(house.curator2)["id"]
    body = {"name": "d", "schema": IMAGES, "nominal_size": 1, "budget": BUDGET, "parent": theirs}
    assert house.curator.post("/v1/datasets", json=body).status_code == 404
    parent = house.register(house.curator)["id"]
    child = house.register(house.curator, parent=parent)["id"]
    house.upload(house.curator, child, b"abc")
    early = house.seal(house.curator, child, b"abc")
    assert (early.status_code, early.json()["slug"]) == (409, "wrong-state")
    assert "parent" in early.json()["detail"]


def test_a_child_keeps_the_relation_of_its_parents_budget(house):
    first = house.ready(house.curator)
    id = house.register(house.curator, relation="replace_one", parent=first["id"])["id"]
    house.upload(house.curator, id, b"abc")
    answer = house.seal(house.curator, id, b"abc")
    assert (answer.status_code, answer.json()["slug"]) == (409, "account-conflict")
    assert "add_remove" in answer.json()["detail"]


def test_a_budget_without_room_is_refused_at_once(house):
    body = {"name": "d", "schema": IMAGES, "nominal_size": 1}
    for budget in ({"epsilon": 0.001, "delta": 1e-9, "order": 2}, {"epsilon": 1e-6, "delta": 1e-10}):
        answer = house.curator.post("/v1/datasets", json=body | {"budget": budget})
        assert (answer.status_code, answer.json()["slug"]) == (422, "invalid-account")


def test_deleting_while_uploading_gives_up_the_upload(house):
    id = house.register(house.curator)["id"]
    house.upload(house.curator, id, b"abc")
    signed = house.curator.post(f"/v1/datasets/{id}/upload/urls", json={"numbers": [2]}).json()["parts"][0]
    assert house.curator.delete(f"/v1/datasets/{id}").status_code == 202
    assert httpx.put(signed["url"], content=b"late").status_code == 404
    assert house.curator.delete(f"/v1/datasets/{id}").status_code == 202  # safe to repeat
    [(key, upload)] = house.sql("SELECT object_key, upload_id FROM datasets WHERE id = %s", id)
    with pytest.raises(UploadGone):
        house.app.state.uploads.complete(key, upload, [])


def test_a_deleted_dataset_says_so_to_its_owner_and_admins_and_nothing_can_be_done_with_it(house):
    dataset = house.ready(house.curator)
    id, address = dataset["id"], f"/v1/datasets/{dataset['id']}"
    before = house.sql("SELECT now()")[0][0]
    deleted = house.curator.delete(address, params={"reason": "asked by a patient"}).json()
    assert (deleted["state"], deleted["removed_at"]) == ("deleted", None)
    assert datetime.fromisoformat(deleted["deleted_at"]) > before
    for who in (house.curator, house.admin):
        seen = who.get(address).json()
        assert (seen["state"], seen["deletion_reason"]) == ("deleted", "asked by a patient")
        assert id not in [one["id"] for one in who.get("/v1/datasets?limit=200").json()["items"]]
        assert id in [one["id"] for one in who.get("/v1/datasets?state=deleted&limit=200").json()["items"]]
    assert house.curator2.get(address).status_code == 404
    house.sql("UPDATE datasets SET removed_at = now() WHERE id = %s", id, role="train")
    assert house.curator.get(address).json()["removed_at"] is not None
    for answer in (
        house.job(house.curator, id),
        house.curator.post(f"{address}/upload"),
        house.seal(house.curator, id, b"x"),
    ):
        assert answer.status_code == 404
    ledger = house.admin.get(f"/v1/admin/ledger/{dataset['account']}").json()
    assert ledger["account"]["id"] == dataset["account"]


@pytest.mark.parametrize("state", ["draft", "uploading", "checking", "held", "ready", "rejected"])
def test_an_admin_removes_a_dataset_in_any_state_and_says_why(state, house):
    make = {
        "draft": house.register,
        "ready": house.ready,
        "uploading": lambda who: began(house, house.register(who)),
    }.get(state, house.sealed)
    id = make(house.curator)["id"]
    if state == "held":
        house.checked(id, few=True)
    if state == "rejected":
        house.sql("UPDATE datasets SET state = 'rejected', fault = 'damaged' WHERE id = %s", id, role="train")
    assert house.curator.get(f"/v1/datasets/{id}").json()["state"] == state
    silent = house.admin.delete(f"/v1/datasets/{id}")
    assert (silent.status_code, silent.json()["slug"]) == (422, "invalid-request")
    answer = house.admin.delete(f"/v1/datasets/{id}", params={"reason": "stuck"})
    assert (answer.status_code, answer.json()["state"]) == (202, "deleted")
    seen = house.curator.get(f"/v1/datasets/{id}").json()
    assert (seen["state"], seen["deletion_reason"]) == ("deleted", "stuck")


def began(house: House, dataset: dict[str, str]) -> dict[str, str]:
    house.upload(house.curator, dataset["id"], b"abc")
    return dataset


def test_the_database_keeps_deletion_and_jobs_apart(house):
    dataset = house.ready(house.curator)["id"]
    job = house.job(house.curator, dataset).json()["id"]
    for role in ("service", "train"):
        with pytest.raises(psycopg.errors.RestrictViolation, match="a job works on this dataset"):
            house.sql("UPDATE datasets SET state = 'deleted' WHERE id = %s", dataset, role=role)
    with pytest.raises(psycopg.errors.RestrictViolation, match="removed once"):
        house.sql("UPDATE datasets SET removed_at = now() WHERE id = %s", dataset, role="train")
    house.job_row(job, state="failed", fault="lost")
    assert house.curator.delete(f"/v1/datasets/{dataset}").status_code == 202
    with pytest.raises(psycopg.errors.RestrictViolation, match="does not go from"):
        house.sql("UPDATE datasets SET state = 'ready' WHERE id = %s", dataset, role="train")
    with pytest.raises(psycopg.errors.RestrictViolation, match="said when it happens"):
        house.sql("UPDATE datasets SET deletion_reason = 'other' WHERE id = %s", dataset)


def test_a_synthesizer_that_was_removed_is_neither_released_nor_gone_on_from(house):
    dataset = house.ready(house.curator)["id"]
    job = house.trained(house.curator, dataset)
    release = house.draft(house.curator, job)["id"]
    house.built(release)
    house.sql("UPDATE jobs SET synthesizer_removed_at = now() WHERE id = %s", job, role="train")
    for answer in (
        house.curator.post("/v1/releases", json={"job": job, "name": "r"}),
        house.curator.post(f"/v1/releases/{release}/rebuild"),
    ):
        assert (answer.status_code, answer.json()["slug"]) == (409, "wrong-state")
        assert "train again" in answer.json()["detail"]


def test_a_file_longer_than_the_site_takes_is_refused_when_it_is_sealed(house):
    id = house.register(house.curator)["id"]
    house.upload(house.curator, id, b"abc")
    body = {"size": (256 << 30) + 1, "sha256": "0" * 64}
    answer = house.curator.post(f"/v1/datasets/{id}/seal", json=body)
    assert (answer.status_code, answer.json()["slug"]) == (413, "upload-too-large")
    assert answer.json()["most_bytes"] == 256 << 30
    assert "SLUICE_UPLOAD_BYTES_MAX" in answer.json()["detail"]


def test_names_are_for_people_and_never_part_of_an_address(house):
    """U3: what a caller calls a dataset is shown back and appears in no key."""
    names = [
        "../../etc/passwd", "/etc/passwd", "..\\..\\x", "%2e%2e%2f", "a/b/c", "C:\\x", "CON", "nul", "~root",
        "x" * 200, "naïve", "数据", "😀", ".", "..", "...", "-rf", "--help", "$(id)", "`id`",
        "a;b",
        "a|b", "a&b", "a b", "'", '"', "<script>", "%00", "\\x00", "=1+1", "@SUM(A1)",
    ]  # fmt: skip
    assert len(names) >= 30
    for name in names:
        dataset = house.register(house.curator, name=name)
        assert dataset["name"] == name
        [(key,)] = house.sql("SELECT object_key FROM datasets WHERE id = %s", dataset["id"])
        assert key.startswith("datasets/")
        assert uuid.UUID(hex=key.removeprefix("datasets/"))
    for name in ("", "a\x00b", "a\nb", "\x7f", "\u202egnp.exe", "x" * 201):
        body = {"name": name, "schema": IMAGES, "nominal_size": 1, "budget": BUDGET}
        assert house.curator.post("/v1/datasets", json=body).status_code == 422


def test_a_lost_store_is_named_and_leaves_the_dataset_as_it_was(house, monkeypatch):
    id = house.register(house.curator)["id"]
    far = s3.client(
        endpoint="http://127.0.0.1:9", region="us-east-1", access_key="a", secret_key="b", attempts=1
    )
    monkeypatch.setattr(house.app.state.uploads, "_client", far)
    answer = house.begin(house.curator, id)
    assert (answer.status_code, answer.json()["slug"], answer.headers["retry-after"]) == (
        503,
        "not-ready",
        "2",
    )
    monkeypatch.undo()
    assert house.curator.get(f"/v1/datasets/{id}").json()["state"] == "draft"
    assert house.begin(house.curator, id).status_code == 200


def test_pages_over_ties_show_every_dataset_once(house):
    who = house.person("curator")
    ids = {house.register(who, name=f"d{i}")["id"] for i in range(7)}
    house.sql("ALTER TABLE datasets DISABLE TRIGGER datasets_keep")
    house.sql("UPDATE datasets SET created_at = '2026-01-01T00:00:00Z' WHERE owner_id = %s", who.id)
    house.sql("ALTER TABLE datasets ENABLE TRIGGER datasets_keep")
    seen, cursor = [], None
    while True:
        query = {"limit": 3} | ({"cursor": cursor} if cursor else {})
        page = who.get("/v1/datasets", params=query).json()
        seen += [dataset["id"] for dataset in page["items"]]
        cursor = page["next"]
        if cursor is None:
            break
        house.register(who, name="new meanwhile")  # newer rows do not shift the pages that follow
    assert len(seen) == 7
    assert set(seen) == ids
    for bad in ("x", "AAAA", "MjAyNi0wMS0wMSB4", "é", "a" * 200):
        answer = who.get("/v1/datasets", params={"cursor": bad})
        assert (answer.status_code, answer.json()["slug"]) == (422, "invalid-request")


# -- encryption


def test_uploads_are_encrypted_for_a_key_that_the_service_does_not_have(house):
    told = house.anonymous.get("/.well-known/sluice-upload-key.json").json()
    assert (told["id"], told["algorithm"]) == (house.app.state.upload_key.id, "RSA-OAEP-256")
    assert WrappingKey(told["public"]).id == told["id"]
    environment = house.servers.environments
    assert FileKeys(environment["train"]["SLUICE_UPLOAD_KEY"]).public.id == told["id"]
    given = [name for name, value in environment["service"].items() if "PRIVATE KEY" in value]
    assert given == []


def test_an_upload_that_is_not_encrypted_is_refused_with_a_way_out(house):
    id = house.register(house.curator)["id"]
    plain = house.curator.post(f"/v1/datasets/{id}/upload")
    assert (plain.status_code, plain.json()["slug"]) == (422, "not-encrypted")
    assert "docs/api.md" in plain.json()["detail"]
    assert house.curator.get(f"/v1/datasets/{id}").json()["state"] == "draft"
    # Begun by a client from before uploads were encrypted.
    house.upload(house.curator, id, b"plain")
    house.sql("UPDATE datasets SET key_id = NULL, wrapped_key = NULL WHERE id = %s", id)
    sealed = house.seal(house.curator, id, b"plain")
    assert (sealed.status_code, sealed.json()["slug"]) == (422, "not-encrypted")
    with pytest.raises(psycopg.errors.RestrictViolation, match="sealed with its key"):
        house.sql(
            "UPDATE datasets SET state = 'checking', size = 5, sha256 = %s, sealed_at = now() WHERE id = %s",
            bytes(32), id, role="service",
        )  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "status", "slug"),
    [
        ({"key_id": "0" * 32}, 409, "wrong-upload-key"),
        ({"wrapped_key": base64.b64encode(bytes(512)).decode()}, 409, "wrong-upload-key"),
        ({"wrapped_key": base64.b64encode(bytes(256)).decode()}, 422, "invalid-request"),
        ({"wrapped_key": "!" * 512}, 422, "invalid-request"),
        ({"wrapped_key": "A" * 513}, 422, "invalid-request"),
        ({"key_id": "x"}, 422, "invalid-request"),
        ({"key": "more"}, 422, "invalid-request"),
    ],
)
def test_a_key_that_is_none_is_refused(house, changed, status, slug):
    id = house.register(house.curator)["id"]
    good = {
        "key_id": house.app.state.upload_key.id,
        "wrapped_key": base64.b64encode(bytes(384)).decode(),
    }
    answer = house.curator.post(f"/v1/datasets/{id}/upload", json=good | changed)
    assert (answer.status_code, answer.json()["slug"]) == (status, slug)


def test_parts_under_two_keys_do_not_make_one_file(house):
    """A client that lost its key begins with another: the parts from before are given up."""
    id = house.register(house.curator)["id"]
    house.upload(house.curator, id, b"x" * PART)
    assert house.begin(house.curator, id).json()["arrived"] == [1]
    [(key, before)] = house.sql("SELECT object_key, upload_id FROM datasets WHERE id = %s", id)
    other = os.urandom(384)
    assert house.begin(house.curator, id, other).json()["arrived"] == []
    assert house.sql("SELECT wrapped_key FROM datasets WHERE id = %s", id) == [(other,)]
    with pytest.raises(UploadGone):
        house.app.state.uploads.parts(key, before)


def test_deleting_a_dataset_destroys_its_key(house):
    for state in ("uploading", "checking", "ready"):
        if state == "uploading":
            id = house.register(house.curator)["id"]
            house.upload(house.curator, id, b"x")
        else:
            id = (house.sealed if state == "checking" else house.ready)(house.curator)["id"]
        assert house.sql("SELECT state, wrapped_key FROM datasets WHERE id = %s", id) == [(state, bytes(384))]
        assert house.curator.delete(f"/v1/datasets/{id}").status_code == 202
        [(key, wrapped)] = house.sql("SELECT key_id, wrapped_key FROM datasets WHERE id = %s", id)
        assert wrapped is None
        assert key == house.app.state.upload_key.id  # this tells it from one that was never encrypted


def test_a_key_goes_with_the_state_whoever_deletes_and_is_otherwise_fixed(house):
    id = house.ready(house.curator)["id"]
    for change in ("wrapped_key = NULL", f"wrapped_key = '\\x{'01' * 384}'", "key_id = 'x'"):
        with pytest.raises(psycopg.errors.RestrictViolation):
            house.sql(f"UPDATE datasets SET {change} WHERE id = %s", id, role="service")
    for role in ("train", "publish", "sweep"):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            house.sql("UPDATE datasets SET wrapped_key = NULL WHERE id = %s", id, role=role)
    house.sql("UPDATE datasets SET state = 'deleted' WHERE id = %s", id, role="service")
    assert house.sql("SELECT wrapped_key FROM datasets WHERE id = %s", id) == [(None,)]


@pytest.mark.parametrize(
    "mark", ["\x1b[2J", "\x9b31m", "\x7f", "\u202e", "\u2066", "\u200f", "\u2028", "\r", "\n"]
)
def test_a_name_that_a_terminal_would_obey_is_refused(house, mark):
    body = {"name": f"a{mark}b", "schema": IMAGES, "nominal_size": 1, "budget": BUDGET}
    answer = house.curator.post("/v1/datasets", json=body)
    assert (answer.status_code, answer.json()["slug"]) == (422, "invalid-request")
    assert house.register(house.curator, name="Ärzte – 医院 أطباء")["name"] == "Ärzte – 医院 أطباء"
