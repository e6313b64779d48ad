"""Many concurrent requests: health checks answer, connections are returned, excess requests are refused."""

import asyncio
import gc
import itertools
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace

import httpx
import psutil
import pytest
import uvicorn
from fastapi import APIRouter
from fastapi.responses import PlainTextResponse

from service import auth, health, limits, overload, server
from service.__main__ import main
from service.app import POOL, create_app
from service.auth import Admin
from service.people.schemas import PersonView
from service.refreshed import Refreshed
from service.routing import THREADS
from tests.service.house import BUDGET, IMAGES, Caller, House, new_key, opened

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
    """Waits for a state that the server reaches by itself; the limit only ends a hanging test."""
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def connections(house: House) -> int:
    return house.app.state.engine.pool.checkedout()


@contextmanager
def held_up(monkeypatch) -> Iterator[tuple[list[int], threading.Event]]:
    """Blocks `GET /v1/me`, holding its connection, until the event is set; lists the blocked requests."""
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
        wait_until(lambda: len(stopped) == min(POOL, THREADS))
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
    known = house.app.state.signing_keys
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
    monkeypatch.setattr(house.app.state.signing_keys, "_load", lambda: go.wait(60))
    try:
        assert house.anonymous.get(KEYS).text == before.text
    finally:
        go.set()
        wait_until(lambda: house.app.state.signing_keys._reading is None)
        house.app.state.signing_keys._read = None


def test_one_person_has_so_many_streams(house, monkeypatch):
    monkeypatch.setattr(house.app.state, "streams", overload.Slots(total=3, per_key=1))
    job = house.job(house.curator, house.ready(house.curator)["id"]).json()["id"]
    path = f"/v1/jobs/{job}/events"
    with house.curator.stream("GET", path) as first:
        events = first.iter_text()  # kept: httpx closes the stream with it
        next(events)
        with house.curator.stream("GET", path) as refused:
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        with house.admin.stream("GET", path) as other:
            assert other.status_code == 200
            # Streams are not among the requests that wait.
            wait_until(lambda: house.app.state.admission.proven._all == 0)
    wait_until(lambda: house.app.state.streams._all == 0)


def _in_a_thread_of_its_own(who: Admin) -> None: ...


async def _without_authentication(who: Admin) -> None: ...


@pytest.mark.parametrize("endpoint", [_in_a_thread_of_its_own, _without_authentication])
def test_a_route_of_another_class_stops_the_service_at_its_start(endpoint, house, monkeypatch):
    router = APIRouter()
    router.add_api_route("/v1/other", endpoint)
    monkeypatch.setattr("service.app.people", SimpleNamespace(router=router))
    with pytest.raises(RuntimeError, match=r"^/v1/other: make its router with"):
        create_app(house.settings)


# -- bounds


@pytest.fixture(scope="module")
def narrow(servers):
    with opened(servers, requests_waiting=12, anonymous_at_once=4, anonymous_per_minute=20) as house:
        yield house


@pytest.fixture
def minute(monkeypatch):
    """A minute of its own for each test, 45 s before its end."""
    now = 60 * next(_minutes) + 15.0
    monkeypatch.setattr(limits.time, "time", lambda: now)


_minutes = itertools.count(100_000_000)


def statuses(answers: list[httpx.Response]) -> Counter:
    return Counter((answer.status_code, answer.headers.get("retry-after")) for answer in answers)


def test_above_the_bound_a_request_is_refused_at_once_and_health_answers(narrow, monkeypatch, minute):
    people = (narrow.analyst, narrow.curator)
    for who in people:
        assert who.get("/v1/me").status_code == 200  # from now on these keys are proven
    answers: list[httpx.Response] = []
    with held_up(monkeypatch) as (_, go):
        storms = []
        for number, who in enumerate(people, start=1):
            send = partial(at_once, who, [("GET", "/v1/me")] * 6)
            storms.append(threading.Thread(target=lambda send=send: answers.extend(send())))
            storms[-1].start()
            wait_until(lambda number=number: narrow.app.state.admission.proven._all == 6 * number)
            if number == 1:  # one key has half of the places
                assert statuses([who.get("/v1/me")]) == {(429, "1"): 1}
        refused = narrow.analyst.get("/v1/me")  # answered although nothing that waits is
        assert (refused.status_code, refused.json()["slug"]) == (503, "overloaded")
        assert refused.headers["retry-after"] == "2"
        assert refused.headers["content-type"] == "application/problem+json"
        assert refused.headers["x-request-id"] == refused.json()["request_id"]
        for path in ("/healthz", "/readyz", KEYS):
            assert narrow.anonymous.get(path).status_code == 200
        # Strangers have places of their own, and threads to be looked up with.
        assert narrow.anonymous.get("/v1/me").status_code == 401
        go.set()
        for storm in storms:
            storm.join()
    assert statuses(answers) == {(200, None): 12}
    wait_until(lambda: narrow.app.state.admission.proven._all == 0)


def test_one_address_has_so_many_requests_under_way_and_others_have_theirs(narrow, monkeypatch, minute):
    go, asked = threading.Event(), []
    real = auth.person_of
    monkeypatch.setattr(
        "service.auth.person_of", lambda *given: (asked.append(1), go.wait(60), real(*given))[2]
    )
    wrong = httpx.Client(base_url=narrow.anonymous.base_url, headers={"Authorization": "Bearer sl_wrong"})
    answers: list[httpx.Response] = []
    storm = threading.Thread(target=lambda: answers.extend(at_once(wrong, [("GET", "/v1/me")] * 4)))
    storm.start()
    try:
        wait_until(lambda: narrow.app.state.admission.unproven._all == 4)
        refused = narrow.anonymous.get("/v1/me")
        assert (refused.status_code, refused.json()["slug"]) == (429, "rate-limited")
        assert refused.headers["retry-after"] == "1"
        elsewhere = narrow.anonymous.get("/v1/me", headers={"X-Forwarded-For": "192.0.2.7"})
        assert elsewhere.status_code == 401
    finally:
        go.set()
        storm.join()
        wrong.close()
    assert statuses(answers) == {(401, None): 4}


@pytest.mark.parametrize("key", [None, "Bearer sl_guess", "Basic dTpw"])
def test_an_address_without_a_good_key_is_told_to_wait_and_known_keys_are_not(key, narrow, minute):
    headers = {"Authorization": key} if key else {}
    assert narrow.curator.get("/v1/me").status_code == 200
    asked = [narrow.anonymous.get("/v1/me", headers=headers) for _ in range(25)]
    assert statuses(asked) == {(401, None): 20, (429, "45"): 5}
    assert narrow.curator.get("/v1/me").status_code == 200
    elsewhere = narrow.anonymous.get("/v1/me", headers=headers | {"X-Forwarded-For": "192.0.2.8"})
    assert elsewhere.status_code == 401
    for path in ("/healthz", "/readyz", KEYS):
        assert narrow.anonymous.get(path).status_code == 200


def test_good_keys_do_not_count_against_their_address(narrow, minute):
    for _ in range(22):  # more than the limit of an address
        assert narrow.person("analyst").get("/v1/me").status_code == 200


def test_a_revoked_key_is_a_stranger_again(narrow, minute):
    who = narrow.person("analyst")
    assert who.get("/v1/me").status_code == 200
    narrow.sql("UPDATE keys SET revoked_at = now() WHERE person_id = %s", who.id)
    assert statuses([who.get("/v1/me") for _ in range(25)]) == {(401, None): 20, (429, "45"): 5}


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("2001:db8:1:2::1", "2001:db8:1:2:ffff::9", True),
        ("2001:db8:1:2::1", "2001:db8:1:3::1", False),
        ("192.0.2.1", "192.0.2.2", False),
        ("192.0.2.1", "::ffff:192.0.2.1", True),
    ],
)
def test_an_ipv6_client_is_known_by_its_64_bit_network(one, other, same):
    networks = [overload.network_of({"client": (address, 1)}) for address in (one, other)]
    assert (networks[0] == networks[1]) is same


def test_what_is_remembered_of_addresses_and_keys_is_bounded(narrow, monkeypatch, minute):
    monkeypatch.setattr(limits, "MAX_COUNTED", 100)
    rates = limits.Rates(5)
    for address in range(1000):
        rates.count(address)
    assert len(rates._counts) <= 101
    monkeypatch.setattr(overload, "MAX_PROVEN", 3)
    good = narrow.app.state.admission.proven_credentials
    good.clear()
    for _ in range(5):
        assert narrow.person("analyst").get("/v1/me").status_code == 200
    assert len(good) == 3


# -- the server


async def _address(scope, receive, send) -> None:
    if scope["type"] == "http":
        await PlainTextResponse(scope["client"][0])(scope, receive, send)


@contextmanager
def running(house: House, **settings) -> Iterator[int]:
    """The server as `python -m service` configures it, with an application that tells a client's address."""
    config = server.configuration(_address, house.settings.model_copy(update=settings), lifespan="off")
    config.timeout_keep_alive = 1
    running = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            running.should_exit = True
            thread.join()


def test_a_client_that_breaks_the_protocol_ends_its_own_connection_alone(house):
    """Answered before their bodies arrive, they send what is no chunk, all at the same time."""
    head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    with running(house) as port, ExitStack() as lines:
        broken = [
            lines.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60)) for _ in range(40)
        ]
        for line in broken:
            line.sendall(head)
            assert line.recv(4096).startswith(b"HTTP/1.1 200")
        for line in broken:
            line.sendall(b"zz\r\n")
        assert httpx.get(f"http://127.0.0.1:{port}/", timeout=60).text == "127.0.0.1"


def test_a_client_that_does_not_read_is_cut_off(house, monkeypatch):
    monkeypatch.setattr(server, "WRITE_SECONDS", 0.2)

    async def large(scope, receive, send):
        await PlainTextResponse(b"x" * (32 << 20))(scope, receive, send)

    monkeypatch.setattr(f"{__name__}._address", large)
    with running(house) as port, socket.create_connection(("127.0.0.1", port), timeout=60) as line:
        line.sendall(HEAD + b"\r\n")
        assert line.recv(1)
        assert psutil_connections(port)
        wait_until(lambda: not psutil_connections(port))


def psutil_connections(port: int) -> list[object]:
    """Connections that the server still holds."""
    return [
        one
        for one in psutil.Process().net_connections()
        if one.laddr.port == port and one.status == psutil.CONN_ESTABLISHED
    ]


def test_credentials_count_as_known_only_where_they_are_looked_up(house):
    """A key that was revoked since would otherwise have no limit on open routes."""
    assert house.curator.get("/v1/me").status_code == 200
    admission = house.app.state.admission
    headers = [(b"authorization", f"Bearer {house.curator.key}".encode())]
    proven = {}
    for path in ("/v1/me", "/openapi.json", "/metrics", overload.REDEEM):
        ticket = admission.admit({"headers": headers, "client": ("192.0.2.1", 1), "path": path})
        proven[path] = ticket.proven
        ticket.close()
    assert proven == {"/v1/me": True, "/openapi.json": False, "/metrics": False, overload.REDEEM: False}


def test_slow_invitations_take_no_places_of_people_who_sign_in(house):
    admission, scope = house.app.state.admission, {"headers": [], "path": overload.REDEEM}
    held = [admission.admit(scope | {"client": (f"192.0.2.{number // 5}", 1)}) for number in range(50)]
    with pytest.raises(overload.Overloaded):
        admission.admit(scope | {"client": ("192.0.2.99", 1)})
    assert house.curator.get("/v1/me").status_code == 200
    stranger = house.person("curator")  # a key that is new to this process
    assert stranger.get("/v1/me").status_code == 200
    for ticket in held:
        ticket.close()


def test_health_does_not_wait_for_requests_that_arrived_before_it(house, monkeypatch):
    """Two hundred requests and then /healthz arrive while the event loop is busy with another."""
    begun, busy, go = [], threading.Event(), threading.Event()

    async def record(scope, receive, send):
        begun.append(scope["path"])
        if scope["path"] == "/busy":
            busy.set()
            go.wait(60)  # holds the event loop itself
        await PlainTextResponse("")(scope, receive, send)

    def line():
        return lines.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))

    monkeypatch.setattr(f"{__name__}._address", record)
    with running(house) as port, ExitStack() as lines:
        others, health_line, first = [line() for _ in range(200)], line(), line()
        first.sendall(b"GET /busy HTTP/1.1\r\nHost: x\r\n\r\n")
        assert busy.wait(60)
        for number, other in enumerate(others):
            other.sendall(f"GET /{number} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        health_line.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        go.set()
        for each in (*others, health_line, first):
            assert each.recv(4096).startswith(b"HTTP/1.1 200")
    assert sorted(begun) == sorted(["/busy", "/healthz", *(f"/{number}" for number in range(200))])
    assert begun.index("/healthz") <= 2 * server.REQUESTS_PER_ROUND


@pytest.mark.parametrize(("trusted", "address"), [(None, "127.0.0.1"), ("127.0.0.0/8", "192.0.2.9")])
def test_a_forwarded_address_is_believed_of_named_proxies_alone(trusted, address, house):
    with running(house, trusted_proxies=trusted) as port:
        told = httpx.get(f"http://127.0.0.1:{port}/", headers={"X-Forwarded-For": "192.0.2.9"}).text
    assert told == address


HEAD = b"GET / HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize("sent", [b"", HEAD, HEAD + b"\r\n" + HEAD])
def test_a_client_that_does_not_finish_the_head_of_a_request_is_cut_off(sent, house, monkeypatch):
    monkeypatch.setattr(server, "HEAD_SECONDS", 0.2)
    with running(house) as port, socket.create_connection(("127.0.0.1", port), timeout=60) as line:
        line.sendall(sent)
        while line.recv(4096):
            pass


def test_one_address_cannot_take_every_connection(house, monkeypatch):
    monkeypatch.setattr(server, "max_connections", lambda: 6)
    monkeypatch.setattr(server, "HEAD_SECONDS", 600)
    with running(house) as port, ExitStack() as lines:
        for _ in range(3):
            lines.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60)).sendall(b"GET / ")
        fourth = lines.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
        assert fourth.recv(1) == b""
        other = httpx.HTTPTransport(local_address="127.0.0.2")
        with httpx.Client(transport=other, base_url=f"http://127.0.0.1:{port}") as elsewhere:
            assert elsewhere.get("/").text == "127.0.0.2"


def test_a_body_that_does_not_arrive_is_given_up(house, monkeypatch):
    monkeypatch.setattr(limits, "BODY_SECONDS", 0.2)
    url, key = house.anonymous.base_url, house.curator.key
    with socket.create_connection((url.host, url.port), timeout=60) as line:
        head = f"POST /v1/datasets HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
        line.sendall(f"{head}Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n".encode())
        assert line.recv(4096).startswith(b"HTTP/1.1 408")


def test_objects_that_exist_at_start_up_are_excluded_from_garbage_collection(house, monkeypatch):
    """A full collection of them would block all responses for a fifth of a second."""
    frozen = []
    monkeypatch.setattr("service.__main__.load", lambda _: house.settings)
    monkeypatch.setattr("service.__main__.log.configure", lambda _: None)
    monkeypatch.setattr("sys.argv", ["service"])
    monkeypatch.setattr("uvicorn.Server.run", lambda _: frozen.append(gc.get_freeze_count()))
    switched = sys.getswitchinterval()
    try:
        main()
    finally:
        sys.setswitchinterval(switched)
        gc.unfreeze()
    assert frozen[0] > 50_000
