"""Liveness, readiness, and the form of error responses."""

import pytest
from pydantic import BaseModel

from core.errors import Problem
from core.heartbeats import beat
from service.app import create_app


@pytest.fixture
def client(service_settings, serve):
    with serve(create_app(service_settings)) as client:
        yield client


def test_alive(client):
    answer = client.get("/healthz")
    assert answer.status_code == 200
    assert answer.json()["status"] == "ok"


def test_ready_names_every_part_and_a_worker_that_beats_is_up(client, engine):
    beat(engine, "train")
    answer = client.get("/readyz")
    assert answer.status_code == 200
    assert answer.json() == {
        "needs": {"database": "ok", "queue": "ok", "store": "ok"},
        "workers": {"train": "ok", "publish": "down", "sweep": "down"},
    }


@pytest.mark.parametrize(
    ("setting", "value", "part"),
    [
        ("database_url", "postgresql://u:unheardOf7@127.0.0.1:9/x", "database"),
        ("queue_url", "redis://u:unheardOf7@127.0.0.1:9/0", "queue"),
        ("s3_endpoint", "http://127.0.0.1:9", "store"),
    ],
)
def test_a_lost_server_makes_it_not_ready_and_is_named(setting, value, part, service_settings, serve):
    values = service_settings.model_dump() | {setting: value}
    with serve(create_app(type(service_settings)(**values))) as client:
        answer = client.get("/readyz")
    assert answer.status_code == 503
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["slug"] == "not-ready"
    assert answer.json()["needs"] == {
        n: "down" if n == part else "ok" for n in ("database", "queue", "store")
    }
    assert "unheardOf7" not in answer.text


def test_an_unknown_address_is_a_problem_with_a_way_out(client):
    answer = client.get("/v1/nothing-here")
    assert answer.status_code == 404
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["slug"] == "not-found"
    assert "nothing-here" not in answer.text


def test_a_wrong_method_is_a_problem_and_keeps_its_allow_header(client):
    answer = client.post("/healthz")
    assert (answer.status_code, answer.json()["slug"]) == (405, "method-not-allowed")
    assert answer.headers["allow"] == "GET"


def test_request_ids_come_back_and_cannot_forge_a_log_line(client):
    assert (
        client.get("/healthz", headers={"X-Request-Id": "abc-1.2_3"}).headers["x-request-id"] == "abc-1.2_3"
    )
    for bad in ('x" forged="1', "a" * 65, "ä".encode("latin-1")):
        given = client.get("/healthz", headers={"X-Request-Id": bad}).headers["x-request-id"]
        assert len(given) == 32
        assert given.isalnum()


class Body(BaseModel):
    count: int
    other: str


class Full(Problem):
    status, slug, title = 409, "full", "No room"


@pytest.fixture
def odd(service_settings, serve):
    """The service with routes that fail in each way a route can."""
    app = create_app(service_settings)

    @app.post("/echo")
    def echo(body: Body) -> None: ...

    @app.get("/full")
    def full() -> None:
        raise Full("3 asked, 1 left", asked=3, left=1)

    @app.get("/broken")
    def broken() -> None:
        raise RuntimeError("canary-5f1c")

    with serve(app) as client:
        yield client


@pytest.mark.parametrize(
    "body", [{"count": "canary-5f1c", "other": 1}, {"canary-5f1c": 1}, ["canary-5f1c"], "canary-5f1c"]
)
def test_a_validation_error_never_echoes_what_was_sent(body, odd):
    answer = odd.post("/echo", json=body)
    assert (answer.status_code, answer.json()["slug"]) == (422, "invalid-request")
    assert "canary-5f1c" not in answer.text
    assert all(set(error) == {"loc", "type", "msg"} for error in answer.json()["errors"])


def test_a_named_problem_carries_its_numbers(odd):
    answer = odd.get("/full")
    assert answer.status_code == 409
    assert {k: answer.json()[k] for k in ("slug", "title", "detail", "asked", "left")} == {
        "slug": "full",
        "title": "No room",
        "detail": "3 asked, 1 left",
        "asked": 3,
        "left": 1,
    }


def test_an_unexpected_error_tells_nothing_but_its_request_id(odd):
    answer = odd.get("/broken", headers={"X-Request-Id": "r-1"})
    assert (answer.status_code, answer.json()["slug"], answer.json()["request_id"]) == (
        500,
        "internal-error",
        "r-1",
    )
    assert "canary-5f1c" not in answer.text
