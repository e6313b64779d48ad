"""Many callers at once: health answers, connections come back, a storm is answered or refused at once."""

import asyncio
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import httpx
import pytest
from fastapi import APIRouter

from service import health
from service.app import POOL, create_app
from service.auth import Admin
from service.people.routes import PersonView
from service.refreshed import Refreshed
from tests.service.house import BUDGET, IMAGES, Caller, House, new_key

KEYS, LIST = "/.well-known/sluice-keys.json", "/.well-known/sluice-revocations.json"


def at_once(who: Caller | httpx.Client, requests: list[tuple[str, str]], **options) -> list[httpx.Response]:
    """Sends all of them before any is answered, each on a connection of its own."""

    async def send() -> list[httpx.Response]:
        headers, limits = dict(who.headers), httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=who.base_url, headers=headers, limits=limits, timeout=120
        ) as http:
            return await asyncio.gather(*(http.request(verb, path, **options) for verb, path in requests))

    return asyncio.run(send())


def wait_until(true) -> None:
    """For a state that a server reaches by itself; a minute is for busy machines and no part of the test."""
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def connections(house: House) -> int:
    return house.app.state.engine.pool.checkedout()


@contextmanager
def held_up(monkeypatch) -> Iterator[tuple[list[int], threading.Event]]:
    """Makes `GET /v1/me` stop, with its connection in hand, until the event is set; lists those stopped."""
    stopped, go, of = [], threading.Event(), PersonView.of
    monkeypatch.setattr(PersonView, "of", lambda row: (stopped.append(1), go.wait(60), of(row))[2])
    try:
        yield stopped, go
    finally:
        go.set()


def test_health_and_well_known_answer_while_every_thread_and_connection_is_taken(house, monkeypatch):
    house.sql("INSERT INTO revocations VALUES (1, '{}') ON CONFLICT DO NOTHING", role="publish")
    answers: list[httpx.Response] = []
    with held_up(monkeypatch) as (stopped, go):
        storm = threading.Thread(
            target=lambda: answers.extend(at_once(house.analyst, [("GET", "/v1/me")] * 100))
        )
        storm.start()
        wait_until(lambda: len(stopped) == POOL)
        for path in ("/healthz", "/readyz", KEYS, LIST, "/metrics"):
            assert house.anonymous.get(path, timeout=20).status_code == 200, path
        go.set()
        storm.join()
    # Nobody waited for a connection until the pool gave up, and every connection came back.
    assert Counter(answer.status_code for answer in answers) == {200: 100}
    wait_until(lambda: connections(house) == 0)


def test_two_hundred_requests_with_one_idempotency_key_get_one_answer(house):
    key = new_key()
    body = {"name": f"storm {key}", "schema": IMAGES, "nominal_size": 100, "budget": BUDGET}
    answers = at_once(
        house.curator, [("POST", "/v1/datasets")] * 200, json=body, headers={"Idempotency-Key": key}
    )
    assert {answer.status_code for answer in answers} == {201}
    assert len({answer.text for answer in answers}) == 1
    assert house.sql("SELECT count(*) FROM datasets WHERE name = %s", body["name"]) == [(1,)]


@pytest.mark.parametrize("credentials", ["", "Authorization: Bearer sl_of-nobody\r\n"])
def test_nobody_is_told_so_before_their_body_is_read(credentials, house):
    host, port = house.anonymous.base_url.host, house.anonymous.base_url.port
    with socket.create_connection((host, port), timeout=60) as line:
        head = f"POST /v1/datasets HTTP/1.1\r\nHost: {host}\r\n{credentials}"
        line.sendall(f"{head}Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n".encode())
        assert line.recv(4096).startswith(b"HTTP/1.1 401")


def test_however_many_ask_whether_it_is_ready_the_servers_are_asked_once(house, monkeypatch):
    go, asked = threading.Event(), []
    monkeypatch.setattr(health, "_ask_queue", lambda _: (asked.append(1), go.wait(60)))
    monkeypatch.setattr(Refreshed, "FRESH_SECONDS", 60)
    house.app.state.readiness._read = None
    answers: list[httpx.Response] = []
    storm = threading.Thread(
        target=lambda: answers.extend(at_once(house.anonymous, [("GET", "/readyz")] * 50))
    )
    storm.start()
    wait_until(lambda: asked)
    assert house.anonymous.get("/healthz").status_code == 200
    go.set()
    storm.join()
    assert {answer.status_code for answer in answers} == {200}
    assert len(asked) == 1


def test_a_well_known_answer_is_read_once_given_to_all_and_known_by_its_tag(house, monkeypatch):
    monkeypatch.setattr(Refreshed, "FRESH_SECONDS", 60)
    known = house.app.state.known_keys
    reads, load = [], known._load
    monkeypatch.setattr(known, "_load", lambda: (reads.append(1), load())[1])
    known._read = None
    answers = at_once(house.anonymous, [("GET", KEYS)] * 50)
    assert {answer.text for answer in answers} == {answers[0].text}
    assert len(reads) == 1
    again = house.anonymous.get(KEYS, headers={"If-None-Match": answers[0].headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_a_well_known_answer_outlives_a_database_that_does_not_answer(house, monkeypatch):
    monkeypatch.setattr(Refreshed, "FRESH_SECONDS", 0)
    before = house.anonymous.get(KEYS)
    go = threading.Event()
    monkeypatch.setattr(house.app.state.known_keys, "_load", lambda: go.wait(60))
    try:
        assert house.anonymous.get(KEYS).text == before.text
    finally:
        go.set()
        wait_until(lambda: house.app.state.known_keys._reading is None)
        house.app.state.known_keys._read = None


def _in_a_thread_of_its_own(who: Admin) -> None: ...


async def _without_authentication(who: Admin) -> None: ...


@pytest.mark.parametrize("endpoint", [_in_a_thread_of_its_own, _without_authentication])
def test_a_route_of_another_class_stops_the_service_at_its_start(endpoint, house, monkeypatch):
    router = APIRouter()
    router.add_api_route("/v1/other", endpoint)
    monkeypatch.setattr("service.app.people", SimpleNamespace(router=router))
    with pytest.raises(RuntimeError, match=r"^/v1/other: make its router with"):
        create_app(house.settings)
