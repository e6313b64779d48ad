"""Datasets held for an admin's decision: shared records, large budgets, public declarations."""

import os
import uuid

import psycopg
import pytest

from core import binding
from core.faults import Fault
from tests.service.house import House


def seen(house: House, who, id: str) -> dict:
    return who.get(f"/v1/datasets/{id}").json()


def held(house: House, who, content: bytes | None = None, **others) -> dict:
    id = house.sealed(who, content, **others)["id"]
    assert house.checked(id) == "held"
    return seen(house, who, id)


def decide(house: House, id: str, decision: str, who=None, **more):
    body = {"decision": decision, "reason": "compared by hand"} | more
    return (who or house.admin).post(f"/v1/datasets/{id}/review", json=body)


# -- a claimed hash binds nothing (item 3)


def test_a_claimed_hash_binds_nothing_and_tells_nothing(house):
    """Sealing random bytes under somebody's hash, or under one that nobody knows, is answered alike."""
    content = os.urandom(32)
    theirs = house.ready(house.curator, content, budget={"epsilon": 2.0, "delta": 1e-6})
    house.job(house.curator, theirs["id"], target={"epsilon": 0.5})
    before, accounts = house.balance(theirs["account"]), house.sql("SELECT count(*) FROM accounts")
    answers = []
    for claimed, relation in (
        (content, "replace_one"),
        (content, "add_remove"),
        (os.urandom(32), "add_remove"),
    ):
        id = house.register(house.curator2, relation=relation, name="guess")["id"]
        house.upload(house.curator2, id, os.urandom(32))
        told = house.seal(house.curator2, id, claimed)
        assert told.status_code == 202
        answers.append(
            {k: v for k, v in told.json().items() if k not in ("id", "relation", "created_at", "sealed_at")}
        )
        assert house.curator2.get(f"/v1/datasets/{id}/budget").status_code == 409
        assert house.curator2.get(f"/v1/admin/ledger/{theirs['account']}/grants").status_code == 404
        rejected(house, id)
        after = seen(house, house.curator2, id)
        assert (after["state"], after["fault"], after["account"]) == ("rejected", "hash-mismatch", None)
    assert answers[0] == answers[1] == answers[2]
    assert answers[0]["account"] is None
    assert house.balance(theirs["account"]) == before
    assert house.sql("SELECT count(*) FROM accounts") == accounts
    # Whoever claims a hash first, with terms of their choice, fixes nothing for those who have the data.
    fresh = os.urandom(32)
    id = house.register(house.curator2, budget={"epsilon": 0.5, "delta": 1e-9}, relation="replace_one")["id"]
    house.upload(house.curator2, id, os.urandom(32))
    house.seal(house.curator2, id, fresh)
    rejected(house, id)
    mine = house.ready(house.curator, fresh, budget={"epsilon": 5.0, "delta": 1e-6})
    assert (mine["relation"], mine["budget"]["epsilon"], mine["declared"]) == ("add_remove", 5.0, None)


def rejected(house: House, id: str) -> None:
    """What the worker writes when the file is not what was claimed."""
    with house.session("train") as session:
        assert binding.reject(session, uuid.UUID(id), Fault.HASH_MISMATCH) == "rejected"


# -- known records (item 2)


def test_known_records_are_held_and_their_owner_learns_no_more(house):
    content = os.urandom(32)
    first = house.ready(house.curator, content, budget={"epsilon": 2.0, "delta": 1e-6})
    house.job(house.curator, first["id"], target={"epsilon": 0.5})
    second = held(house, house.curator2, content)
    plain = held(house, house.curator2, budget={"epsilon": 50.0, "delta": 1e-6})  # for another reason
    differing = {name for name in second if second[name] != plain[name]} - {
        "id",
        "created_at",
        "sealed_at",
        "budget",
    }
    assert not differing
    assert (second["causes"], second["matches"], second["account"]) == ([], [], None)
    for refused in (
        house.job(house.curator2, second["id"]),
        house.curator2.get(f"/v1/datasets/{second['id']}/budget"),
    ):
        assert (refused.status_code, refused.json()["slug"], refused.json()["state"]) == (
            409,
            "wrong-state",
            "held",
        )
    shown = seen(house, house.admin, second["id"])
    assert shown["causes"] == ["overlap"]
    assert shown["matches"] == [{"dataset": first["id"], "account": first["account"], "share": "most"}]
    assert second["id"] in [
        d["id"] for d in house.admin.get("/v1/datasets?state=held&limit=200").json()["items"]
    ]


@pytest.mark.parametrize("decision", ["join", "accept", "reject"])
def test_an_admin_decides(decision, house):
    content = os.urandom(32)
    first = house.ready(house.curator, content, budget={"epsilon": 2.0, "delta": 1e-6})
    cost = house.job(house.curator, first["id"], target={"epsilon": 0.5}).json()["cost"]
    id = held(house, house.curator2, content, budget={"epsilon": 7.0, "delta": 1e-6})["id"]
    more = {"account": first["account"]} if decision == "join" else {}
    answer = decide(house, id, decision, **more)
    assert answer.status_code == 202, answer.text
    house.checked(id) if decision != "reject" else None
    now = seen(house, house.curator2, id)
    assert now["review"]["decision"] == decision
    assert now["review"]["reason"] == "compared by hand"
    if decision == "reject":
        assert (now["state"], now["fault"], now["account"]) == ("rejected", "not-accepted", None)
    elif decision == "join":
        # The terms in force are those of the account, and the answer says that others were declared.
        assert (now["state"], now["account"], now["shared"]) == ("ready", first["account"], True)
        assert (now["budget"]["epsilon"], now["declared"]["epsilon"]) == (2.0, 7.0)
        assert house.curator2.get(f"/v1/datasets/{id}/budget").json()["held"] == cost
        assert seen(house, house.curator, first["id"])["shared"] is True
    else:
        assert (now["state"], now["shared"], now["budget"]["epsilon"]) == ("ready", False, 7.0)
        assert now["account"] not in (None, first["account"])
    again = decide(house, id, "accept")
    assert (again.status_code, again.json()["slug"]) == (409, "wrong-state")


def test_two_copies_that_wait_at_once_do_not_get_a_budget_each(house):
    content = os.urandom(32)
    one = held(house, house.curator, content, budget={"epsilon": 50.0, "delta": 1e-6})
    two = house.sealed(house.curator2, content)["id"]
    assert house.checked(two) == "held"
    first = house.accepted(one["id"])
    assert seen(house, house.admin, two)["causes"] == ["overlap"]
    assert house.accepted(two, decision="join", account=first["account"])["account"] == first["account"]


def test_a_decision_has_to_make_sense(house):
    content = os.urandom(32)
    first = house.ready(house.curator, content)
    id = held(house, house.curator2, content, relation="replace_one")["id"]
    conflict = decide(house, id, "join", account=first["account"])
    assert (conflict.status_code, conflict.json()["slug"]) == (409, "account-conflict")
    assert decide(house, id, "join", account=str(uuid.uuid4())).json()["slug"] == "not-found"
    assert decide(house, id, "join").status_code == 422
    assert decide(house, id, "accept", account=first["account"]).status_code == 422
    assert decide(house, id, "accept", reason="").status_code == 422
    assert decide(house, str(uuid.uuid4()), "accept").json()["slug"] == "not-found"
    assert decide(house, id, "accept", who=house.curator2).status_code == 403
    assert decide(house, first["id"], "accept").json()["slug"] == "wrong-state"
    assert seen(house, house.curator2, id)["state"] == "held"
    assert house.curator2.delete(f"/v1/datasets/{id}").status_code == 202  # its owner may give it up


def test_few_records_are_held_whether_they_are_known_or_not(house):
    """Otherwise an upload of a single guess would tell whether somebody is in another's data."""
    id = house.sealed(house.curator)["id"]
    assert house.checked(id, few=True) == "held"
    assert seen(house, house.admin, id)["causes"] == ["few"]


# -- caps (item 4)


@pytest.mark.parametrize(
    ("budget", "size"),
    [
        ({"epsilon": 10.001, "delta": 1e-6}, 100),
        ({"epsilon": 1e6, "delta": 0.1}, 100),
        ({"epsilon": 1.0, "delta": 1.1e-4}, 100),
        ({"epsilon": 1.0, "delta": 1e-5}, 100_001),
    ],
)
def test_a_budget_above_the_caps_needs_a_second_person(budget, size, house):
    waiting = held(house, house.curator, budget=budget, nominal_size=size)
    assert waiting["account"] is None
    assert seen(house, house.admin, waiting["id"])["causes"] == ["budget"]
    assert house.job(house.curator, waiting["id"]).status_code == 409
    now = house.accepted(waiting["id"])
    assert (now["state"], now["budget"]["epsilon"]) == ("ready", budget["epsilon"])


def test_budgets_at_the_caps_need_nobody(house):
    ready = house.sealed(house.curator, budget={"epsilon": 10.0, "delta": 1e-4}, nominal_size=10_000)
    assert house.checked(ready["id"]) == "ready"


# -- public declarations (item 10)


def test_a_public_declaration_is_confirmed_by_a_second_person(house):
    who, target = house.curator, house.ready(house.curator)
    source = held(house, who, public=True)
    assert seen(house, house.admin, source["id"])["causes"] == ["public"]
    adapt = {"plan": ADAPT, "source": source["id"]}
    early = house.job(who, target["id"], **adapt)
    assert (early.status_code, early.json()["slug"], early.json()["state"]) == (409, "wrong-state", "held")
    house.accepted(source["id"])
    assert house.job(who, target["id"], **adapt).status_code == 202


def test_private_records_are_never_accepted_as_public(house):
    content = os.urandom(32)
    private = house.ready(house.curator, content)
    source = held(house, house.curator, content, public=True)
    assert seen(house, house.admin, source["id"])["causes"] == ["public", "overlap"]
    for decision, more in (("accept", {}), ("join", {"account": private["account"]})):
        answer = decide(house, source["id"], decision, **more)
        assert (answer.status_code, answer.json()["slug"]) == (409, "shares-private-records")
    assert decide(house, source["id"], "reject").status_code == 202


def test_a_source_is_none_once_the_same_records_are_private(house):
    who, content = house.curator, os.urandom(32)
    target = house.ready(who)
    source = house.ready(who, content, public=True)
    assert house.job(who, target["id"], plan=ADAPT, source=source["id"]).status_code == 202
    late = held(house, house.curator2, content)
    house.accepted(late["id"])
    answer = house.job(who, target["id"], plan=ADAPT, source=source["id"])
    assert (answer.status_code, answer.json()["slug"]) == (422, "unfit-source")


ADAPT = {"kind": "adapt", "records": 100, "batch": 20, "directions": 4, "dim": 6, "steps": 5}


# -- the database holds to it whatever the service says


REVIEW = "INSERT INTO reviews (dataset_id, decision, reason, decided_by) VALUES "


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE datasets SET state = 'ready' WHERE id = %(held)s",
        "UPDATE datasets SET state = 'checking' WHERE id = %(held)s",
        "UPDATE datasets SET state = 'rejected' WHERE id = %(held)s",
        "UPDATE datasets SET account_id = %(account)s WHERE id = %(held)s",
        "UPDATE datasets SET causes = '{}' WHERE id = %(held)s",
        "UPDATE datasets SET over_cap = false WHERE id = %(held)s",
        "UPDATE datasets SET public = true WHERE id = %(ready)s",
        "UPDATE datasets SET state = 'checking' WHERE id = %(ready)s",
        REVIEW + "(%(held)s, 'accept', 'x', %(owner)s)",
        REVIEW + "(%(ready)s, 'accept', 'x', %(admin)s)",
        REVIEW + "(%(held)s, 'accept', '', %(admin)s)",
        "INSERT INTO accounts (id, relation, epsilon, delta, renyi_order, capacity, head) VALUES"
        " (gen_random_uuid(), 'add_remove', 9, 1e-5, 4, 0, decode(repeat('00', 32), 'hex'))",
        "INSERT INTO datasets SELECT (jsonb_populate_record(d, jsonb_build_object('id', gen_random_uuid(),"
        " 'object_key', gen_random_uuid()))).* FROM datasets d WHERE id = %(ready)s",
    ],
)
def test_the_services_own_login_cannot_get_round_a_decision(change, house):
    waiting, ready = held(house, house.curator, public=True), house.ready(house.curator)
    given = {
        "held": waiting["id"], "ready": ready["id"], "account": ready["account"], "owner": house.curator.id,
        "admin": house.admin.id,
    }  # fmt: skip
    with psycopg.connect(house.url("service")) as connection, pytest.raises(psycopg.Error) as refused:
        connection.execute(change, given)
    assert isinstance(
        refused.value, psycopg.errors.RestrictViolation | psycopg.errors.InsufficientPrivilege
        | psycopg.errors.CheckViolation
    )  # fmt: skip
    assert seen(house, house.curator, waiting["id"])["state"] == "held"


def test_a_job_is_charged_to_the_account_of_its_own_dataset(house):
    """With the service's login: a job on one dataset, charged to the richer account of another."""
    poor, rich = (
        house.ready(house.curator, budget={"epsilon": 1.0, "delta": 1e-6}),
        house.ready(house.curator),
    )
    job = house.job(house.curator, rich["id"]).json()["id"]
    with (
        psycopg.connect(house.url("service")) as connection,
        pytest.raises(psycopg.errors.RestrictViolation, match="charged to its account"),
    ):
        connection.execute(
            "INSERT INTO jobs SELECT (jsonb_populate_record(j, jsonb_build_object('id', gen_random_uuid(),"
            " 'dataset_id', %s::text))).* FROM jobs j WHERE id = %s",
            [poor["id"], job],
        )
