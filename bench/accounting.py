"""Times the privacy arithmetic: one event, quotes cold and warm, calibration, refusals.

Run as `python -m bench.accounting [--json]` on an idle machine.
"""

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from sluice.methods import Plan, Target
from sluice.methods.dpgan import DPGANPlan
from sluice.methods.gswgan import GSWGANPlan
from sluice.methods.sinkhorn import SinkhornPlan
from sluice.methods.swd import SWDPlan
from sluice.methods.swd_one_shot import SWDOneShotPlan
from sluice.privacy.accountant import Accountant, cost
from sluice.privacy.events import Geometry, PoissonGaussian, Query, Rotation, SlicedProjection
from sluice.privacy.relation import Relation

DPGAN = ["dpgan", "--records", "60000", "--batch", "512", "--noise", "2", "--steps", "174000"]
SWD = ["swd", "--records", "60000", "--batch", "100", "--dim", "784", "--noise", "0.84", "--steps", "60100"]
HOSTILE = ["sinkhorn", "--rate", "0.9", "--noise", "0.001", "--steps", "1000000000"]

EVENTS = {
    "dpgan": lambda i: PoissonGaussian(
        query=Query.SUM, bound=1.0, noise_stddev=2 + i / 1000, steps=174_000, sampling_prob=1 / 118
    ),
    "sinkhorn": lambda i: PoissonGaussian(
        query=Query.FUNCTION, bound=1.0, noise_stddev=1.5 + i / 1000, steps=160_000, sampling_prob=1 / 1200
    ),
    "gswgan": lambda i: Rotation(
        query=Query.FUNCTION, bound=1.0, noise_stddev=4 + i / 1000, steps=20_000, parts=1000
    ),
    "swd": lambda i: SlicedProjection(
        geometry=Geometry.SPHERE,
        directions=1000,
        dim=784,
        records=60_000,
        batch=100,
        noise_stddev=1.3 + i / 1000,
        steps=60_100,
    ),
}

PLANS: list[Plan] = [
    DPGANPlan(steps=50_000, sampling_prob=1 / 118),
    SinkhornPlan(steps=50_000, sampling_prob=1 / 1200),
    GSWGANPlan(steps=20_000, parts=1000),
    SWDPlan(steps=60_100, records=60_000, batch=100, dim=784),
    SWDOneShotPlan(),
]


def seconds(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def cold_quote(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "sluice.cli.main", "quote", *arguments, "--delta", "1e-5", "--json"]
    done = subprocess.run(command, check=False, capture_output=True)
    assert done.returncode in (0, 2), done.stderr  # priced or refused
    assert done.stdout


def computing(work: Callable[[], Any]) -> float:
    """CPU seconds of this process and its ended children, which do not depend on how busy the machine is."""
    before = sum(os.times()[:4])
    work()
    return sum(os.times()[:4]) - before


def warm_quotes() -> dict[str, float]:
    """Times, in one process with everything imported, a quote of a cached plan and one of a new plan."""
    from sluice.cli.pricing import Terms

    quote, event = Terms(None, 1e-5, Relation.ADD_REMOVE, None).figures, EVENTS["dpgan"]
    quote([event(0)])
    return {
        "quote warm, same plan": seconds(lambda: quote([event(0)])),
        "quote warm, new plan": min(seconds(lambda i=i: quote([event(i)])) for i in (901, 902, 903)),
    }


def measure() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []

    def add(what: str, took: float, limit: float) -> None:
        rows.append({"what": what, "seconds": round(took, 4), "limit": limit, "ok": took <= limit})

    for name, event in EVENTS.items():
        for relation in Relation:
            for order in (4, 32):
                cost(event(0), order=order, relation=relation)
                took = max(
                    seconds(lambda i=i, o=order, r=relation, e=event: cost(e(i), order=o, relation=r))
                    for i in (1, 2, 3)
                )
                add(f"cost of {name}, order {order}, {relation.value}", took, 0.05)
    add("quote cold, dpgan", min(seconds(lambda: cold_quote(DPGAN)) for _ in range(3)), 2.0)
    add("quote cold, swd", min(seconds(lambda: cold_quote(SWD)) for _ in range(3)), 2.0)
    for what, took in warm_quotes().items():
        add(what, took, 0.2)
    for plan in PLANS:
        for accountant in Accountant:
            target = Target(epsilon=1.5, delta=1e-5, relation=Relation.ADD_REMOVE, accountant=accountant)
            took = seconds(lambda p=plan, t=target: p.calibrated(t))
            add(f"calibration of {plan.kind} by {accountant.value}", took, 5.0)
    add("quote cold, dpgan, computing", computing(lambda: cold_quote(DPGAN)), 3.0)
    add("quote cold, swd, computing", computing(lambda: cold_quote(SWD)), 3.0)
    add("hostile plan refused, computing", computing(lambda: cold_quote(HOSTILE)), 2.0)
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    add("hostile plan refused", seconds(lambda: cold_quote(HOSTILE)), 2.0)
    megabytes = max(before, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss) / 1024
    rows.append(
        {
            "what": "largest child, megabytes",
            "seconds": round(megabytes, 1),
            "limit": 500.0,
            "ok": megabytes <= 500,
        }
    )
    return rows


def main() -> int:
    rows = measure()
    if "--json" in sys.argv[1:]:
        print(json.dumps(rows))
    else:
        for row in rows:
            mark = "" if row["ok"] else "  OVER"
            print(f"{row['what']:<45} {row['seconds']:>9.4f}   limit {row['limit']:g}{mark}")
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
