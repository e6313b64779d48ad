"""Budgets: views, export, recomputation, grants by two people, refusal while the ledger is out of sync."""

import csv
import io
import json
import os
import uuid
from datetime import UTC, datetime

import psycopg
import pytest
from psycopg.types.json import Jsonb
from sqlalchemy import select
from sqlalchemy.orm import Session

from core import ledger
from core.database import connect
from core.ledger import Move
from core.tables import Grant, Witness
from core.witness import LedgerNotWitnessed, charge_lost
from sluice.privacy.account import capacity
from sluice.privacy.relation import Relation
from sluice.release.ledger import fold
from tests.service.house import opened


@pytest.fixture
def account(house):
    """An account with one job settled, one voided, one held."""
    dataset = house.ready(house.curator)
    for _ in range(3):
        house.job(house.curator, dataset["id"], target={"epsilon": 0.5})
    settled, voided, held = (
        job["id"] for job in house.curator.get(f"/v1/jobs?dataset={dataset['id']}").json()["items"][::-1]
    )
    now = datetime.now(UTC)
    house.job_row(settled, state="running", fence=1, started_at=now, opened_at=now)
    with Session(house.engine) as session, session.begin():
        account = uuid.UUID(dataset["account"])
        ledger.settle(session, account, job=uuid.UUID(settled), move=Move(actor="train", reason="trained"))
    house.job_row(settled, state="trained", finished_at=now)
    house.curator.post(f"/v1/jobs/{voided}/cancel")
    return {"id": dataset["account"], "dataset": dataset["id"], "jobs": (settled, voided, held)}


def test_an_admin_sees_every_account_and_every_row(house, account):
    id = account["id"]
    [seen] = [a for a in house.admin.get("/v1/admin/ledger?limit=200").json()["items"] if a["id"] == id]
    cost = house.admin.get(f"/v1/jobs/{account['jobs'][2]}").json()["cost"]
    assert seen["granted"] == capacity(10.0, 1e-6, 4) == 6144610006
    assert (seen["held"], seen["settled"], seen["left"]["cost"]) == (cost, cost, seen["granted"] - 2 * cost)
    assert (seen["moves"], seen["datasets"], seen["spent"]["pld"]) == (6, 1, None)
    whole = house.admin.get(f"/v1/admin/ledger/{id}").json()
    assert whole["chain"] == {"ok": True, "broken_row": None, "why": None}
    assert [e["kind"] for e in whole["entries"]] == [
        "grant", "reserve", "reserve", "reserve", "settle", "void",
    ]  # fmt: skip
    assert whole["entries"][-1]["digest"] == whole["account"]["head"] == seen["head"]
    assert whole["account"]["last_move_at"][:19] == whole["entries"][-1]["at"][:19]
    # Two of the three were not given back; both readings say less than their sum.
    one = whole["entries"][1]["readings"]
    for accountant in ("renyi", "pld"):
        assert one[accountant] < whole["account"]["spent"][accountant] < 2 * one[accountant]


def test_rows_shown_can_be_checked_by_whoever_gets_them(house, account):
    whole = house.admin.get(f"/v1/admin/ledger/{account['id']}").json()
    balance, head, number, broken = fold(whole["entries"])
    assert (broken, number, head.hex()) == (None, 6, whole["account"]["head"])
    assert (balance.capacity, balance.held, balance.settled) == tuple(
        whole["account"][name] for name in ("granted", "held", "settled")
    )
    whole["entries"][2]["cost"] -= 1
    assert fold(whole["entries"])[3].number == 3


def test_rows_are_filtered_and_paged(house, account):
    path = f"/v1/admin/ledger/{account['id']}"

    def numbers(**query):
        return [e["number"] for e in house.admin.get(path, params=query).json()["entries"]]

    assert numbers(kind="reserve") == [2, 3, 4]
    assert numbers(actor="train") == [1, 5]  # opened when the records were read, and settled
    assert numbers(actor="nobody") == []
    fifth = house.admin.get(path, params={"after": 4, "limit": 1}).json()
    assert ([e["number"] for e in fifth["entries"]], fifth["next"]) == ([5], 5)
    assert numbers(since=fifth["entries"][0]["at"]) == [5, 6]
    seen, after = [], 0
    while after is not None:
        page = house.admin.get(path, params={"limit": 4, "after": after}).json()
        seen += [e["number"] for e in page["entries"]]
        after = page["next"]
    assert seen == [1, 2, 3, 4, 5, 6]


def test_an_altered_row_is_shown_as_broken(house, account):
    house.sql("ALTER TABLE entries DISABLE TRIGGER entries_stay")
    house.sql("UPDATE entries SET reason = 'nothing' WHERE account_id = %s AND number = 2", account["id"])
    house.sql("ALTER TABLE entries ENABLE TRIGGER entries_stay")
    chain = house.admin.get(f"/v1/admin/ledger/{account['id']}").json()["chain"]
    assert (chain["ok"], chain["broken_row"]) == (False, 2)


def test_an_export_is_whole_and_runs_nothing_in_a_spreadsheet(house):
    """U2: every lead that starts a formula is escaped."""
    leads = ["=1+1", "+1", "-1", "@SUM(A1)", "\tx", "\rx", "plain", 'quo"ted', "com,ma", "new\nline"]
    owner = connect(house.url("owner"), pool_size=1)
    with Session(owner) as session, session.begin():
        account = ledger.open_account(
            session, relation=Relation.ADD_REMOVE, epsilon=1.0, delta=1e-6, order=8,
            move=Move(actor="=cmd|' /C calc'!A0", reason=leads[0]),
        )  # fmt: skip
        for more, lead in enumerate(leads[1:], start=2):
            grant = Grant(
                id=uuid.uuid4(), account_id=account.id, epsilon=float(more), reason=lead,
                proposed_by=house.curator.id, decided_by=house.admin.id, state="confirmed",
            )  # fmt: skip
            session.add(grant)
            session.flush()
            ledger.raise_budget(session, account, epsilon=float(more), move=Move(actor="@x", reason=lead))
        id = account.id
    owner.dispose()
    answer = house.admin.get(f"/v1/admin/ledger/{id}?format=csv")
    assert answer.headers["content-type"].startswith("text/csv")
    assert answer.headers["content-disposition"] == f'attachment; filename="ledger-{id}.csv"'
    rows = list(csv.DictReader(io.StringIO(answer.text, newline="")))
    assert len(rows) == len(leads)
    assert not any(cell.startswith(tuple("=+-@\t\r")) for row in rows for cell in row.values())
    assert [row["reason"].removeprefix("'") for row in rows] == leads
    shown = house.admin.get(f"/v1/admin/ledger/{id}").json()["entries"]
    for row, entry in zip(rows, shown, strict=True):
        for name in ("number", "kind", "cost", "at", "previous", "digest"):
            assert row[name] == str(entry[name])
        assert json.loads(row["terms"]) == entry["terms"]


def test_reading_all_history_again_names_the_rows_that_changed(house, account):
    path = f"/v1/admin/ledger/{account['id']}/recompute"
    for accountant in ("renyi", "pld"):
        told = house.admin.get(path, params={"accountant": accountant}).json()
        assert [row["changed"] for row in told["rows"]] == [False] * 3
        assert [row["number"] for row in told["rows"]] == [2, 3, 4]
        spent = house.admin.get(f"/v1/admin/ledger/{account['id']}").json()["account"]["spent"]
        assert told["total"] == spent[accountant]
    house.sql("ALTER TABLE entries DISABLE TRIGGER entries_stay")
    house.sql(
        "UPDATE entries SET readings = jsonb_set(readings, '{pld}', '0.1') "
        "WHERE account_id = %s AND number = 3",
        account["id"],
    )
    house.sql("ALTER TABLE entries ENABLE TRIGGER entries_stay")
    told = house.admin.get(path, params={"accountant": "pld"}).json()
    assert [row["changed"] for row in told["rows"]] == [False, True, False]
    assert told["rows"][1]["stored"] == 0.1
    assert told["rows"][1]["now"] == told["rows"][0]["now"]
    assert house.admin.get(path, params={"accountant": "guess"}).status_code == 422
    assert house.admin.get(path).status_code == 422


# -- two people


def propose(who, account, epsilon=12.0):
    return who.post(
        f"/v1/admin/ledger/{account}/grants", json={"epsilon": epsilon, "reason": "a second cohort"}
    )


def test_a_budget_grows_by_two_people_and_by_exactly_what_they_agreed(house):
    dataset = house.ready(house.curator)
    account = dataset["account"]
    before = house.balance(account)
    proposed = propose(house.curator, account)
    assert (proposed.status_code, proposed.json()["state"]) == (201, "proposed")
    assert house.balance(account) == before
    path = f"/v1/admin/ledger/{account}/grants/{proposed.json()['id']}"
    alone = house.curator.post(f"{path}/confirm")
    assert (alone.status_code, alone.json()["slug"]) == (403, "second-person-needed")
    stranger = house.curator2.post(f"{path}/confirm")
    assert (stranger.status_code, stranger.json()["slug"]) == (404, "not-found")
    assert house.balance(account) == before
    second = propose(house.admin, account, 20.0)
    assert (second.status_code, second.json()["slug"]) == (409, "grant-open")
    for _ in range(2):  # said twice, done once
        confirmed = house.admin.post(f"{path}/confirm")
        assert (confirmed.status_code, confirmed.json()["state"]) == (200, "confirmed")
        assert house.balance(account) == before | {"capacity": capacity(12.0, 1e-6, 4)}
    late = house.admin2.post(f"{path}/confirm")
    assert (late.status_code, late.json()["slug"]) == (409, "wrong-state")
    seen = house.admin.get(f"/v1/admin/ledger/{account}").json()
    assert seen["account"]["epsilon"] == 12.0
    assert seen["chain"]["ok"]
    row = seen["entries"][-1]
    assert (row["kind"], row["cost"], row["actor"]) == (
        "grant",
        capacity(12.0, 1e-6, 4) - before["capacity"],
        "admin1",
    )
    assert row["reason"].endswith(": a second cohort")
    assert row["terms"]["epsilon"] == 12.0
    [listed] = house.curator.get(f"/v1/admin/ledger/{account}/grants").json()
    assert (listed["proposed_by"], listed["decided_by"]) == (str(house.curator.id), str(house.admin.id))


def test_another_curator_of_the_same_people_may_confirm(house):
    content = os.urandom(32)
    account = house.ready(house.curator, content)["account"]
    assert propose(house.curator2, account).status_code == 404
    grant = propose(house.curator, account).json()["id"]
    theirs = house.sealed(house.curator2, content)["id"]
    assert house.checked(theirs) == "held"
    assert house.accepted(theirs, decision="join", account=account)["account"] == account
    assert house.curator2.post(f"/v1/admin/ledger/{account}/grants/{grant}/confirm").status_code == 200


def test_a_withdrawn_proposal_is_over(house):
    account = house.ready(house.curator)["account"]
    grant = propose(house.admin, account).json()["id"]
    path = f"/v1/admin/ledger/{account}/grants/{grant}"
    assert [house.admin.post(f"{path}/withdraw").json()["state"] for _ in range(2)] == ["withdrawn"] * 2
    over = house.admin2.post(f"{path}/confirm")
    assert (over.status_code, over.json()["slug"]) == (409, "wrong-state")
    assert propose(house.curator, account).status_code == 201


@pytest.mark.parametrize("epsilon", [10.0, 9.0])
def test_a_budget_never_shrinks(epsilon, house):
    account = house.ready(house.curator)["account"]
    answer = propose(house.curator, account, epsilon)
    assert (answer.status_code, answer.json()["slug"]) == (422, "budget-not-raised")


def test_a_proposal_belongs_to_its_account(house):
    one, two = house.ready(house.curator)["account"], house.ready(house.curator)["account"]
    grant = propose(house.curator, one).json()["id"]
    assert house.admin.post(f"/v1/admin/ledger/{two}/grants/{grant}/confirm").status_code == 404
    assert house.admin.post(f"/v1/admin/ledger/{one}/grants/{uuid.uuid4()}/confirm").status_code == 404


def test_a_job_fits_after_the_budget_was_raised(house):
    dataset = house.ready(house.curator, budget={"epsilon": 1.0, "delta": 1e-6})
    assert house.job(house.curator, dataset["id"], target={"epsilon": 2.0}).status_code == 409
    grant = propose(house.curator, dataset["account"], 3.0).json()["id"]
    house.admin.post(f"/v1/admin/ledger/{dataset['account']}/grants/{grant}/confirm")
    assert house.job(house.curator, dataset["id"], target={"epsilon": 2.0}).status_code == 202


# -- the witness


@pytest.fixture
def own_house(servers):
    """A database that may fall behind its witness without disturbing other tests."""
    with opened(servers) as house:
        yield house


def everything_that_grants(house, dataset, account, grant, job):
    """Each request that would give budget, or give some back."""
    return {
        "job": lambda: house.job(house.curator, dataset),
        "confirm": lambda: house.admin.post(f"/v1/admin/ledger/{account}/grants/{grant}/confirm"),
        "cancel": lambda: house.curator.post(f"/v1/jobs/{job}/cancel"),
    }


def test_nothing_is_granted_unless_the_ledger_was_compared_lately(house):
    dataset = house.ready(house.curator)
    grant = propose(house.curator, dataset["account"]).json()["id"]
    job = house.job(house.curator, dataset["id"]).json()["id"]
    asks = everything_that_grants(house, dataset["id"], dataset["account"], grant, job)
    fresh = house.sealed(house.curator)["id"]
    before = house.balance(dataset["account"])
    for when in ("NULL", "now() - interval '61 seconds'", "now() + interval '2 minutes'"):
        house.sql(f"UPDATE witness SET checked_at = {when}", role="sweep")
        for ask in asks.values():
            answer = ask()
            assert (answer.status_code, answer.json()["slug"]) == (503, "ledger-not-witnessed")
        with pytest.raises(LedgerNotWitnessed):  # no new account either
            house.checked(fresh)
        assert house.balance(dataset["account"]) == before
    assert house.curator.get(f"/v1/datasets/{dataset['id']}/budget").status_code == 200
    house.witnessed()
    assert {name: ask().status_code for name, ask in asks.items()} == {
        "job": 202, "confirm": 200, "cancel": 202,
    }  # fmt: skip
    assert house.checked(fresh) == "ready"


def test_a_restored_backup_gives_nothing_until_an_admin_counts_the_loss_as_spent(own_house):
    house = own_house
    house.sweep()
    dataset = house.ready(house.curator)
    id, account = dataset["id"], dataset["account"]
    kept = house.job(house.curator, id, target={"epsilon": 0.5}).json()
    grant = propose(house.curator, account).json()["id"]
    tables = ("accounts", "entries", "jobs")
    backup = {name: house.sql(f"SELECT to_jsonb(t) FROM {name} t") for name in tables}
    lost = house.job(house.curator, id, target={"epsilon": 1.0}).json()
    house.sweep()
    asks = everything_that_grants(house, id, account, grant, kept["id"])
    before = house.balance(account)

    # Back to the backup: the second job never happened, as far as this database knows.
    restore(house, backup)
    assert house.balance(account)["held"] == kept["cost"]
    house.sweep()
    for name, ask in asks.items():
        answer = ask()
        assert (answer.status_code, answer.json()["slug"]) == (503, "ledger-behind-witness"), name
    for path in (f"/v1/datasets/{id}", f"/v1/datasets/{id}/budget", "/v1/jobs", f"/v1/jobs/{kept['id']}"):
        assert house.curator.get(path).status_code == 200
    quote = {"dataset": id, "plan": kept["plan"]}
    assert house.curator.post("/v1/quotes", json=quote).status_code == 200
    witness = house.admin.get("/v1/admin/witness").json()
    told = witness["behind"]["accounts"][account]
    assert (told["reason"], told["spent"]) == ("behind", before["held"])
    assert told["capacity"] == before["capacity"]

    path, generation = "/v1/admin/witness/acknowledge", witness["behind"]["generation"]
    body = {"generation": generation, "reason": "disk lost on Tuesday"}
    wrong = house.admin.post(path, json=body | {"generation": generation + 1})
    assert (wrong.status_code, wrong.json()["slug"]) == (409, "wrong-state")
    told = house.admin.post(path, json=body)
    assert (told.status_code, told.json()["acknowledged"]) == (200, generation)
    # All that the witness knew of is spent now, and the job that may have run is over.
    assert house.balance(account) == before | {"held": 0, "settled": kept["cost"] + lost["cost"]}
    over = house.curator.get(f"/v1/jobs/{kept['id']}").json()
    assert (over["state"], over["fault"]) == ("failed", "lost")
    house.sweep()
    assert house.admin.get("/v1/admin/witness").json()["behind"] is None
    assert {name: ask().status_code for name, ask in asks.items()} == {
        "job": 202, "confirm": 200, "cancel": 202,
    }  # fmt: skip
    assert house.balance(account)["settled"] == kept["cost"] + lost["cost"]
    shown = house.admin.get(f"/v1/admin/ledger/{account}").json()
    assert shown["chain"]["ok"]
    assert any(e["reason"] == "behind its witness: disk lost on Tuesday" for e in shown["entries"])
    again = house.admin.post(path, json=body)
    assert (again.status_code, again.json()["slug"]) == (409, "wrong-state")


def test_an_account_that_the_backup_never_had_is_made_again_by_a_restore_and_not_by_the_service(own_house):
    house = own_house
    house.sweep()
    backup = {name: [] for name in ("datasets", "entries", "jobs", "accounts")}
    dataset = house.ready(house.curator)
    cost = house.job(house.curator, dataset["id"]).json()["cost"]
    house.sweep()
    before = house.balance(dataset["account"])
    restore(house, backup)
    assert house.admin.get("/v1/admin/ledger").json()["items"] == []
    house.sweep()
    generation = house.admin.get("/v1/admin/witness").json()["behind"]["generation"]
    body = {"generation": generation, "reason": "disk lost on Tuesday"}
    answer = house.admin.post("/v1/admin/witness/acknowledge", json=body)
    assert (answer.status_code, answer.json()["slug"]) == (409, "restore-needed")
    engine = connect(house.url("owner"), pool_size=1)  # as `sluice restore --charge` does
    with Session(engine) as session, session.begin():
        row = session.scalars(select(Witness)).one()
        charge_lost(session, row.behind["accounts"], Move(actor="restore", reason="disk lost on Tuesday"))
        row.acknowledged = generation
    engine.dispose()
    house.sweep()
    assert house.admin.get("/v1/admin/witness").json()["behind"] is None
    assert house.balance(dataset["account"]) == before | {"held": 0, "settled": cost}
    assert house.admin.get(f"/v1/admin/ledger/{dataset['account']}").json()["chain"]["ok"]


def test_a_raised_capacity_shuts_the_ledger_and_cannot_be_acknowledged(own_house):
    """A hundred times the budget, written over the balance: nothing is granted from it."""
    house = own_house
    house.sweep()
    dataset = house.ready(house.curator)
    id, account = dataset["id"], dataset["account"]
    kept = house.job(house.curator, id, target={"epsilon": 0.5}).json()
    grant = propose(house.curator, account).json()["id"]
    house.sweep()
    asks = everything_that_grants(house, id, account, grant, kept["id"])
    before = house.balance(account)
    house.sql("ALTER TABLE accounts DISABLE TRIGGER USER")
    house.sql("UPDATE accounts SET capacity = capacity * 100 WHERE id = %s", account)
    house.sweep()
    for name, ask in asks.items():
        answer = ask()
        assert (answer.status_code, answer.json()["slug"]) == (503, "ledger-altered"), name
    behind = house.admin.get("/v1/admin/witness").json()["behind"]
    told = behind["accounts"][account]
    assert (told["reason"], told["capacity"]) == ("altered", before["capacity"])
    body = {"generation": behind["generation"], "reason": "it looks fine to me"}
    answer = house.admin.post("/v1/admin/witness/acknowledge", json=body)
    assert (answer.status_code, answer.json()["slug"]) == (503, "ledger-altered")
    assert "owner" in answer.json()["detail"]
    house.sql("UPDATE accounts SET capacity = %s WHERE id = %s", told["capacity"], account)
    house.sql("ALTER TABLE accounts ENABLE TRIGGER USER")
    house.sweep()
    assert house.admin.get("/v1/admin/witness").json()["behind"] is None
    assert house.balance(account) == before
    assert {name: ask().status_code for name, ask in asks.items()} == {
        "job": 202, "confirm": 200, "cancel": 202,
    }  # fmt: skip


def test_a_witness_that_lost_its_entries_grants_nothing_and_cannot_be_acknowledged(own_house, tmp_path):
    house = own_house
    dataset = house.ready(house.curator)
    house.sweep()
    generation = house.admin.get("/v1/admin/witness").json()["generation"]
    house.witness._root.rename(tmp_path / "away")
    house.witness._root.mkdir()
    house.sweep()
    answer = house.job(house.curator, dataset["id"])
    assert (answer.status_code, answer.json()["slug"]) == (503, "witness-lost")
    witness = house.admin.get("/v1/admin/witness").json()
    assert witness["behind"] == {"generation": 0, "accounts": {}, "lost": True}
    assert witness["generation"] == generation
    for named in (generation, 1):
        body = {"generation": named, "reason": "it is gone"}
        answer = house.admin.post("/v1/admin/witness/acknowledge", json=body)
        assert (answer.status_code, answer.json()["slug"]) == (409, "wrong-state")
    house.witness._root.rmdir()
    (tmp_path / "away").rename(house.witness._root)
    house.sweep()
    assert house.job(house.curator, dataset["id"]).status_code == 202


def restore(house, backup):
    """What a dump of that moment would hold; the datasets have not changed since."""
    with psycopg.connect(house.url("owner")) as connection:
        connection.execute("SET session_replication_role = replica")  # as a restore does: no triggers
        for name, rows in backup.items():
            connection.execute(f"DELETE FROM {name}")
            for (row,) in rows:
                put = f"INSERT INTO {name} SELECT * FROM jsonb_populate_record(NULL::{name}, %s)"
                connection.execute(put, [Jsonb(row)])
