"""A new method needs a plan, a trainer and a section on its guarantee, and no other edit."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sluice.client.api import Sluice
from tests.e2e.curating import Site
from tests.e2e.driving import launcher

ROOT, TOY = Path(__file__).resolve().parents[2], Path(__file__).parent / "toy"
PLANTED = {"method.py": "src/sluice/methods/toy.py", "trainer.py": "worker/trainers/toy.py"}
PAGE = "docs/guarantees.md"


@pytest.fixture
def checkout(tmp_path):
    """A copy of what a server runs from, with the files of the toy method."""
    copy = tmp_path / "checkout"
    for name in ("core", "docs", "local", "migrations", "service", "src", "worker"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    before = {path.relative_to(copy) for path in copy.rglob("*")}
    for source, path in PLANTED.items():
        shutil.copy(TOY / source, copy / path)
    added = {str(path.relative_to(copy)) for path in copy.rglob("*")} - {str(path) for path in before}
    assert added == set(PLANTED.values())
    with (copy / PAGE).open("a") as page:
        page.write((TOY / "guarantee.md").read_text())
    return copy


def test_three_files_add_a_method(checkout, tmp_path):
    """It is described, priced, trained by a worker, released and verified like every other method."""
    path = {"PYTHONPATH": os.pathsep.join([str(checkout), str(checkout / "src")])}
    with launcher(tmp_path / "data") as start:
        up = start(cwd=checkout, environment=path)
        admins = up.admins()
        up.expect("Ctrl-C stops")
        site = Site(up, *admins)
        dataset = site.dataset()
        quote = site.ask("POST", "/v1/quotes", json={"dataset": dataset, "method": "toy", "epsilon": 4})
        assert (quote["plan"]["kind"], quote["plan"]["steps"], quote["plan"]["clip_norm"]) == ("toy", 3, 2.0)
        other = site.ask("POST", "/v1/quotes", json={"dataset": dataset, "epsilon": 4})
        assert other["plan"]["kind"] != "toy"  # a new method is not recommended by being there
        body = {"dataset": dataset, "method": "toy", "epsilon": 4}
        job = site.ask("POST", "/v1/jobs", json=body)
        assert job["event"] == quote["event"]
        trained = site.wait(f"/v1/jobs/{job['id']}", ("trained", "failed"))
        assert (trained["state"], trained["fault"], trained["progress"]["step"]) == ("trained", None, 3)
        assert site.entries(job["id"]) == ["reserve", "settle"]
        verified = released(site, job["id"], tmp_path / "release")
        assert verified["ok"]
        assert verified["epsilon"]["renyi"] == pytest.approx(job["epsilon"]["renyi"])
        site.http.close()
    command = [sys.executable, "-m", "sluice.cli.main", "quote", "toy", "--help"]
    help = subprocess.run(
        command, env=os.environ | path, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert "--clip" in help.stdout, help.stderr


def released(site, job, directory):
    """Publishes samples of a job with the approval of a second curator, downloads and verifies them."""
    clients = [
        Sluice(str(site.http.base_url), headers["Authorization"].removeprefix("Bearer "))
        for headers in (site.admin, site.second_admin, site.curator)
    ]
    ada, bert, carla = clients
    invited = bert.add_person(name="dora", role="curator")
    with Sluice(ada.url) as nobody:
        dora = Sluice(ada.url, nobody.redeem(invited["invitation"]["invitation"])["key"])
    team = ada.add_team("digits")["id"]
    bert.move_person(carla.me()["id"], team, datasets=True)
    ada.move_person(invited["id"], team)
    made = carla.create_release({"job": job, "name": "toy", "count": 20, "formats": ["npz"]})
    built = carla.wait_built(made["id"])
    assert built["state"] == "in_review", built["fault"]
    dora.review(built["id"])
    dora.approve(built["id"], built["digest"])
    carla.publish(built["id"])
    assert carla.wait_published(built["id"])["state"] == "published"
    release = carla.release("toy")
    release.download(directory)
    x, y = release.load()
    assert (len(x), len(y)) == (20, 20)
    verified = release.verify()
    for client in (*clients, dora):
        client.close()
    return verified
