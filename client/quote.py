"""`sluice quote`: what a plan, an event or a list of events costs, worked out here, without a server."""

import inspect
import json
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer
from typer.core import TyperGroup

from client.connection import facts, output, with_options

if TYPE_CHECKING:
    from privacy.events import Event
    from privacy.plans import Plan
    from privacy.relation import Relation

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


class RelationName(StrEnum):
    ADD_REMOVE = "add-remove"
    REPLACE_ONE = "replace-one"


class AccountantName(StrEnum):
    RENYI = "renyi"
    PLD = "pld"


Delta = Annotated[float | None, typer.Option(help="Delta of the guarantee, e.g. 1e-5.")]
Epsilon = Annotated[
    float | None, typer.Option(help="Target: the least noise (or most steps) for it is found.")
]
Budget = Annotated[float | None, typer.Option(help="Budget of the account; fitting by default.")]
RelationOption = Annotated[RelationName, typer.Option("--relation", help="Neighbouring relation.")]
AccountantOption = Annotated[
    AccountantName, typer.Option("--accountant", help="Which reading meets --epsilon.")
]
Order = Annotated[float | None, typer.Option(help="Rényi order of the account; the best by default.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, stable keys.")]
PlotFile = Annotated[
    Path | None, typer.Option("--plot", help="Also write epsilon over steps as an SVG file.")
]
File = Annotated[Path, typer.Argument(help="A JSON file; - reads standard input.")]


class Methods(TyperGroup):
    """One command for each kind of plan, made of its fields when asked for: help loads no arithmetic."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*_kinds(), *super().list_commands(ctx)]

    def get_command(self, ctx: Any, name: str) -> Any:
        if name in (own := super().list_commands(ctx)) or name not in _kinds():
            return super().get_command(ctx, name) if name in own else None
        one = typer.Typer(add_completion=False)
        one.command(name)(_command(name))
        return typer.main.get_command(one)


app = typer.Typer(
    cls=Methods, no_args_is_help=True, help="What would it cost? Computed offline; nothing is written."
)


def _kinds() -> list[str]:
    """Kinds of plans; the one-shot form of a kind is an option of it."""
    from privacy.plans import PLANS

    return [kind.replace("_", "-") for kind in PLANS if not kind.endswith("_one_shot")]


def _command(name: str) -> Callable[..., None]:
    from privacy.plans import PLANS

    kind = name.replace("-", "_")
    shared = list(inspect.signature(quote_plan).parameters.values())[1:]

    def command(**options: Any) -> None:
        quote_plan(lambda: plan_of(kind, options), **{each.name: options.pop(each.name) for each in shared})

    with_options(command, [*plan_options(kind), *shared])
    command.__doc__ = sys.modules[PLANS[kind].__module__].__doc__
    return command


def plan_options(kind: str) -> list[inspect.Parameter]:
    """The fields of a kind of plan as options; none is required here, the plan says what it lacks."""
    from dataclasses import MISSING, fields

    from privacy.plans import PLANS

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
    option = inspect.Parameter.KEYWORD_ONLY
    return [inspect.Parameter(name, option, default=None, annotation=each) for name, each in found.items()]


def plan_of(kind: str, options: dict[str, Any]) -> "Plan":
    """The plan that options by name describe; what is None is left to the plan."""
    from dataclasses import fields

    from privacy.plans import PLANS, plan_from_dict
    from privacy.plans.base import rate_of
    from privacy.problems import InvalidPlan

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


@app.command()
def event(
    file: File,
    delta: Delta = None,
    epsilon: Budget = None,
    relation: RelationOption = RelationName.ADD_REMOVE,
    order: Order = None,
    as_json: AsJson = False,
) -> None:
    """Reads one event from a JSON file."""

    def quote() -> dict[str, Any]:
        from privacy.events import from_json

        one = from_json(read(file))
        return {"event": one.to_dict(), **figures([one], epsilon, delta, known(relation), order)}

    answer(quote, as_json)


@app.command()
def account(
    events: Annotated[Path, typer.Option(help="A JSON file with an event or a list of events.")],
    epsilon: Annotated[float | None, typer.Option(help="The account's epsilon.")] = None,
    delta: Delta = None,
    relation: RelationOption = RelationName.ADD_REMOVE,
    order: Order = None,
    as_json: AsJson = False,
) -> None:
    """Composes the events of a JSON file in one account."""

    def quote() -> dict[str, Any]:
        from privacy.accountant import flat
        from privacy.events import from_dict, read_json
        from privacy.problems import InvalidTarget

        if epsilon is None:
            raise InvalidTarget("An account has a budget: give --epsilon and --delta.")
        body = read_json(read(events))
        listed = flat([from_dict(one) for one in (body if isinstance(body, list) else [body])])
        shown = [one.to_dict() for one in listed]
        return {"events": shown, **figures(listed, epsilon, delta, known(relation), order)}

    answer(quote, as_json)


def read(file: Path) -> str:
    from privacy.problems import UnknownEvent

    try:
        return sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UnknownEvent(f"{file} cannot be read ({reason}); name a JSON file.") from None


def known(relation: RelationName) -> "Relation":
    from privacy.relation import Relation

    return Relation(relation.replace("-", "_"))


def quote_plan(
    make: Callable[[], "Plan"],
    delta: Delta = None,
    epsilon: Epsilon = None,
    relation: RelationOption = RelationName.ADD_REMOVE,
    accountant: AccountantOption = AccountantName.RENYI,
    order: Order = None,
    plot: PlotFile = None,
    as_json: AsJson = False,
) -> None:
    """Settles the missing number of a plan, then shows what it costs."""

    def quote() -> dict[str, Any]:
        from privacy import limits

        limits.warm_up()
        from privacy.accountant import Accountant
        from privacy.plans import Target
        from privacy.problems import InvalidTarget

        plan = make()
        if delta is None:
            raise InvalidTarget("A guarantee has a delta: give --delta, for instance 1e-5.")
        given = [epsilon is not None, plan.noise_multiplier is not None, plan.steps is not None]
        if given not in ([False, True, True], [True, False, True], [True, True, False]):
            raise InvalidTarget("Give two of --epsilon, --noise and --steps; the third follows.")
        if epsilon is not None:
            by = {"relation": known(relation), "accountant": Accountant(accountant.value)}
            target = Target(epsilon=epsilon, delta=delta, **by)
            plan = plan.stretched(target) if plan.steps is None else plan.calibrated(target)
        published = plan.published_reading(delta)
        result = {
            "plan": plan.to_dict(),
            "event": plan.event().to_dict(),
            "rate": getattr(plan.event(), "sampling_prob", None),
            "steps": plan.steps,
            "multiplier": plan.noise_multiplier,
            "noise_stddev": plan.noise_stddev,
            **figures([plan.event()], epsilon, delta, known(relation), order),
            "published": published
            and {
                "epsilon": published.claimed_epsilon,
                "formula": published.formula,
                "flaw": published.flaw,
                "guarantee": False,
            },
        }
        if plot is not None or not as_json:
            result["curve"] = epsilon_over_steps(plan, delta, known(relation))
        if plot is not None:
            plot.write_text(svg(result["curve"], delta), encoding="utf-8")
        return result

    answer(quote, as_json)


def figures(
    events: "list[Event] | tuple[Event, ...]",
    epsilon: float | None,
    delta: float | None,
    relation: "Relation",
    order: float | None,
) -> dict[str, Any]:
    """The numbers every quote has, for events in one account of (epsilon, delta)."""
    from privacy import limits

    limits.warm_up()
    from privacy import account as accounts
    from privacy.accountant import Accountant, cost
    from privacy.accountant import epsilon as read_epsilon
    from privacy.problems import InvalidTarget, TooCostlyToAccount

    if delta is None:
        raise InvalidTarget("A guarantee has a delta: give --delta, for instance 1e-5.")
    if not events:
        raise InvalidTarget("There is no event to account for; list at least one.")
    by_renyi = read_epsilon(events, delta=delta, accountant=Accountant.RENYI, relation=relation)
    best = accounts.best_order(events, epsilon=epsilon or by_renyi.epsilon, delta=delta, relation=relation)
    if order is None:
        order = best if epsilon is None else accounts.default_order(epsilon, delta)
    costs = [cost(one, order=order, relation=relation) for one in events]
    total = sum(costs)
    # Without a budget, the account is the smallest that holds these events at the best order.
    budget = epsilon or accounts.cost_as_epsilon(total, delta=delta, order=order) * (1 + 1e-9)
    capacity = accounts.capacity(budget, delta, order)
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
        "left_as_epsilon": accounts.left_as_epsilon(left, delta=delta, order=order),
        "fits": left >= 0,
        "admits": accounts.admits(costs, capacity),
        "best_order": best,
        "admits_at_best_order": accounts.admits(
            [cost(one, order=best, relation=relation) for one in events],
            accounts.capacity(budget, delta, best),
        ),
    }


def answer(quote: Callable[[], dict[str, Any]], as_json: bool) -> None:
    """Prints a quote, or the one sentence that says why there is none."""
    from privacy.problems import Problem

    try:
        result = quote()
    except Problem as problem:
        if as_json:
            print(json.dumps({"problem": problem.to_dict()}))
        print(f"{problem.title}: {problem.detail}", file=sys.stderr)
        raise typer.Exit(2) from None
    if as_json:
        print(json.dumps(result, allow_nan=False))
    else:
        show(result)


def show(result: dict[str, Any]) -> None:
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
    if claim := result.get("published"):
        rows.append(("published", f"{claim['epsilon']:.4g}", f"no guarantee: {claim['flaw']}"))
    facts(*rows)
    if result["at_grid_end"]:
        output().print("The best order lies at the end of the range; the PLD reading is the better guide.")
    if len(result.get("curve", [])) > 1:
        output().print(drawing(result["curve"]))


def epsilon_over_steps(plan: "Plan", delta: float, relation: "Relation") -> list[tuple[int, float]]:
    """Rényi readings along the way to the plan's last step."""
    from dataclasses import replace

    from privacy.accountant import Accountant

    how = {"delta": delta, "relation": relation, "accountant": Accountant.RENYI}
    steps = sorted({max(1, plan.known_steps * i // 40) for i in range(1, 41)})
    return [(at, replace(plan, steps=at).reading(**how).epsilon) for at in steps]


def drawing(curve: list[tuple[int, float]], height: int = 8) -> str:
    """Epsilon over steps in the terminal, eighths of a line high."""
    top = max(value for _, value in curve) or 1.0
    lines = []
    for row in range(height, 0, -1):
        eighths = [min(8, max(0, round((value / top * height - row + 1) * 8))) for _, value in curve]
        label = f"{top * row / height:8.3g} " if row in (height, height // 2) else " " * 9
        lines.append(label + "".join(" ▁▂▃▄▅▆▇█"[count] for count in eighths))
    return "\n".join([*lines, " " * 9 + f"{curve[0][0]:,} … {curve[-1][0]:,} steps, epsilon by Rényi"])


def svg(curve: list[tuple[int, float]], delta: float) -> str:
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
