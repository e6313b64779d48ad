"""Two hundred ask at once for the last of a budget, of four API processes; it is never overspent."""

import asyncio
import itertools
import json
import random
import uuid
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from core import ledger
from core.tables import Account, Entry, Job
from sluice.methods import plan_from_dict
from sluice.privacy.accountant import cost
from sluice.privacy.relation import Relation
from tests.e2e.driving import PATIENCE
from tests.e2e.serving import ORDER, Site, api_processes, crowd_database

CLIENTS, ROOM, PROCESSES = 200, 10, 3


def plan(noise):
    """The plan that is priced quickest: what races here is the ledger, not arithmetic."""
    return {"kind": "swd_one_shot", "steps": 1, "noise_multiplier": noise}


def price(plan):
    return cost(plan_from_dict(plan).event(), order=ORDER, relation=Relation.ADD_REMOVE)


@pytest.fixture(scope="module")
def site(servers, tmp_path_factory):
    # One key asks more often here than a person would.
    more = {"SLUICE_REQUESTS_PER_MINUTE": "1000000"}
    environment, directory = servers.environments["service"] | more, tmp_path_factory.mktemp("race")
    with (
        crowd_database(servers) as database,
        api_processes(PROCESSES, directory, environment, database) as (addresses, _),
    ):
        site = Site(database)
        curator, site.key = site.person("curator", "curator")
        site.dataset = lambda capacity: site.ready_dataset(curator, capacity=capacity)
        site.addresses = addresses
        yield site
        site.engine.dispose()


class Answer(NamedTuple):
    status: int
    body: dict


async def post(address, key, body, idempotency_key):
    """One request, written plainly: two hundred at once of a library's cost more than the service."""
    url, text = urlsplit(address), json.dumps(body).encode()
    head = [
        "POST /v1/jobs HTTP/1.1",
        f"Host: {url.netloc}",
        f"Authorization: Bearer {key}",
        "Content-Type: application/json",
        f"Content-Length: {len(text)}",
        "Connection: close",
    ]
    if idempotency_key:
        head.append(f"Idempotency-Key: {idempotency_key}")
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    writer.write("\r\n".join([*head, "", ""]).encode() + text)
    answer = await asyncio.wait_for(reader.read(), PATIENCE)
    writer.close()
    head, _, content = answer.partition(b"\r\n\r\n")
    return Answer(int(head.split()[1]), json.loads(content))


def submit(site, bodies, idempotency_key=None):
    """All at once, in turn to each process."""

    async def all_at_once():
        each = zip(bodies, itertools.cycle(site.addresses), strict=False)
        return await asyncio.gather(*(post(at, site.key, body, idempotency_key) for body, at in each))

    site.level()
    return asyncio.run(all_at_once())


def check(site, account, bodies, answers):
    """Nothing overspent, nothing lost, everybody told why; gives the costs accepted and refused."""
    accepted, refused = [], []
    for body, answer in zip(bodies, answers, strict=True):
        assert answer.status in (202, 409), answer
        due = price(body["plan"])
        if answer.status == 202:
            assert answer.body["cost"] == due
            accepted.append(due)
        else:
            problem = answer.body
            assert problem["slug"] == "budget-exceeded"
            assert problem["asked"]["cost"] == due > problem["left"]["cost"]
            assert problem["left"]["epsilon"] >= 0
            assert (
                problem["largest_epsilon"] is None or problem["largest_epsilon"] < problem["asked"]["renyi"]
            )
            refused.append(due)
    with Session(site.engine) as session:
        now = session.get_one(Account, account.id)
        assert (now.held, now.settled) == (sum(accepted), 0)
        assert now.held <= now.capacity
        mine = {uuid.UUID(answer.body["id"]) for answer in answers if answer.status == 202}
        assert set(session.scalars(select(Job.id).where(Job.account_id == account.id))) == mine
        reserved = select(Entry.job_id).where(Entry.account_id == account.id, Entry.kind == "reserve")
        assert set(session.scalars(reserved)) == mine
        assert ledger.verify(session, now) is None
        # An account only fills up here, so whoever would still fit at the end was refused wrongly.
        assert not refused or min(refused) > now.left
    return accepted, refused


@pytest.mark.parametrize("repetitions", [4, pytest.param(20, marks=pytest.mark.long)])
def test_room_for_ten_and_ten_win(repetitions, site):
    one = plan(8.0)
    for repetition in range(repetitions):
        # From room for exactly ten to room for almost eleven.
        room = ROOM * price(one) + repetition * price(one) // repetitions
        dataset, account = site.dataset(room)
        assert account.capacity // price(one) == ROOM
        bodies = [{"dataset": str(dataset.id), "plan": one}] * CLIENTS
        accepted, refused = check(site, account, bodies, submit(site, bodies))
        assert (len(accepted), len(refused)) == (ROOM, CLIENTS - ROOM)


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long)])
def test_unequal_costs_fill_the_budget_as_far_as_they_fit(site, seed):
    plans = [plan(noise) for noise in (5.0, 6.5, 8.0, 9.5, 11.0, 16.0)]
    rng = random.Random(seed)
    for _ in range(3 if seed == 1 else 100):
        dataset, account = site.dataset(ROOM * price(plans[2]))
        bodies = [{"dataset": str(dataset.id), "plan": rng.choice(plans)} for _ in range(CLIENTS)]
        accepted, refused = check(site, account, bodies, submit(site, bodies))
        assert accepted
        assert refused


def test_one_key_sent_two_hundred_times_reserves_once(site):
    one = plan(8.0)
    dataset, account = site.dataset(ROOM * price(one))
    bodies = [{"dataset": str(dataset.id), "plan": one}] * CLIENTS
    answers = submit(site, bodies, idempotency_key=uuid.uuid4().hex)
    assert {answer.status for answer in answers} == {202}
    assert all(answer == answers[0] for answer in answers)
    with Session(site.engine) as session:
        assert session.get_one(Account, account.id).held == price(one)
