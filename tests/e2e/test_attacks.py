"""What attackers tried, through the real command line and database logins, as two curators of one site.

Each step got budget for nothing, or a false epsilon, before accounts were bound to records.
tests/e2e/test_restore.py plays the restored backup.
"""

import hashlib
import json
import os

import httpx
import psycopg
import pytest

from sluice.client.api import Sluice
from tests.e2e.driving import run_client, wait_for
from tests.encrypting import encrypted
from tests.worker.conftest import GSWGAN, SCHEMA, npz, upload
from tests.worker.test_checking import arrays, members_swapped, zipped_anew

IMAGES = ("--image", "8x8", "--classes", "dark,light", "--records", "200")


class Stand:
    """A running site, the command line of several people, and the database logins of its roles."""

    def __init__(self, up, key, second_admin, directory):
        self.up, self.url, self.directory = up, f"http://127.0.0.1:{up.port}", directory
        with Sluice(self.url) as service:
            self.keys = {"admin": key, "otto": service.redeem(second_admin)["key"]}
            for name in ("carla", "cora"):
                added = self.run("admin", "people", "add", name, "--role", "curator")
                self.keys[name] = service.redeem(added["invitation"]["invitation"])["key"]

    def run(self, who, *arguments, code=0):
        """A command of this person: its answer as JSON, or the problem it was refused with."""
        environment = {"SLUICE_URL": self.url, "SLUICE_KEY": self.keys[who]}
        environment |= {"XDG_CONFIG_HOME": str(self.directory / who), "COLUMNS": "200"}
        ended, out, err = run_client(self.directory, *arguments, "--json", **environment)
        assert ended == code, out + err
        return err + out if code else json.loads(out)

    def add(self, who, name, body, *more, epsilon=4, delta="1e-5"):
        file = self.directory / f"{name}.npz"
        file.write_bytes(body)
        budget = ("--epsilon", epsilon, "--delta", delta)
        return self.run(who, "datasets", "add", file, "--name", name, *IMAGES, *budget, *more)

    def database(self, role):
        """As this role logs in."""
        state = json.loads((self.up.data / "state.json").read_text())
        name = "sluice" if role == "owner" else f"sluice_{role}"
        port, password = state["ports"][0], state["database"][role]
        return psycopg.connect(f"postgresql://{name}:{password}@127.0.0.1:{port}/sluice", autocommit=True)

    def balance(self, account):
        return next(one for one in self.run("otto", "ledger", "show") if one["id"] == account)


@pytest.fixture
def stand(start, tmp_path):
    up = start(environment={"SLUICE_CAP_EPSILON": "10"})
    admins = up.admins()
    up.expect("Ctrl-C stops")
    return Stand(up, *admins, tmp_path)


def test_two_curators_try_to_get_budget_for_nothing(stand, tmp_path):
    records = upload()
    mine = stand.add("carla", "scans", records)
    assert (mine["state"], mine["budget"]["epsilon"], mine["shared"]) == ("ready", 4, False)

    # Saved again with other compression: the same people, so no second budget, for nobody.
    copy = stand.add("cora", "copy", zipped_anew(records), epsilon=9)
    assert (copy["state"], copy["account"], copy["causes"], copy["matches"]) == ("held", None, [], [])
    assert "held for review" in stand.run("cora", "jobs", "quote", copy["id"], plan_file(tmp_path), code=1)
    shown = stand.run("otto", "datasets", "show", copy["id"])
    assert shown["causes"] == ["overlap"]
    assert shown["matches"] == [{"dataset": mine["id"], "account": mine["account"], "share": "most"}]
    joined = stand.run(
        "otto", "datasets", "review", copy["id"], "--join", mine["account"], "--reason", "the same patients"
    )
    assert (joined["state"], joined["account"], joined["shared"]) == ("ready", mine["account"], True)
    assert (joined["budget"]["epsilon"], joined["declared"]["epsilon"]) == (4, 9)
    again = stand.add("carla", "again", zipped_anew(records), epsilon=9)
    assert again["account"] == mine["account"]

    # Random bytes sealed under somebody's hash: answered like any other claim, and bound to nothing.
    known, unknown = (claim(stand, "cora", digest) for digest in (records, os.urandom(50)))
    assert known == unknown == {"state": "checking", "account": None, "fault": None}

    # A budget that one person made up.
    greedy = stand.add("carla", "greedy", upload(), epsilon=1e6, delta="0.1")
    assert (greedy["state"], greedy["account"]) == ("held", None)
    refused = stand.run(
        "otto", "datasets", "review", greedy["id"], "--reject", "--reason", "no study needs this", code=1
    )
    assert "not-accepted" in refused

    # Private records declared public, with the members of the archive swapped.
    public = stand.add("carla", "public", members_swapped(records), "--public")
    assert public["state"] == "held"
    decision = ("datasets", "review", public["id"], "--accept", "--reason", "looks public to me")
    assert "shares-private-records" in stand.run("otto", *decision, code=1)

    # A relay whose owners have other deltas.
    x, y = arrays(upload())
    theirs = stand.add("cora", "theirs", npz(x, y), delta="1e-6")
    plan = plan_file(tmp_path, GSWGAN)
    first = stand.run("carla", "jobs", "start", mine["id"], plan, "--epsilon", 1, "--shared")
    wait(stand, "carla", first["id"])
    relay = ("jobs", "start", theirs["id"], plan, "--epsilon", 1, "--after", first["id"])
    assert "delta" in stand.run("cora", *relay, code=1)
    assert stand.balance(theirs["account"])["held"] == 0

    # With the service's own login: the capacity of an account.
    for role in ("service", "train", "sweep", "publish"):
        with stand.database(role) as login, pytest.raises(psycopg.errors.InsufficientPrivilege):
            login.execute("UPDATE accounts SET capacity = capacity * 100")
    # And by the owner of the tables: noticed, and nothing is granted until it is put right.
    with stand.database("owner") as owner:
        owner.execute("UPDATE accounts SET capacity = capacity * 100 WHERE id = %s", [mine["account"]])
    wait_for(lambda: refusal(stand, "otto", "ledger", "verify"))
    start_job = ("jobs", "start", mine["id"], plan, "--epsilon", 3)
    wait_for(lambda: "ledger-altered" in refusal(stand, "carla", *start_job))


def plan_file(directory, plan=None):
    file = directory / "plan.json"
    file.write_text(json.dumps(plan or {"kind": "swd_one_shot", "directions": 10}))
    return file


def claim(stand, who, content):
    """Seals random bytes under the hash of this content; what the answer tells, before the file is read."""
    with httpx.Client(base_url=stand.url, headers={"Authorization": f"Bearer {stand.keys[who]}"}) as http:
        budget = {"epsilon": 1, "delta": 1e-6}
        body = {"name": "claim", "schema": SCHEMA, "nominal_size": 200, "budget": budget}
        id = http.post("/v1/datasets", json=body).json()["id"]
        public = http.get("/.well-known/sluice-upload-key.json").json()
        begin, body = encrypted(public, id, os.urandom(50))
        http.post(f"/v1/datasets/{id}/upload", json=begin)
        [part] = http.post(f"/v1/datasets/{id}/upload/urls", json={"numbers": [1]}).json()["parts"]
        httpx.put(part["url"], content=body)
        sealed = {"size": len(body), "sha256": hashlib.sha256(content).hexdigest()}
        told = http.post(f"/v1/datasets/{id}/seal", json=sealed).json()
        wait_for(lambda: http.get(f"/v1/datasets/{id}").json()["state"] == "rejected")
        after = http.get(f"/v1/datasets/{id}").json()
        assert (after["fault"], after["account"]) == ("hash-mismatch", None)
        return {name: told[name] for name in ("state", "account", "fault")}


def wait(stand, who, job):
    wait_for(lambda: stand.run(who, "jobs", "show", job)["state"] in ("trained", "failed"))
    assert stand.run(who, "jobs", "show", job)["state"] == "trained"


def refusal(stand, who, *arguments):
    """The problem a command is refused with; "" if it succeeds."""
    try:
        return stand.run(who, *arguments, code=1)
    except AssertionError:
        return ""
