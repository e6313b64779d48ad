"""Quotes, jobs and their keys: what is charged, what is given back, and what is told again."""

import json
import math
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from fractions import Fraction

import psycopg
import pytest
from kombu.exceptions import OperationalError

from service.jobs import actions, pricing, routes
from service.jobs.schemas import NewJob
from sluice.methods import METHODS, PublicFacts, Target, default_plan, plan_from_dict, recommended
from sluice.privacy.accountant import Accountant
from sluice.privacy.relation import Relation
from tests.service.house import PLAN, new_key

DPGAN = {"kind": "dpgan", "sampling_prob": 0.01, "expected_batch": 64, "steps": 1000}


def quote(who, dataset, **others):
    return who.post("/v1/quotes", json={"dataset": dataset, "plan": PLAN} | others)


# -- quotes


def test_a_quote_calibrates_and_says_what_would_be_left(house):
    dataset = house.ready(house.curator)
    before = house.balance(dataset["account"])
    told = quote(house.curator, dataset["id"], target={"epsilon": 1.0}).json()
    noise = told["plan"]["noise_multiplier"]
    assert told["order"] == 4
    # One Gaussian release: order / (2 noise^2), in units of 1e-9, rounded up.
    assert abs(told["cost"] - math.ceil(Fraction(4) / 2 / Fraction(noise) ** 2 * 10**9)) <= 1
    assert 0.998 * 1.0 <= told["epsilon"]["renyi"] <= 1.0
    assert told["epsilon"]["pld"] <= told["epsilon"]["renyi"]
    assert told["total_after"] == told["epsilon"]  # nothing was spent before
    assert told["left"]["cost"] == before["capacity"]
    assert told["left_after"]["cost"] == before["capacity"] - told["cost"]
    assert told["fits"] == before["capacity"] // told["cost"]
    assert told["largest_epsilon"] is None
    assert house.balance(dataset["account"]) == before
    assert house.sql("SELECT count(*) FROM entries WHERE account_id = %s", dataset["account"]) == [(1,)]


def test_a_quote_by_pld_needs_less_noise_for_the_same_epsilon(house):
    dataset = house.ready(house.curator)
    by = {
        accountant: quote(
            house.curator, dataset["id"], target={"epsilon": 1.0, "accountant": accountant}
        ).json()
        for accountant in ("renyi", "pld")
    }
    assert by["pld"]["epsilon"]["pld"] <= 1.0
    assert by["pld"]["plan"]["noise_multiplier"] < by["renyi"]["plan"]["noise_multiplier"]


def test_a_quote_for_given_noise_reads_it(house):
    dataset = house.ready(house.curator)
    told = quote(house.curator, dataset["id"], plan=PLAN | {"noise_multiplier": 5.0}).json()
    assert told["plan"]["noise_multiplier"] == 5.0
    assert told["cost"] == pytest.approx(4 / (2 * 25) * 1e9, abs=1)
    both = quote(house.admin, dataset["id"], plan=DPGAN | {"noise_multiplier": 1.0}).json()
    assert both["event"]["sampling_prob"] == 0.01
    assert 0 < both["epsilon"]["pld"] < both["epsilon"]["renyi"]


def test_what_does_not_fit_is_told_the_largest_epsilon_and_that_one_fits(house):
    dataset = house.ready(house.curator, budget={"epsilon": 1.0, "delta": 1e-6})
    assert house.job(house.curator, dataset["id"], target={"epsilon": 0.5}).status_code == 202
    told = quote(house.curator, dataset["id"], target={"epsilon": 5.0}).json()
    assert (told["fits"], told["left_after"]) == (0, None)
    largest = told["largest_epsilon"]
    assert 0 < largest < 1.0
    refused = house.job(house.curator, dataset["id"], target={"epsilon": 5.0})
    assert (refused.status_code, refused.json()["slug"]) == (409, "budget-exceeded")
    assert refused.json()["asked"] == {"cost": told["cost"]} | told["epsilon"]
    assert refused.json()["left"] == told["left"]
    assert refused.json()["largest_epsilon"] == largest
    assert house.job(house.curator, dataset["id"], target={"epsilon": largest * 1.05}).status_code == 409
    assert house.job(house.curator, dataset["id"], target={"epsilon": largest}).status_code == 202


@pytest.mark.parametrize(
    ("change", "slug"),
    [
        ({"plan": PLAN | {"noise_multiplier": 1e-6}}, "too-costly-to-account"),
        ({"plan": PLAN}, "not-calibrated"),
        ({"plan": DPGAN | {"sampling_prob": 1.5}, "target": {"epsilon": 1.0}}, "invalid-plan"),
        ({"plan": DPGAN | {"steps": None}, "target": {"epsilon": 1.0}}, "not-calibrated"),
        ({"plan": {"kind": "swd", "records": 10, "batch": 20, "dim": 4, "steps": 1}}, "invalid-plan"),
        ({"plan": PLAN, "target": {"epsilon": 1e-6}}, "target-out-of-reach"),
        ({"plan": PLAN | {"directions": "10"}}, "invalid-request"),
        ({"plan": PLAN | {"directions": True}}, "invalid-request"),
        ({"plan": {"kind": "unheard of"}}, "invalid-request"),
        ({"plan": PLAN | {"seed": 1}}, "invalid-request"),
        ({"target": {"epsilon": 0}}, "invalid-request"),
    ],
)
def test_a_plan_that_cannot_be_priced_is_refused_by_name(change, slug, house, request):
    dataset = request.getfixturevalue("one_dataset")
    for path in ("/v1/quotes", "/v1/jobs"):
        answer = house.curator.post(path, json={"dataset": dataset["id"], "plan": PLAN} | change)
        assert (answer.status_code, answer.json()["slug"]) == (422, slug), answer.text
    assert house.balance(dataset["account"])["held"] == 0


@pytest.fixture(scope="module")
def one_dataset(shared_house):
    shared_house.witnessed()
    return shared_house.ready(shared_house.curator)


def test_no_connection_is_held_while_a_price_is_computed(house, monkeypatch, one_dataset):
    held = []

    def watched(wrapped):
        def price(*arguments):
            held.append(house.app.state.engine.pool.checkedout())
            result = wrapped(*arguments)
            held.append(house.app.state.engine.pool.checkedout())
            return result

        return price

    monkeypatch.setattr(pricing, "priced", watched(pricing.priced))
    monkeypatch.setattr(pricing, "largest_epsilon", watched(pricing.largest_epsilon))
    assert quote(house.curator, one_dataset["id"], target={"epsilon": 0.9}).status_code == 200
    assert quote(house.curator, one_dataset["id"], target={"epsilon": 90.0}).json()["fits"] == 0
    assert house.job(house.curator, one_dataset["id"], key=new_key()).status_code == 202
    assert house.job(house.curator, one_dataset["id"], target={"epsilon": 90.0}).status_code == 409
    assert held == [0] * 12


# -- jobs


def test_a_job_is_charged_when_it_is_made(house):
    dataset = house.ready(house.curator)
    answer = house.job(house.curator, dataset["id"])
    job = answer.json()
    assert (answer.status_code, job["state"]) == (202, "queued")
    assert job["progress"]["steps"] == plan_from_dict(job["plan"]).progress_steps
    assert house.balance(dataset["account"])["held"] == job["cost"]
    [(kind, cost, event, actor)] = house.sql(
        "SELECT kind, cost, event, actor FROM entries WHERE job_id = %s", job["id"]
    )
    assert (kind, cost, event, actor) == ("reserve", job["cost"], job["event"], "curator")
    assert house.curator.get(f"/v1/jobs/{job['id']}").json() == job
    told = quote(house.curator, dataset["id"], target={"epsilon": 1.0}).json()
    assert told["total_after"]["renyi"] > told["epsilon"]["renyi"]
    assert told["left"]["cost"] == house.balance(dataset["account"])["capacity"] - job["cost"]


@pytest.mark.parametrize(
    "schema",
    [
        {"kind": "table", "columns": [{"kind": "number", "name": "age", "low": 0, "high": 120}]},
        {"kind": "image", "height": 7, "width": 28, "classes": ["a"]},
        {"kind": "image", "height": 28, "width": 65, "classes": ["a"]},
    ],
)
def test_nobody_pays_for_a_training_that_is_bound_to_fail(house, schema):
    dataset = house.ready(house.curator, schema=schema)
    before = house.balance(dataset["account"])
    answer = house.job(house.curator, dataset["id"])
    assert (answer.status_code, answer.json()["slug"]) == (422, "no-method")
    assert "8 to 64 pixels" in answer.json()["detail"]
    assert house.balance(dataset["account"]) == before


def test_nobody_pays_for_rows_of_another_length(house):
    dataset = house.ready(house.curator)
    swd = {"kind": "swd", "records": 100, "batch": 10, "directions": 4, "steps": 5, "frequencies": 4}
    refused = house.job(house.curator, dataset["id"], plan=swd | {"dim": 19})
    assert slug(refused) == (422, "invalid-plan")
    assert "must be 18, the length of a row of these images" in refused.json()["detail"]
    assert house.balance(dataset["account"])["held"] == 0
    fits = house.job(house.curator, dataset["id"], plan=swd | {"dim": 18})
    assert fits.status_code == 202, fits.text


# -- defaults


def declared(dataset):
    """The facts and the target that a client computes with, from what the service shows of a dataset."""
    facts = PublicFacts.of(dataset["schema"], dataset["nominal_size"])
    terms = {"delta": dataset["budget"]["delta"], "relation": Relation(dataset["relation"])}
    return facts, Target(epsilon=2.0, accountant=Accountant.RENYI, **terms)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("path", ["/v1/quotes", "/v1/jobs"])
def test_a_method_and_an_epsilon_give_the_plan_that_a_client_computes(method, path, house):
    dataset = house.ready(house.curator)
    facts, target = declared(dataset)
    plan = default_plan(METHODS[method], facts, target, {}).calibrated(target)
    body = {"dataset": dataset["id"], "method": method, "epsilon": 2.0}
    if METHODS[method].needs_source and path == "/v1/jobs":
        body["source"] = house.ready(house.curator, public=True)["id"]
    answer = house.curator.post(path, json=body)
    assert answer.is_success, answer.text
    assert answer.json()["plan"] == json.loads(json.dumps(plan.to_dict()))
    assert 1.9 < answer.json()["epsilon"]["renyi"] <= 2.0
    old = {"plan": plan.to_dict() | {"noise_multiplier": None}, "target": {"epsilon": 2.0}}
    same = house.curator.post(path, json={**body, "method": None, "epsilon": None, **old})
    assert (same.status_code, same.json()["plan"]) == (answer.status_code, answer.json()["plan"])


def test_without_a_method_the_recommended_one_is_used(house):
    dataset, public = house.ready(house.curator), house.ready(house.curator, public=True)
    facts, _ = declared(dataset)
    job = {"dataset": dataset["id"], "epsilon": 2.0}
    for more, wanted in [
        ({}, recommended(facts)),
        ({"source": public["id"]}, recommended(facts, source=True)),
        ({"shared": True}, recommended(facts, relay=True)),
    ]:
        answer = house.curator.post("/v1/jobs", json=job | more)
        assert answer.status_code == 202, answer.text
        assert answer.json()["plan"]["kind"] == wanted.name
    assert recommended(facts, source=True).needs_source
    assert recommended(facts, relay=True).can_relay
    assert quote(house.curator, **job, plan=None).json()["plan"]["kind"] == recommended(facts).name


def test_options_replace_defaults_by_field_or_short_name(house):
    dataset = house.ready(house.curator)
    body = {"dataset": dataset["id"], "method": "dpgan", "epsilon": 2.0}
    rate = {"rate": 0.1, "clip": 2, "steps": 7, "recipe": "fast-cpu"}
    plan = quote(house.curator, **body, plan=None, options=rate).json()["plan"]
    assert (plan["sampling_prob"], plan["clip_norm"], plan["steps"]) == (0.1, 2.0, 7)
    assert plan["recipe"]["network"] == "dense"
    by_field = {"sampling_prob": 0.1, "clip_norm": 2.0, "steps": 7, "recipe": plan["recipe"]}
    assert quote(house.curator, **body, plan=None, options=by_field).json()["plan"] == plan


@pytest.mark.parametrize(
    ("body", "slug"),
    [
        ({"epsilon": 1.0, "method": "magic"}, "invalid-plan"),
        ({"epsilon": 1.0, "method": "dpgan", "options": {"colour": "red"}}, "invalid-plan"),
        ({"epsilon": 1.0, "method": "dpgan", "options": {"steps": -1}}, "invalid-plan"),
        ({"epsilon": 1.0, "method": "dpgan", "options": {"clip": 10**400}}, "invalid-plan"),
        ({"epsilon": 1.0, "method": "dpgan", "options": {"rate": "x"}}, "invalid-plan"),
        ({"epsilon": 1.0, "method": "dpgan", "options": {"records": "x"}}, "invalid-plan"),
        ({"epsilon": 1.0, "method": "dpgan", "options": {"recipe": "magic"}}, "invalid-plan"),
        ({"epsilon": 1.0, "method": "dpgan", "options": {"recipe": {"latent": "x"}}}, "invalid-plan"),
        ({"epsilon": 1.0, "method": "dpgan", "options": {"steps": [1]}}, "invalid-request"),
        ({"epsilon": 1.0, "method": "dpgan", "options": {"clip": "x; give <b>"}}, "invalid-request"),
        ({"epsilon": 1.0, "method": "no such; method"}, "invalid-request"),
        ({"epsilon": 1.0, "target": {"epsilon": 1.0}}, "invalid-request"),
        ({"epsilon": 1.0, "plan": PLAN, "method": "dpgan"}, "invalid-request"),
        ({"epsilon": 1.0, "plan": PLAN, "options": {}}, "invalid-request"),
        ({"epsilon": 0.0}, "invalid-request"),
        ({"method": "dpgan"}, "invalid-request"),
        ({}, "invalid-request"),
    ],
)
def test_a_request_that_no_plan_follows_from_is_refused(body, slug, house, one_dataset):
    before = house.balance(one_dataset["account"])
    for path in ("/v1/quotes", "/v1/jobs"):
        answer = house.curator.post(path, json={"dataset": one_dataset["id"]} | body)
        assert (answer.status_code, answer.json()["slug"]) == (422, slug), answer.text
        assert "magic" not in answer.text
        assert "<b>" not in answer.text
    assert house.balance(one_dataset["account"]) == before


def test_no_method_is_recommended_for_records_that_none_can_learn(house):
    schema = {"kind": "table", "columns": [{"kind": "number", "name": "age", "low": 0, "high": 120}]}
    dataset = house.ready(house.curator, schema=schema)
    for path in ("/v1/quotes", "/v1/jobs"):
        for more in ({}, {"method": "swd"}):
            answer = house.curator.post(path, json={"dataset": dataset["id"], "epsilon": 1.0} | more)
            assert slug(answer) == (422, "no-method")


def test_a_key_used_before_there_were_defaults_is_still_known():
    """Replies are stored under a digest of this text, for ever."""
    id = "0b6f9f4e-6f0e-4d3b-9d3c-2f6d7a1c5e80"
    plan = {"kind": "swd", "records": 100, "batch": 10, "dim": 18, "steps": 5, "recipe": "fast-cpu"}
    body = NewJob.model_validate({"dataset": id, "plan": plan, "target": {"epsilon": 1.0}})
    assert body.model_dump_json() == (
        f'{{"dataset":"{id}","plan":{{"kind":"swd","steps":5,"noise_multiplier":null,"records":100,"batch":10,'
        '"directions":1000,"dim":18,"geometry":"sphere","row_bound":0.5,"label_weight":8.0,'
        '"frequencies":null,"recipe":"fast-cpu"},"target":{"epsilon":1.0,"accountant":"renyi"},'
        '"source":null,"shared":false,"after":null}'
    )


# -- adaptations

ADAPT = {"kind": "adapt", "records": 100, "batch": 20, "directions": 4, "dim": 6, "steps": 5}


def slug(answer):
    return answer.status_code, answer.json()["type"].rpartition(":")[2]


def test_an_adaptation_is_charged_for_its_target_alone(house):
    target, source = house.ready(house.curator), house.ready(house.curator, public=True)
    assert (target["public"], source["public"]) == (False, True)
    before = house.balance(source["account"])
    answer = house.job(house.curator, target["id"], plan=ADAPT, source=source["id"])
    assert answer.status_code == 202, answer.text
    told = answer.json()
    assert (told["dataset"], told["source"]) == (target["id"], source["id"])
    assert told["progress"]["steps"] == 505  # those on public images are no part of the charge
    assert told["event"]["steps"] == 5
    assert house.balance(target["account"])["held"] == told["cost"] > 0
    assert house.balance(source["account"]) == before
    assert slug(house.curator.delete(f"/v1/datasets/{source['id']}")) == (409, "wrong-state")


def test_only_what_is_public_for_sure_is_a_source(house):
    """Nobody is charged for a source: not private data, nor any that shares people with private data."""
    who, target = house.curator, house.ready(house.curator)
    public = house.ready(who, public=True)
    shared = house.ready(who, b"the same file", public=True)
    house.ready(who, b"the same file")  # accepted as private, after the public one
    child = house.ready(who, public=True, parent=target["id"])
    wide = {"kind": "image", "height": 8, "width": 16, "classes": ["a", "b"]}
    single = {"kind": "image", "height": 8, "width": 8, "classes": ["a"]}
    unfit = [
        {"source": house.ready(who)["id"]}, {"source": target["id"]}, {"source": shared["id"]},
        {"source": child["id"]}, {"source": house.ready(who, public=True, schema=wide)["id"]},
        {"source": house.ready(who, public=True, schema=single)["id"]}, {},
        {"source": public["id"], "plan": PLAN},
    ]  # fmt: skip
    before = house.balance(target["account"])
    for body in unfit:
        assert slug(house.job(who, target["id"], **{"plan": ADAPT} | body)) == (422, "unfit-source"), body
    theirs = house.ready(house.curator2, public=True)
    assert slug(house.job(who, target["id"], plan=ADAPT, source=theirs["id"])) == (404, "not-found")
    checking = house.sealed(who, public=True)
    assert slug(house.job(who, target["id"], plan=ADAPT, source=checking["id"])) == (409, "wrong-state")
    assert house.balance(target["account"]) == before


def test_a_classifier_is_drafted_without_samples(house):
    target, source = house.ready(house.curator), house.ready(house.curator, public=True)
    job = house.trained(house.curator, target["id"], plan=ADAPT, source=source["id"])
    refused = house.curator.post("/v1/releases", json={"job": job, "name": "c", "count": 10})
    assert slug(refused) == (422, "no-samples")
    told = house.draft(house.curator, job)
    assert (told["kind"], told["count"], told["formats"]) == ("classifier", 0, [])
    house.built(told["id"])
    assert slug(house.curator.get(f"/v1/releases/{told['id']}/preview")) == (404, "not-found")


# -- relays

RELAY = {"kind": "gswgan", "parts": 10, "panel": 10, "images": 4, "steps": 5, "recipe": "fast-cpu"}


def test_owners_take_turns_until_one_has_no_budget_left(house):
    one, other = house.ready(house.curator), house.ready(house.curator2)
    turns = [(house.curator, one, 9.0), (house.curator2, other, 1.0), (house.curator, one, 9.0)]
    before, told = None, []
    for who, dataset, eps in turns:
        body = {"plan": RELAY, "target": {"epsilon": eps}, "shared": True, "after": before}
        answer = house.job(who, dataset["id"], **body)
        told.append(answer.json())
        if answer.status_code == 202:
            before = house.finish(told[-1]["id"])
    assert [each.get("state") for each in told[:2]] == ["queued", "queued"]
    assert (told[1]["after"], told[1]["shared"]) == (told[0]["id"], True)
    assert (told[0]["account"], told[1]["account"]) == (one["account"], other["account"])
    # The first owner has nothing left for another turn; the second goes on without.
    assert told[2]["type"].endswith("budget-exceeded")
    again = house.job(house.curator2, other["id"], plan=RELAY, shared=True, after=before)
    assert (again.status_code, again.json()["after"]) == (202, told[1]["id"])
    paid = [house.balance(dataset["account"])["settled"] for dataset in (one, other)]
    assert paid == [told[0]["cost"], told[1]["cost"]]


def test_only_what_fits_and_was_shared_is_gone_on_from(house):
    who, dataset = house.curator2, house.ready(house.curator2)
    mine = house.ready(house.curator)
    kept = house.trained(house.curator, mine["id"], plan=RELAY)
    shared = house.trained(house.curator, mine["id"], plan=RELAY, shared=True)
    waiting = house.job(house.curator, mine["id"], plan=RELAY, shared=True).json()["id"]
    wider = house.ready(
        who, schema={"kind": "image", "height": 8, "width": 9, "classes": ["clear", "shadow"]}
    )
    before = house.balance(dataset["account"])
    for body, expected in [
        ({"after": kept}, (404, "not-found")),
        ({"after": str(uuid.uuid4())}, (404, "not-found")),
        ({"after": waiting}, (409, "wrong-state")),
        ({"after": shared, "plan": RELAY | {"recipe": "paper"}}, (422, "unfit-relay")),
        ({"after": shared, "plan": RELAY | {"recipe": None}}, (422, "unfit-relay")),
        ({"after": shared, "plan": PLAN}, (422, "unfit-relay")),
        ({"shared": True, "plan": PLAN}, (422, "unfit-relay")),
        ({"after": shared, "dataset": wider["id"]}, (422, "unfit-relay")),
    ]:
        assert slug(house.job(who, **{"dataset": dataset["id"], "plan": RELAY} | body)) == expected, body
    assert house.balance(dataset["account"]) == before


OTHER_TERMS = {
    "delta": {"budget": {"epsilon": 10.0, "delta": 1e-5}},
    "relation": {"relation": "replace_one"},
}


@pytest.mark.parametrize("terms", OTHER_TERMS)
def test_a_relay_has_one_delta_and_one_relation(terms, house):
    """Their epsilons stand on one card and are added up; nothing is charged for one that cannot."""
    shared = house.trained(house.curator, house.ready(house.curator)["id"], plan=RELAY, shared=True)
    other = house.ready(house.curator2, **OTHER_TERMS[terms])
    before = house.balance(other["account"])
    refused = house.job(house.curator2, other["id"], plan=RELAY, after=shared)
    assert slug(refused) == (422, "unfit-relay")
    assert "at delta 1e-06 under add_remove" in refused.json()["detail"]
    assert house.balance(other["account"]) == before


def test_every_account_before_it_counts_and_not_only_the_last(house):
    """A relay that was made before they were refused is not gone on from."""
    first = house.trained(house.curator, house.ready(house.curator)["id"], plan=RELAY, shared=True)
    other = house.ready(house.curator2, budget={"epsilon": 10.0, "delta": 1e-5})
    second = house.trained(house.curator2, other["id"], plan=RELAY, shared=True)
    mine = house.ready(house.curator, budget={"epsilon": 10.0, "delta": 1e-5})
    assert house.job(house.curator, mine["id"], plan=RELAY, after=second).status_code == 202
    with psycopg.connect(house.url("owner"), autocommit=True) as connection:
        connection.execute("SET session_replication_role = replica")
        connection.execute("UPDATE jobs SET after_id = %s WHERE id = %s", (first, second))
    refused = house.job(house.curator, mine["id"], plan=RELAY, after=second)
    assert slug(refused) == (422, "unfit-relay")


def test_cancelling_before_records_are_opened_gives_back_exactly(house):
    dataset = house.ready(house.curator)
    before = house.balance(dataset["account"])
    job = house.job(house.curator, dataset["id"]).json()
    for _ in range(2):  # safe to repeat
        answer = house.curator.post(f"/v1/jobs/{job['id']}/cancel")
        assert (answer.status_code, answer.json()["state"], answer.json()["fault"]) == (
            202,
            "cancelled",
            "cancelled",
        )
        assert house.balance(dataset["account"]) == before
    kinds = house.sql("SELECT kind FROM entries WHERE job_id = %s ORDER BY number", job["id"])
    assert kinds == [("reserve",), ("void",)]
    ledger = house.admin.get(f"/v1/admin/ledger/{dataset['account']}").json()
    assert ledger["chain"]["ok"]
    assert ledger["account"]["spent"] == {"renyi": 0.0, "pld": 0.0}


@pytest.mark.parametrize("state", ["running", "queued"])  # queued: handed back by a worker that had opened
def test_cancelling_after_records_were_opened_keeps_the_charge(state, house):
    dataset = house.ready(house.curator)
    job = house.job(house.curator, dataset["id"]).json()
    now = datetime.now(UTC)
    house.job_row(job["id"], state=state, fence=1, started_at=now, opened_at=now)
    for _ in range(2):
        answer = house.curator.post(f"/v1/jobs/{job['id']}/cancel")
        assert (answer.status_code, answer.json()["state"], answer.json()["cancel_asked"]) == (
            202,
            state,
            True,
        )
    assert house.balance(dataset["account"])["held"] == job["cost"]
    assert house.sql("SELECT kind FROM entries WHERE job_id = %s", job["id"]) == [("reserve",)]


def test_fifty_cancels_at_once_give_back_once(house):
    dataset = house.ready(house.curator)
    before = house.balance(dataset["account"])
    kept = house.job(house.curator, dataset["id"]).json()
    job = house.job(house.curator, dataset["id"]).json()
    with ThreadPoolExecutor(50) as pool:
        answers = list(pool.map(lambda _: house.curator.post(f"/v1/jobs/{job['id']}/cancel"), range(50)))
    assert {(a.status_code, a.json()["state"]) for a in answers} == {(202, "cancelled")}
    assert house.balance(dataset["account"]) == before | {"held": kept["cost"]}


def test_jobs_of_others_are_not_there(house):
    job = house.job(house.curator, house.ready(house.curator)["id"]).json()
    for path in ("", "/events"):
        assert house.curator2.get(f"/v1/jobs/{job['id']}{path}").status_code == 404
    assert house.curator2.post(f"/v1/jobs/{job['id']}/cancel").status_code == 404
    assert house.curator2.get("/v1/jobs", params={"dataset": job["dataset"]}).json()["items"] == []
    assert house.job(house.curator2, job["dataset"]).status_code == 404
    assert house.admin.get(f"/v1/jobs/{job['id']}").status_code == 200
    assert house.admin.post(f"/v1/jobs/{job['id']}/cancel").json()["state"] == "cancelled"


def test_a_dataset_deleted_while_a_job_is_priced_gets_no_job(house, monkeypatch):
    dataset = house.ready(house.curator)
    plain = pricing.priced

    def slow(*arguments):
        assert house.curator.delete(f"/v1/datasets/{dataset['id']}").status_code == 202
        return plain(*arguments)

    monkeypatch.setattr(pricing, "priced", slow)
    answer = house.job(house.curator, dataset["id"])
    assert (answer.status_code, answer.json()["slug"]) == (409, "wrong-state")
    assert house.balance(dataset["account"])["held"] == 0


def test_a_lost_doorbell_does_not_lose_the_job(house, monkeypatch):
    dataset = house.ready(house.curator)

    def broken(*_, **__):
        raise OperationalError("no queue")

    monkeypatch.setattr(house.app.state.queues["train"], "send_task", broken)
    answer = house.job(house.curator, dataset["id"])
    assert answer.status_code == 202
    assert house.balance(dataset["account"])["held"] == answer.json()["cost"]


# -- idempotency keys


def test_one_key_fifty_times_at_once_makes_one_job(house):
    dataset = house.ready(house.curator)
    key = new_key()
    with ThreadPoolExecutor(50) as pool:
        answers = list(pool.map(lambda _: house.job(house.curator, dataset["id"], key=key), range(50)))
    assert {answer.status_code for answer in answers} == {202}
    job = answers[0].json()
    assert all(answer.json() == job for answer in answers)
    assert house.balance(dataset["account"])["held"] == job["cost"]
    assert house.sql("SELECT count(*) FROM jobs WHERE dataset_id = %s", dataset["id"]) == [(1,)]
    assert house.sql("SELECT count(*) FROM entries WHERE account_id = %s", dataset["account"]) == [(2,)]


def test_a_key_tells_the_first_answer_for_ever(house):
    dataset = house.ready(house.curator, budget={"epsilon": 1.0, "delta": 1e-6})
    key = new_key()
    first = house.job(house.curator, dataset["id"], key=key, target={"epsilon": 0.9})
    assert first.status_code == 202
    assert house.job(house.curator, dataset["id"], target={"epsilon": 0.9}).status_code == 409
    house.job_row(first.json()["id"], state="failed", fault="diverged")
    assert house.curator.delete(f"/v1/datasets/{dataset['id']}").status_code == 202
    house.sql("UPDATE witness SET checked_at = NULL", role="sweep")
    again = house.job(house.curator, dataset["id"], key=key, target={"epsilon": 0.9})
    assert (again.status_code, again.json()) == (202, first.json())
    # The same numbers in another order and spelling are the same body.
    plan = dict(reversed(PLAN.items())) | {"steps": 1}
    again = house.job(house.curator, dataset["id"], key=key, target={"epsilon": 0.9}, plan=plan)
    assert (again.status_code, again.json()) == (202, first.json())


def test_a_key_used_for_another_body_is_refused(house, one_dataset):
    key = new_key()
    assert house.job(house.curator, one_dataset["id"], key=key).status_code == 202
    held = house.balance(one_dataset["account"])["held"]
    other = house.job(house.curator, one_dataset["id"], key=key, target={"epsilon": 0.7})
    assert (other.status_code, other.json()["slug"]) == (422, "idempotency-key-reused")
    body = {"name": "d", "schema": {"kind": "image", "height": 1, "width": 1, "classes": ["a"]}}
    body |= {"nominal_size": 1, "budget": {"epsilon": 1.0, "delta": 1e-6}}
    elsewhere = house.curator.post("/v1/datasets", json=body, headers={"Idempotency-Key": key})
    assert (elsewhere.status_code, elsewhere.json()["slug"]) == (422, "idempotency-key-reused")
    assert house.balance(one_dataset["account"])["held"] == held


def test_keys_of_two_people_are_two_keys(house):
    key = new_key()
    mine = house.job(house.curator, house.ready(house.curator)["id"], key=key)
    theirs = house.job(house.curator2, house.ready(house.curator2)["id"], key=key)
    assert (mine.status_code, theirs.status_code) == (202, 202)
    assert mine.json()["id"] != theirs.json()["id"]


def test_without_a_key_each_request_is_its_own(house, one_dataset):
    first, second = (house.job(house.curator, one_dataset["id"]) for _ in range(2))
    assert first.json()["id"] != second.json()["id"]


def test_a_refusal_is_not_remembered(house):
    dataset = house.ready(house.curator, budget={"epsilon": 1.0, "delta": 1e-6})
    held = house.job(house.curator, dataset["id"], target={"epsilon": 0.9}).json()
    key = new_key()
    assert house.job(house.curator, dataset["id"], key=key, target={"epsilon": 0.9}).status_code == 409
    assert house.curator.post(f"/v1/jobs/{held['id']}/cancel").status_code == 202
    assert house.job(house.curator, dataset["id"], key=key, target={"epsilon": 0.9}).status_code == 202


@pytest.mark.parametrize("key", ["", "x" * 201, "a b", "ä".encode("latin-1")])
def test_an_odd_key_is_refused(key, house, one_dataset):
    body = {"dataset": one_dataset["id"], "plan": PLAN, "target": {"epsilon": 1.0}}
    answer = house.curator.post("/v1/jobs", json=body, headers={"Idempotency-Key": key})
    assert (answer.status_code, answer.json()["slug"]) == (422, "invalid-request")


def test_registering_with_a_key_makes_one_dataset(house):
    body = {"name": "d", "schema": {"kind": "image", "height": 1, "width": 1, "classes": ["a"]}}
    body |= {"nominal_size": 1, "budget": {"epsilon": 1.0, "delta": 1e-6}}
    key = {"Idempotency-Key": new_key()}
    answers = [house.curator.post("/v1/datasets", json=body, headers=key) for _ in range(3)]
    assert {a.status_code for a in answers} == {201}
    assert answers[1].json() == answers[2].json() == answers[0].json()


# -- watching


def test_lists_filter_and_page_over_ties(house):
    who = house.person("curator")
    first, second = house.ready(who), house.ready(who)
    jobs = [house.job(who, d["id"]).json()["id"] for d in (first, second) for _ in range(4)]
    house.sql("UPDATE jobs SET created_at = '2026-01-01T00:00:00Z' WHERE owner_id = %s", who.id)
    house.job_row(jobs[0], state="running", fence=1)
    assert who.post(f"/v1/jobs/{jobs[1]}/cancel").json()["state"] == "cancelled"

    def listed(**query):
        seen, cursor = [], None
        while True:
            answer = who.get("/v1/jobs", params=query | {"limit": 3} | ({"cursor": cursor} if cursor else {}))
            assert len(answer.json()["items"]) <= 3
            seen += [job["id"] for job in answer.json()["items"]]
            cursor = answer.json()["next"]
            if cursor is None:
                return seen

    assert sorted(listed()) == sorted(jobs)
    assert sorted(listed(dataset=second["id"])) == sorted(jobs[4:])
    assert listed(state="running") == [jobs[0]]
    assert listed(state="cancelled", dataset=first["id"]) == [jobs[1]]
    assert len(listed(state="queued")) == 6
    assert listed(dataset=str(uuid.uuid4())) == []
    assert who.get("/v1/jobs?state=lost").status_code == 422
    assert who.get("/v1/jobs?limit=0").status_code == 422
    assert who.get("/v1/jobs?limit=201").status_code == 422


def test_progress_tells_steps_and_when_it_should_end(house, one_dataset):
    job = house.job(house.curator, one_dataset["id"], plan=DPGAN).json()
    assert job["progress"] == {"step": 0, "steps": 1000, "started_at": None, "eta": None}
    started = datetime.now(UTC) - timedelta(seconds=100)
    house.job_row(job["id"], state="running", fence=1, started_at=started, step=250)
    progress = house.curator.get(f"/v1/jobs/{job['id']}").json()["progress"]
    assert (progress["step"], progress["steps"]) == (250, 1000)
    left = datetime.fromisoformat(progress["eta"]) - datetime.now(UTC)
    assert left.total_seconds() == pytest.approx(300, abs=20)


class Stream:
    """Reads server-sent events in the background, as they come."""

    def __init__(self, who, job):
        self.events, self.ended, self.came = [], threading.Event(), threading.Condition()
        self.thread = threading.Thread(target=self._read, args=(who, job), daemon=True)
        self.thread.start()

    def _read(self, who, job):
        with who.stream("GET", f"/v1/jobs/{job}/events") as answer:
            self.type = answer.headers["content-type"]
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    with self.came:
                        self.events.append(json.loads(line.removeprefix("data: ")))
                        self.came.notify_all()
        self.ended.set()

    def wait(self, count):
        with self.came:
            assert self.came.wait_for(lambda: len(self.events) >= count, timeout=20)
        return self.events[-1]


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(routes, "_POLL_SECONDS", 0.05)


def test_a_stream_tells_each_change_and_ends_with_the_job(house, quick, one_dataset):
    job = house.job(house.curator, one_dataset["id"], plan=DPGAN).json()["id"]
    stream = Stream(house.curator, job)
    assert stream.wait(1)["state"] == "queued"
    assert stream.type.startswith("text/event-stream")
    now = datetime.now(UTC)
    house.job_row(job, state="running", fence=1, started_at=now, opened_at=now, step=1)
    assert stream.wait(2)["state"] == "running"
    house.job_row(job, step=500)
    assert stream.wait(3)["progress"]["step"] == 500
    assert house.app.state.engine.pool.checkedout() <= 1  # a stream holds no connection between looks
    assert house.curator.post(f"/v1/jobs/{job}/cancel").status_code == 202
    assert stream.wait(4)["cancel_asked"] is True
    house.job_row(job, state="failed", fault="lost", finished_at=now)
    assert stream.ended.wait(20)
    assert len(stream.events) == 5
    assert (stream.events[-1]["state"], stream.events[-1]["fault"]) == ("failed", "lost")
    after = Stream(house.curator, job)
    assert after.ended.wait(20)
    assert [event["state"] for event in after.events] == ["failed"]


def test_many_streams_leave_room_for_requests(house, quick, one_dataset):
    job = house.job(house.curator, one_dataset["id"], plan=DPGAN).json()["id"]
    streams = [Stream(house.curator, job) for _ in range(40)]
    for stream in streams:
        stream.wait(1)
    assert house.curator2.get("/v1/me").status_code == 200
    house.curator.post(f"/v1/jobs/{job}/cancel")
    assert all(stream.ended.wait(20) for stream in streams)


def test_revoking_a_key_ends_its_stream(house, quick):
    who = house.person("curator")
    job = house.job(who, house.ready(who)["id"]).json()["id"]
    stream = Stream(who, job)
    stream.wait(1)
    [(key,)] = house.sql("SELECT id FROM keys WHERE person_id = %s", who.id)
    assert house.admin.delete(f"/v1/admin/keys/{key}").status_code == 204
    assert stream.ended.wait(5)
    assert [event["state"] for event in stream.events] == ["queued"]


def test_ended_states_are_those_the_database_keeps(house):
    assert set(actions.ENDED) == {"trained", "failed", "cancelled"}
