"""Times the ledger: jobs reserved and settled per second, by number of clients and of accounts.

Run as `python -m bench.ledger [--seconds 5] [--json]` on an idle machine. It starts its own PostgreSQL,
durable as in production, and clients in as many processes as there are cores, each client with its own
connection.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from core import ledger
from core.database import connect
from core.people import Role, add_person
from core.tables import Account, Dataset, Entry, Job
from local.stack import Stack
from sluice.privacy.events import Gaussian, Query
from sluice.privacy.relation import Relation

EVENT = Gaussian(query=Query.SUM, bound=1.0, noise_stddev=1000.0)
READINGS = {"renyi": 0.01, "pld": 0.01}
MOVE = ledger.Move(actor="bench", reason="timed")
CLIENTS, ACCOUNTS = (1, 8, 64), (1, 64)


def set_up(url: str) -> tuple[uuid.UUID, list[uuid.UUID]]:
    """Creates a person and the accounts of the largest case, each with enough budget and a dataset."""
    engine = connect(url)
    with Session(engine) as session, session.begin():
        person = add_person(session, name=f"bench-{uuid.uuid4().hex}", role=Role.CURATOR)
        accounts = [
            ledger.open_account(
                session, relation=Relation.ADD_REMOVE, epsilon=1e5, delta=1e-5, order=8, move=MOVE
            )
            for _ in range(max(ACCOUNTS))
        ]
        for account in accounts:
            dataset = Dataset(
                id=account.id, owner_id=person.id, name="bench", schema={}, nominal_size=1,
                relation="add_remove", epsilon=1e5, delta=1e-5, order=8, state="ready", account_id=account.id,
                object_key=uuid.uuid4().hex, size=1, sha256=bytes(32), sealed_at=account.created_at,
            )  # fmt: skip
            session.add(dataset)
        found = person.id, [account.id for account in accounts]
    engine.dispose()
    return found


def one_job(session: Session, person: uuid.UUID, account: Account) -> None:
    """Does what the service does to start a job and what a worker does to end it: two transactions."""
    id = uuid.uuid4()
    with session.begin():
        cost = ledger.reserve(session, account, EVENT, job=id, readings=READINGS, move=MOVE)
        session.add(
            Job(
                id=id, dataset_id=account.id, account_id=account.id, owner_id=person, plan={}, event={},
                cost=cost, readings=READINGS, state="queued", steps=1,
            )
        )  # fmt: skip
    with session.begin():
        ledger.settle(session, account.id, job=id, move=MOVE)
    session.expunge_all()


def clients(
    url: str,
    person: uuid.UUID,
    accounts: list[uuid.UUID],
    begin: Any,
    seconds: float,
    out: Any,
) -> None:
    """Runs one process: a thread with its own connection for each account named."""
    engine = connect(url, pool_size=len(accounts))
    times: list[float] = []
    spans: list[float] = []

    def run(account_id: uuid.UUID) -> None:
        with Session(engine, expire_on_commit=False) as session:
            with session.begin():
                account = session.get_one(Account, account_id)
            session.expunge_all()
            begin.wait()
            began = started = time.perf_counter()
            while started < began + seconds:
                one_job(session, person, account)
                now = time.perf_counter()
                times.append(now - started)
                started = now
            spans.append(started - began)

    threads = [threading.Thread(target=run, args=(account,)) for account in accounts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    engine.dispose()
    out.put((max(spans), times))


def measure(url: str, set_up: Any, *, count: int, width: int, seconds: float) -> dict[str, Any]:
    person, accounts = set_up
    spawn = multiprocessing.get_context("spawn")
    processes = min(count, os.cpu_count() or 1)
    begin, out = spawn.Barrier(count), spawn.Queue()
    chosen = [accounts[i % width] for i in range(count)]
    running = [
        spawn.Process(target=clients, args=(url, person, chosen[i::processes], begin, seconds, out))
        for i in range(processes)
    ]
    for each in running:
        each.start()
    answers = [out.get() for _ in running]
    span, times = max(span for span, _ in answers), sorted(one for _, times in answers for one in times)
    for each in running:
        each.join()
    return {
        "clients": count,
        "accounts": width,
        "jobs_per_second": len(times) / span,
        "median_ms": 1000 * statistics.median(times),
        "p95_ms": 1000 * times[int(0.95 * len(times))],
    }


def checked(url: str, accounts: list[uuid.UUID]) -> int:
    """Verifies every hash chain at the end; returns the number of rows."""
    engine = connect(url)
    with Session(engine) as session:
        for account in session.scalars(select(Account).where(Account.id.in_(accounts))).all():
            broken = ledger.verify(session, account)
            if broken or account.held:
                raise SystemExit(f"account {account.id} does not hold: {broken}")
        rows = session.scalars(select(func.count()).select_from(Entry)).one()
    engine.dispose()
    return rows


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--seconds", type=float, default=5, help="for each case")
    arguments.add_argument("--json", action="store_true")
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as directory:
        stack = Stack(Path(directory) / "data", witness=Path(directory) / "witness")
        try:
            stack.start_servers()
            stack.prepare()
            url = stack.environment("service")["SLUICE_DATABASE_URL"]
            made = set_up(stack.owner_url)
            results = [
                measure(url, made, count=count, width=width, seconds=given.seconds)
                for width in ACCOUNTS
                for count in CLIENTS
            ]
            rows = checked(stack.owner_url, made[1])
        finally:
            stack.stop()
    if given.json:
        return print(json.dumps({"cores": os.cpu_count(), "rows": rows, "cases": results}))
    table = Table("clients", "accounts", "jobs per second", "median ms", "95 % ms")
    for one in results:
        table.add_row(
            str(one["clients"]), str(one["accounts"]), f"{one['jobs_per_second']:.0f}",
            f"{one['median_ms']:.1f}", f"{one['p95_ms']:.1f}",
        )  # fmt: skip
    Console().print(table)
    print(f"A job is one reserve and one settle, each committed to disk. {rows} rows, all chains verified.")


if __name__ == "__main__":
    main()
