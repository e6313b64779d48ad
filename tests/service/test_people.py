"""Invitations and keys, and decisions that need two independent people."""

import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import psycopg
import pytest
from psycopg import errors
from sqlalchemy import insert, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from core import people
from core.database import connect
from core.errors import WrongState
from core.tables import Person, Rules
from migrations import migrate
from service import first_key
from tests.service.house import House, fresh_database

INVITATION = """INSERT INTO invitations (id, person_id, digest, issued_by, confirmed_by, expires_at)
    VALUES (gen_random_uuid(), %s, sha256(%s::bytea), %s, %s, now() + interval '1 day')"""


def new(role: str) -> dict[str, str]:
    return {"name": f"p{uuid.uuid4().hex}", "role": role}


def slug(answer) -> tuple[int, str]:
    return answer.status_code, answer.json().get("slug", "")


def later(house: House, *callers, days: int = 8) -> None:
    """Dates the arrival of these people so many days back."""
    for person in callers:
        for moved in ("people SET created_at = {} WHERE id", "invitations SET used_at = {} WHERE person_id"):
            past = f"now() - interval '{days} days'"
            house.sql(f"UPDATE {moved.format(past)} = %s", person.id)


# -- invitations


def test_an_admin_never_sees_the_key_of_somebody_else(house):
    added = house.admin.post("/v1/admin/people", json=new("curator"))
    assert added.status_code == 201
    assert '"key"' not in added.text
    body = added.json()
    assert body["created_by"] == body["invitation"]["issued_by"] == str(house.admin.id)
    answer = house.admin.post(f"/v1/admin/people/{body['id']}/keys", json={})
    assert answer.status_code == 405  # the route that showed a key to an admin
    who = house.redeemed(body["id"], body["invitation"]["invitation"])
    assert who.get("/v1/me").json()["id"] == body["id"]
    [key] = house.admin.get(f"/v1/admin/people/{body['id']}/keys").json()
    assert key["issued_by"] == str(house.admin.id)
    own = who.post("/v1/me/keys", json={"label": "laptop"}).json()
    assert house.caller("own", who.id, own["key"]).get("/v1/me").json()["id"] == body["id"]
    assert [key["issued_by"] for key in who.get("/v1/me/keys").json()] == [str(house.admin.id), str(who.id)]


def test_an_invitation_works_once_and_a_second_use_shows(house):
    added = house.admin.post("/v1/admin/people", json=new("curator")).json()
    text = added["invitation"]["invitation"]
    house.redeemed(added["id"], text)
    for _ in range(2):
        again = house.anonymous.post("/v1/invitations/redeem", json={"invitation": text})
        assert slug(again) == (403, "invitation-refused")
        assert "used before" in again.json()["detail"]
    [shown] = house.admin2.get("/v1/admin/invitations", params={"person": added["id"]}).json()["items"]
    assert (shown["state"], shown["refused"]) == ("used", 2)
    assert len(house.admin.get(f"/v1/admin/people/{added['id']}/keys").json()) == 1


def test_only_the_hash_of_an_invitation_is_kept(house):
    text = house.admin.post("/v1/admin/people", json=new("analyst")).json()["invitation"]["invitation"]
    assert len(text) == 4 + 43
    rows = house.sql("SELECT invitations::text FROM invitations")
    assert text not in str(rows)


@pytest.mark.parametrize("ending", ["expired", "withdrawn", "replaced", "disabled", "issuer disabled"])
def test_an_invitation_ends(ending, house):
    issuer = house.person("admin")
    added = issuer.post("/v1/admin/people", json=new("curator")).json()
    id = added["invitation"]["id"]
    if ending == "expired":
        house.sql("ALTER TABLE invitations DISABLE TRIGGER invitations_keep")
        house.sql("UPDATE invitations SET expires_at = now() WHERE id = %s", id)
        house.sql("ALTER TABLE invitations ENABLE TRIGGER invitations_keep")
    elif ending == "withdrawn":
        assert house.admin.delete(f"/v1/admin/invitations/{id}").status_code == 204
    elif ending == "replaced":
        assert house.admin.post(f"/v1/admin/people/{added['id']}/invitations").status_code == 201
    else:
        out = added["id"] if ending == "disabled" else issuer.id
        assert house.admin.post(f"/v1/admin/people/{out}/disable").status_code == 200
    text = added["invitation"]["invitation"]
    assert slug(house.anonymous.post("/v1/invitations/redeem", json={"invitation": text})) == (
        403, "invitation-refused",
    )  # fmt: skip
    assert house.admin.get(f"/v1/admin/people/{added['id']}/keys").json() == []


def test_a_new_invitation_revokes_the_old_keys_when_it_is_redeemed(house):
    who = house.person("curator")
    fresh = house.admin.post(f"/v1/admin/people/{who.id}/invitations").json()
    assert who.get("/v1/me").status_code == 200
    assert house.admin2.post(f"/v1/admin/people/{who.id}/disable").json()["disabled"] is True
    fresh = house.admin.post(f"/v1/admin/people/{who.id}/invitations").json()
    again = house.redeemed(str(who.id), fresh["invitation"])
    assert (who.get("/v1/me").status_code, again.get("/v1/me").json()["disabled"]) == (401, False)
    shown = house.admin.get("/v1/admin/invitations", params={"person": str(who.id)}).json()["items"]
    assert [(each["state"], each["issued_by"]) for each in shown[:2]] == [
        ("used", str(house.admin.id)), ("revoked", str(house.admin.id)),
    ]  # fmt: skip


def test_nobody_revokes_keys_of_others_as_their_own(house):
    mine = house.curator.post("/v1/me/keys", json={}).json()["id"]
    assert slug(house.curator2.delete(f"/v1/me/keys/{mine}")) == (404, "not-found")
    assert house.curator.delete(f"/v1/me/keys/{mine}").status_code == 204


# -- a new admin takes two


def test_a_new_admin_is_confirmed_by_an_independent_admin(house):
    added = house.admin.post("/v1/admin/people", json=new("admin")).json()
    assert (added["invitation"]["state"], added["invitation"]["invitation"]) == ("waiting", None)
    path = f"/v1/admin/invitations/{added['invitation']['id']}/confirm"
    assert slug(house.admin.post(path)) == (403, "not-independent")
    confirmed = house.admin2.post(path)
    assert (confirmed.status_code, confirmed.json()["state"]) == (200, "open")
    assert slug(house.admin2.post(path)) == (409, "wrong-state")
    third = house.redeemed(added["id"], confirmed.json()["invitation"])
    # Neither of the two who let them in is independent of them yet.
    for inviter in (house.admin, house.admin2):
        other = inviter.post("/v1/admin/people", json=new("admin")).json()["invitation"]["id"]
        assert slug(third.post(f"/v1/admin/invitations/{other}/confirm")) == (403, "not-independent")
    later(house, third)
    assert third.post(f"/v1/admin/invitations/{other}/confirm").status_code == 200


def test_an_admin_who_lost_their_key_or_was_disabled_comes_back_by_two(house):
    lost = house.person("admin")
    house.admin.post(f"/v1/admin/people/{lost.id}/disable")
    fresh = house.admin.post(f"/v1/admin/people/{lost.id}/invitations").json()
    assert (fresh["state"], fresh["invitation"]) == ("waiting", None)
    path = f"/v1/admin/invitations/{fresh['id']}/confirm"
    assert slug(house.admin.post(path)) == (403, "not-independent")
    back = house.redeemed(str(lost.id), house.admin2.post(path).json()["invitation"])
    assert back.get("/v1/me").json()["disabled"] is False


def test_an_admin_does_not_invite_themselves(house):
    assert slug(house.admin.post(f"/v1/admin/people/{house.admin.id}/invitations")) == (409, "wrong-state")


def test_a_key_that_is_made_while_an_invitation_is_redeemed_ends_with_the_older_ones(house):
    """Somebody with a stolen key could keep a key by making new ones all the time."""
    owner = house.invited(house.admin, "analyst")
    invitation = house.admin.post(f"/v1/admin/people/{owner.id}/invitations").json()["invitation"]
    with session_of(house.url("service")) as thief, ThreadPoolExecutor(1) as pool:
        _, stolen = people.add_own_key(thief, owner.key, label="stolen", days=1)
        redeeming = pool.submit(house.redeemed, str(owner.id), invitation)
        waiting = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%%redeem%%'"
        while not house.sql(waiting) and not redeeming.done():
            pass
        thief.commit()
        back = redeeming.result()
    assert back.get("/v1/me").status_code == 200
    assert house.caller("thief", owner.id, stolen).get("/v1/me").status_code == 401


def test_people_with_keys_from_before_invitations_are_not_independent_of_each_other(house):
    """An admin saw each of these keys, and nobody wrote down which one."""
    pair = [house.person("admin").id, house.person("curator").id]
    asked = "SELECT independent(%s, %s)"
    assert house.sql(asked, *pair) == [(True,)]
    house.sql("UPDATE keys SET invitation_id = NULL, issued_by = NULL WHERE person_id = ANY(%s)", pair)
    assert house.sql(asked, *pair) == [(False,)]
    house.sql("UPDATE keys SET created_at = now() - interval '8 days' WHERE person_id = ANY(%s)", pair)
    assert house.sql(asked, *pair) == [(True,)]


# -- what two people decide


@pytest.fixture(scope="module")
def puppets(shared_house):
    """A team: two whom `admin` invited just now, one whom the other admin did, one invited long ago."""
    house = shared_house
    house.witnessed()
    mine, also_mine = house.invited(house.admin, "curator"), house.invited(house.admin, "curator")
    other, old = house.invited(house.admin2, "curator"), house.invited(house.admin, "curator")
    later(house, old)
    house.team(mine, also_mine, other, old)
    return mine, also_mine, other, old


def grant(house: House, proposer, confirmer) -> tuple[int, str]:
    """The response to a confirmation. The proposer is set in the row, so they need no dataset."""
    account = house.ready(house.curator)["account"]
    path = f"/v1/admin/ledger/{account}/grants"
    proposed = house.admin.post(path, json={"epsilon": 11.0, "reason": "more"}).json()["id"]
    house.sql("UPDATE grants SET proposed_by = %s WHERE id = %s", proposer.id, proposed)
    before = house.balance(account)
    answer = confirmer.post(f"{path}/{proposed}/confirm")
    assert (house.balance(account) == before) == (answer.status_code != 200)
    return slug(answer)


def test_an_admin_does_not_confirm_what_their_own_curator_proposed(house, puppets):
    mine, _, other, old = puppets
    assert grant(house, mine, house.admin) == (403, "not-independent")
    assert grant(house, mine, house.admin2)[0] == 200
    assert grant(house, other, house.admin)[0] == 200
    assert grant(house, old, house.admin)[0] == 200


@pytest.mark.parametrize("cause", ["public", "budget"])
def test_an_admin_does_not_accept_a_dataset_of_their_own_curator(cause, house, puppets):
    declared = {"public": True} if cause == "public" else {"budget": {"epsilon": 20.0, "delta": 1e-6}}
    dataset = house.sealed(puppets[0], **declared)["id"]
    assert house.checked(dataset) == "held"
    path = f"/v1/datasets/{dataset}/review"
    accept = {"decision": "accept", "reason": "fine"}
    assert slug(house.admin.post(path, json=accept)) == (403, "not-independent")
    assert house.admin2.post(path, json=accept).status_code == 202


def test_an_admin_may_reject_a_dataset_of_their_own_curator(house, puppets):
    dataset = house.sealed(puppets[0], public=True)["id"]
    house.checked(dataset)
    decision = {"decision": "reject", "reason": "not public"}
    assert house.admin.post(f"/v1/datasets/{dataset}/review", json=decision).status_code == 202


def test_a_release_is_approved_by_somebody_independent_of_its_author(house, puppets):
    mine, also_mine, other, old = puppets
    id = house.draft(mine, house.trained(mine, house.ready(mine)["id"]))["id"]
    body = {"digest": house.built(id)}
    path = f"/v1/releases/{id}/approve"
    for who in (house.admin, also_mine):  # who invited the author, and whom the same admin invited
        assert slug(who.post(path, json=body)) == (403, "not-independent")
    # The other admin's curator, whose key the first admin then replaces.
    fresh = house.admin.post(f"/v1/admin/people/{other.id}/invitations").json()
    replaced = house.redeemed(str(other.id), fresh["invitation"])
    assert slug(replaced.post(path, json=body)) == (403, "not-independent")
    assert old.post(path, json=body).status_code == 200


def test_an_admin_who_replaced_the_key_of_an_author_does_not_approve(house):
    author = house.person("curator")
    id = house.draft(author, house.trained(author, house.ready(author)["id"]))["id"]
    body = {"digest": house.built(id)}
    fresh = house.admin.post(f"/v1/admin/people/{author.id}/invitations").json()
    house.redeemed(str(author.id), fresh["invitation"])
    assert slug(house.admin.post(f"/v1/releases/{id}/approve", json=body)) == (403, "not-independent")
    assert house.admin2.post(f"/v1/releases/{id}/approve", json=body).status_code == 200


def test_an_admin_does_not_act_as_a_curator(house):
    id = house.draft(house.curator, house.trained(house.curator, house.ready(house.curator)["id"]))["id"]
    digest = house.built(id)
    assert house.admin.post(f"/v1/releases/{id}/approve", json={"digest": digest}).status_code == 200
    for verb, body in (("publish", None), ("rebuild", None), ("readers", {"person": str(house.analyst.id)})):
        assert slug(house.admin.post(f"/v1/releases/{id}/{verb}", json=body)) == (403, "forbidden")


# -- the same, with the service's own database login


def refused(house: House, statement: str, *values, why: str | None = None) -> None:
    with pytest.raises((errors.RestrictViolation, errors.InsufficientPrivilege), match=why):
        house.sql(statement, *values, role="service")


def test_the_service_login_makes_no_person_without_an_inviter(house):
    person = "INSERT INTO people (id, name, role, created_by) VALUES (gen_random_uuid(), %s, %s, %s)"
    refused(house, person, uuid.uuid4().hex, "curator", None)
    refused(house, person, uuid.uuid4().hex, "admin", None)
    refused(house, person, uuid.uuid4().hex, "curator", house.curator.id)
    refused(house, "UPDATE people SET created_by = NULL WHERE id = %s", house.curator.id)
    refused(house, "UPDATE people SET role = 'admin' WHERE id = %s", house.curator.id)
    refused(house, "UPDATE people SET disabled_at = NULL WHERE id = %s", house.disabled.id)


def test_the_service_login_makes_no_key_without_an_invitation_or_a_key(house):
    refused(
        house,
        "INSERT INTO keys (id, person_id, label, digest, expires_at)"
        " VALUES (gen_random_uuid(), %s, 'k', sha256('k'), now() + interval '1 day')",
        house.admin2.id,
    )
    made = "SELECT {}(%s, gen_random_uuid(), sha256(%s::bytea), 'k', now() + interval '1 day')"
    guess = uuid.uuid4().hex
    assert house.sql(made.format("redeem_invitation"), guess, guess, role="service") == [("unknown",)]
    assert house.sql(made.format("add_own_key"), guess, guess, role="service") == [(False,)]


def test_the_service_login_invites_no_admin_alone(house):
    victim, token = house.person("admin"), uuid.uuid4().hex
    refused(house, INVITATION, victim.id, token, house.admin.id, None)
    refused(house, INVITATION, victim.id, token, house.admin.id, house.admin2.id)
    refused(house, INVITATION, victim.id, token, None, None)
    refused(house, INVITATION, house.curator.id, token, house.curator2.id, None)
    waiting = house.admin.post(f"/v1/admin/people/{victim.id}/invitations").json()["id"]
    confirm = "UPDATE invitations SET digest = sha256(%s::bytea), confirmed_by = %s WHERE id = %s"
    for confirmer in (None, house.admin.id, victim.id, house.curator.id, house.disabled.id):
        refused(house, confirm, token, confirmer, waiting)
    refused(house, "UPDATE invitations SET issued_by = NULL WHERE id = %s", waiting)
    refused(house, "UPDATE invitations SET used_at = now() - interval '9 days' WHERE id = %s", waiting)
    house.sql(confirm, token, house.admin2.id, waiting, role="service")
    refused(house, confirm, uuid.uuid4().hex, house.admin2.id, waiting)  # once


def test_the_service_login_confirms_nothing_for_two_people_of_one(house, puppets):
    mine, also_mine, _, _ = puppets
    account = house.ready(house.curator)["account"]
    confirmed = """INSERT INTO grants (id, account_id, epsilon, reason, proposed_by, decided_by, state)
        VALUES (gen_random_uuid(), %s, 99, 'r', %s, %s, 'confirmed')"""
    refused(house, confirmed, account, mine.id, house.admin.id)
    refused(house, confirmed, account, mine.id, also_mine.id)
    proposed = house.admin.post(
        f"/v1/admin/ledger/{account}/grants", json={"epsilon": 11.0, "reason": "more"}
    ).json()["id"]
    decide = "UPDATE grants SET state = 'confirmed', decided_by = %s WHERE id = %s"
    for decider in (mine.id, house.admin.id, None):
        refused(house, decide, decider, proposed, why="independent of its proposer")
    dataset = house.sealed(mine, public=True)["id"]
    house.checked(dataset)
    review = "INSERT INTO reviews (dataset_id, decision, reason, decided_by) VALUES (%s, 'accept', 'r', %s)"
    refused(house, review, dataset, house.admin.id, why="independent of its owner")
    release = house.draft(mine, house.trained(mine, house.ready(mine)["id"]))["id"]
    digest = bytes.fromhex(house.built(release))
    approve = "INSERT INTO approvals (release_id, digest, person_id, note) VALUES (%s, %s, %s, '')"
    for approver in (house.admin.id, also_mine.id):
        refused(house, approve, release, digest, approver, why="independent of its author")


def test_the_service_login_does_not_backdate_how_somebody_came(house):
    """The database sets the time a person was added, whatever the row says."""
    id = uuid.uuid4()
    house.sql(
        "INSERT INTO people (id, name, role, created_by, created_at)"
        " VALUES (%s, %s, 'curator', %s, '2020-01-01')",
        id, id.hex, house.admin.id, role="service",
    )  # fmt: skip
    asked = "SELECT independent(%s, %s), independent(%s, %s)"
    assert house.sql(asked, id, house.admin.id, id, house.admin2.id) == [(False, True)]
    refused(house, "UPDATE rules SET independent_days = 1")


# -- how a site starts


@contextmanager
def session_of(url: str):
    engine = connect(url, pool_size=1)
    try:
        with Session(engine) as session:
            yield session
    finally:
        engine.dispose()


def test_a_new_site_starts_with_two_independent_admins_and_only_then(servers, monkeypatch, capsys):
    with fresh_database(servers) as url:
        with psycopg.connect(url("owner")) as owner:
            owner.execute("SET session_replication_role = replica")
            owner.execute("TRUNCATE people, keys, invitations CASCADE")
        own = {"SLUICE_DATABASE_URL": url("service")}
        for name, value in (servers.environments["service"] | own).items():
            monkeypatch.setenv(name, value)
        first_key.main()  # with the service's own login
        out, err = capsys.readouterr()
        assert "for another person" in err
        with session_of(url("service")) as session:
            first = people.person_of(session, out.strip())[0].id
            second, _ = people.redeem(session, err.split()[-1], label="k", days=1)
            session.commit()
            people.require_independent(session, first, second.person_id)
            with pytest.raises(IntegrityError, match="added by an admin"):
                session.execute(insert(Person).values(id=uuid.uuid4(), name="third", role="admin"))
            session.rollback()
            with pytest.raises(IntegrityError, match="an admin invites"):
                people.invite_admin(session, "admin")
        with pytest.raises(SystemExit, match="there is an admin already"):
            first_key.main()
        # The owner of the tables lets an admin in who lost their key, and sets the time.
        migrate(url("owner"), {}, independent_days=30)
        with session_of(url("owner")) as session, session.begin():
            text = people.invite_admin(session, "admin")
            assert people.redeem(session, text, label="k", days=1)[0].person_id == first
            assert session.scalars(select(Rules.independent_days)).all() == [30]
            people.add_person(session, name="carla", role=people.Role.CURATOR)
            with pytest.raises(WrongState):
                people.invite_admin(session, "carla")
