"""`sluice quote`: what a plan, an event or a list of events costs, worked out here, without a server."""

import json
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from privacy.events import Event
    from privacy.plans import Plan
    from privacy.relation import Relation

app = typer.Typer(no_args_is_help=True, help="What would it cost? Computed offline; nothing is written.")


class RelationName(StrEnum):
    ADD_REMOVE = "add-remove"
    REPLACE_ONE = "replace-one"


class AccountantName(StrEnum):
    RENYI = "renyi"
    PLD = "pld"


class ClippingName(StrEnum):
    JOINT = "joint"
    PER_IMAGE = "per-image"


class GeometryName(StrEnum):
    SPHERE = "sphere"
    ORTHONORMAL = "orthonormal"


class FeaturesName(StrEnum):
    HISTOGRAMS = "histograms"
    WAVES = "waves"


Records = Annotated[int | None, typer.Option(help="Declared number of records.")]
Batch = Annotated[int | None, typer.Option(help="Records per batch; the rate becomes 1/ceil(records/batch).")]
Rate = Annotated[float | None, typer.Option(help="Sampling rate, instead of records and batch.")]
Delta = Annotated[float | None, typer.Option(help="Delta of the guarantee, e.g. 1e-5.")]
Epsilon = Annotated[
    float | None, typer.Option(help="Target: the least noise (or most steps) for it is found.")
]
Noise = Annotated[float | None, typer.Option(help="Noise multiplier: noise over sensitivity.")]
Steps = Annotated[int | None, typer.Option(help="Training steps.")]
Clip = Annotated[float, typer.Option(help="Clipping norm.")]
Images = Annotated[int, typer.Option(help="Generated images per step.")]
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


@app.command()
def dpgan(
    delta: Delta = None,
    records: Records = None,
    batch: Batch = None,
    rate: Rate = None,
    epsilon: Epsilon = None,
    noise: Noise = None,
    steps: Steps = None,
    clip: Clip = 1.0,
    relation: RelationOption = RelationName.ADD_REMOVE,
    accountant: AccountantOption = AccountantName.RENYI,
    order: Order = None,
    plot: PlotFile = None,
    as_json: AsJson = False,
) -> None:
    """DPGAN: a discriminator trained by DP-SGD."""

    def plan() -> "Plan":
        from privacy.plans.dpgan import DPGANPlan

        sampling_prob = rate_from(records, batch, rate)
        expected = sampling_prob * records if records else 1.0
        return DPGANPlan(
            sampling_prob=sampling_prob,
            expected_batch=expected,
            clip_norm=clip,
            steps=steps,
            noise_multiplier=noise,
        )

    quote_plan(plan, delta, epsilon, relation, accountant, order, plot, as_json)


@app.command()
def sinkhorn(
    delta: Delta = None,
    records: Records = None,
    batch: Batch = None,
    rate: Rate = None,
    epsilon: Epsilon = None,
    noise: Noise = None,
    steps: Steps = None,
    images: Images = 50,
    clipping: Annotated[ClippingName, typer.Option(help="What is clipped.")] = ClippingName.JOINT,
    clip: Clip = 1.0,
    relation: RelationOption = RelationName.ADD_REMOVE,
    accountant: AccountantOption = AccountantName.RENYI,
    order: Order = None,
    plot: PlotFile = None,
    as_json: AsJson = False,
) -> None:
    """DP-Sinkhorn: a generator follows noisy Sinkhorn gradients."""

    def plan() -> "Plan":
        from privacy.plans import Clipping
        from privacy.plans.sinkhorn import SinkhornPlan

        return SinkhornPlan(
            sampling_prob=rate_from(records, batch, rate),
            images=images,
            clipping=Clipping(clipping.replace("-", "_")),
            clip_norm=clip,
            steps=steps,
            noise_multiplier=noise,
        )

    quote_plan(plan, delta, epsilon, relation, accountant, order, plot, as_json)


@app.command()
def gswgan(
    delta: Delta = None,
    parts: Annotated[int, typer.Option(help="Parts the records are divided into.")] = 1000,
    epsilon: Epsilon = None,
    noise: Noise = None,
    steps: Steps = None,
    images: Images = 32,
    clipping: Annotated[ClippingName, typer.Option(help="What is clipped.")] = ClippingName.JOINT,
    clip: Clip = 1.0,
    relation: RelationOption = RelationName.ADD_REMOVE,
    accountant: AccountantOption = AccountantName.RENYI,
    order: Order = None,
    plot: PlotFile = None,
    as_json: AsJson = False,
) -> None:
    """GS-WGAN: discriminators on parts of the data take turns."""

    def plan() -> "Plan":
        from privacy.plans import Clipping
        from privacy.plans.gswgan import GSWGANPlan

        return GSWGANPlan(
            parts=parts,
            images=images,
            clipping=Clipping(clipping.replace("-", "_")),
            clip_norm=clip,
            steps=steps,
            noise_multiplier=noise,
        )

    quote_plan(plan, delta, epsilon, relation, accountant, order, plot, as_json)


@app.command()
def swd(
    delta: Delta = None,
    records: Records = None,
    batch: Batch = None,
    epsilon: Epsilon = None,
    noise: Noise = None,
    steps: Steps = None,
    directions: Annotated[int, typer.Option(help="Projection directions per step.")] = 1000,
    dim: Annotated[int | None, typer.Option(help="Length of a row, labels included.")] = None,
    geometry: Annotated[GeometryName, typer.Option(help="How directions are drawn.")] = GeometryName.SPHERE,
    row_bound: Annotated[float, typer.Option(help="Norm each row is clipped to.")] = 0.5,
    one_shot: Annotated[bool, typer.Option("--one-shot", help="One noisy release of all records.")] = False,
    features: Annotated[FeaturesName, typer.Option(help="What one-shot sums.")] = FeaturesName.HISTOGRAMS,
    relation: RelationOption = RelationName.ADD_REMOVE,
    accountant: AccountantOption = AccountantName.RENYI,
    order: Order = None,
    plot: PlotFile = None,
    as_json: AsJson = False,
) -> None:
    """DP-SWD: a generator matches noisy random projections, step by step or --one-shot."""

    def plan() -> "Plan":
        from privacy.events import Geometry
        from privacy.plans.swd import Features, SWDOneShotPlan, SWDPlan
        from privacy.problems import InvalidPlan

        if one_shot:
            return SWDOneShotPlan(
                directions=directions,
                features=Features(features.value),
                steps=1 if steps is None else steps,
                noise_multiplier=noise,
            )
        if records is None or batch is None or dim is None:
            raise InvalidPlan("Projections need --records, --batch and --dim; or choose --one-shot.")
        return SWDPlan(
            records=records,
            batch=batch,
            directions=directions,
            dim=dim,
            geometry=Geometry(geometry.value),
            row_bound=row_bound,
            steps=steps,
            noise_multiplier=noise,
        )

    quote_plan(plan, delta, epsilon, relation, accountant, order, plot, as_json)


@app.command()
def event(
    file: File,
    delta: Delta = None,
    epsilon: Annotated[float | None, typer.Option(help="Budget of the account; fitting by default.")] = None,
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
        return {
            "events": [one.to_dict() for one in listed],
            **figures(listed, epsilon, delta, known(relation), order),
        }

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


def rate_from(records: int | None, batch: int | None, rate: float | None) -> float:
    from privacy.plans.base import rate_of
    from privacy.problems import InvalidPlan

    if rate is not None and batch is None:
        return rate
    if rate is not None or records is None or batch is None:
        raise InvalidPlan("Give the sampling either as --rate, or as --records and --batch.")
    return rate_of(records=records, batch=batch)


def quote_plan(
    make: Callable[[], "Plan"],
    delta: float | None,
    epsilon: float | None,
    relation: RelationName,
    accountant: AccountantName,
    order: float | None,
    plot: Path | None,
    as_json: bool,
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
            target = Target(
                epsilon=epsilon,
                delta=delta,
                relation=known(relation),
                accountant=Accountant(accountant.value),
            )
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
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    relation = result["relation"].replace("_", "-")
    table.add_row(
        "epsilon, Rényi", f"{result['epsilon']['renyi']:.4f}", f"at order {result['renyi_order']:g}"
    )
    by_pld = result["epsilon"]["pld"]
    table.add_row(
        "epsilon, PLD",
        "out of reach" if by_pld is None else f"{by_pld:.4f}",
        "composed as if chosen in advance",
    )
    table.add_row("delta, relation", f"{result['delta']:g}, {relation}", "")
    if "multiplier" in result:
        table.add_row("multiplier", f"{result['multiplier']:g}", f"noise {result['noise_stddev']:g}")
        table.add_row("steps", f"{result['steps']:,}", result["rate"] and f"rate {result['rate']:.6g}")
    table.add_row("cost", f"{result['cost'] / 1e9:.9f}", f"at order {result['order']:g}")
    budget = result["account"]
    table.add_row(
        "capacity", f"{result['capacity'] / 1e9:.9f}", f"of ({budget['epsilon']:.4g}, {budget['delta']:g})"
    )
    left = f"worth epsilon {result['left_as_epsilon']:.4f}" if result["fits"] else "does not fit"
    table.add_row("left", f"{result['left'] / 1e9:.9f}", left)
    table.add_row(
        "room for",
        f"{result['admits']}",
        f"{result['admits_at_best_order']} at order {result['best_order']:g}",
    )
    if result.get("published"):
        table.add_row(
            "published",
            f"{result['published']['epsilon']:.4g}",
            f"no guarantee: {result['published']['flaw']}",
        )
    console = Console()
    console.print(table)
    if result["at_grid_end"]:
        console.print("The best order lies at the end of the range; the PLD reading is the better guide.")
    if len(result.get("curve", [])) > 1:
        console.print(drawing(result["curve"]), highlight=False)


def epsilon_over_steps(plan: "Plan", delta: float, relation: "Relation") -> list[tuple[int, float]]:
    """Rényi readings along the way to the plan's last step."""
    from dataclasses import replace

    from privacy.accountant import Accountant

    steps = sorted({max(1, plan.known_steps * i // 40) for i in range(1, 41)})
    return [
        (
            at,
            replace(plan, steps=at)
            .reading(delta=delta, relation=relation, accountant=Accountant.RENYI)
            .epsilon,
        )
        for at in steps
    ]


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


if __name__ == "__main__":
    app()
