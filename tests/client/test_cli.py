"""The commands against a real service: what they print, what they leave behind, how they end."""

import copy
import hashlib
import io
import json
import os
import stat
import subprocess
import sys
import threading
import uuid

import pytest
import typer
from sqlalchemy import text

from core.stores import s3
from core.unwrap import FileKeys
from local.__main__ import app
from sluice.cli.ledger import verify_account
from sluice.cli.main import main
from sluice.client import config
from sluice.client.api import Sluice
from sluice.envelope import Stream, upload_context
from sluice.methods import METHODS, PublicFacts, Target, default_plan, recommended
from sluice.privacy.accountant import Accountant
from sluice.privacy.relation import Relation
from sluice.release.chain import GENESIS
from sluice.release.ledger import digest
from tests.conftest import new_database
from tests.e2e.serving import Site, api_processes

PLAN = {"kind": "dpgan", "sampling_prob": 1.0, "steps": 3, "noise_multiplier": 20.0}
ENOUGH = 10**9


@pytest.fixture(scope="module")
def service(servers, tmp_path_factory):
    """One service for all tests here; each has people and accounts of its own."""
    directory = tmp_path_factory.mktemp("service")
    with (
        new_database(servers) as database,
        api_processes(1, directory, servers.environments["service"], database) as ([url], _),
    ):
        site = Site(database)
        site.url = url
        yield site
        site.engine.dispose()


@pytest.fixture
def site(service, monkeypatch, tmp_path):
    """The service, an admin, a curator and an analyst, and the directory where a person keeps their login."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("COLUMNS", "250")
    for name in ("SLUICE_URL", "SLUICE_KEY"):
        monkeypatch.delenv(name, raising=False)
    service.level()
    one = uuid.uuid4().hex[:6]
    _, service.admin = service.person(f"ada-{one}", "admin")
    service.curator_id, service.curator = service.person(f"carl-{one}", "curator")
    _, service.analyst = service.person(f"anna-{one}", "analyst")
    service.names = {"ada": f"ada-{one}", "carl": f"carl-{one}", "dora": f"dora-{one}"}
    return service


@pytest.fixture
def sluice(site, monkeypatch, capsys):
    """Runs a command as one of the people; gives exit code, standard output and standard error."""

    def run(*arguments, key=None, stdin=""):
        environment = {"SLUICE_URL": site.url, "SLUICE_KEY": key} if key else {}
        monkeypatch.setattr(sys, "argv", ["sluice", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capsys.readouterr()
        with monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            try:
                main()
                code = 0
            except SystemExit as end:
                code = end.code or 0
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return code, out, err

    return run


@pytest.fixture
def told(sluice):
    """The JSON a command prints when all is well."""

    def run(*arguments, **options):
        code, out, err = sluice(*arguments, "--json", **options)
        assert code == 0, err
        return json.loads(out)

    return run


@pytest.fixture
def plan(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(PLAN))
    return path


# -- who and where


def test_login_keeps_a_key_that_only_its_owner_can_read(site, sluice, told):
    who = told("login", "--url", site.url + "/", stdin=f"{site.curator}\n")
    assert (who["name"], who["role"]) == (site.names["carl"], "curator")
    path = config.config_file()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert json.loads(path.read_text()) == {"url": site.url, "key": site.curator}
    assert told("datasets", "list") == []
    code, out, _ = sluice("login", stdin=f"{site.admin}\n")
    assert code == 0
    assert out.startswith(f"{site.names['ada']} (admin) at {site.url}")
    assert site.admin not in out
    assert sorted(one.name for one in path.parent.iterdir()) == [path.name, "trust.json"]


def test_a_key_that_does_not_work_is_not_kept(site, sluice):
    code, _, err = sluice("login", "--url", site.url, stdin="sl_wrong\n")
    assert code == 1
    assert err.startswith("sluice: Authentication required: The key is unknown")
    assert not config.config_file().exists()


def test_a_kept_key_goes_to_its_own_address_only(site, sluice):
    sluice("login", "--url", site.url, stdin=f"{site.curator}\n")
    code, _, err = sluice("datasets", "list", "--url", "http://127.0.0.1:9")
    assert code == 1
    assert err.startswith("sluice: no key for http://127.0.0.1:9: sluice login --url http://127.0.0.1:9, or ")


@pytest.mark.parametrize("damage", ["open", "broken"])
def test_a_login_that_cannot_be_trusted(site, sluice, damage):
    path = config.save(site.url, site.curator)
    path.chmod(0o644) if damage == "open" else path.write_text("{")
    code, _, err = sluice("jobs", "list")
    assert code == 1
    assert "sluice login" in err
    sluice("login", "--url", site.url, stdin=f"{site.curator}\n")
    assert sluice("jobs", "list")[0] == 0


def test_without_a_login_it_says_how(site, sluice):
    code, out, err = sluice("ledger", "show", "--json")
    assert code == 1
    assert json.loads(out)["problem"]["detail"] in err
    assert "sluice login" in err


def test_out_of_reach_is_one_line_and_exit_code_one():
    command = [
        sys.executable,
        "-m",
        "sluice.cli.main",
        "datasets",
        "list",
        "--url",
        "http://127.0.0.1:9",
        "--key",
        "sl_x",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("sluice: cannot reach http://127.0.0.1:9: ")
    assert len(done.stderr.splitlines()) == 1


def test_commands_start_without_the_packages_they_may_not_need():
    code = "import sys, sluice.cli.main; print(*{m.split('.')[0] for m in sys.modules})"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not {"httpx", "numpy", "scipy", "core", "sqlalchemy", "boto3", "pydantic"} & set(loaded)


# -- datasets

ADD = [
    "--name",
    "digits",
    "--records",
    1000,
    "--epsilon",
    4,
    "--delta",
    1e-5,
    "--image",
    "28x28",
    "--classes",
    "0,1",
]


@pytest.fixture
def objects(servers):
    """Reads what arrived, as the owner of the store; removes it afterwards."""
    admin = s3.client(endpoint=servers.s3_endpoint, region="us-east-1", **servers.s3_identities["admin"])
    kept = []

    def read(key):
        kept.append(key)
        return admin.get_object(Bucket="sluice-private", Key=key)["Body"].read()

    yield read
    for key in kept:
        admin.delete_object(Bucket="sluice-private", Key=key)


def row(site, id):
    with site.engine.connect() as connection:
        names = "id, state, size, sha256, object_key, key_id, wrapped_key"
        return connection.execute(text(f"SELECT {names} FROM datasets WHERE id = :id"), {"id": id}).one()


def decrypted(servers, row, stored):
    """As the private side reads it."""
    keys = FileKeys(servers.environments["train"]["SLUICE_UPLOAD_KEY"])
    key = keys.unwrap(bytes(row.wrapped_key), row.key_id)
    return Stream(key, upload_context(row.id)).decrypt(stored)


@pytest.fixture
def file(tmp_path):
    """Two parts: an almost empty one and a short one."""
    path = tmp_path / "digits.npz"
    with path.open("wb") as out:
        out.write(os.urandom(1 << 20))
        out.seek(64 << 20)
        out.write(os.urandom(1 << 20))
    return path


def test_a_file_is_declared_sent_in_parts_and_sealed(servers, site, sluice, told, file, objects):
    sealed = told("datasets", "add", file, *ADD, "--detach", key=site.curator)
    assert sealed["state"] == "checking"
    assert sealed["schema"]["classes"] == ["0", "1"]
    kept = row(site, sealed["id"])
    stored = objects(kept.object_key)
    assert (kept.size, bytes(kept.sha256)) == (len(stored), hashlib.sha256(stored).digest())
    assert decrypted(servers, kept, stored) == file.read_bytes()
    assert [one["id"] for one in told("datasets", "list", key=site.curator)] == [sealed["id"]]
    code, out, _ = sluice("datasets", "show", sealed["id"], key=site.curator)
    assert code == 0
    assert "images 28×28×1, 2 classes" in out
    deleted = told("datasets", "delete", sealed["id"], "--detach", key=site.curator)
    assert (deleted["state"], deleted["removed_at"]) == ("deleted", None)
    assert told("datasets", "list", key=site.curator) == []
    code, out, _ = sluice("datasets", "delete", sealed["id"], "--detach", key=site.curator)
    assert (code, "a train worker removes its bytes" in out) == (0, True)
    with site.engine.begin() as connection:  # as a train worker does
        connection.execute(text("UPDATE datasets SET removed_at = now() WHERE state = 'deleted'"))
    code, out, _ = sluice("datasets", "delete", sealed["id"], key=site.curator)
    assert (code, "its bytes were removed from the store at 20" in out) == (0, True)
    assert "deleted, bytes removed 20" in sluice("datasets", "show", sealed["id"], key=site.curator)[1]


def test_a_cut_upload_is_picked_up(servers, site, sluice, told, file, objects, monkeypatch):
    sign, signed = Sluice.sign_parts, []

    def cut(service, id, numbers, **more):
        signed.extend(numbers)
        if len(signed) == 2:
            raise KeyboardInterrupt
        return sign(service, id, numbers, **more)

    monkeypatch.setattr(Sluice, "sign_parts", cut)
    code, _, err = sluice("datasets", "add", file, *ADD, "--detach", key=site.curator)
    assert code == 130
    id = told("datasets", "list", key=site.curator)[0]["id"]
    assert f"sluice datasets upload {id} {file}" in err
    sealed = told("datasets", "upload", id, file, "--detach", key=site.curator)
    assert signed == [1, 2, 2]
    assert sealed["state"] == "checking"
    kept = row(site, id)
    assert decrypted(servers, kept, objects(kept.object_key)) == file.read_bytes()


def test_a_rejected_file_ends_with_one(site, sluice, tmp_path, objects):
    file = tmp_path / "bad.npz"
    file.write_bytes(b"no records")
    change = (
        "UPDATE datasets SET state = 'rejected', fault = 'not-an-archive' "
        "WHERE owner_id = :me AND state = 'checking'"
    )
    done = threading.Event()

    def reject():
        while not done.wait(0.05):
            with site.engine.begin() as connection:
                connection.execute(text(change), {"me": site.curator_id})

    worker = threading.Thread(target=reject)
    worker.start()
    try:
        code, out, _ = sluice("datasets", "add", file, *ADD, key=site.curator)
    finally:
        done.set()
        worker.join()
    assert code == 1
    assert "rejected: not-an-archive" in out
    with site.engine.connect() as connection:
        query = text("SELECT object_key FROM datasets WHERE owner_id = :me")
        objects(connection.execute(query, {"me": site.curator_id}).scalar_one())


def test_a_declaration_that_does_not_fit_names_its_fields(site, sluice, tmp_path):
    file = tmp_path / "x.npz"
    file.write_bytes(b"x")
    wrong = [*ADD[:5], -4, *ADD[6:]]
    code, out, err = sluice("datasets", "add", file, *wrong, "--json", key=site.curator)
    assert code == 1
    assert json.loads(out)["problem"]["slug"] == "invalid-request"
    assert "budget.epsilon: " in err


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (["--image", "28"], "declare the data either by"),
        (["--schema", "nowhere.json"], "declare the data either by"),
    ],
)
def test_a_schema_that_is_none(site, sluice, tmp_path, change, sentence):
    code, _, err = sluice("datasets", "add", tmp_path / "x", *ADD, *change, key=site.curator)
    assert code == 1
    assert sentence in err


def test_a_missing_file_registers_nothing(site, sluice, told, tmp_path):
    code, _, err = sluice("datasets", "add", tmp_path / "none.npz", *ADD, key=site.curator)
    assert code == 1
    assert "is not a file" in err
    assert told("datasets", "list", key=site.curator) == []


# -- jobs


def test_quote_start_list_cancel(site, sluice, told, plan):
    dataset, _ = site.ready_dataset(site.curator_id, capacity=ENOUGH)
    priced = told("jobs", "quote", dataset.id, plan, key=site.curator)
    job = told("jobs", "start", dataset.id, plan, key=site.curator)
    assert job["state"] == "queued"
    assert job["cost"] == priced["cost"]
    assert told("ledger", "show", "--dataset", dataset.id, key=site.curator)["held"] == job["cost"]
    assert [one["id"] for one in told("jobs", "list", "--state", "queued", key=site.curator)] == [job["id"]]
    assert told("jobs", "list", "--state", "trained", key=site.curator) == []
    assert told("jobs", "cancel", job["id"], key=site.curator)["state"] == "cancelled"
    assert told("ledger", "show", "--dataset", dataset.id, key=site.curator)["held"] == 0
    for command in (["quote", dataset.id, plan], ["list"], ["show", job["id"]]):
        code, out, _ = sluice("jobs", *command, key=site.curator)
        assert code == 0
        assert f"{job['epsilon']['renyi']:.4f}" in out


def test_what_quote_prints_can_be_started(site, told):
    dataset, _ = site.ready_dataset(site.curator_id, capacity=ENOUGH)
    quoted = told("quote", "dpgan", "--rate", 1, "--noise", 20, "--steps", 3, "--delta", 1e-5)
    job = told("jobs", "start", dataset.id, "-", key=site.curator, stdin=json.dumps(quoted))
    assert job["plan"] == quoted["plan"]
    target = told(
        "jobs", "start", dataset.id, "-", "--epsilon", 0.5, key=site.curator, stdin=json.dumps(quoted)
    )
    assert 0.49 < target["epsilon"]["renyi"] <= 0.5


def test_too_little_budget_says_what_would_fit(site, sluice, plan):
    dataset, _ = site.ready_dataset(site.curator_id, capacity=10**7)
    code, out, err = sluice("jobs", "start", dataset.id, plan, "--json", key=site.curator)
    assert code == 1
    problem = json.loads(out)["problem"]
    assert problem["slug"] == "budget-exceeded"
    assert problem["asked"]["cost"] > problem["left"]["cost"]
    lines = err.splitlines()
    assert lines[0].startswith("sluice: Not enough budget left: ")
    assert any(line == f"  largest epsilon: {problem['largest_epsilon']:.6g}" for line in lines)


def test_watching_ends_with_the_job(site, sluice, plan, monkeypatch):
    dataset, _ = site.ready_dataset(site.curator_id, capacity=ENOUGH)
    steps = iter(
        ["state = 'running', step = 1, started_at = now()", "step = 2", "state = 'trained', step = 3"]
    )
    watch = Sluice.watch

    def watch_and_train(service, id):
        """Takes the next step of the job once the last one was seen."""
        for job in watch(service, id):
            yield job
            if change := next(steps, None):
                with site.engine.begin() as connection:
                    connection.execute(text(f"UPDATE jobs SET {change} WHERE id = :id"), {"id": id})

    monkeypatch.setattr(Sluice, "watch", watch_and_train)
    code, out, err = sluice("jobs", "start", dataset.id, plan, "--watch", "--json", key=site.curator)
    assert code == 0, err
    seen = [json.loads(line) for line in out.splitlines()]
    assert [(one["state"], one["progress"]["step"]) for one in seen] == [
        ("queued", 0), ("running", 1), ("running", 2), ("trained", 3),
    ]  # fmt: skip
    code, out, _ = sluice("jobs", "watch", seen[0]["id"], key=site.curator)
    assert code == 0
    assert "trained" in out


def test_watching_a_job_that_did_not_make_it_ends_with_one(site, sluice, told, plan):
    dataset, _ = site.ready_dataset(site.curator_id, capacity=ENOUGH)
    job = told("jobs", "start", dataset.id, plan, key=site.curator)
    told("jobs", "cancel", job["id"], key=site.curator)
    code, _, err = sluice("jobs", "watch", job["id"], key=site.curator)
    assert code == 1
    assert err == f"sluice: job {job['id']} ended as cancelled: cancelled\n"


def test_what_belongs_to_another_role_is_refused(site, sluice, plan):
    for command in (["datasets", "list"], ["ledger", "show"], ["people", "list"]):
        code, _, err = sluice(*command, key=site.analyst)
        assert code == 1
        assert err.startswith("sluice: Not allowed for your role: ")


# -- budgets


@pytest.fixture
def spent(site, told, plan):
    """An account with a grant, two promises and one given back."""
    dataset, account = site.ready_dataset(site.curator_id, capacity=ENOUGH)
    jobs = [told("jobs", "start", dataset.id, plan, key=site.curator) for _ in range(2)]
    told("jobs", "cancel", jobs[0]["id"], key=site.curator)
    return str(account.id)


@pytest.fixture
def tamper(site):
    """What a superuser with bad intentions does; undone afterwards."""

    def run(*changes):
        with site.engine.begin() as connection:
            for change in ("SET LOCAL session_replication_role = replica", *changes):  # no trigger fires
                connection.execute(text(change))

    run("CREATE TABLE kept AS TABLE entries")
    yield run
    run("DELETE FROM entries", "INSERT INTO entries TABLE kept", "DROP TABLE kept")


def test_a_whole_ledger_verifies(site, sluice, told, spent):
    verdicts = told("ledger", "verify", "--reprice", key=site.admin)
    [verdict] = [one for one in verdicts if one["account"] == spent]
    assert verdict == {
        "account": spent, "ok": True, "rows": 4, "head": verdict["head"], "broken_row": None, "why": None,
    }  # fmt: skip
    code, out, _ = sluice("ledger", "verify", spent, key=site.admin)
    assert code == 0
    assert "1 accounts verified: hash chain and balances are consistent" in out


@pytest.mark.parametrize(
    ("change", "number"),
    [
        ("UPDATE entries SET reason = 'other' WHERE number = 2", 2),
        ("UPDATE entries SET actor = 'nobody' WHERE number = 1", 1),
        ("UPDATE entries SET at = at + interval '1 microsecond' WHERE number = 3", 3),
        ("UPDATE entries SET terms = terms || '{\"epsilon\": 99}' WHERE number = 1", 1),
        ("UPDATE entries SET digest = decode(repeat('00', 32), 'hex') WHERE number = 2", 2),
        ("DELETE FROM entries WHERE number = 3", 3),
        ("DELETE FROM entries WHERE number = 4", 4),
    ],
)
def test_the_first_broken_row_is_named(site, sluice, spent, tamper, change, number):
    tamper(f"{change} AND account_id = '{spent}'")
    code, out, _ = sluice("ledger", "verify", "--json", key=site.admin)
    assert code == 1
    [verdict] = [one for one in json.loads(out) if not one["ok"]]
    assert verdict["account"] == spent
    assert (verdict["ok"], verdict["broken_row"]) == (False, number)
    code, out, _ = sluice("ledger", "verify", spent, key=site.admin)
    assert code == 1
    assert f"BROKEN: row {number} " in out


class Lying:
    """A service that swears all is well and shows other things than it has."""

    def __init__(self, service, lie):
        self.service, self.lie = service, lie

    def ledger(self, account, *, after=0):
        page = copy.deepcopy(self.service.ledger(account, after=after, limit=2))
        page["chain"] = {"ok": True, "broken_row": None, "why": None}
        self.lie(page)
        return page


def lie_about(number, field, value):
    def lie(page):
        for entry in page["entries"]:
            if entry["number"] == number:
                entry.pop(field) if value is KeyError else entry.update({field: value})

    return lie


ROW_LIES = [
    (1, "terms", None), (1, "terms", KeyError), (2, "cost", 1), (2, "cost", "1"), (2, "kind", "settle"),
    (2, "kind", "gift"), (2, "number", 7), (2, "number", KeyError), (2, "job", None), (3, "event", None),
    (3, "readings", {"renyi": 1}), (3, "previous", "00" * 32), (3, "digest", "00" * 32), (3, "digest", "zz"),
    (3, "digest", None), (3, "account", "x"), (4, "actor", "x"), (4, "reason", "x"), (4, "at", "x"),
    (4, "terms", {}), (4, "digest", KeyError),
]  # fmt: skip


def test_a_lying_service_is_found_out_in_every_field_of_a_row(site, spent):
    with Sluice(site.url, site.admin) as service:
        assert verify_account(Lying(service, lambda _: None), spent)["ok"]
        for number, field, value in ROW_LIES:
            verdict = verify_account(Lying(service, lie_about(number, field, value)), spent)
            assert not verdict["ok"], (number, field, value)
            assert verdict["broken_row"] == number, (number, field, value)


@pytest.mark.parametrize(
    "claim",
    [
        {"granted": 2 * ENOUGH}, {"held": 0}, {"settled": 5}, {"moves": 5}, {"moves": 3}, {"head": "00" * 32},
        {"epsilon": 99.0}, {"delta": 0.1}, {"order": 2}, {"relation": "replace_one"},
    ],
)  # fmt: skip
def test_a_lying_service_is_found_out_in_what_it_claims_of_the_account(site, spent, claim):
    with Sluice(site.url, site.admin) as service:
        assert not verify_account(Lying(service, lambda page: page["account"].update(claim)), spent)["ok"]


def test_a_grant_of_more_than_its_budget_is_found_whatever_the_service_says(site, spent):
    """All rows hashed anew, and the account claims what they add up to."""

    def lie(page):
        head = GENESIS
        for row in page["entries"]:
            row["cost"] *= 3 if row["kind"] == "grant" else 1
            row["previous"] = head.hex()
            head = digest(head, row)
            row["digest"] = head.hex()
        page["account"] |= {"head": head.hex(), "granted": 3 * page["account"]["granted"]}

    class Whole(Lying):
        def ledger(self, account, *, after=0):
            page = copy.deepcopy(self.service.ledger(account, after=after))
            self.lie(page)
            return page

    with Sluice(site.url, site.admin) as service:
        verdict = verify_account(Whole(service, lie), spent)
    assert (verdict["ok"], verdict["broken_row"]) == (False, 1)
    assert verdict["why"] == "grants more than its budget holds"


def test_a_ledger_that_was_written_anew_does_not_run_through_a_head_known_from_elsewhere(
    site, sluice, told, spent
):
    rows = told("ledger", "show", spent, key=site.admin)["entries"]
    assert sluice("ledger", "verify", spent, "--head", rows[1]["digest"], key=site.admin)[0] == 0
    code, out, _ = sluice("ledger", "verify", spent, "--head", "ab" * 32, key=site.admin)
    assert code == 1
    assert "the head that was given" in out


def test_an_account_that_moves_meanwhile_is_not_taken_for_a_broken_one(site, told, spent, plan):
    dataset = told("jobs", "list", key=site.curator)[0]["dataset"]

    class Moving(Lying):
        def ledger(self, account, *, after=0):
            page = super().ledger(account, after=after)
            if after < 6:
                told("jobs", "start", dataset, plan, key=site.curator)
                page["account"] = self.service.ledger(account)["account"]
            return page

    with Sluice(site.url, site.admin) as service:
        verdict = verify_account(Moving(service, lambda _: None), spent)
    assert verdict["ok"], verdict
    assert verdict["rows"] > 6


def test_a_charge_below_its_events_cost_is_found(site, spent, monkeypatch):
    monkeypatch.setattr("sluice.privacy.accountant.cost", lambda *_, **__: 10**15)
    with Sluice(site.url, site.admin) as service:
        verdict = verify_account(service, spent, reprice=True)
    assert (verdict["ok"], verdict["broken_row"]) == (False, 2)
    assert "its event costs 1000000.000000" in verdict["why"]


def test_export(site, sluice, told, spent, tmp_path):
    code, out, _ = sluice("ledger", "export", spent, key=site.admin)
    assert code == 0
    assert [line.split(",")[2] for line in out.splitlines()[1:]] == ["grant", "reserve", "reserve", "void"]
    file = tmp_path / "rows.jsonl"
    assert told("ledger", "export", spent, "--format", "json", "--out", file, key=site.admin)["rows"] == 4
    shown = told("ledger", "show", spent, key=site.admin)
    assert [json.loads(line) for line in file.read_text().splitlines()] == shown["entries"]
    code, out, _ = sluice("ledger", "show", spent, key=site.admin)
    assert code == 0
    assert "cancelled before records were opened" in out
    assert sluice("ledger", "export", spent, "--out", tmp_path / "no/where", key=site.admin)[0] == 1


def test_the_audit_log_is_shown_exported_and_verified(site, sluice, told, tmp_path):
    told("datasets", "list", key=site.curator)
    shown = told("audit-log", "show", "--person", site.names["carl"], "--last", 1, key=site.admin)
    assert [(row["name"], row["action"]) for row in shown] == [(site.names["carl"], "GET /v1/datasets")]
    assert told("audit-log", "show", "--person", "nobody", "--since", "2020-01-01", key=site.admin) == []
    code, out, _ = sluice("audit-log", "show", "--last", 3, key=site.admin)
    assert (code, "GET /v1/admin/audit-log" in out) == (0, True)
    verified = told("audit-log", "verify", key=site.admin)
    assert (verified["ok"], verified["why"]) == (True, None)
    assert told("audit-log", "verify", "--head", verified["head"], key=site.admin)["rows"] > verified["rows"]
    file = tmp_path / "log.jsonl"
    exported = told("audit-log", "export", "--out", file, key=site.admin)
    lines = file.read_text().splitlines()
    assert exported == {"rows": len(lines), "to": str(file)}
    assert told("audit-log", "verify", file, key=site.admin)["rows"] == len(lines)
    file.write_text("\n".join(line.replace("GET /v1/datasets", "GET /v1/me") for line in lines))
    code, out, _ = sluice("audit-log", "verify", file, key=site.admin)
    assert (code, "was changed after it was written" in out) == (1, True)
    code, out, _ = sluice("audit-log", "verify", "--head", "00" * 32, key=site.admin)
    assert (code, "do not include the digest" in out) == (1, True)
    code, _, err = sluice("audit-log", "show", key=site.curator)
    assert (code, "admin" in err) == (1, True)


def test_a_budget_is_raised_by_two_people(site, sluice, told, spent):
    before = told("ledger", "show", spent, key=site.admin)["account"]
    proposed = told("ledger", "grant", spent, "--epsilon", 20, "--reason", "more years", key=site.curator)
    code, _, err = sluice("ledger", "confirm", spent, proposed["id"], key=site.curator)
    assert code == 1
    assert err.startswith("sluice: A second person has to confirm this: ")
    assert told("ledger", "confirm", spent, proposed["id"], key=site.admin)["state"] == "confirmed"
    [after] = [one for one in told("ledger", "show", key=site.admin) if one["id"] == spent]
    assert (after["epsilon"], after["granted"] > before["granted"]) == (20, True)
    assert [one["state"] for one in told("ledger", "grants", spent, key=site.admin)] == ["confirmed"]
    again = told("ledger", "grant", spent, "--epsilon", 30, "--reason", "even more", key=site.curator)
    assert told("ledger", "withdraw", spent, again["id"], key=site.curator)["state"] == "withdrawn"
    assert told("ledger", "verify", spent, key=site.admin)[0]["ok"]


# -- people and keys


def test_people_and_their_keys(site, sluice, told):
    dora = told("people", "add", site.names["dora"], "--role", "curator", key=site.admin)
    assert {one["name"] for one in told("people", "list", key=site.admin)} >= set(site.names.values())
    # An invitation is given to login in place of a key; the key that is kept was never shown to anybody.
    invitation = dora["invitation"]["invitation"]
    assert told("login", "--url", site.url, stdin=f"{invitation}\n")["name"] == site.names["dora"]
    assert sluice("login", "--url", site.url, stdin=f"{invitation}\n")[0] == 1
    [first] = told("keys", "list")
    fresh = told("keys", "add", "--label", "laptop", "--days", 30)
    code, out, _ = sluice("keys", "list", site.names["dora"], key=site.admin)
    assert code == 0
    assert "laptop" in out
    assert fresh["key"] not in out
    assert told("keys", "revoke", first["id"], key=fresh["key"]) == {"revoked": first["id"]}
    assert sluice("datasets", "list")[0] == 1
    assert told("datasets", "list", key=fresh["key"]) == []
    # Lost: invited again, which ends the old key once it is used.
    code, out, err = sluice("people", "invite", site.names["dora"], key=site.admin)
    assert (code, "shown only once" in err) == (0, True)
    assert sluice("login", "--url", site.url, stdin=out)[0] == 0
    assert sluice("datasets", "list", key=fresh["key"])[0] == 1
    shown = told("people", "invitations", site.names["dora"], key=site.admin)
    assert [(one["state"], one["refused"]) for one in shown] == [("used", 0), ("used", 1)]
    assert told("people", "disable", site.names["dora"], key=site.admin)["disabled"]
    assert sluice("datasets", "list")[0] == 1
    code, _, err = sluice("keys", "list", "nobody", key=site.admin)
    assert code == 1
    assert "nobody is called nobody" in err


def test_teams_and_who_is_in_them(site, sluice, told):
    name = f"team-{site.names['carl']}"
    made = told("teams", "add", name, key=site.admin)
    assert made in told("teams", "list", key=site.admin)
    assert told("teams", "move", site.names["carl"], name, key=site.admin)["team"] == made["id"]
    code, out, _ = sluice("teams", "list", key=site.admin)
    assert (code, name in out) == (0, True)
    assert told("teams", "move", site.names["carl"], key=site.admin)["team"] is None
    code, _, err = sluice("teams", "move", site.names["carl"], "none-such", key=site.admin)
    assert (code, "no team is called none-such" in err) == (1, True)


def test_a_new_admin_takes_two(site, sluice, told):
    name = f"bert-{uuid.uuid4().hex[:6]}"
    code, out, err = sluice("people", "add", name, "--role", "admin", key=site.admin)
    assert (code, "sli_" in out, "inviting an admin takes two" in err) == (0, False, True)
    [waiting] = told("people", "invitations", name, key=site.admin)
    code, _, err = sluice("people", "confirm", waiting["id"], key=site.admin)
    assert (code, "independent" in err) == (1, True)
    _, second = site.person(f"eve-{name}", "admin")
    confirmed = told("people", "confirm", waiting["id"], key=second)
    told("people", "withdraw", waiting["id"], key=second)
    code, _, err = sluice("login", "--url", site.url, stdin=confirmed["invitation"])
    assert (code, "withdrawn" in err) == (1, True)


# -- what is the same everywhere

AT_HOME = {("releases", "verify"), ("releases", "sample"), ("releases", "classify")}  # these ask nobody


def test_every_command_has_json_and_the_connection():
    groups = typer.main.get_command(app).commands
    for group in ("datasets", "jobs", "releases", "ledger", "audit-log", "people", "keys", "teams"):
        for name, command in groups[group].commands.items():
            options = {option for each in command.params for option in each.opts}
            assert ({"--json"} if (group, name) in AT_HOME else {"--json", "--url", "--key"}) <= options, name
            assert command.help, (group, name)
    for name in ("login", "train", "verify", "demo"):
        assert "--json" in {option for each in groups[name].params for option in each.opts}, name


def test_every_exit_code_is_documented(sluice):
    _, out, _ = sluice("--help")
    told = " ".join(out.replace("│", " ").split())
    for code in (
        "0 success",
        "1 refused",
        "2 wrong usage",
        "3 a release that is altered",
        "4 a release that was",
    ):
        assert code in told


def test_the_shell_completes_commands(monkeypatch):
    command = [sys.executable, "-c", "from sluice.cli.main import main; main()"]
    asked = {"_SLUICE_COMPLETE": "complete_bash", "COMP_WORDS": "sluice rel", "COMP_CWORD": "1"}
    patched = "import sys; sys.argv[0] = 'sluice'; " + command[2]
    done = subprocess.run(
        [*command[:2], patched], capture_output=True, text=True, env=os.environ | asked, check=False
    )
    assert done.stdout.split() == ["releases"], done.stderr


# -- training in one command


def test_train_prices_charges_and_enqueues_within_the_epsilon(site, told):
    dataset, _ = site.ready_dataset(site.curator_id, capacity=10**11)
    small = ["--method", "dpgan", "--set", "rate=0.1", "--set", "steps=5", "--set", "recipe=fast-cpu"]
    job = told("train", dataset.id, "--epsilon", 2, *small, "--detach", key=site.curator)
    assert job["state"] == "queued"
    assert 1.99 < job["epsilon"]["renyi"] <= 2
    assert (job["plan"]["steps"], job["plan"]["expected_batch"]) == (5, 100)
    by_default = told("train", dataset.id, "--epsilon", 2, "--detach", key=site.curator)
    facts = PublicFacts.of(dataset.schema, dataset.nominal_size)
    assert by_default["plan"]["kind"] == recommended(facts).name
    assert by_default["epsilon"]["renyi"] <= 2


def test_train_adapts_hands_on_and_goes_on(site, sluice, told):
    dataset, _ = site.ready_dataset(site.curator_id, capacity=10**11)
    public, _ = site.ready_dataset(site.curator_id, capacity=10**11, public=True)
    ask = ["train", dataset.id, "--epsilon", 2, "--detach"]
    adapting = told(*ask, "--source", public.id, key=site.curator)
    assert (adapting["plan"]["kind"], adapting["source"]) == ("adapt", str(public.id))
    shared = told(*ask, "--shared", key=site.curator)
    assert (shared["plan"]["kind"], shared["shared"], shared["after"]) == ("gswgan", True, None)
    code, _, err = sluice(*ask, "--after", shared["id"], key=site.curator)
    assert (code, "is not trained" in err) == (1, True), err  # not trained yet


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("side", "channels", "records"), [(28, 1, 60_000), (8, 3, 120)])
def test_every_method_has_numbers_to_train_with(method, side, channels, records):
    """No method asks for a number that a curator would have to look up."""
    schema = {
        "kind": "image",
        "height": side,
        "width": side,
        "channels": channels,
        "classes": ["a", "b", "c"],
    }
    aim = Target(epsilon=10.0, delta=1e-5, relation=Relation.ADD_REMOVE, accountant=Accountant.RENYI)
    plan = default_plan(METHODS[method], PublicFacts.of(schema, records), aim, {})
    reading = plan.calibrated(aim).reading(
        delta=1e-5, relation=Relation.ADD_REMOVE, accountant=Accountant.RENYI
    )
    assert 9 < reading.epsilon <= 10


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--method", "magic"], "There is no such method; there are "),
        (["--method", "dpgan", "--set", "steps"], "'steps' sets nothing"),
        (["--method", "dpgan", "--set", "noise=-1"], "Invalid plan"),
        (["--method", "dpgan", "--set", "colour=red"], "Invalid plan"),
        (["--method", "dpgan", "--set", "recipe=magic"], "There is no preset of that name"),
    ],
)
def test_a_training_that_cannot_be_is_refused_before_it_is_charged(site, sluice, told, more, sentence):
    dataset, _ = site.ready_dataset(site.curator_id, capacity=10**11)
    code, _, err = sluice("train", dataset.id, "--epsilon", 2, *more, "--detach", key=site.curator)
    assert code == 1
    assert sentence in err
    assert told("jobs", "list", key=site.curator) == []
