"""Teams: access to datasets, jobs and releases of team members, and of nobody else."""

import uuid

import psycopg
import pytest

from tests.service.test_releases import RELAY, act


@pytest.fixture(scope="module")
def job(shared_house):
    shared_house.witnessed()
    return shared_house.trained(shared_house.curator, shared_house.ready(shared_house.curator)["id"])


def listed(who, what):
    return {one["id"] for one in who.get(f"/v1/{what}?limit=200").json()["items"]}


def test_a_curator_of_another_team_does_not_know_of_a_draft(house, job):
    id = house.draft(house.curator, job, audience="everyone")["id"]
    digest = house.built(id)
    for who in (house.curator2, house.person("curator")):
        assert id not in listed(who, "releases")
        assert who.get(f"/v1/releases?job={job}").json()["items"] == []
        for path in ("", "/preview", "/review"):
            assert who.get(f"/v1/releases/{id}{path}").status_code == 404
        assert act(who, id, "approve", digest=digest) == (404, "not-found")
    assert id in listed(house.mate, "releases")


def test_a_curator_of_another_team_sees_a_published_release_as_an_analyst_does(house, job):
    open, granted = (house.published(house.curator, job, audience=a)["id"] for a in ("everyone", "granted"))
    stranger = house.curator2
    assert listed(stranger, "releases") & {open, granted} == {open}
    assert act(house.curator, granted, "readers", person=str(stranger.id))[0] == 200
    assert listed(stranger, "releases") >= {open, granted}
    for id in (open, granted):
        told = stranger.get(f"/v1/releases/{id}").json()
        assert (told["job"], told["approvals"]) == (None, [])
        assert stranger.get(f"/v1/releases/{id}/review").status_code == 403
        paths = {"paths": ["manifest.json"]}
        assert stranger.post(f"/v1/releases/{id}/downloads", json=paths).status_code == 200
        assert act(stranger, id, "withdraw", reason="x") == (403, "forbidden")
        own = house.mate.get(f"/v1/releases/{id}").json()
        assert (own["job"], len(own["approvals"])) == (job, 1)
    assert stranger.get(f"/v1/releases?job={job}").json()["items"] == []  # nor which job it is of


def test_people_without_a_team_share_with_nobody(house):
    """People without a team do not share with each other, though both have team NULL."""
    one, other = house.person("curator"), house.person("curator")
    dataset = house.ready(one)["id"]
    job = house.trained(one, dataset)
    release = house.draft(one, job)["id"]
    for what, id in (("datasets", dataset), ("jobs", job), ("releases", release)):
        assert id in listed(one, what)
        assert id not in listed(other, what)
        assert other.get(f"/v1/{what}/{id}").status_code == 404
    assert house.job(other, dataset).status_code == 404
    assert other.post("/v1/releases", json={"job": job, "name": "r"}).status_code == 404


def test_a_team_trains_releases_and_reviews_together(house):
    """One registers, a second trains and drafts, the first approves. Diagnostics stay with the second."""
    dataset = house.ready(house.curator)["id"]
    job = house.trained(house.mate, dataset)
    assert {job} <= listed(house.curator, "jobs")
    house.sql("INSERT INTO diagnostics VALUES (%s, 1, '{}', '<svg/>')", job, role="train")
    assert house.mate.get(f"/v1/jobs/{job}/diagnostics").status_code == 200
    assert house.curator.get(f"/v1/jobs/{job}/diagnostics").status_code == 403
    id = house.draft(house.mate, job)["id"]
    digest = house.built(id)
    assert act(house.mate, id, "approve", digest=digest) == (403, "author-cannot-approve")
    assert act(house.curator, id, "approve", digest=digest) == (200, "approved")
    assert act(house.mate, id, "publish") == (202, "publishing")
    house.sql("UPDATE datasets SET report = '{\"clamped\": 7}' WHERE id = %s", dataset)
    assert house.mate.get(f"/v1/datasets/{dataset}").json()["report"] is None
    assert house.job(house.mate, dataset, plan=RELAY).status_code == 202


def test_whoever_leaves_a_team_keeps_their_own_datasets_alone(house):
    leaver, stayer = house.person("curator"), house.person("curator")
    team = house.team(leaver, stayer)
    own, others = house.ready(leaver)["id"], house.ready(stayer)["id"]
    job = house.trained(leaver, others)
    release = house.draft(leaver, job)["id"]
    digest = house.built(release)
    assert listed(leaver, "datasets") == {own, others}
    moved = house.admin.post(f"/v1/admin/people/{leaver.id}/team", json={"team": None})
    assert (moved.status_code, moved.json()["team"]) == (200, None)
    assert listed(leaver, "datasets") == {own}
    assert (listed(leaver, "jobs"), leaver.get(f"/v1/releases/{release}").status_code) == (set(), 404)
    assert act(stayer, release, "approve", digest=digest) == (200, "approved")
    assert act(leaver, release, "publish") == (404, "not-found")
    assert own in listed(stayer, "datasets")  # what was registered in a team stays with it
    assert [t["people"] for t in house.admin.get("/v1/admin/teams").json() if t["id"] == team] == [1]


def test_datasets_of_no_team_go_along_only_if_that_is_said(house):
    newcomer, mate = house.person("curator"), house.person("curator")
    first = house.admin.post("/v1/admin/teams", json={"name": f"t{uuid.uuid4().hex}"}).json()["id"]
    second = house.team(mate)
    house.sql("UPDATE people SET team_id = %s WHERE id = %s", first, mate.id)
    dataset = house.register(newcomer)["id"]
    move = f"/v1/admin/people/{newcomer.id}/team"
    assert house.admin.post(move, json={"team": first}).status_code == 200
    assert listed(mate, "datasets") == set()
    assert house.admin.post(move, json={"team": first, "datasets": True}).status_code == 200
    assert listed(mate, "datasets") == {dataset}
    assert house.admin.post(move, json={"team": second, "datasets": True}).status_code == 200
    assert listed(mate, "datasets") == {dataset}


def test_whom_an_admin_invited_another_admin_puts_into_a_team(house):
    """Or one admin could redeem an invitation, join any team and read its data."""
    puppet = house.invited(house.admin, "curator")
    path, body = f"/v1/admin/people/{puppet.id}/team", {"team": house.team(house.person("curator"))}
    refused = house.admin.post(path, json=body)
    assert (refused.status_code, refused.json()["slug"]) == (403, "not-independent")
    assert puppet.get("/v1/me").json()["team"] is None
    assert house.admin2.post(path, json=body).status_code == 200
    assert house.admin.post(path, json={"team": None}).status_code == 200
    assert puppet.get("/v1/me").json()["team"] is None


def test_teams_that_do_not_exist_and_names_that_do_are_refused(house):
    path = f"/v1/admin/people/{house.mate.id}/team"
    assert house.admin.post(path, json={"team": str(uuid.uuid4())}).status_code == 404
    assert house.admin.post(f"/v1/admin/people/{uuid.uuid4()}/team", json={"team": None}).status_code == 404
    body = {"name": f"t{uuid.uuid4().hex}"}
    assert house.admin.post("/v1/admin/teams", json=body).status_code == 201
    again = house.admin.post("/v1/admin/teams", json=body)
    assert (again.status_code, again.json()["slug"]) == (409, "name-taken")
    assert house.mate.get("/v1/me").json()["team"] == house.curator.get("/v1/me").json()["team"]


def test_the_database_keeps_datasets_in_their_team(house):
    dataset, elsewhere = house.register(house.curator)["id"], house.team()
    for team in (elsewhere, None):
        with pytest.raises(psycopg.errors.RestrictViolation, match="stays in the team"):
            house.sql("UPDATE datasets SET team_id = %s WHERE id = %s", team, dataset, role="service")
    alone = house.register(house.person("curator"))["id"]
    with pytest.raises(psycopg.errors.RestrictViolation, match="stays in the team"):
        house.sql("UPDATE datasets SET team_id = %s WHERE id = %s", elsewhere, alone, role="service")


def test_the_database_takes_no_approval_of_another_team(house, job):
    id = house.draft(house.curator, job)["id"]
    digest = bytes.fromhex(house.built(id))
    approve = "INSERT INTO approvals (release_id, digest, person_id, note) VALUES (%s, %s, %s, '')"
    for who in (house.curator2, house.person("curator"), house.analyst):
        with pytest.raises(psycopg.errors.RestrictViolation, match="of the team of the dataset"):
            house.sql(approve, id, digest, who.id, role="service")
    house.sql(approve, id, digest, house.mate.id, role="service")


def test_a_relay_goes_on_across_teams_and_shows_nothing_else(house):
    """A shared job can be gone on from by whoever was told its id; it is listed to its own team alone."""
    first = house.trained(house.curator, house.ready(house.curator)["id"], plan=RELAY, shared=True)
    last = house.trained(house.curator2, house.ready(house.curator2)["id"], plan=RELAY, after=first)
    assert house.curator2.get(f"/v1/jobs/{first}").status_code == 404
    assert house.curator.get(f"/v1/jobs/{last}").status_code == 404
    release = house.draft(house.curator2, last)["id"]
    assert house.curator.get(f"/v1/releases/{release}").status_code == 404
    assert len(house.curator2.get(f"/v1/releases/{release}/review").json()["earlier"]) == 1
