"""The arithmetic of `sluice quote`: options of a method, costs in an account, and how they are shown."""

from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from sluice.cli.connection import output, print_fields
from sluice.methods import METHODS, SHORT_NAMES, Plan, Target, plan_from_options
from sluice.plot import line_plot
from sluice.privacy import account
from sluice.privacy.accountant import Accountant, cost
from sluice.privacy.accountant import epsilon as read_epsilon
from sluice.privacy.events import Event
from sluice.privacy.problems import InvalidPlan, InvalidTarget, TooCostlyToAccount
from sluice.privacy.relation import Relation

Curve = list[tuple[int, float]]

HELP = {
    "batch": "Records per batch; the rate becomes 1/ceil(records/batch).",
    "clip": "Clipping norm.",
    "clipping": "What is clipped.",
    "dim": "Length of a row, labels included.",
    "directions": "Projection directions per step.",
    "features": "What is summed.",
    "geometry": "How directions are drawn.",
    "images": "Generated images per step.",
    "noise": "Noise multiplier: noise over sensitivity.",
    "parts": "Number of disjoint parts of the records.",
    "rate": "Sampling rate, instead of records and batch.",
    "recipe": "Name of a preset: how it learns, without influence on the cost.",
    "records": "Declared number of records.",
    "row_bound": "Norm each row is clipped to.",
    "steps": "Training steps.",
}


def variants(name: str) -> dict[str, str]:
    """Methods that are also a flag of this one: NAME_FORM is the flag `--form` of NAME."""
    return {other.removeprefix(f"{name}_"): other for other in METHODS if other.startswith(f"{name}_")}


def method_options(name: str) -> dict[str, Any]:
    """Typer annotations for the fields of a method's plan; all optional, the plan says what is missing."""
    options: dict[str, Any] = {}
    short_names = {field: short for short, field in SHORT_NAMES.items()}
    for field in (
        field for method in (name, *variants(name).values()) for field in fields(METHODS[method].plan)
    ):
        option = short_names.get(field.name, field.name)
        kind: Any = next(kind for kind in get_args(field.type) or (field.type,) if kind is not type(None))
        if isinstance(kind, type) and issubclass(kind, StrEnum):
            kind = _with_dashes(kind)
        elif kind not in (int, float, bool):
            kind = str if option == "recipe" else None
        if kind is not None and field.name != "expected_batch":
            default = "" if field.default in (MISSING, None) else f" Default {field.default}."
            options[option] = Annotated[kind | None, typer.Option(help=HELP.get(option, "") + default)]
    if "rate" in options:
        for option in ("records", "batch"):
            options[option] = Annotated[int | None, typer.Option(help=HELP[option])]
    for flag, variant in variants(name).items():
        help = METHODS[variant].description
        options[flag] = Annotated[bool, typer.Option(f"--{flag.replace('_', '-')}", help=help)]
    return options


def _with_dashes(kind: type[StrEnum]) -> Any:
    make: Any = StrEnum
    return make(kind.__name__, {member.name: member.value.replace("_", "-") for member in kind})


def plan_of(name: str, options: dict[str, Any]) -> Plan:
    """The plan that options of `sluice quote NAME` describe."""
    chosen = [variant for flag, variant in variants(name).items() if options.pop(flag, False)]
    values = {
        key: str(value).replace("-", "_") if isinstance(value, StrEnum) else value
        for key, value in options.items()
    }
    return plan_from_options((chosen or [name])[0], values)


@dataclass(frozen=True)
class Terms:
    """The account a quote is for; without an epsilon, the smallest that holds the events."""

    epsilon: float | None
    delta: float | None
    relation: Relation
    order: float | None

    def known_delta(self) -> float:
        if self.delta is None:
            raise InvalidTarget("A guarantee has a delta: give --delta, for instance 1e-5.")
        return self.delta

    def target(self, accountant: str = Accountant.RENYI) -> Target | None:
        if self.epsilon is None:
            return None
        by = Accountant(accountant)
        return Target(epsilon=self.epsilon, delta=self.known_delta(), relation=self.relation, accountant=by)

    def figures(self, events: Sequence[Event]) -> dict[str, Any]:
        """The numbers every quote has, for events in one account."""
        delta, epsilon, order, relation = self.known_delta(), self.epsilon, self.order, self.relation
        if not events:
            raise InvalidTarget("There is no event to account for; list at least one.")
        by_renyi = read_epsilon(events, delta=delta, accountant=Accountant.RENYI, relation=relation)
        best = account.best_order(events, epsilon=epsilon or by_renyi.epsilon, delta=delta, relation=relation)
        if order is None:
            order = best if epsilon is None else account.default_order(epsilon, delta)
        costs = [cost(event, order=order, relation=relation) for event in events]
        total = sum(costs)
        # Without a budget, the account is the smallest that holds these events at the best order.
        budget = epsilon or account.cost_as_epsilon(total, delta=delta, order=order) * (1 + 1e-9)
        capacity = account.capacity(budget, delta, order)
        costs_at_best = [cost(event, order=best, relation=relation) for event in events]
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
            "admits_at_best_order": account.admits(costs_at_best, account.capacity(budget, delta, best)),
        }


def quote_plan(plan: Plan, terms: Terms, accountant: str, plot: Path | None) -> dict[str, Any]:
    """Finds the number that the plan lacks, then gives what it costs."""
    delta, target = terms.known_delta(), terms.target(accountant)
    given = [target is not None, plan.noise_multiplier is not None, plan.steps is not None]
    if given not in ([False, True, True], [True, False, True], [True, True, False]):
        raise InvalidTarget("Give two of --epsilon, --noise and --steps; the third follows.")
    if target is not None:
        plan = plan.with_max_steps(target) if plan.steps is None else plan.calibrated(target)
    claim, curve = plan.published_reading(delta), partial(epsilon_over_steps, plan, delta, terms.relation)
    if plot is not None:
        if not plan.by_steps:
            raise InvalidPlan(
                f"The cost of {plan.kind} does not grow step by step: there is nothing to plot."
            )
        name = f"epsilon by Rényi at delta {delta:g}"
        plot.write_text(line_plot({name: curve()}, from_zero=True), encoding="utf-8")
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


def show(result: dict[str, Any], curve: Callable[[], Curve]) -> None:
    by_pld, budget, best = result["epsilon"]["pld"], result["account"], result["best_order"]
    rows = [
        ("epsilon, Rényi", f"{result['epsilon']['renyi']:.4f}", f"at order {result['renyi_order']:g}"),
        (
            "epsilon, PLD",
            "out of reach" if by_pld is None else f"{by_pld:.4f}",
            "for plans chosen in advance",
        ),
        ("delta, relation", f"{result['delta']:g}, {result['relation'].replace('_', '-')}", ""),
    ]
    if "multiplier" in result:
        rows += [
            ("multiplier", f"{result['multiplier']:g}", f"noise {result['noise_stddev']:g}"),
            ("steps", f"{result['steps']:,}", f"rate {result['rate']:.6g}" if result["rate"] else ""),
        ]
    worth = f"worth epsilon {result['left_as_epsilon']:.4f}" if result["fits"] else "does not fit"
    rows += [
        ("cost", f"{result['cost'] / 1e9:.9f}", f"at order {result['order']:g}"),
        ("capacity", f"{result['capacity'] / 1e9:.9f}", f"of ({budget['epsilon']:.4g}, {budget['delta']:g})"),
        ("left", f"{result['left'] / 1e9:.9f}", worth),
        ("room for", f"{result['admits']}", f"{result['admits_at_best_order']} at order {best:g}"),
    ]
    if take := result.get("recommended"):
        options = {name: value for name, value in take.items() if name not in ("method", "why")}
        settings = " ".join(f"--set {name}={value}" for name, value in options.items())
        rows = [("recommended", take["method"], settings), *rows]
    if claim := result.get("published"):
        rows.append(("published", f"{claim['epsilon']:.4g}", f"no guarantee: {claim['flaw']}"))
    print_fields(*rows)
    if take:
        output().print(f"Why {take['method']}: {take['why']}.")
    if result["at_grid_end"]:
        output().print("The best order lies at the end of the range; the PLD reading is the better guide.")
    if len(points := curve()) > 1:
        output().print(drawing(points))


def epsilon_over_steps(plan: Plan, delta: float, relation: Relation) -> Curve:
    """Rényi readings after parts of the steps, for a plan whose cost grows with them."""
    if not plan.by_steps:
        return []
    steps = sorted({max(1, plan.known_steps * i // 40) for i in range(1, 41)})
    plans = {count: replace(plan, steps=count) for count in steps}
    by = Accountant.RENYI
    return [(n, p.reading(delta=delta, relation=relation, accountant=by).epsilon) for n, p in plans.items()]


def drawing(curve: Curve, height: int = 8) -> str:
    """Epsilon over steps for a terminal, with a resolution of an eighth of a line."""
    top = max(value for _, value in curve) or 1.0
    lines = []
    for row in range(height, 0, -1):
        eighths = [min(8, max(0, round((value / top * height - row + 1) * 8))) for _, value in curve]
        label = f"{top * row / height:8.3g} " if row in (height, height // 2) else " " * 9
        lines.append(label + "".join(" ▁▂▃▄▅▆▇█"[count] for count in eighths))
    return "\n".join([*lines, " " * 9 + f"{curve[0][0]:,} … {curve[-1][0]:,} steps, epsilon by Rényi"])
