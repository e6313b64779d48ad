"""A release from a trained job to an analyst and back, with the commands people type, on the whole stack."""

import json
from types import SimpleNamespace

import httpx
import numpy as np
import pytest

from local.digits import draw
from sluice.client.api import Sluice
from tests.e2e.driving import run_client


class Person:
    """Somebody at their own machine: a key, a home, a directory."""

    def __init__(self, url, key, directory):
        self.directory, self.key, self.url = directory, key, url
        self.environment = {"SLUICE_URL": url, "SLUICE_KEY": key, "SLUICE_HOME": str(directory / "home")}
        self.environment["COLUMNS"] = "250"
        directory.mkdir()

    def says(self, *arguments):
        code, out, err = run_client(self.directory, *arguments, **self.environment)
        return SimpleNamespace(returncode=code, stdout=out, stderr=err)

    def told(self, *arguments):
        done = self.says(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    def refused(self, slug, *arguments, code=1):
        done = self.says(*arguments, "--json")
        assert done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        assert json.loads(done.stdout)["problem"]["slug"] == slug


@pytest.fixture
def people(start, tmp_path):
    up = start(environment={"SLUICE_DIAGNOSTICS": "true"})
    key, second_admin = up.admins()
    up.expect("Ctrl-C stops")
    url = f"http://127.0.0.1:{up.port}"
    with Sluice(url) as service:
        found = {"ada": Person(url, key, tmp_path / "ada")}
        found["bert"] = Person(url, service.redeem(second_admin)["key"], tmp_path / "bert")
        # Dora approves what Carla drafts: no one person invited both.
        for inviter, name, role in (
            ("ada", "carla", "curator"), ("bert", "dora", "curator"),
            ("ada", "anna", "analyst"), ("ada", "otto", "analyst"),
        ):  # fmt: skip
            added = found[inviter].told("people", "add", name, "--role", role)
            key = service.redeem(added["invitation"]["invitation"])["key"]
            found[name] = Person(url, key, tmp_path / name)
            found[name].id = added["id"]
    found["ada"].told("teams", "add", "digits")
    for mover, name in (("bert", "carla"), ("ada", "dora")):  # not whoever invited them
        found[mover].told("teams", "move", name, "digits")
    return found


def test_from_a_file_to_a_release_and_back(people):
    ada, carla, dora, anna, otto = (people[name] for name in ("ada", "carla", "dora", "anna", "otto"))
    x, y = draw(300, seed=5)
    np.savez_compressed(carla.directory / "digits.npz", x=x, y=y)
    declared = ["--name", "digits", "--image", "28x28", "--classes", "0,1,2,3,4,5,6,7,8,9", "--records", 300]
    dataset = carla.told("datasets", "add", "digits.npz", *declared, "--epsilon", 20, "--delta", 1e-5)["id"]

    # one command trains; unknown methods and numbers are refused before anything is charged
    small = ["--method", "dpgan", "--set", "batch=30", "--set", "steps=4"]
    assert (
        "There is no such method" in carla.says("train", dataset, "--epsilon", 5, "--method", "magic").stderr
    )
    assert carla.says("train", dataset, "--epsilon", 5, *small, "--set", "clip=-1").returncode == 1
    job = carla.told("train", dataset, "--epsilon", 5, *small)
    assert (job["state"], job["progress"]["step"]) == ("trained", 4)
    assert 4.9 < job["epsilon"]["renyi"] <= 5
    lines = carla.says("jobs", "diagnostics", job["id"]).stdout.splitlines()
    assert all(json.loads(line) for line in lines)
    assert dora.says("jobs", "diagnostics", job["id"]).returncode == 1

    # four eyes see one digest
    made = carla.told("releases", "create", job["id"], "--name", "pets", "--count", 50, "--format", "npz")
    id, digest = made["id"], made["digest"]
    assert made["state"] == "in_review"
    carla.refused("author-cannot-approve", "releases", "approve", id, "--digest", digest)
    carla.refused("not-approved", "releases", "publish", id)
    dora.refused("approval-of-another-bundle", "releases", "approve", id, "--digest", "ab" * 32)
    picture = dora.directory / "preview.png"
    assert dora.told("releases", "show", "pets", "--preview", picture)["digest"] == digest
    assert picture.read_bytes().startswith(b"\x89PNG")
    review = dora.told("releases", "review", "pets")
    assert (review["digest"], review["author"]) == (digest, "carla")
    assert (review["job"]["id"], review["job"]["cost"]) == (job["id"], job["cost"])
    assert (review["job"]["dataset"]["name"], review["job"]["dataset"]["owner"]) == ("digits", "carla")
    printed = " ".join(dora.says("releases", "review", "pets").stdout.split())
    assert "digits of carla: about 300 records, images of 28 x 28 x 1 in 10 classes" in printed
    assert f"sluice releases approve {id} --digest {digest}" in printed
    anna.refused("not-found", "releases", "review", id)
    fetched = dora.told("releases", "download", id, "looked-at", "--review")
    assert (fetched["bundle"], fetched["signed"], fetched["published"]) == (digest, False, False)
    with np.load(dora.directory / "looked-at/data/images.npz") as held:
        assert held["x"].shape[0] == 50
    dora.refused("not-signed", "verify", "looked-at", code=3)
    assert dora.told("releases", "approve", id, "--digest", digest)["state"] == "approved"
    carla.told("releases", "rebuild", id)  # the same facts, but a new build: nobody looked at it yet
    carla.refused("not-approved", "releases", "publish", id)
    digest = dora.told("releases", "show", id)["digest"]
    dora.told("releases", "approve", id, "--digest", digest)
    assert carla.told("releases", "publish", id)["state"] == "published"

    # those it is granted to find it, get it and verify it; others do not know of it
    assert anna.told("releases", "list") == []
    anna.refused("not-found", "releases", "download", id, "pets")
    carla.told("releases", "grant", id, anna.id)
    assert [one["name"] for one in anna.told("releases", "list", "--search", "pets")] == ["pets"]
    verified = anna.told("releases", "download", "pets")
    assert (verified["bundle"], verified["ok"]) == (digest, True)
    assert verified["epsilon"]["renyi"] == pytest.approx(job["epsilon"]["renyi"], rel=1e-9)
    drawn = [
        anna.told("releases", "sample", "pets", "--count", 30, "--seed", 7, "--out", f"{i}.npz")
        for i in (1, 2)
    ]
    assert [one["count"] for one in drawn] == [30, 30]
    assert (anna.directory / "1.npz").read_bytes() == (anna.directory / "2.npz").read_bytes()
    otto.refused("not-found", "releases", "show", id)
    with Sluice(anna.url, anna.key) as service:
        [file] = service.downloads(id, ["manifest.json"])
    assert httpx.get(file["url"]).json()["release"] == id

    # taken back: links die, downloads stop, what is at home is known to be withdrawn, offline too
    assert anna.says("verify", "pets").returncode == 0
    assert carla.told("releases", "withdraw", id, "--reason", "a mistake")["state"] == "withdrawn"
    assert httpx.get(file["url"]).status_code in (403, 404)
    anna.refused("release-withdrawn", "releases", "download", id, "again", code=4)
    anna.refused("release-withdrawn", "verify", "pets", code=4)
    anna.refused("release-withdrawn", "verify", "pets", "--offline", code=4)
    assert ada.told("ledger", "show", "--dataset", dataset)["settled"] == job["cost"]  # spent is spent

    # and bytes that are not those
    (anna.directory / "pets/README.md").write_text("other")
    anna.refused("bundle-altered", "verify", "pets", "--offline", code=3)
