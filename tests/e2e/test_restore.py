"""A backup is put back with the real command: what was spent since is charged, or nothing is restored."""

import hashlib
import json
import shutil
import subprocess
import uuid

import psycopg
import pytest
from sqlalchemy.orm import Session

from core.database import connect
from core.stores import s3
from core.stores.witness import DirectoryWitness, S3Witness
from core.tables import Account
from core.witness import WitnessLog, compare
from tests.core.ledgers import Books, closed_cost
from tests.e2e.curating import Site
from tests.e2e.driving import PATIENCE, SLUICE, plain_environment, wait_for
from tests.worker.conftest import upload

PLAN = {"kind": "dpgan", "sampling_prob": 0.05, "expected_batch": 10, "steps": 5}


def restore(*arguments, **environment):
    """`sluice restore`: its exit code, what it printed, and what it said went wrong."""
    ran = subprocess.run(
        [*SLUICE, "restore", *map(str, arguments)],
        capture_output=True,
        text=True,
        env=plain_environment(**environment),
    )
    return ran.returncode, ran.stdout, ran.stderr


def contents(*directories):
    """Every file by its name and content."""
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        for directory in directories
        for path in directory.rglob("*")
        if path.is_file()
    }


def spending(site):
    """Account → what is held and settled in it."""
    items = site.ask("GET", "/v1/admin/ledger?limit=200", site.admin)["items"]
    return {one["id"]: one["held"] + one["settled"] for one in items}


def trained(site, dataset, key):
    job = site.job(dataset, steps=5, key=key)
    return site.wait(f"/v1/jobs/{job}", ("trained",))


def test_a_restore_charges_what_was_spent_or_changes_nothing(start, tmp_path):
    data, witness, backup = (tmp_path / name for name in ("data", "data-witness", "backup"))

    def up():
        return start(data)

    # A site with one paid job, stopped and copied as docs/operations.md says.
    running = up()
    admins = running.admins()
    running.expect("Ctrl-C stops")
    site = Site(running, *admins)
    dataset = site.dataset()
    first = trained(site, dataset, "first")
    site.http.close()
    assert running.stop() == 0
    shutil.copytree(data, backup, symlinks=True)

    # Afterwards more is spent: from the same account, and from one that the backup has never heard of.
    site.reach(up().ready())
    second = trained(site, dataset, "second")
    third = trained(site, site.dataset(upload()), "third")
    old, new = second["account"], third["account"]
    before = spending(site)
    assert before == {old: first["cost"] + second["cost"], new: third["cost"]}
    terms = {
        id: {
            name: site.ask("GET", f"/v1/admin/ledger/{id}", site.admin)["account"][name]
            for name in ("granted", "epsilon", "delta", "order", "relation")
        }
        for id in before
    }

    def witnessed():
        log = WitnessLog(DirectoryWitness(witness))
        log.catch_up()
        return {id: seen["spent"] for id, seen in log.accounts.items()} == before

    wait_for(witnessed)
    code, _, told = restore(backup, "--data", data, "--charge")
    assert code == 1
    assert told.startswith("sluice: another sluice is running on ")
    site.http.close()
    assert site.up.stop() == 0

    # Without --charge it says what is missing, and changes nothing.
    everything = contents(data / "postgres", data / "s3", backup, witness)
    code, out, err = restore(backup, "--data", data, "--json")
    assert code == 1, err
    told = json.loads(out)
    assert (told["restored"], told["charged"], told["put_aside"]) == (False, False, None)
    assert {one["account"]: (one["in_backup"], one["charge"]) for one in told["accounts"]} == {
        old: (True, second["cost"]),
        new: (False, third["cost"]),
    }
    assert contents(data / "postgres", data / "s3", backup, witness) == everything
    assert {path.name for path in tmp_path.iterdir()} == {"data", "data-witness", "backup"}
    code, out, _ = restore(backup, "--data", data)
    assert code == 1
    assert "Nothing was changed" in out
    assert "--charge" in out

    # Copied back by hand, it stays shut.
    kept = contents(witness)
    data.rename(tmp_path / "newer")
    shutil.copytree(backup, data, symlinks=True)
    site.reach(up().ready())
    wait_for(lambda: site.ask("GET", "/v1/admin/witness", site.admin)["behind"])
    asked = {"dataset": dataset, "plan": PLAN, "target": {"epsilon": 1}}
    answer = site.http.post("/v1/jobs", headers=site.curator, json=asked)
    assert (answer.status_code, answer.json()["slug"]) == (503, "ledger-behind-witness")
    assert "sluice restore" in answer.json()["detail"]
    site.http.close()
    assert site.up.stop() == 0
    assert contents(witness) == kept

    # With the command, what the witness knows is charged.
    code, out, err = restore(backup, "--data", data, "--charge", "--reason", "disk lost on Tuesday", "--json")
    assert code == 0, err
    told = json.loads(out)
    assert (told["restored"], told["charged"], told["data"]) == (True, True, str(data))
    assert (tmp_path / told["put_aside"] / "state.json").exists()
    assert contents(witness) == kept, "the witness is only read"
    site.reach(up().ready())
    wait_for(lambda: site.ask("GET", "/v1/admin/witness", site.admin)["checked_at"])
    assert site.ask("GET", "/v1/admin/witness", site.admin)["behind"] is None
    assert spending(site) == before
    for id in before:
        shown = site.ask("GET", f"/v1/admin/ledger/{id}", site.admin)
        assert {name: shown["account"][name] for name in terms[id]} == terms[id]
        assert shown["chain"]["ok"]
        last = shown["entries"][-1]
        assert (last["actor"], last["reason"]) == ("restore", "behind its witness: disk lost on Tuesday")

    # And it goes on: the next job trains, and the first one's synthesizer can be released.
    fourth = trained(site, dataset, "fourth")
    assert spending(site) == before | {old: before[old] + fourth["cost"]}
    release = site.ask("POST", "/v1/releases", json={"job": first["id"], "name": "scans", "count": 10})["id"]
    assert site.wait(f"/v1/releases/{release}", ("in_review", "failed"))["state"] == "in_review"
    assert len(contents(witness)) > len(kept)
    site.http.close()


@pytest.fixture(scope="module")
def initialised(tmp_path_factory):
    """A data directory that `sluice init` made, with its witness; tests take copies."""
    at = tmp_path_factory.mktemp("initialised")
    made = subprocess.run(
        [*SLUICE, "init", "--data", at / "data", "--witness", at / "witness"],
        capture_output=True,
        env=plain_environment(),
    )
    assert made.returncode == 0, made.stderr
    return at


def test_a_backup_that_forgot_nothing_is_restored_as_it_is(initialised, tmp_path):
    """Also onto a machine where nothing is left but the witness."""
    data, witness = tmp_path / "data", shutil.copytree(initialised / "witness", tmp_path / "witness")
    for _ in range(2):
        code, out, err = restore(initialised / "data", "--data", data, "--witness", witness)
        assert (code, err) == (0, "")
        assert f"sluice up --data {data}" in out
    asides = [path.name for path in tmp_path.iterdir() if path.name.startswith("data.before-restore-")]
    assert len(asides) == 1
    assert json.loads((data / "state.json").read_text())["witness"] == str(witness)
    assert not list(tmp_path.glob("*.restoring"))


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("no witness", "the witness of this site is not in "),
        ("witness of another site", "is not the witness of this site"),
        ("an empty directory", "is not the witness of this site"),
        ("another site", "is a backup of another site"),
        ("not a copy", "is not a copy of a data directory"),
        ("inside", "overlap"),
        ("elsewhere", "SLUICE_DATABASE_URL names a server outside"),
    ],
)
def test_a_restore_that_cannot_be_right_is_refused_and_changes_nothing(wrong, why, initialised, tmp_path):
    backup = shutil.copytree(initialised / "data", tmp_path / "backup", symlinks=True)
    data = shutil.copytree(initialised / "data", tmp_path / "data", symlinks=True)
    witness = shutil.copytree(initialised / "witness", tmp_path / "witness")
    environment = {}
    match wrong:
        case "no witness":
            witness = tmp_path / "nowhere"
        case "witness of another site":
            (witness / "site").write_text(uuid.uuid4().hex)
        case "an empty directory":
            shutil.rmtree(witness)
            witness.mkdir()
        case "another site":
            state = json.loads((data / "state.json").read_text())
            (data / "state.json").write_text(json.dumps(state | {"site": uuid.uuid4().hex}))
        case "not a copy":
            (backup / "state.json").unlink()
        case "inside":
            backup = data
        case "elsewhere":
            environment["SLUICE_DATABASE_URL"] = "postgresql://sluice:longEnough1@127.0.0.1:1/sluice"
    before = contents(tmp_path)
    code, _, told = restore(backup, "--data", data, "--witness", witness, "--charge", **environment)
    assert code == 1
    assert why in told
    assert contents(tmp_path) == before
    assert not list(tmp_path.glob("*.restoring"))


def test_a_restore_needs_a_backup_or_a_database_and_not_both(tmp_path):
    for arguments in ((), (tmp_path, "--database", "postgresql://x")):
        code, _, told = restore(*arguments)
        assert code == 2
        assert "--database" in told


# ---- a witness that is not where it was


def test_a_site_does_not_start_without_its_witness(start, initialised, tmp_path):
    data = shutil.copytree(initialised / "data", tmp_path / "data", symlinks=True)
    witness = shutil.copytree(initialised / "witness", tmp_path / "data-witness")
    moved = witness.rename(tmp_path / "moved")
    up = start(data)
    up.expect("the witness of this site is not in ")
    assert up.process.wait(PATIENCE) == 1
    assert not witness.exists()
    command = [*SLUICE, "init", "--data", str(data), "--witness", str(moved)]
    assert subprocess.run(command, capture_output=True, env=plain_environment()).returncode == 0
    # Remembered, so that a start without the option finds it.
    start(data, environment={"SLUICE_WITNESS_DIR": ""}).ready()


def test_a_witness_inside_the_data_directory_is_refused(start, tmp_path):
    up = start(tmp_path / "data", environment={"SLUICE_WITNESS_DIR": str(tmp_path / "data/witness")})
    up.expect("is inside the data directory")
    assert up.process.wait(PATIENCE) == 1


def test_a_backup_from_before_sites_had_names_finds_the_witness(start, initialised, tmp_path):
    """Its state.json names neither: both follow from what was always in it."""
    state = json.loads((initialised / "data/state.json").read_text())
    data = shutil.copytree(initialised / "data", tmp_path / "data", symlinks=True)
    older = {name: value for name, value in state.items() if name not in ("site", "witness")}
    (data / "state.json").write_text(json.dumps(older))
    witness = tmp_path / "state/sluice/witness" / state["site"]
    shutil.copytree(initialised / "witness", witness)
    (witness / "ledger").mkdir()
    unknown = {"moves": 3, "head": "ab" * 32, "capacity": 9, "spent": 7, "terms": {}}
    entry = {"generation": 1, "full": True, "accounts": {str(uuid.uuid4()): unknown}}
    (witness / "ledger/000000000001.json").write_text(json.dumps(entry))
    up = start(
        data, environment={"SLUICE_WITNESS_DIR": "", "XDG_STATE_HOME": str(tmp_path / "state")}
    ).ready()
    state = json.loads((data / "state.json").read_text())
    assert state["witness"] == str(witness)
    with psycopg.connect(owner_url(state)) as connection:
        asked = "SELECT behind ->> 'generation' FROM witness"
        wait_for(lambda: connection.execute(asked).fetchone() == ("1",))
    up.stop()


def owner_url(state):
    return f"postgresql://sluice:{state['database']['owner']}@127.0.0.1:{state['ports'][0]}/sluice"


def test_a_lost_witness_shuts_the_site_until_the_operator_accepts_it(start, tmp_path):
    """By default it is in the user's state directory."""
    data, environment = (
        tmp_path / "data",
        {"SLUICE_WITNESS_DIR": "", "XDG_STATE_HOME": str(tmp_path / "state")},
    )
    up = start(environment=environment)
    up.expect("witness in ")
    up.expect("Ctrl-C stops")
    site = json.loads((data / "state.json").read_text())["site"]
    witness = tmp_path / "state/sluice/witness" / site
    assert (witness / "site").read_text() == site
    wait_for(lambda: (witness / "ledger/000000000001.json").exists())

    def row():
        with psycopg.connect(owner_url(json.loads((data / "state.json").read_text()))) as connection:
            return connection.execute("SELECT generation, behind FROM witness").fetchone()

    wait_for(lambda: row()[0] == 1)
    assert up.stop() == 0
    shutil.rmtree(witness / "ledger")
    up = start(environment=environment).ready()
    wait_for(lambda: row() == (1, {"generation": 0, "accounts": {}, "lost": True}))
    assert not (witness / "ledger").exists()
    assert up.stop() == 0
    start(environment=environment, more=["--accept-lost-witness"]).ready()
    wait_for(lambda: row() == (1, None))
    assert (witness / "ledger/000000000001.json").exists()


# ---- a site on many machines: the part after pg_restore


@pytest.fixture(params=["directory", "bucket"])
def witness_of(request, servers, tmp_path):
    """A store, and how the command is told where it is."""
    if request.param == "directory":
        (tmp_path / "witness").mkdir()
        return DirectoryWitness(tmp_path / "witness"), {"SLUICE_WITNESS_DIR": str(tmp_path / "witness")}
    keys, bucket = servers.s3_identities["admin"], f"witness-{uuid.uuid4().hex[:8]}"
    client = s3.client(endpoint=servers.s3_endpoint, region="us-east-1", **keys)
    client.create_bucket(Bucket=bucket)
    environment = {"SLUICE_S3_ENDPOINT": servers.s3_endpoint, "SLUICE_WITNESS_BUCKET": bucket}
    environment |= {f"SLUICE_S3_{name}".upper(): value for name, value in keys.items()}
    return S3Witness(client, bucket), environment


def test_a_database_restored_on_many_machines_is_charged_by_the_same_command(servers, database, witness_of):
    store, environment = witness_of
    books, name = Books(database), f"t_{uuid.uuid4().hex}"
    account, url = books.account(), database("owner").rsplit("/", 1)[0] + f"/{name}"

    def compared(engine):
        with Session(engine) as session, session.begin():
            compare(session, WitnessLog(store))

    compared(books.engine("owner"))
    books.close()
    with psycopg.connect(servers.owner_url.rsplit("/", 1)[0] + "/postgres", autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE {name} TEMPLATE {database('owner').rsplit('/', 1)[1]}")
        engine = connect(url)
        try:
            job = books.reserve(account, 5.0)
            books.open(job)
            books.settle(account, job)
            compared(books.engine("owner"))
            code, out, err = restore("--database", url, "--json", **environment)
            assert code == 1, err
            [one] = json.loads(out)["accounts"]
            assert (one["account"], one["charge"]) == (str(account.id), closed_cost(5.0))
            code, out, err = restore("--database", url, "--charge", **environment)
            assert code == 0, err
            assert "Start the services" in out
            with Session(engine) as session:
                restored = session.get_one(Account, account.id)
                assert (restored.held, restored.settled) == (0, closed_cost(5.0))
            compared(engine)
            code, _, err = restore("--database", url, **environment)
            assert code == 0, err  # nothing is left to charge
        finally:
            engine.dispose()
            books.close()
            admin.execute(f"DROP DATABASE {name} WITH (FORCE)")
