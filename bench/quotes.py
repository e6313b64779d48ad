"""Times `POST /v1/quotes` over HTTP: the first request for a plan, a repeated one, and another target.

Run as `python -m bench.quotes [--repeat 30] [--json]` on an idle machine.
"""

import argparse
import json
import secrets
import statistics
import sys
import tempfile
import time
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table
from sqlalchemy.orm import Session

from core import ledger
from core.database import connect
from core.people import Role, add_person, invite, redeem
from core.tables import Dataset
from local.child import Child, check_port
from local.ports import HOST, free_port
from local.stack import Stack
from sluice.client.api import Sluice
from sluice.privacy.relation import Relation

PLANS: dict[str, dict[str, Any]] = {
    "swd, one shot": {"kind": "swd_one_shot", "steps": 1},
    "dpgan": {"kind": "dpgan", "sampling_prob": 1 / 118, "expected_batch": 508.0, "steps": 20_000},
    "sinkhorn": {"kind": "sinkhorn", "sampling_prob": 1 / 1200, "images": 50, "steps": 50_000},
    "gswgan": {"kind": "gswgan", "parts": 1000, "images": 32, "steps": 20_000},
    "swd": {"kind": "swd", "records": 60_000, "batch": 100, "directions": 1000, "dim": 784, "steps": 10_000},
}


def set_up(url: str) -> tuple[str, str]:
    """Returns a curator's key and the id of a dataset of theirs that is ready."""
    engine = connect(url)
    with Session(engine) as session, session.begin():
        person = add_person(session, name="bench", role=Role.CURATOR)
        _, key = redeem(session, invite(session, person, by=None)[1] or "", label="bench", days=1)
        account = ledger.open_account(
            session, relation=Relation.ADD_REMOVE, epsilon=10.0, delta=1e-5, order=4,
            move=ledger.Move(actor="bench", reason="timed"),
        )  # fmt: skip
        dataset = Dataset(
            id=uuid.uuid4(), owner_id=person.id, name="bench", schema={}, nominal_size=60_000,
            relation="add_remove", epsilon=10.0, delta=1e-5, order=4, account_id=account.id, state="ready",
            object_key=uuid.uuid4().hex, size=1, sha256=secrets.token_bytes(32), sealed_at=datetime.now(UTC),
        )  # fmt: skip
        session.add(dataset)
        found = key, str(dataset.id)
    engine.dispose()
    return found


def measure(service: Sluice, dataset: str, *, repeat: int) -> list[dict[str, Any]]:
    def ask(plan: dict[str, Any], epsilon: float) -> float:
        began = time.perf_counter()
        service.quote(dataset, plan, target={"epsilon": epsilon})
        return 1000 * (time.perf_counter() - began)

    first = ask(PLANS["swd, one shot"], 3.0)
    results = [
        {"plan": "first of a process", "cold_ms": first, "warm_ms": None, "p95_ms": None, "other_ms": None}
    ]
    for name, plan in PLANS.items():
        cold = ask(plan, 2.0)
        warm = sorted(ask(plan, 2.0) for _ in range(repeat))
        other = statistics.median(ask(plan, 2.0 + 0.1 * i) for i in range(1, 4))
        p95 = warm[int(0.95 * len(warm))]
        warm_ms = statistics.median(warm)
        results.append({"plan": name, "cold_ms": cold, "warm_ms": warm_ms, "p95_ms": p95, "other_ms": other})
    return results


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--repeat", type=int, default=30, help="warm requests for each plan")
    arguments.add_argument("--json", action="store_true")
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as directory:
        stack = Stack(Path(directory) / "data", port=free_port(), witness=Path(directory) / "witness")
        try:
            stack.start_servers()
            stack.prepare()
            key, dataset = set_up(stack.owner_url)
            api = Child(
                name="service",
                command=[sys.executable, "-m", "service", "--port", str(stack.port)],
                log=stack.data / "log/service.log",
                probe=lambda: (check_port(stack.port), httpx.get(f"{stack.url}/healthz").raise_for_status())[
                    0
                ],
                environment=stack.environment("service"),
            )
            stack.processes.append(api)
            api.start()
            api.wait_ready(lambda: False)
            with Sluice(stack.url, key) as service:
                results = measure(service, dataset, repeat=given.repeat)
        finally:
            stack.stop()
    if given.json:
        return print(json.dumps(results))
    table = Table("plan", "cold ms", "again ms", "95 %", "other target ms")
    for one in results:
        numbers = (one[name] for name in ("cold_ms", "warm_ms", "p95_ms", "other_ms"))
        table.add_row(one["plan"], *("" if each is None else f"{each:,.1f}" for each in numbers))
    Console().print(table)
    print(f"One client over HTTP on {HOST}; calibration to epsilon 2, both accountants, remaining budget.")


if __name__ == "__main__":
    main()
