"""Real jobs on the whole stack, while its parts are killed: every one ends, paid once, in time."""

import hashlib
import random
import re
import time

import httpx
import pytest
import redis

from tests.e2e.test_up import state_of
from tests.worker.conftest import SCHEMA, upload


class Site:
    """A running stack with a curator on it."""

    def __init__(self, up, admin_key):
        self.up = up
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{up.port}", timeout=60)
        self.admin = {"Authorization": f"Bearer {admin_key}"}
        person = self.ask("POST", "/v1/admin/people", self.admin, json={"name": "carla", "role": "curator"})
        key = self.ask("POST", f"/v1/admin/people/{person['id']}/keys", self.admin, json={})["key"]
        self.curator = {"Authorization": f"Bearer {key}"}

    def ask(self, method, path, headers=None, **more):
        """Asks until the service answers: parts of it are being killed."""
        end = time.monotonic() + 60
        while True:
            try:
                answer = self.http.request(method, path, headers=headers or self.curator, **more)
                if answer.status_code < 500:
                    assert answer.status_code < 300, answer.text
                    return answer.json()
            except httpx.TransportError:
                pass
            assert time.monotonic() < end, "the service does not come back"
            time.sleep(0.2)

    def dataset(self):
        body = upload()
        budget = {"epsilon": 1000, "delta": 1e-5, "order": 4}
        declared = {"name": "two", "schema": SCHEMA, "nominal_size": 200, "budget": budget}
        id = self.ask("POST", "/v1/datasets", json=declared)["id"]
        self.ask("POST", f"/v1/datasets/{id}/upload")
        [part] = self.ask("POST", f"/v1/datasets/{id}/upload/urls", json={"numbers": [1]})["parts"]
        assert httpx.put(part["url"], content=body).status_code == 200
        sealed = {"size": len(body), "sha256": hashlib.sha256(body).hexdigest()}
        self.ask("POST", f"/v1/datasets/{id}/seal", json=sealed)
        self.wait(f"/v1/datasets/{id}", ("ready",), 60)
        return id

    def job(self, dataset, *, steps, key):
        plan = {"kind": "dpgan", "sampling_prob": 0.05, "expected_batch": 10, "steps": steps}
        body = {"dataset": dataset, "plan": plan, "target": {"epsilon": 4}}
        quote = self.ask("POST", "/v1/quotes", json=body)
        assert quote["epsilon"]["renyi"] <= 4
        headers = self.curator | {"Idempotency-Key": key}
        return self.ask("POST", "/v1/jobs", headers, json=body)["id"]

    def wait(self, path, states, seconds, until=None):
        end = time.monotonic() + seconds
        while True:
            view = self.ask("GET", path)
            if view["state"] in states or (until and until(view)):
                return view
            assert time.monotonic() < end, view
            time.sleep(0.1)

    def entries(self, job):
        account = self.ask("GET", f"/v1/jobs/{job}")["account"]
        shown = self.ask("GET", f"/v1/admin/ledger/{account}", self.admin)
        assert shown["chain"] == {"ok": True, "broken_row": None, "why": None}
        return [entry["kind"] for entry in shown["entries"] if entry["job"] == job]


@pytest.fixture
def site(start):
    up = start()
    line = up.expect("key of the first admin")
    up.expect("Ctrl-C stops")
    site = Site(up, re.search(r"sl_[\w-]{43}", line)[0])
    yield site
    site.http.close()


def test_from_registration_to_a_settled_job_through_a_worker_that_dies(site):
    dataset = site.dataset()
    job = site.job(dataset, steps=500, key="one")
    site.wait(f"/v1/jobs/{job}", (), 60, until=lambda view: view["progress"]["step"] > 0)
    site.up.children()["train"].kill()
    view = site.wait(f"/v1/jobs/{job}", ("trained", "failed"), 120)
    assert (view["state"], view["progress"]["step"]) == ("trained", 500)
    assert site.entries(job) == ["reserve", "settle"]
    budget = site.ask("GET", f"/v1/datasets/{dataset}/budget")
    assert (budget["held"], budget["settled"]) == (0, view["cost"])
    assert budget["spent"]["renyi"] <= 4


@pytest.mark.parametrize("server", ["postgres", "valkey", "s3"])
def test_servers_killed_at_random_during_jobs(server, site):
    """Ten kills, the queue also emptied: each job ends trained under one charge, soon after the last."""
    chance = random.Random(server)
    dataset = site.dataset()
    jobs = []
    for kill in range(10):
        if kill % 4 == 0:
            jobs.append(site.job(dataset, steps=300, key=f"job-{kill}"))
        time.sleep(chance.uniform(0, 0.7))  # at random: there is no event to wait for
        if server == "valkey" and kill % 2:
            empty_queue(site)
        else:
            site.up.children()[server].kill()
            site.up.expect(f"{server} is up again")
    for job in jobs:
        view = site.wait(f"/v1/jobs/{job}", ("trained", "failed"), 90)
        assert view["state"] == "trained", view["fault"]
        assert site.entries(job) == ["reserve", "settle"]


def empty_queue(site):
    """As an operator would lose it: everything in it is gone."""
    state = state_of(site.up.data)
    url = f"redis://train:{state['queue']['train']}@127.0.0.1:{state['ports'][1]}/0"
    with redis.Redis.from_url(url) as connection:
        connection.delete("train:train", "train:unacked", "train:unacked_index", "train:_kombu.binding.train")
