"""Releases: approval of a digest by a second person, visibility, signed downloads, withdrawal."""

import base64
import hashlib
import os
import uuid
from concurrent.futures import ThreadPoolExecutor

import httpx
import psycopg
import pytest

from core.stores import s3
from core.stores.public import SIGNED_SECONDS, public_key, review_key
from tests.service.house import STATED, opened, signed_earlier


@pytest.fixture(scope="module")
def job(shared_house):
    shared_house.witnessed()
    return shared_house.trained(shared_house.curator, shared_house.ready(shared_house.curator)["id"])


def act(who, id, verb, **body):
    answer = who.post(f"/v1/releases/{id}/{verb}", json=body or None)
    return answer.status_code, answer.json().get("slug") or answer.json()["state"]


@pytest.fixture
def reviewed(house, job):
    id = house.draft(house.curator, job)["id"]
    return id, house.built(id)


# ---- drafting


def test_a_draft_says_all_that_will_be_public_and_costs_nothing(house, job):
    account = house.curator.get(f"/v1/jobs/{job}").json()["account"]
    before = house.balance(account)
    told = house.draft(
        house.curator, job, count=30, seed=7, note="for teaching", formats=["png", "npz", "png"]
    )
    assert told["state"] == "building"
    assert (told["count"], told["seed"], told["formats"], told["reviewers"]) == (30, 7, ["npz", "png"], 2)
    assert told["author"] == str(house.curator.id)
    assert told["progress"] == {"done": 0, "count": 30}
    assert house.balance(account) == before


def test_a_seed_is_drawn_when_none_is_given(house, job):
    assert house.draft(house.curator, job)["seed"] != house.draft(house.curator, job)["seed"]


def test_the_same_key_gives_the_same_draft(house, job):
    body, key = {"job": job, "name": "once"}, {"Idempotency-Key": uuid.uuid4().hex}
    first, second = (house.curator.post("/v1/releases", json=body, headers=key).json() for _ in range(2))
    assert first["id"] == second["id"]


def test_only_a_trained_job_of_ones_own_is_released(house, job):
    house.witnessed()
    dataset = house.ready(house.curator)["id"]
    queued = house.job(house.curator, dataset).json()["id"]
    answer = house.curator.post("/v1/releases", json={"job": queued, "name": "r"})
    assert (answer.status_code, answer.json()["slug"]) == (409, "wrong-state")
    assert house.curator2.post("/v1/releases", json={"job": job, "name": "r"}).status_code == 404


def test_the_database_itself_knows_no_release_of_an_unpaid_job(house):
    house.witnessed()
    queued = house.job(house.curator, house.ready(house.curator)["id"]).json()["id"]
    insert = (
        "INSERT INTO releases (id, job_id, author_id, name, note, licence, count, seed, formats, audience,"
        " reviewers, state) VALUES (%s, %s, %s, 'r', '', '', 1, 1, '{npz}', 'everyone', 2, 'building')"
    )
    with pytest.raises(psycopg.errors.RestrictViolation, match="trained and settled"):
        house.sql(insert, uuid.uuid4(), queued, house.curator.id, role="service")


@pytest.mark.parametrize(
    "odd",
    [
        {"count": 0}, {"count": 10**6 + 1}, {"seed": -1}, {"formats": []}, {"formats": ["exe"]},
        {"audience": "world"}, {"name": ""}, {"name": "a\nb"}, {"epsilon": 1}, {"note": "x" * 3000},
    ],
)  # fmt: skip
def test_odd_drafts_are_refused(odd, house, job):
    answer = house.curator.post("/v1/releases", json={"job": job, "name": "r"} | odd)
    assert (answer.status_code, answer.json()["slug"]) == (422, "invalid-request")


# ---- review


def test_four_eyes_then_published(house, reviewed):
    id, digest = reviewed
    assert act(house.curator, id, "publish") == (409, "not-approved")
    assert act(house.curator, id, "approve", digest=digest) == (403, "author-cannot-approve")
    assert act(house.mate, id, "approve", digest=digest) == (200, "approved")
    assert act(house.mate, id, "approve", digest=digest) == (200, "approved")  # safe to repeat
    [approval] = house.curator.get(f"/v1/releases/{id}").json()["approvals"]
    assert (approval["person"], approval["digest"]) == (str(house.mate.id), digest)
    assert act(house.mate, id, "publish") == (403, "forbidden")
    assert act(house.curator, id, "publish") == (202, "publishing")
    house.put(id)
    assert act(house.curator, id, "publish") == (202, "published")


def test_publishing_again_begins_a_new_count_of_attempts(house, reviewed):
    id, digest = reviewed
    assert act(house.admin, id, "approve", digest=digest) == (200, "approved")
    assert act(house.curator, id, "publish") == (202, "publishing")
    house.sql(
        "UPDATE releases SET attempts = 21, fault = 'lost', lease_until = now() + interval '1 h'"
        " WHERE id = %s",
        id, role="publish",
    )  # fmt: skip
    assert act(house.curator, id, "publish") == (202, "publishing")
    assert house.sql("SELECT attempts, lease_until FROM releases WHERE id = %s", id) == [(0, None)]


@pytest.mark.parametrize("role", ["service", "publish"])
def test_temporary_tables_do_not_stand_in_for_a_review(role, house, reviewed):
    """An author's own approval, and publishing without one, with tables of the session's own making."""
    id, digest = reviewed
    with psycopg.connect(house.url("owner"), autocommit=True) as owner:
        owner.execute(
            f"GRANT TEMPORARY ON DATABASE {owner.info.dbname} TO PUBLIC"
        )  # as if it was never revoked
    approve = (
        "INSERT INTO public.approvals (release_id, digest, person_id, note)"
        " VALUES (%(id)s, decode(%(digest)s, 'hex'), %(author)s, '')"
    )
    publish = "UPDATE public.releases SET state = 'approved' WHERE id = %(id)s"
    given = {"id": id, "digest": digest, "author": house.curator.id, "other": house.mate.id}
    refusals = (psycopg.errors.RestrictViolation, psycopg.errors.InsufficientPrivilege)
    for statement in (approve, publish):
        with psycopg.connect(house.url(role)) as connection:
            connection.execute("CREATE TEMPORARY TABLE releases (LIKE public.releases)")
            connection.execute("CREATE TEMPORARY TABLE approvals (LIKE public.approvals INCLUDING DEFAULTS)")
            connection.execute(
                "INSERT INTO pg_temp.releases SELECT * FROM public.releases WHERE id = %(id)s", given
            )
            connection.execute("UPDATE pg_temp.releases SET author_id = %(other)s", given)
            connection.execute(approve.replace("public", "pg_temp").replace("author", "other"), given)
            connection.execute("SET search_path = pg_temp, public")
            with pytest.raises(refusals):
                connection.execute(statement, given)
    assert house.curator.get(f"/v1/releases/{id}").json()["state"] == "in_review"


def test_an_approval_is_of_one_digest_and_a_new_build_voids_it(house, reviewed):
    id, digest = reviewed
    assert act(house.admin, id, "approve", digest="0" * 64) == (409, "approval-of-another-bundle")
    assert act(house.admin, id, "approve", digest=digest) == (200, "approved")
    assert act(house.curator, id, "rebuild") == (202, "building")
    assert act(house.admin, id, "approve", digest=digest) == (409, "wrong-state")
    other = house.built(id)
    assert act(house.curator, id, "publish") == (409, "not-approved")
    assert act(house.admin, id, "approve", digest=digest) == (409, "approval-of-another-bundle")
    assert act(house.admin, id, "approve", digest=other) == (200, "approved")


def test_not_even_the_publisher_can_publish_what_nobody_approved(house, reviewed):
    id, _ = reviewed
    for state in ("approved", "publishing", "published"):
        with pytest.raises(psycopg.errors.RestrictViolation):
            house.sql("UPDATE releases SET state = %s WHERE id = %s", state, id, role="publish")


def test_an_approval_by_the_author_is_refused_by_the_database_too(house, reviewed):
    id, digest = reviewed
    approve = "INSERT INTO approvals (release_id, digest, person_id, note) VALUES (%s, %s, %s, '')"
    with pytest.raises(psycopg.errors.RestrictViolation, match="author"):
        house.sql(approve, id, bytes.fromhex(digest), house.curator.id, role="service")
    with pytest.raises(psycopg.errors.RestrictViolation, match="under review"):
        house.sql(approve, id, bytes(32), house.mate.id, role="service")


def test_a_bundle_under_review_is_not_exchanged(house, reviewed):
    id, _ = reviewed
    with pytest.raises(psycopg.errors.RestrictViolation, match="stays as it was built"):
        house.sql("UPDATE releases SET digest = %s WHERE id = %s", os.urandom(32), id, role="publish")


def test_approval_and_rebuild_at_once_never_leave_an_approved_old_bundle(house, job):
    for _ in range(10):
        id = house.draft(house.curator, job)["id"]
        digest = house.built(id)
        with ThreadPoolExecutor(2) as pool:
            yes = pool.submit(act, house.mate, id, "approve", digest=digest)
            anew = pool.submit(act, house.curator, id, "rebuild")
            assert anew.result() == (202, "building")
            assert yes.result() in ((200, "approved"), (409, "wrong-state"))
        assert house.curator.get(f"/v1/releases/{id}").json()["state"] == "building"


def test_a_site_of_one_person_approves_its_own_and_the_release_says_so(servers):
    with opened(servers, reviewers=1) as alone:
        alone.witnessed()
        job = alone.trained(alone.curator, alone.ready(alone.curator)["id"])
        id = alone.draft(alone.curator, job)["id"]
        digest = alone.built(id)
        assert act(alone.curator, id, "publish") == (409, "not-approved")  # still a deliberate yes
        assert act(alone.curator, id, "approve", digest=digest) == (200, "approved")
        assert act(alone.curator, id, "publish") == (202, "publishing")
        assert alone.curator.get(f"/v1/releases/{id}").json()["reviewers"] == 1


def test_a_discarded_draft_comes_to_nothing(house, reviewed):
    id, digest = reviewed
    assert act(house.curator, id, "discard") == (200, "discarded")
    for verb, body in (("approve", {"digest": digest}), ("publish", {}), ("rebuild", {})):
        who = house.admin if verb == "approve" else house.curator
        assert act(who, id, verb, **body) == (409, "wrong-state")


# ---- analysts


def test_an_analyst_sees_what_is_for_everyone_or_for_them(house, job):
    analyst, other = house.person("analyst"), house.person("analyst")
    secret = house.published(house.curator, job, name=f"granted {uuid.uuid4().hex}")
    open = house.published(house.curator, job, name=f"open {uuid.uuid4().hex}", audience="everyone")
    house.draft(house.curator, job, audience="everyone")

    def seen(who):
        return {release["id"] for release in who.get("/v1/releases?limit=200").json()["items"]}

    assert open["id"] in seen(other)
    assert secret["id"] not in seen(other)
    assert other.get(f"/v1/releases/{secret['id']}").status_code == 404
    assert act(house.curator, secret["id"], "readers", person=str(analyst.id))[0] == 200
    assert secret["id"] in seen(analyst)
    assert secret["id"] not in seen(other)
    assert house.curator.delete(f"/v1/releases/{secret['id']}/readers/{analyst.id}").status_code == 204
    assert secret["id"] not in seen(analyst)
    assert all(r["state"] == "published" for r in other.get("/v1/releases").json()["items"])


def test_an_analyst_is_not_told_of_the_job_or_the_approvers(house, job):
    id = house.published(house.curator, job, audience="everyone")["id"]
    told = house.analyst.get(f"/v1/releases/{id}").json()
    assert (told["job"], told["approvals"]) == (None, [])
    assert job not in house.analyst.get("/v1/releases?limit=200").text


def test_search_finds_by_name_and_note_and_takes_signs_literally(house, job):
    mark = uuid.uuid4().hex
    by_name = house.published(house.curator, job, name=f"Scans {mark} 100%", audience="everyone")["id"]
    by_note = house.published(house.curator, job, name="x", note=f"see {mark}_", audience="everyone")["id"]

    def found(text):
        items = house.analyst.get("/v1/releases", params={"search": text}).json()["items"]
        return {release["id"] for release in items}

    assert found(mark.upper()) == {by_name, by_note}
    assert found(f"{mark} 100%") == {by_name}
    assert found(f"{mark}%") == set()
    assert found(f"{mark}_") == {by_note}


def test_preview_and_files_are_there_for_reviewers_and_later_for_readers(house, job):
    id = house.draft(house.curator, job, audience="everyone")["id"]
    assert house.mate.get(f"/v1/releases/{id}/preview").json()["slug"] == "wrong-state"
    digest = house.built(id)
    answer = house.mate.get(f"/v1/releases/{id}/preview")
    assert (answer.headers["content-type"], answer.content) == ("image/png", b"a picture")
    told = house.mate.get(f"/v1/releases/{id}").json()
    assert told["digest"] == digest
    assert told["privacy"] == STATED
    assert (told["owners"], told["together"]) == ([STATED], None)
    assert house.analyst.get(f"/v1/releases/{id}/preview").status_code == 404
    assert act(house.curator, id, "downloads", paths=["manifest.json"]) == (409, "wrong-state")


def test_a_relay_is_shown_owner_by_owner_with_their_sum(house, job):
    other = STATED | {"epsilon": {"renyi": 4.5, "pld": None}}
    id = house.draft(house.curator, job)["id"]
    assert house.curator.get(f"/v1/releases/{id}").json()["owners"] == []
    house.built(id, privacy=STATED | {"others": [other]})
    told = house.curator.get(f"/v1/releases/{id}").json()
    assert told["owners"] == [STATED, other]
    assert told["together"] == {"epsilon": pytest.approx(0.9 + 4.5), "delta": 2e-6}


# ---- where it comes from

ADAPT = {"kind": "adapt", "records": 100, "batch": 20, "directions": 4, "dim": 6, "steps": 5}
RELAY = {"kind": "gswgan", "parts": 10, "panel": 10, "images": 4, "steps": 5, "recipe": "fast-cpu"}


def test_an_approver_sees_job_dataset_and_source_of_another_curator(house):
    target = house.ready(house.curator, name="scans", nominal_size=1234)
    source = house.ready(house.curator, name="pictures", public=True)
    for dataset in (target, source):
        house.sql("UPDATE datasets SET report = '{\"clamped\": 7}' WHERE id = %s", dataset["id"])
    job = house.trained(house.curator, target["id"], plan=ADAPT, source=source["id"])
    house.sql("INSERT INTO diagnostics VALUES (%s, 1, '{\"loss\": 7}', '<svg/>')", job, role="train")
    id = house.draft(house.curator, job)["id"]
    digest = house.built(id)
    [(account,)] = house.sql("SELECT account_id FROM datasets WHERE id = %s", target["id"])
    confirm_larger_budget(house, account, 12.0)
    own = house.curator.get(f"/v1/jobs/{job}").json()
    for who in (house.mate, house.admin, house.curator):
        answer = who.get(f"/v1/releases/{id}/review")
        told = answer.json()
        assert (told["release"], told["digest"], told["state"]) == (id, digest, "in_review")
        assert (told["author"], told["earlier"]) == ("curator", [])
        for name in ("id", "plan", "event", "epsilon", "cost", "created_at", "finished_at"):
            assert told["job"][name] == own[name]
        assert told["job"]["dataset"] == card(target, epsilon=12.0)
        assert told["job"]["source"] == card(source)
        for measured in ("clamped", "loss", "report", "svg"):  # what was measured is for its owner
            assert measured not in answer.text
    assert house.analyst.get(f"/v1/releases/{id}/review").status_code == 403
    assert house.mate.get(f"/v1/releases/{uuid.uuid4()}/review").status_code == 404


def confirm_larger_budget(house, account, epsilon):
    body = {"epsilon": epsilon, "reason": "a second cohort"}
    path = f"/v1/admin/ledger/{account}/grants"
    grant = house.curator.post(path, json=body).json()["id"]
    assert house.admin.post(f"{path}/{grant}/confirm").status_code == 200


def card(dataset, owner="curator", **budget):
    """What was declared, and the budget in force."""
    same = {name: dataset[name] for name in ("id", "name", "schema", "nominal_size", "relation", "public")}
    return same | {"owner": owner, "budget": dataset["budget"] | budget}


def test_an_approver_sees_every_job_of_a_relay(house):
    datasets = [house.ready(house.curator), house.ready(house.curator2)]
    first = house.trained(house.curator, datasets[0]["id"], plan=RELAY, shared=True)
    last = house.trained(house.curator2, datasets[1]["id"], plan=RELAY, after=first)
    id = house.draft(house.curator2, last)["id"]
    told = house.admin.get(f"/v1/releases/{id}/review").json()
    assert (told["job"]["id"], told["job"]["dataset"]) == (last, card(datasets[1], "curator2"))
    [earlier] = told["earlier"]
    assert (earlier["id"], earlier["dataset"]) == (first, card(datasets[0]))
    assert told["digest"] is None


# ---- links


@pytest.fixture(scope="module")
def publisher(shared_house):
    house = shared_house
    keys = house.servers.environments["publish"]
    publisher = s3.client(
        endpoint=house.servers.s3_endpoint, region="us-east-1", access_key=keys["SLUICE_S3_ACCESS_KEY"],
        secret_key=keys["SLUICE_S3_SECRET_KEY"],
    )  # fmt: skip
    yield publisher
    publisher.close()


@pytest.fixture
def shelved(house, job, publisher):
    """A published release with a real object behind its one file."""
    release = house.published(house.curator, job, audience="everyone")
    key = public_key(release["id"], bytes.fromhex(release["digest"]), "manifest.json")
    publisher.put_object(Bucket="sluice-public", Key=key, Body=b"{}")
    return release["id"], key, publisher


def signed(house, id):
    answer = house.analyst.post(f"/v1/releases/{id}/downloads", json={"paths": ["manifest.json"]}).json()
    assert answer["expires_in"] == 900
    [file] = answer["files"]
    return file


def test_a_link_gives_the_file_and_any_range_of_it(house, shelved):
    file = signed(house, shelved[0])
    whole = httpx.get(file["url"])
    assert (whole.status_code, whole.content) == (200, b"{}")
    assert hashlib.sha256(whole.content).hexdigest() == file["sha256"]
    part = httpx.get(file["url"], headers={"Range": "bytes=1-"})
    assert (part.status_code, part.content) == (206, b"}")
    assert "X-Amz-Expires=900" in file["url"]


def test_a_link_is_good_for_nothing_else(house, shelved):
    id, key, publisher = shelved
    url = httpx.URL(signed(house, id)["url"])
    other = key.replace("manifest.json", "other.json")
    publisher.put_object(Bucket="sluice-public", Key=other, Body=b"other")

    def at(path):
        return url.copy_with(path=path)

    tries = {
        "another key": httpx.get(at(f"/sluice-public/{other}")),
        "another bucket": httpx.get(at(f"/sluice-private/{key}")),
        "the vault": httpx.get(at(f"/sluice-vault/{key}")),
        "a list": httpx.get(at("/sluice-public/")),
        "a list by query": httpx.get(at("/sluice-public").copy_merge_params({"list-type": "2"})),
        "climbing": httpx.get(at(f"/sluice-public/{key}/../other.json")),
        "put": httpx.put(url, content=b"x"),
        "delete": httpx.delete(url),
        "another date": httpx.get(url.copy_merge_params({"X-Amz-Date": "20200101T000000Z"})),
        "longer": httpx.get(url.copy_merge_params({"X-Amz-Expires": "604800"})),
        "no signature": httpx.get(url.copy_with(query=None)),
        "another key id": httpx.get(
            url.copy_merge_params({"X-Amz-Credential": "AKIA/20260101/x/s3/aws4_request"})
        ),
    }
    assert {name: answer.status_code for name, answer in tries.items()} == dict.fromkeys(tries, 403)
    assert httpx.post(url, content=b"x").status_code in (403, 405)
    assert httpx.get(url).content == b"{}"  # nothing was changed by any of it


def test_a_reviewer_gets_the_bundle_under_review_and_nobody_else_does(house, job, publisher):
    id = house.draft(house.curator, job, audience="everyone")["id"]
    path, body = f"/v1/releases/{id}/review/downloads", {"paths": ["manifest.json"]}
    assert house.mate.post(path, json=body).json()["slug"] == "wrong-state"  # not built yet
    digest = house.built(id)
    key = review_key(id, 1, bytes.fromhex(digest), "manifest.json")
    publisher.put_object(Bucket="sluice-public", Key=key, Body=b"{}")
    for who in (house.mate, house.admin, house.curator):
        [file] = who.post(path, json=body).json()["files"]
        found = httpx.get(file["url"])
        assert (found.status_code, hashlib.sha256(found.content).hexdigest()) == (200, file["sha256"])
    told = [who.post(path, json=body).status_code for who in (house.curator2, house.analyst)]
    assert told == [404, 403]
    for odd in ("attestation.json", "../manifest.json"):
        assert house.mate.post(path, json={"paths": [odd]}).status_code == 404
    assert act(house.mate, id, "approve", digest=digest) == (200, "approved")
    assert house.mate.post(path, json=body).status_code == 200
    assert act(house.curator, id, "publish") == (202, "publishing")
    assert house.mate.post(path, json=body).json()["slug"] == "wrong-state"
    house.put(id)
    publisher.delete_object(Bucket="sluice-public", Key=key)
    assert httpx.get(file["url"]).status_code in (403, 404)


def test_a_bundle_built_anew_is_another_one_to_review(house, job):
    id = house.draft(house.curator, job)["id"]
    path, body = f"/v1/releases/{id}/review/downloads", {"paths": ["manifest.json"]}
    digest = house.built(id)
    first = house.mate.post(path, json=body).json()["files"][0]["url"]
    assert act(house.curator, id, "rebuild") == (202, "building")
    assert house.mate.post(path, json=body).json()["slug"] == "wrong-state"
    house.built(id, bytes.fromhex(digest))
    second = house.mate.post(path, json=body).json()["files"][0]["url"]
    assert f"/review/{id}/1/{digest}/" in first
    assert f"/review/{id}/2/{digest}/" in second
    house.sql("DELETE FROM review_copies WHERE release_id = %s", id)  # as of a bundle of an older version
    assert "rebuild it" in house.mate.post(path, json=body).json()["detail"]


@pytest.mark.parametrize(("age", "status"), [(SIGNED_SECONDS - 300, 200), (SIGNED_SECONDS + 1, 403)])
def test_a_link_expires(age, status, house, shelved):
    with signed_earlier(age):
        url = house.app.state.downloads.sign_download(shelved[1])
    assert f"X-Amz-Expires={SIGNED_SECONDS}&" in url
    assert httpx.get(url).status_code == status


def test_paths_that_are_none_of_the_release_are_not_signed(house, shelved):
    for path in ("../x", "attestation.json/..", "data/x", "/manifest.json", "manifest.json\x00"):
        answer = house.analyst.post(f"/v1/releases/{shelved[0]}/downloads", json={"paths": [path]})
        assert answer.status_code == 404, path
        assert "url" not in answer.text


def test_after_withdrawal_nothing_is_signed_and_old_links_are_dead_once_removed(house, shelved):
    id, key, publisher = shelved
    url = signed(house, id)["url"]
    assert act(house.curator2, id, "withdraw", reason="mistake") == (403, "forbidden")
    assert act(house.curator, id, "withdraw", reason="a mistake in the schema") == (202, "withdrawing")
    assert act(house.analyst, id, "downloads", paths=["manifest.json"]) == (410, "release-withdrawn")
    assert house.analyst.get(f"/v1/releases/{id}/preview").status_code == 410
    publisher.delete_object(Bucket="sluice-public", Key=key)
    assert httpx.get(url).status_code in (403, 404)  # AWS says 403 of what is not there to who may not list
    told = house.analyst.get(f"/v1/releases/{id}").json()
    assert (told["state"], told["reason"], told["files"], told["manifest"]) == (
        "withdrawing", "a mistake in the schema", [], None,
    )  # fmt: skip


def test_withdrawing_gives_nothing_back(house, job):
    account = house.curator.get(f"/v1/jobs/{job}").json()["account"]
    id = house.published(house.curator, job)["id"]
    before = house.balance(account)
    assert act(house.curator, id, "withdraw", reason="x") == (202, "withdrawing")
    house.sql("UPDATE releases SET state = 'withdrawn' WHERE id = %s", id, role="publish")
    assert house.balance(account) == before
    for verb, body in (("publish", {}), ("rebuild", {}), ("approve", {"digest": "0" * 64})):
        who = house.admin if verb == "approve" else house.curator
        assert act(who, id, verb, **body) == (409, "wrong-state")


# ---- keys, lists, diagnostics


def test_keys_and_the_newest_list_are_public(house):
    raw = os.urandom(32)
    house.sql("INSERT INTO signing_keys (id, public) VALUES (%s, %s)", raw.hex()[:16], raw, role="publish")
    [key] = [
        key
        for key in house.anonymous.get("/.well-known/sluice-keys.json").json()["keys"]
        if key["id"] == raw.hex()[:16]
    ]
    assert base64.b64decode(key["public"]) == raw
    for number in (101, 102):
        house.sql("INSERT INTO revocations VALUES (%s, %s)", number, f'{{"n":{number}}}\n', role="publish")
    assert house.anonymous.get("/.well-known/sluice-revocations.json").text == '{"n":102}\n'
    for table in ("signing_keys", "revocations", "approvals"):
        with pytest.raises(psycopg.Error):
            house.sql(f"DELETE FROM {table}", role="publish")


def test_diagnostics_are_for_the_owner_of_the_job(house, job):
    assert house.curator.get(f"/v1/jobs/{job}/diagnostics").status_code == 404
    house.sql("INSERT INTO diagnostics VALUES (%s, 1, '{\"loss\": 1}', '<svg/>')", job, role="train")
    for format, text in (("jsonl", '{"loss": 1}'), ("svg", "<svg/>")):
        told = house.curator.get(f"/v1/jobs/{job}/diagnostics?format={format}")
        assert (told.status_code, told.text) == (200, text)
    assert house.curator2.get(f"/v1/jobs/{job}/diagnostics").status_code == 404
    assert house.admin2.get(f"/v1/jobs/{job}/diagnostics").status_code == 403
    assert house.admin.get(f"/v1/jobs/{job}/diagnostics").status_code == 403
    assert house.analyst.get(f"/v1/jobs/{job}/diagnostics").status_code == 403


def test_diagnostics_are_not_for_the_other_owners_of_a_relay(house):
    """Neither for who went before nor for who came after, though both gave records to one generator."""
    jobs, before = [], None
    for who in (house.curator, house.curator2):
        dataset = house.ready(who)["id"]
        before = house.trained(who, dataset, plan=RELAY, shared=True, after=before)
        house.sql("INSERT INTO diagnostics VALUES (%s, 1, '{}', '<svg/>')", before, role="train")
        jobs.append(before)
    for who, told in ((house.curator, [200, 404]), (house.curator2, [404, 200])):
        assert [who.get(f"/v1/jobs/{job}/diagnostics").status_code for job in jobs] == told


def test_diagnostics_are_off_unless_the_site_says_so(servers):
    """Also those that were kept while they were on; the owner is told what turns them on."""
    with opened(servers) as quiet:
        quiet.witnessed()
        job = quiet.trained(quiet.curator, quiet.ready(quiet.curator)["id"])
        quiet.sql("INSERT INTO diagnostics VALUES (%s, 1, '{\"loss\": 1}', '<svg/>')", job, role="train")
        told = quiet.curator.get(f"/v1/jobs/{job}/diagnostics")
        assert (told.status_code, told.json()["slug"]) == (404, "not-found")
        assert "off at this site" in told.json()["detail"]
        assert "SLUICE_DIAGNOSTICS=true" in told.json()["detail"]
        assert "loss" not in told.text
        stranger = quiet.curator2.get(f"/v1/jobs/{job}/diagnostics").json()["detail"]
        assert stranger == "No job that you may see has this id."


def test_an_admin_is_not_told_the_counts_of_a_dataset(house):
    dataset = house.sealed(house.curator)["id"]
    house.checked(dataset, report={"clamped": 7})
    assert house.curator.get(f"/v1/datasets/{dataset}").json()["report"] == {"clamped": 7}
    assert house.admin.get(f"/v1/datasets/{dataset}").json()["report"] is None
