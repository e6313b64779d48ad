"""Load test of a real stack: statuses and times of the responses, and response times of /healthz meanwhile.

Run as `python -m bench.load [--repeat 3] [--only NAME] [--json]`. It starts its own PostgreSQL, queue,
store and service. Every client has its own connection and sends its next request once the last one is
answered. Clients run in one process, the probe of /healthz in another; they share the machine's cores with
the service.
"""

import argparse
import asyncio
import json
import multiprocessing
import sys
import tempfile
import time
import uuid
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table
from sqlalchemy.orm import Session

from core.database import connect
from core.people import Role, add_person, invite, redeem
from local.ports import HOST, free_port
from local.stack import Stack

KEYS, LIST = "/.well-known/sluice-keys.json", "/.well-known/sluice-revocations.json"
PEOPLE = 20  # whose keys the authenticated clients share, so that no key reaches its limit per minute
PROBE_EVERY = 0.02
LONGEST = 150.0  # seconds until a client gives up
DATASET = {
    "name": "storm", "nominal_size": 100, "budget": {"epsilon": 1.0, "delta": 1e-6},
    "schema": {"kind": "image", "height": 8, "width": 8, "classes": ["a", "b"]},
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Clients:
    """`count` clients that send these requests in turn, `times` each, from `addresses` addresses."""

    count: int
    paths: tuple[str, ...]
    times: int = 1
    method: str = "GET"
    keys: tuple[str, ...] = ()
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""
    addresses: int = 1

    def request(self, client: int, turn: int) -> tuple[str, bytes]:
        path = self.paths[(client + turn) % len(self.paths)]
        headers = dict(self.headers) | {"Host": HOST}
        if self.keys:
            headers["Authorization"] = f"Bearer {self.keys[client % len(self.keys)]}"
        if self.body:
            headers |= {"Content-Type": "application/json", "Content-Length": str(len(self.body))}
        lines = [f"{self.method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        return path, "\r\n".join(lines).encode() + b"\r\n\r\n" + self.body


@dataclass
class Answers:
    """Seconds and statuses by group and route, and the number of different bodies."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    statuses: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    bodies: dict[str, set[bytes]] = field(default_factory=lambda: defaultdict(set))


async def _client(
    port: int,
    name: str,
    group: Clients,
    index: int,
    ready: asyncio.Semaphore,
    go: asyncio.Event,
    out: Answers,
) -> None:
    source = (f"127.0.1.{1 + index % group.addresses}", 0) if group.addresses > 1 else None
    reader = writer = None
    for turn in range(group.times):
        path, request = group.request(index, turn)
        label = f"{name} {path}"
        began = 0.0
        try:
            if writer is None:
                reader, writer = await asyncio.open_connection(HOST, port, local_addr=source)
            if not turn:
                ready.release()
                await go.wait()
            began = time.monotonic()
            writer.write(request)
            assert reader is not None
            status, body, closing = await asyncio.wait_for(_answer(reader), LONGEST)
            out.bodies[label].add(body)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, ValueError) as problem:
            status, closing = type(problem).__name__, True
        out.seconds[label].append(time.monotonic() - began if began else 0.0)
        out.statuses[label][status] += 1
        if closing and writer is not None:
            writer.close()
            writer = None
    if writer is not None:
        writer.close()


async def _answer(reader: asyncio.StreamReader) -> tuple[str, bytes, bool]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    length = int(head.partition("content-length:")[2].partition("\r\n")[0])
    return head.split(" ", 2)[1], await reader.readexactly(length), "connection: close" in head


async def _storm(port: int, groups: dict[str, Clients]) -> tuple[float, Answers]:
    ready, go, out = asyncio.Semaphore(0), asyncio.Event(), Answers()
    async with asyncio.TaskGroup() as tasks:
        total = 0
        for name, group in groups.items():
            for index in range(group.count):
                tasks.create_task(_client(port, name, group, index, ready, go, out))
                total += 1
                if total % 100 == 0:  # no more than the backlog of the listening socket
                    await asyncio.sleep(0.05)
        for _ in range(total):
            await ready.acquire()
        began = time.monotonic()
        go.set()
    return time.monotonic() - began, out


async def _probe(port: int, stop: Any) -> list[tuple[str, float]]:
    """Requests /healthz every 20 ms, each on its own connection, without waiting for the last response."""
    found: list[tuple[str, float]] = []

    async def ask() -> None:
        began, writer = time.monotonic(), None
        try:
            reader, writer = await asyncio.open_connection(HOST, port)
            writer.write(f"GET /healthz HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n\r\n".encode())
            status, _, _ = await asyncio.wait_for(_answer(reader), LONGEST)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, ValueError) as problem:
            status = type(problem).__name__
        found.append((status, time.monotonic() - began))
        if writer is not None:
            writer.close()

    async with asyncio.TaskGroup() as tasks:
        while not stop.is_set():
            tasks.create_task(ask())
            await asyncio.sleep(PROBE_EVERY)
    return found


def _run_storm(port: int, groups: dict[str, Clients], out: Any) -> None:
    out.put(asyncio.run(_storm(port, groups)))


def _run_probe(port: int, stop: Any, out: Any) -> None:
    out.put(asyncio.run(_probe(port, stop)))


def percentiles(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    at = {f"p{p}": ordered[min(len(ordered) - 1, len(ordered) * p // 100)] for p in (50, 95, 99)}
    return {name: round(1000 * value, 1) for name, value in (at | {"max": ordered[-1]}).items()}


def measure(port: int, service: psutil.Process, groups: dict[str, Clients]) -> dict[str, Any]:
    spawn = multiprocessing.get_context("spawn")
    stop, storm_out, probe_out = spawn.Event(), spawn.Queue(), spawn.Queue()
    probe = spawn.Process(target=_run_probe, args=(port, stop, probe_out))
    storm = spawn.Process(target=_run_storm, args=(port, groups, storm_out))
    probe.start()
    time.sleep(1)
    storm.start()
    seconds, answers = storm_out.get()
    stop.set()
    health = probe_out.get()
    for process in (storm, probe):
        process.join()
    routes = {
        label: percentiles(found)
        | {"statuses": dict(answers.statuses[label]), "bodies": len(answers.bodies[label])}
        for label, found in answers.seconds.items()
    }
    total = sum(sum(found.values()) for found in answers.statuses.values())
    return {
        "seconds": round(seconds, 2),
        "per_second": round(total / seconds),
        "routes": routes,
        "healthz": percentiles([each for _, each in health])
        | {"statuses": dict(Counter(status for status, _ in health))},
        "memory_mb": round(service.memory_info().rss / 1e6),
    }


def storms(keys: tuple[str, ...]) -> dict[str, dict[str, Clients]]:
    anonymous = {n: {"anonymous": Clients(count=n, paths=(KEYS,))} for n in (80, 200, 1000)}
    authenticated = Clients(count=200, paths=("/v1/me", "/v1/datasets", "/v1/releases"), times=5, keys=keys)
    once = uuid.uuid4().hex
    same = Clients(
        count=200, method="POST", paths=("/v1/datasets",), keys=keys[:1], body=json.dumps(DATASET).encode(),
        headers=(("Idempotency-Key", once),),
    )  # fmt: skip
    strangers = {
        "anonymous": Clients(count=700, paths=(KEYS, LIST, "/v1/me"), times=5),
        "wrong key": Clients(count=300, paths=("/v1/me",), times=5, keys=("sl_of-nobody",)),
    }
    many = {name: Clients(**vars(group) | {"addresses": 100}) for name, group in strangers.items()}
    return {
        "anonymous 80": anonymous[80],
        "anonymous 200": anonymous[200],
        "anonymous 1,000": anonymous[1000],
        "authenticated 200": {"authenticated": authenticated},
        "same key 200": {"same key": same},
        "mixed, 1 address": {"authenticated": authenticated, **strangers},
        "mixed, 100 addresses": {"authenticated": authenticated, **many},
    }


def people(url: str) -> tuple[str, ...]:
    engine = connect(url)
    with Session(engine) as session, session.begin():
        found = [
            add_person(session, name=f"bench-{uuid.uuid4().hex}", role=Role.CURATOR) for _ in range(PEOPLE)
        ]
        invitations = [invite(session, person, by=None)[1] or "" for person in found]
        keys = tuple(redeem(session, text, label="bench", days=1)[1] for text in invitations)
    engine.dispose()
    return keys


def show(results: dict[str, list[dict[str, Any]]]) -> None:
    table = Table("load", "route", "statuses", "p50", "p95", "p99", "max ms", "bodies", title="Best of each")
    for name, runs in results.items():
        best = min(runs, key=lambda run: run["healthz"]["p99"])
        lines = {"/healthz": best["healthz"] | {"bodies": ""}} | best["routes"]
        title = f"{name}\n{best['seconds']} s, {best['per_second']} /s\n{best['memory_mb']} MB"
        for label, told in lines.items():
            statuses = " ".join(f"{status}:{count}" for status, count in sorted(told["statuses"].items()))
            cells = [str(told[column]) for column in ("p50", "p95", "p99", "max", "bodies")]
            table.add_row(title, label, statuses, *cells)
            title = ""
        table.add_section()
    Console(width=150).print(table)
    for name, runs in results.items():
        p99s = sorted(run["healthz"]["p99"] for run in runs)
        print(f"{name}: /healthz p99 of each run in ms: {p99s}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", help="only loads whose name contains this")
    parser.add_argument("--json", action="store_true", help="print all measurements as JSON")
    chosen = parser.parse_args()
    results: dict[str, list[dict[str, Any]]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="sluice-load-") as place:
        data, witness = Path(place) / "data", Path(place) / "witness"
        with Stack(data, port=free_port(), durable=False, witness=witness) as stack:
            [service] = [child.process for child in stack.processes if child.name == "service"]
            assert service is not None
            keys = people(stack.owner_url)
            for round_number in range(chosen.repeat):
                for name, groups in storms(keys).items():
                    if chosen.only and chosen.only not in name:
                        continue
                    print(f"round {round_number + 1}: {name}", file=sys.stderr)
                    results[name].append(measure(stack.port, psutil.Process(service.pid), groups))
                # Rate limits count by the minute, so each round starts in a new minute.
                if round_number + 1 < chosen.repeat:
                    time.sleep(60 - time.time() % 60)
    if chosen.json:
        print(json.dumps(results, indent=1))
    else:
        show(results)


if __name__ == "__main__":
    main()
