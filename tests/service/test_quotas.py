"""Quotas of teams, also under concurrent requests."""

import hashlib
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from core.stores.uploads import PART_BYTES
from tests.service.house import PLAN, opened


@pytest.fixture
def people(house):
    """Two people of a new team, and its id."""
    one, other = house.person("curator"), house.person("curator")
    return one, other, house.team(one, other)


def limit(house, team, **quotas):
    answer = house.admin.post(f"/v1/admin/teams/{team}/quotas", json=quotas)
    assert answer.status_code == 200, answer.text
    return answer.json()


def sign(house, who, id, size, numbers=(1,)):
    assert house.begin(who, id).status_code == 200
    return who.post(f"/v1/datasets/{id}/upload/urls", json={"numbers": list(numbers), "size": size})


def refused(answer, used, limit):
    told = answer.json()
    assert (answer.status_code, told["slug"], told["used"], told["limit"]) == (
        409, "quota-exceeded", used, limit,
    )  # fmt: skip
    assert "ask an admin" in told["detail"]


# ---- bytes


def test_an_upload_counts_before_its_first_part_is_signed(house, people):
    one, other, team = people
    limit(house, team, bytes=100)
    first, second = house.register(one)["id"], house.register(other)["id"]
    assert sign(house, one, first, 70).status_code == 200
    refused(sign(house, other, second, 31), 70, 100)
    assert sign(house, other, second, 30).status_code == 200
    assert limit(house, team, bytes=100)["bytes"] == 100
    refused(sign(house, one, house.register(one)["id"], 1), 100, 100)
    assert one.delete(f"/v1/datasets/{first}").is_success
    refused(
        sign(house, one, house.register(one)["id"], 70), 100, 100
    )  # until the store has none of it any more
    house.sql("UPDATE datasets SET removed_at = now() WHERE id = %s", first, role="train")
    assert sign(house, one, house.register(one)["id"], 70).status_code == 200


def test_where_bytes_are_limited_an_address_takes_what_was_declared_and_no_more(house, people):
    one, _, team = people
    limit(house, team, bytes=1000)
    id = house.register(one)["id"]
    assert house.begin(one, id).status_code == 200
    without = one.post(f"/v1/datasets/{id}/upload/urls", json={"numbers": [1]})
    assert (without.status_code, without.json()["slug"]) == (422, "size-needed")
    url = sign(house, one, id, 8).json()["parts"][0]["url"]
    assert httpx.put(url, content=b"x" * 9).status_code == 403
    assert httpx.put(url, content=b"x" * 5000).status_code == 403
    assert sign(house, one, id, 9).json()["slug"] == "wrong-state"  # declared once
    assert sign(house, one, id, 8, numbers=[1, 2]).json()["slug"] == "size-mismatch"
    assert httpx.put(url, content=b"x" * 8).status_code == 200
    assert house.seal(one, id, b"x" * 8).status_code == 202


def test_lengths_of_all_parts_follow_from_the_size(house):
    sign = house.app.state.uploads.sign_part
    urls = [sign("k", "u", number, size=2 * PART_BYTES + 5) for number in (1, 2, 3)]
    assert all("content-length" in url for url in urls)
    assert "content-length" not in sign("k", "u", 1)


def test_what_was_sent_before_there_was_a_quota_is_counted_when_it_is_sealed(house, people):
    one, _, team = people
    id, content = house.register(one)["id"], b"x" * 64
    house.upload(one, id, content)
    limit(house, team, bytes=63)
    refused(house.seal(one, id, content), 0, 63)
    assert one.get(f"/v1/datasets/{id}").json()["state"] == "uploading"
    limit(house, team, bytes=64)
    assert house.seal(one, id, content).status_code == 202


def test_many_uploads_at_once_share_one_quota(house, people):
    one, other, team = people
    limit(house, team, bytes=35)
    ids = [(who, house.register(who)["id"]) for who in (one, other) for _ in range(10)]
    with ThreadPoolExecutor(20) as pool:
        told = list(pool.map(lambda each: sign(house, *each, 10).status_code, ids))
    assert sorted(told) == [200] * 3 + [409] * 17


# ---- jobs


def test_twenty_jobs_at_once_do_not_exceed_the_quota(house, people):
    """Whoever is refused is not charged, and may come again when a job has ended."""
    one, other, team = people
    dataset = house.ready(one, budget={"epsilon": 9.0, "delta": 1e-6})
    limit(house, team, jobs=3)
    body = {"dataset": dataset["id"], "plan": PLAN, "target": {"epsilon": 0.1}}

    def submit(number):
        return (one, other)[number % 2].post("/v1/jobs", json=body)

    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(submit, range(20)))
    made = [answer.json() for answer in answers if answer.status_code == 202]
    assert (len(made), {a.json()["slug"] for a in answers if a.status_code != 202}) == (3, {"quota-exceeded"})
    assert house.balance(dataset["account"])["held"] == sum(job["cost"] for job in made)
    assert limit(house, team, jobs=3)["jobs"] == 3
    refused(submit(0), 3, 3)
    house.finish(made[0]["id"])
    assert submit(0).status_code == 202
    refused(submit(1), 3, 3)


def test_teams_do_not_use_each_others_quota(house, people):
    one, _, team = people
    limit(house, team, jobs=1)
    assert house.job(one, house.ready(one)["id"]).status_code == 202
    refused(house.job(one, house.ready(one)["id"]), 1, 1)
    assert house.job(house.curator2, house.ready(house.curator2)["id"]).status_code == 202


def test_the_time_limit_is_told_and_stays_as_it_was_when_the_job_was_made(house, people):
    one, _, team = people
    limit(house, team, job_seconds=60)
    dataset = house.ready(one)["id"]
    body = {"dataset": dataset, "plan": PLAN, "target": {"epsilon": 0.1}}
    assert one.post("/v1/quotes", json=body).json()["limit_seconds"] == 60
    job = one.post("/v1/jobs", json=body).json()
    assert job["limit_seconds"] == 60
    limit(house, team, job_seconds=None)
    assert one.get(f"/v1/jobs/{job['id']}").json()["limit_seconds"] == 60
    assert one.post("/v1/jobs", json=body).json()["limit_seconds"] is None


# ---- defaults of the site


def test_a_person_without_a_team_has_the_default_of_the_site_alone(servers):
    with opened(servers, team_bytes=64, team_jobs=1, team_job_seconds=60) as site:
        site.witnessed()
        one, other = site.person("curator"), site.person("curator")
        for who in (one, other):  # not together
            id, content = site.register(who)["id"], b"x" * 63 + who.name[-1:].encode()
            url = sign(site, who, id, 64).json()["parts"][0]["url"]
            assert httpx.put(url, content=content).status_code == 200
            told = {"size": 64, "sha256": hashlib.sha256(content).hexdigest()}
            assert who.post(f"/v1/datasets/{id}/seal", json=told).status_code == 202
            site.checked(id)
            if who.get(f"/v1/datasets/{id}").json()["state"] == "held":
                site.accepted(id)
            job = site.job(who, id, target={"epsilon": 0.1})
            assert (job.status_code, job.json()["limit_seconds"]) == (202, 60)
            refused(site.job(who, id, target={"epsilon": 0.1}), 1, 1)
        refused(sign(site, one, site.register(one)["id"], 1), 64, 64)
        team = site.team(one)
        told = limit(site, team, bytes=1000)
        assert told["quotas"] == {"bytes": 1000, "jobs": 1, "job_seconds": 60}
        assert told["bytes"] == 0  # what was registered without a team does not count for it
