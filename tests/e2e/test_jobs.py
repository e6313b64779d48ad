"""Real jobs on the whole stack, while its parts are killed: each ends trained and is charged once."""

import random
import time

import psycopg
import pytest
import redis

from tests.e2e.test_up import owner_url, state_of


def test_from_registration_to_a_settled_job_through_a_worker_that_dies(site):
    dataset = site.dataset()
    job = site.job(dataset, steps=500, key="one")
    site.wait(f"/v1/jobs/{job}", (), until=lambda view: view["progress"]["step"] > 0)
    site.up.children()["train"].kill()
    with psycopg.connect(owner_url(site.up.data)) as owner:  # its lease would last 20 s
        owner.execute("UPDATE jobs SET lease_until = now() WHERE id = %s AND state = 'running'", [job])
    view = site.wait(f"/v1/jobs/{job}", ("trained", "failed"))
    assert (view["state"], view["progress"]["step"]) == ("trained", 500)
    assert site.entries(job) == ["reserve", "settle"]
    budget = site.ask("GET", f"/v1/datasets/{dataset}/budget")
    assert (budget["held"], budget["settled"]) == (0, view["cost"])
    assert budget["spent"]["renyi"] <= 4


@pytest.mark.parametrize("kills", [5, pytest.param(20, marks=pytest.mark.long)])
@pytest.mark.parametrize("server", ["postgres", "valkey", "s3"])
def test_servers_killed_at_random_during_jobs(server, kills, site):
    """The queue is also emptied: each job ends trained under one charge."""
    chance = random.Random(server)
    dataset = site.dataset()
    jobs = []
    for kill in range(kills):
        if kill % 4 == 0:
            jobs.append(site.job(dataset, steps=300, key=f"{server}-{kills}-{kill}"))
        time.sleep(chance.uniform(0, 0.7))  # at random: there is no event to wait for
        if server == "valkey" and kill % 2:
            empty_queue(site)
        else:
            site.up.children()[server].kill()
            site.up.expect(f"{server} is up again")
    for job in jobs:
        view = site.wait(f"/v1/jobs/{job}", ("trained", "failed"))
        assert view["state"] == "trained", view["fault"]
        assert site.entries(job) == ["reserve", "settle"]


def empty_queue(site):
    """As an operator would lose it: everything in it is gone."""
    state = state_of(site.up.data)
    url = f"redis://train:{state['queue']['train']}@127.0.0.1:{state['ports'][1]}/0"
    with redis.Redis.from_url(url) as connection:
        connection.delete("train:train", "train:unacked", "train:unacked_index", "train:_kombu.binding.train")
