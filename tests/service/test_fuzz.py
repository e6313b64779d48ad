"""Fuzzes every operation of the OpenAPI document with Schemathesis, as each kind of caller."""

import json
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from service.auth import OPEN
from tests.service.house import House, opened
from tests.service.test_permissions import TABLE

# Examples per operation, and the least number of requests and of operations that succeed.
ROLES = {"anonymous": (2, 150, 0), "analyst": (3, 200, 1), "curator": (6, 1000, 10), "admin": (6, 500, 14)}
# A valid request may still be refused because of stored data: an old cursor, a key used before.
LEFT_OUT = "positive_data_acceptance"


@pytest.fixture(scope="module")
def tried(servers):
    """A service without a rate limit, with a dataset and a job, and a sweeper."""
    with opened(servers, requests_per_minute=10**9) as house:
        dataset = house.ready(house.curator)
        house.job(house.curator, dataset["id"])
        done = threading.Event()

        def sweep() -> None:
            while not done.wait(5):
                house.witnessed()

        sweeper = threading.Thread(target=sweep)
        sweeper.start()
        yield house, dataset["account"]
        done.set()
        sweeper.join()


def first_role(house: House, operation: str) -> str:
    """The role that an operation is covered with: the first one that may use it."""
    method, path = operation.split(" ")
    roles = house.app.state.permissions.get((method, path), {"anonymous"})
    return next(role for role in ("anonymous", "curator", "admin", "analyst") if role in roles)


def explore(
    house: House, account: str, role: str, at: Path, *, examples: int, phases: str, elsewhere: str = ""
) -> str:
    """Runs Schemathesis and returns its output. `elsewhere` configures what is first for another role."""
    config = at / "schemathesis.toml"
    names = json.dumps([name for name in TABLE if first_role(house, name) != role])
    operations = f"[[operations]]\ninclude-name = {names}\n{elsewhere}\n" if elsewhere else ""
    config.write_text(f'max-stream-events = 1\n[parameters]\naccount = "{account}"\n{operations}')
    key = [] if role == "anonymous" else ["-H", f"Authorization: Bearer {house.people[role].key}"]
    run = subprocess.run(
        [
            Path(sys.executable).parent / "schemathesis", "--config-file", config, "run",
            f"{house.anonymous.base_url}/openapi.json", *key, "--checks", "all", "--exclude-checks", LEFT_OUT,
            "--phases", phases, "-n", str(examples), "--no-shrink", "--generation-database", "none",
            "--seed", "1", "--request-timeout", "30", "--warnings", "off", "--max-failures", "5",
        ],
        capture_output=True, text=True, cwd=at, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert f"Tested: {len(TABLE)}" in run.stdout
    return run.stdout


def served(house: House) -> dict[tuple[str, str, str], int]:
    """(method, route, status) → how often, by the service's own count."""
    line = re.compile(r'sluice_requests_total\{method="(\w+)",route="([^"]+)",status="(\d+)"\} ([\d.]+)')
    found = line.findall(house.anonymous.get("/metrics").text)
    return {(method, route, status): int(float(count)) for method, route, status, count in found}


@pytest.mark.parametrize("role", ROLES)
def test_no_request_of_any_kind_breaks_it(role, tried, tmp_path):
    house, account = tried
    before = served(house)
    examples, requests, operations = ROLES[role]
    # The coverage phase runs once per operation; with --long, for every role.
    explore(
        house, account, role, tmp_path, examples=examples, phases="examples,coverage,fuzzing",
        elsewhere="phases.coverage.enabled = false",
    )  # fmt: skip
    after = served(house)
    statuses = {key: count - before.get(key, 0) for key, count in after.items()}
    assert sum(statuses.values()) > requests
    assert not [key for key, count in statuses.items() if key[2].startswith("5") and count]
    good = {
        f"{method} {route}" for (method, route, status), count in statuses.items() if count and status < "300"
    }
    guarded = {f"{method} {route}" for method, route in house.app.state.permissions}
    assert len(good & guarded) >= operations
    assert role != "anonymous" or not good & guarded


@pytest.mark.long
@pytest.mark.parametrize("role", ROLES)
def test_no_request_of_any_kind_breaks_it_at_length(role, tried, tmp_path):
    house, account = tried
    out = explore(house, account, role, tmp_path, examples=200, phases="examples,coverage,fuzzing,stateful")
    print(out[-600:])  # noqa: T201 (the summary of a long run)


def test_the_document_shows_examples_and_every_way_it_may_fail(house):
    document = house.anonymous.get("/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    schemas = document["components"]["schemas"]
    problem = {"$ref": "#/components/schemas/ProblemView"}
    for path, verbs in document["paths"].items():
        for verb, operation in verbs.items():
            for status in ("400", "401", "403", "404", "409", "413", "422", "429", "503"):
                content = operation["responses"][status]["content"]
                assert list(content) == ["application/problem+json"], (verb, path)
                assert content["application/problem+json"]["schema"] == problem
                assert content["application/problem+json"]["example"]["status"] == int(status)
            assert ("security" in operation) == (path not in OPEN)
            if "requestBody" in operation:
                schema = operation["requestBody"]["content"]["application/json"]["schema"]
                # A body that may be left out is described as itself or null.
                [body] = [one["$ref"] for one in schema.get("anyOf", [schema]) if "$ref" in one]
                named = schemas[body.rpartition("/")[2]]
                fields = named["properties"]
                shown = "examples" in named or any(
                    "examples" in fields[name] or "default" in fields[name] for name in fields
                )
                assert shown, body
                assert named["additionalProperties"] is False
    assert {"type", "slug", "title", "status", "detail", "request_id"} == set(
        schemas["ProblemView"]["required"]
    )


def test_the_document_describes_every_plan(house):
    schemas = house.anonymous.get("/openapi.json").json()["components"]["schemas"]
    kinds = schemas["NewJob"]["properties"]["plan"]["anyOf"][0]["discriminator"]["mapping"]
    assert set(kinds) == {"dpgan", "sinkhorn", "gswgan", "swd", "swd_one_shot", "atlas", "adapt"}
    dpgan = schemas[kinds["dpgan"].rpartition("/")[2]]
    assert {"kind", "sampling_prob"} == set(dpgan["required"])


@pytest.mark.parametrize("method", ["PUT", "PATCH", "TRACE", "BREW", "OPTIONS", "HEAD"])
def test_an_address_names_all_its_methods(method, house):
    for path, allowed in (("/v1/datasets", "GET, POST"), ("/v1/me", "GET"), ("/healthz", "GET")):
        answer = house.admin.request(method, path)
        assert (answer.status_code, answer.headers["allow"]) == (405, allowed)


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"nonsense", b'{"name": "a\xff"}', b"[" * 100_000, b'{"a":' * 20_000, b"9" * 5000,
        b'{"epsilon": 1e999}', b"\x00", b'"\\ud800"', "\ufeff{}".encode(), "{}".encode("utf-16"),
    ],
)  # fmt: skip
def test_what_is_no_json_is_told_so(body, house):
    headers = {"Content-Type": "application/json"}
    answer = house.curator.post("/v1/datasets", content=body, headers=headers)
    assert answer.status_code in (400, 422)
    assert answer.json()["slug"] in ("bad-request", "invalid-request")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", "a\x00b"), ("name", "\ud800"), ("nominal_size", 10**400), ("nominal_size", 1e400),
        ("nominal_size", True), ("nominal_size", "5"), ("nominal_size", 2.5),
        ("budget", {"epsilon": 1e309, "delta": 1e-6}),
        ("budget", {"epsilon": 1, "delta": float("nan")}), ("parent", "not-a-uuid"), ("parent", "\x00" * 36),
        ("schema", {"kind": "image", "height": 2**70, "width": 1, "classes": ["a"]}),
        ("schema", {"kind": "table", "columns": [{"kind": "number", "name": "a\x00", "low": 0, "high": 1}]}),
        ("schema", {"kind": "table", "columns": []}), ("schema", {"kind": "audio"}), ("schema", None),
    ],
)  # fmt: skip
def test_an_odd_value_is_refused_by_its_place(field, value, house):

    body = {"name": "d", "schema": {"kind": "image", "height": 1, "width": 1, "classes": ["a"]}}
    body |= {"nominal_size": 1, "budget": {"epsilon": 1.0, "delta": 1e-6}, field: value}
    headers = {"Content-Type": "application/json"}
    answer = house.curator.post("/v1/datasets", content=json.dumps(body), headers=headers)
    assert (answer.status_code, answer.json()["slug"]) == (422, "invalid-request")
    assert answer.json()["errors"][0]["loc"][:2] == ["body", field]


def test_a_whole_number_may_be_written_with_a_point(house):
    body = {"name": "d", "schema": {"kind": "image", "height": 1, "width": 1, "classes": ["a"]}}
    body |= {"nominal_size": 5.0, "budget": {"epsilon": 1, "delta": 1e-6}}
    assert house.curator.post("/v1/datasets", json=body).json()["nominal_size"] == 5


@pytest.mark.parametrize("since", ["0.5", "1700000000", "yesterday", "2026-01-01", "2026-01-01T00:00:00"])
def test_a_moment_without_a_date_or_an_offset_is_refused(since, house):
    account = house.admin.get("/v1/admin/ledger").json()["items"]
    id = account[0]["id"] if account else house.ready(house.curator)["account"]
    answer = house.admin.get(f"/v1/admin/ledger/{id}", params={"since": since})
    assert (answer.status_code, answer.json()["errors"][0]["loc"]) == (422, ["query", "since"])
