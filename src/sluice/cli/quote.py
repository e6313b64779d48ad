"""`sluice quote`: what a plan, an event or a list of events costs, worked out here, without a server."""

import inspect
import re
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from sluice.cli.connection import AsJson, with_options
from sluice.client.terminal import dumps, inert

if TYPE_CHECKING:
    from sluice.cli.pricing import Terms


class RelationName(StrEnum):
    ADD_REMOVE = "add-remove"
    REPLACE_ONE = "replace-one"


class AccountantName(StrEnum):
    RENYI = "renyi"
    PLD = "pld"


class Device(StrEnum):
    CPU = "cpu"
    CUDA = "cuda"


Delta = Annotated[float | None, typer.Option(help="Delta of the guarantee, e.g. 1e-5.")]
Epsilon = Annotated[
    float | None, typer.Option(help="Target: the least noise (or most steps) for it is found.")
]
RelationOption = Annotated[RelationName, typer.Option("--relation", help="Neighbouring relation.")]
AccountantOption = Annotated[
    AccountantName, typer.Option("--accountant", help="Which reading meets --epsilon.")
]
Order = Annotated[float | None, typer.Option(help="Rényi order of the account; the best by default.")]
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
    from sluice.methods import PLANS

    return [kind.replace("_", "-") for kind in PLANS if not kind.endswith("_one_shot")]


def _command(name: str) -> Callable[..., None]:
    from sluice.cli.pricing import about, plan_of, plan_options, quote_plan

    kind = name.replace("-", "_")

    def price(
        terms: "Terms", accountant: AccountantName, plot: Path | None, **options: Any
    ) -> dict[str, Any]:
        return quote_plan(plan_of(kind, options), terms, accountant.value, plot)

    own = [
        inspect.Parameter(option, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for option, default, annotation in (
            *((option, None, annotation) for option, annotation in plan_options(kind).items()),
            ("accountant", AccountantName.RENYI, AccountantOption),
            ("plot", None, PlotFile),
        )
    ]
    return priced(price, own, about(kind))


def priced(
    price: Callable[..., dict[str, Any]], own: list[inspect.Parameter], doc: str | None
) -> Callable[..., None]:
    """A command with options of its own and those every quote has; what `price` gives of them is printed."""

    def command(
        delta: Delta = None,
        epsilon: Epsilon = None,
        relation: RelationOption = RelationName.ADD_REMOVE,
        order: Order = None,
        as_json: AsJson = False,
        **options: Any,
    ) -> None:
        from sluice.cli.pricing import Terms, show
        from sluice.privacy.problems import Problem

        try:
            result = price(Terms(epsilon, delta, relation.replace("-", "_"), order), **options)
        except Problem as problem:
            if as_json:
                print(dumps({"problem": problem.to_dict()}))
            print(inert(f"{problem.title}: {problem.text}"), file=sys.stderr)
            raise typer.Exit(2) from None
        curve = result.pop("curve", list)  # worked out if it is shown
        print(dumps(result)) if as_json else show(result, curve())

    shared = [each for each in inspect.signature(command).parameters.values() if each.name != "options"]
    with_options(command, [*own, *shared])
    command.__doc__ = doc
    return command


def _quoting(function: Callable[..., dict[str, Any]]) -> Callable[..., None]:
    return priced(function, list(inspect.signature(function).parameters.values())[1:], function.__doc__)


@app.command("event")
@_quoting
def event(terms: "Terms", file: File) -> dict[str, Any]:
    """Reads one event from a JSON file."""
    from sluice.privacy.events import from_json

    one = from_json(read(file))
    return {"event": one.to_dict(), **terms.figures([one])}


@app.command("account")
@_quoting
def account(
    terms: "Terms",
    events: Annotated[Path, typer.Option(help="A JSON file with an event or a list of events.")],
) -> dict[str, Any]:
    """Composes the events of a JSON file in one account of --epsilon and --delta."""
    from sluice.privacy.accountant import flat
    from sluice.privacy.events import from_dict, read_json
    from sluice.privacy.problems import InvalidTarget

    if terms.epsilon is None:
        raise InvalidTarget("An account has a budget: give --epsilon and --delta.")
    body = read_json(read(events))
    listed = flat([from_dict(one) for one in (body if isinstance(body, list) else [body])])
    return {"events": [one.to_dict() for one in listed], **terms.figures(listed)}


@app.command("recommend")
@_quoting
def recommend(
    terms: "Terms",
    image: Annotated[str, typer.Option(metavar="HxW", help="Height and width in pixels, such as 28x28.")],
    classes: Annotated[int, typer.Option(min=1, help="How many classes.")],
    records: Annotated[int, typer.Option(min=1, help="How many records, about.")],
    device: Annotated[Device, typer.Option(help="What it would be trained on.")] = Device.CPU,
) -> dict[str, Any]:
    """Names the method to take for such images within --epsilon and --delta, says why, and prices it."""
    from sluice.cli.pricing import quote_plan
    from sluice.methods import Target
    from sluice.methods.recommend import Images, recommended
    from sluice.privacy.accountant import Accountant
    from sluice.privacy.problems import InvalidTarget
    from sluice.privacy.relation import Relation

    if terms.epsilon is None:
        raise InvalidTarget("What to take depends on the budget: give --epsilon and --delta.")
    sides = image_size(image)
    if sides is None:
        raise InvalidTarget("Sides are two numbers with an x between them, such as 28x28.")
    target = Target(
        epsilon=terms.epsilon,
        delta=terms.known_delta(),
        relation=Relation(terms.relation),
        accountant=Accountant.RENYI,
    )
    plan, why = recommended(Images(*sides[:2], classes, records), target, device.value)
    take = {"method": plan.kind, "charts": plan.charts, "why": why}
    return {"recommended": take, **quote_plan(plan, terms, "renyi", None)}


def image_size(text: str) -> tuple[int, int, int] | None:
    """Height, width and channels of 28x28 or 32x32x3."""
    found = re.fullmatch(r"(\d+)x(\d+)(?:x([13]))?", text)
    return (int(found[1]), int(found[2]), int(found[3] or 1)) if found else None


def read(file: Path) -> str:
    from sluice.privacy.problems import UnknownEvent

    try:
        return sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UnknownEvent(f"{file} cannot be read ({reason}); name a JSON file.") from None
