"""The arithmetic of `sluice quote`: plans from options, what they cost, and how that is shown."""

import inspect
import sys
from dataclasses import MISSING, dataclass, fields, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from sluice.cli.connection import output, print_fields
from sluice.methods import PLANS, Plan, Target, plan_from_dict
from sluice.methods.base import rate_of
from sluice.privacy import account
from sluice.privacy.accountant import Accountant, cost
from sluice.privacy.accountant import epsilon as read_epsilon
from sluice.privacy.events import Event
from sluice.privacy.problems import InvalidPlan, InvalidTarget, TooCostlyToAccount
from sluice.privacy.relation import Relation

Curve = list[tuple[int, float]]

# What a person types → the field of a plan.
FIELDS = {"clip": "clip_norm", "noise": "noise_multiplier", "rate": "sampling_prob"}
HELP = {
    "batch": "Records per batch; the rate becomes 1/ceil(records/batch).",
    "clip": "Clipping norm.",
    "clipping": "What is clipped.",
    "dim": "Length of a row, labels included.",
    "directions": "Projection directions per step.",
    "features": "What one-shot sums.",
    "geometry": "How directions are drawn.",
    "images": "Generated images per step.",
    "noise": "Noise multiplier: noise over sensitivity.",
    "parts": "Parts the records are divided into.",
    "rate": "Sampling rate, instead of records and batch.",
    "recipe": "Name of a preset: how it learns, without bearing on the cost.",
    "records": "Declared number of records.",
    "row_bound": "Norm each row is clipped to.",
    "steps": "Training steps.",
}


def about(kind: str) -> str | None:
    return sys.modules[PLANS[kind].__module__].__doc__


def plan_options(kind: str) -> dict[str, Any]:
    """The fields of a kind of plan as options; none is required here, the plan says what it lacks."""
    classes = [cls for name, cls in PLANS.items() if name in (kind, f"{kind}_one_shot")]
    found: dict[str, Any] = {}
    for field in (field for cls in classes for field in fields(cls)):
        name = {plain: short for short, plain in FIELDS.items()}.get(field.name, field.name)
        [base, *_] = [each for each in get_args(field.type) or (field.type,) if each is not type(None)]
        if inspect.isclass(base) and issubclass(base, StrEnum):
            base = StrEnum(base.__name__, {each.name: each.value.replace("_", "-") for each in base})
        elif base not in (int, float, bool):
            base = str if name == "recipe" else None
        if base and field.name != "expected_batch":
            known = field.default is not MISSING and field.default is not None
            text = HELP.get(name, "") + (f" Default {field.default}." if known else "")
            found[name] = Annotated[base | None, typer.Option(help=text)]
    if "rate" in found:
        for name in ("records", "batch"):
            found[name] = Annotated[int | None, typer.Option(help=HELP[name])]
    if len(classes) > 1:
        found["one_shot"] = Annotated[bool, typer.Option("--one-shot", help="One release of all records.")]
    return found


def plan_of(kind: str, options: dict[str, Any]) -> Plan:
    """The plan that options by name describe; what is None is left to the plan."""
    given = {FIELDS.get(name, name): value for name, value in options.items() if value is not None}
    if given.pop("one_shot", False):
        kind += "_one_shot"
    known = {field.name for field in fields(PLANS[kind])}
    if "sampling_prob" in known:
        records, batch = given.pop("records", None), given.pop("batch", None)
        if (batch is None) == ("sampling_prob" not in given) or (batch is not None and records is None):
            raise InvalidPlan("Give the sampling either as --rate, or as --records and --batch.")
        if batch is not None:
            given["sampling_prob"] = rate_of(records=records, batch=batch)
        if "expected_batch" in known and records:
            given["expected_batch"] = given["sampling_prob"] * records
    plain = {n: v.replace("-", "_") if isinstance(v, StrEnum) else v for n, v in given.items()}
    return plan_from_dict({"kind": kind, **plain})


@dataclass(frozen=True)
class Terms:
    """The account a quote is for; without an epsilon, the smallest that holds what is priced."""

    epsilon: float | None
    delta: float | None
    relation: str
    order: float | None

    def known_delta(self) -> float:
        if self.delta is None:
            raise InvalidTarget("A guarantee has a delta: give --delta, for instance 1e-5.")
        return self.delta

    def figures(self, events: list[Event] | tuple[Event, ...]) -> dict[str, Any]:
        """The numbers every quote has, for events in one account."""
        delta, epsilon, order, relation = (
            self.known_delta(),
            self.epsilon,
            self.order,
            Relation(self.relation),
        )
        if not events:
            raise InvalidTarget("There is no event to account for; list at least one.")
        by_renyi = read_epsilon(events, delta=delta, accountant=Accountant.RENYI, relation=relation)
        best = account.best_order(events, epsilon=epsilon or by_renyi.epsilon, delta=delta, relation=relation)
        if order is None:
            order = best if epsilon is None else account.default_order(epsilon, delta)
        costs = [cost(one, order=order, relation=relation) for one in events]
        total = sum(costs)
        # Without a budget, the account is the smallest that holds these events at the best order.
        budget = epsilon or account.cost_as_epsilon(total, delta=delta, order=order) * (1 + 1e-9)
        capacity = account.capacity(budget, delta, order)
        try:
            by_pld = read_epsilon(events, delta=delta, accountant=Accountant.PLD, relation=relation).epsilon
        except TooCostlyToAccount:
            by_pld = None
        left = capacity - total
        return {
            "relation": relation.value,
            "delta": delta,
            "epsilon": {"renyi": by_renyi.epsilon, "pld": by_pld},
            "renyi_order": by_renyi.order,
            "at_grid_end": by_renyi.at_grid_end,
            "account": {"epsilon": budget, "delta": delta},
            "order": order,
            "cost": total,
            "costs": costs,
            "capacity": capacity,
            "left": left,
            "left_as_epsilon": account.left_as_epsilon(left, delta=delta, order=order),
            "fits": left >= 0,
            "admits": account.admits(costs, capacity),
            "best_order": best,
            "admits_at_best_order": account.admits(
                [cost(one, order=best, relation=relation) for one in events],
                account.capacity(budget, delta, best),
            ),
        }


def quote_plan(plan: Plan, terms: Terms, accountant: str, plot: Path | None) -> dict[str, Any]:
    """Settles the missing number of a plan, then says what it costs."""
    delta, epsilon, relation = terms.known_delta(), terms.epsilon, Relation(terms.relation)
    given = [epsilon is not None, plan.noise_multiplier is not None, plan.steps is not None]
    if given not in ([False, True, True], [True, False, True], [True, True, False]):
        raise InvalidTarget("Give two of --epsilon, --noise and --steps; the third follows.")
    if epsilon is not None:
        by = {"relation": relation, "accountant": Accountant(accountant)}
        target = Target(epsilon=epsilon, delta=delta, **by)
        plan = plan.stretched(target) if plan.steps is None else plan.calibrated(target)
    claim, curve = plan.published_reading(delta), partial(epsilon_over_steps, plan, delta, relation)
    if plot is not None:
        if not plan.by_steps:
            raise InvalidPlan(
                f"The cost of {plan.kind} does not grow step by step: there is nothing to plot."
            )
        plot.write_text(svg(curve(), delta), encoding="utf-8")
    return {
        "plan": plan.to_dict(),
        "event": plan.event().to_dict(),
        "rate": getattr(plan.event(), "sampling_prob", None),
        "steps": plan.steps,
        "multiplier": plan.noise_multiplier,
        "noise_stddev": plan.noise_stddev,
        **terms.figures([plan.event()]),
        "published": claim
        and {
            "epsilon": claim.claimed_epsilon,
            "formula": claim.formula,
            "flaw": claim.flaw,
            "guarantee": False,
        },
        "curve": curve,
    }


def show(result: dict[str, Any], curve: Curve) -> None:
    by_pld, budget = result["epsilon"]["pld"], result["account"]
    rows = [
        ("epsilon, Rényi", f"{result['epsilon']['renyi']:.4f}", f"at order {result['renyi_order']:g}"),
        (
            "epsilon, PLD",
            "out of reach" if by_pld is None else f"{by_pld:.4f}",
            "composed as if chosen in advance",
        ),
        ("delta, relation", f"{result['delta']:g}, {result['relation'].replace('_', '-')}", ""),
    ]
    if "multiplier" in result:
        rows += [
            ("multiplier", f"{result['multiplier']:g}", f"noise {result['noise_stddev']:g}"),
            ("steps", f"{result['steps']:,}", f"rate {result['rate']:.6g}" if result["rate"] else ""),
        ]
    rows += [
        ("cost", f"{result['cost'] / 1e9:.9f}", f"at order {result['order']:g}"),
        ("capacity", f"{result['capacity'] / 1e9:.9f}", f"of ({budget['epsilon']:.4g}, {budget['delta']:g})"),
        (
            "left",
            f"{result['left'] / 1e9:.9f}",
            f"worth epsilon {result['left_as_epsilon']:.4f}" if result["fits"] else "does not fit",
        ),
        (
            "room for",
            f"{result['admits']}",
            f"{result['admits_at_best_order']} at order {result['best_order']:g}",
        ),
    ]
    if take := result.get("recommended"):
        rows = [("take", take["method"], f"--set charts={take['charts']}"), *rows]
    if claim := result.get("published"):
        rows.append(("published", f"{claim['epsilon']:.4g}", f"no guarantee: {claim['flaw']}"))
    print_fields(*rows)
    if take:
        output().print(f"Why {take['method']}: {take['why']}.")
    if result["at_grid_end"]:
        output().print("The best order lies at the end of the range; the PLD reading is the better guide.")
    if len(curve) > 1:
        output().print(drawing(curve))


def epsilon_over_steps(plan: Plan, delta: float, relation: Relation) -> Curve:
    """Rényi readings along the way to the plan's last step, if it may end there."""
    if not plan.by_steps:
        return []
    how = {"delta": delta, "relation": relation, "accountant": Accountant.RENYI}
    steps = sorted({max(1, plan.known_steps * i // 40) for i in range(1, 41)})
    return [(at, replace(plan, steps=at).reading(**how).epsilon) for at in steps]


def drawing(curve: Curve, height: int = 8) -> str:
    """Epsilon over steps in the terminal, eighths of a line high."""
    top = max(value for _, value in curve) or 1.0
    lines = []
    for row in range(height, 0, -1):
        eighths = [min(8, max(0, round((value / top * height - row + 1) * 8))) for _, value in curve]
        label = f"{top * row / height:8.3g} " if row in (height, height // 2) else " " * 9
        lines.append(label + "".join(" ▁▂▃▄▅▆▇█"[count] for count in eighths))
    return "\n".join([*lines, " " * 9 + f"{curve[0][0]:,} … {curve[-1][0]:,} steps, epsilon by Rényi"])


def svg(curve: Curve, delta: float) -> str:
    """The same curve as a small picture that needs nothing to be shown."""
    last, top = curve[-1][0], max(value for _, value in curve) or 1.0
    points = " ".join(f"{60 + 500 * at / last:.1f},{270 - 230 * value / top:.1f}" for at, value in curve)
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 600 320"
 font-family="sans-serif" font-size="12">
<rect width="600" height="320" fill="white"/>
<path d="M60 40V270H560" fill="none" stroke="#888"/>
<polyline points="{points}" fill="none" stroke="#1f5fa8" stroke-width="2"/>
<text x="60" y="24">epsilon by Rényi at delta {delta:g}</text>
<text x="52" y="44" text-anchor="end">{top:.3g}</text><text x="52" y="274" text-anchor="end">0</text>
<text x="60" y="290" text-anchor="middle">0</text>
<text x="560" y="290" text-anchor="middle">{last:,} steps</text>
</svg>
"""
