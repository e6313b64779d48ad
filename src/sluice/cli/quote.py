"""`sluice quote`: what a plan, an event or a list of events costs, computed locally without a server."""

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
    AccountantName, typer.Option("--accountant", help="The accountant that must read at most --epsilon.")
]
Order = Annotated[float | None, typer.Option(help="Rényi order of the account; the best by default.")]
PlotFile = Annotated[
    Path | None, typer.Option("--plot", help="Also write epsilon over steps as an SVG file.")
]
File = Annotated[Path, typer.Argument(help="A JSON file; - reads standard input.")]


class QuoteGroup(TyperGroup):
    """The commands of this file and one for each method. Methods load when asked for, since numpy is slow."""

    def list_commands(self, ctx: Any) -> list[str]:
        from sluice.methods import METHODS

        return [*(name.replace("_", "-") for name in METHODS), *super().list_commands(ctx)]

    def get_command(self, ctx: Any, name: str) -> Any:
        if name in super().list_commands(ctx) or name not in self.list_commands(ctx):
            return super().get_command(ctx, name)
        group = typer.Typer(add_completion=False)
        group.command(name)(method_command(name.replace("-", "_")))
        return typer.main.get_command(group)


app = typer.Typer(
    cls=QuoteGroup, no_args_is_help=True, help="What would it cost? Computed offline; nothing is written."
)


def method_command(name: str) -> Callable[..., None]:
    """`sluice quote METHOD`: the fields of the method's plan are its options."""
    from sluice.cli.pricing import method_options, plan_of, quote_plan
    from sluice.methods import METHODS

    def price(
        terms: "Terms", accountant: AccountantName, plot: Path | None, **options: Any
    ) -> dict[str, Any]:
        return quote_plan(plan_of(name, options), terms, accountant.value, plot)

    price.__doc__ = METHODS[name].description
    own: dict[str, tuple[Any, Any]] = {
        option: (None, annotation) for option, annotation in method_options(name).items()
    }
    own |= {"accountant": (AccountantName.RENYI, AccountantOption), "plot": (None, PlotFile)}
    return quoting(
        price,
        [
            inspect.Parameter(option, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            for option, (default, annotation) in own.items()
        ],
    )


def quoting(
    price: Callable[..., dict[str, Any]], own: list[inspect.Parameter] | None = None
) -> Callable[..., None]:
    """A command with the options of `price` and those every quote has; prints what `price` returns."""

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
        from sluice.privacy.relation import Relation

        try:
            terms = Terms(epsilon, delta, Relation(relation.replace("-", "_")), order)
            result = price(terms, **options)
        except Problem as problem:
            if as_json:
                print(dumps({"problem": problem.to_dict()}))
            print(inert(f"{problem.title}: {problem.text}"), file=sys.stderr)
            raise typer.Exit(2) from None
        curve = result.pop("curve", list)  # computed only if it is shown
        print(dumps(result)) if as_json else show(result, curve)

    if own is None:
        own = list(inspect.signature(price).parameters.values())[1:]
    shared = [option for option in inspect.signature(command).parameters.values() if option.name != "options"]
    with_options(command, [*own, *shared])
    command.__doc__ = price.__doc__
    return command


@app.command("event")
@quoting
def event(terms: "Terms", file: File) -> dict[str, Any]:
    """Reads one event from a JSON file."""
    from sluice.privacy.events import from_json

    one_event = from_json(read(file))
    return {"event": one_event.to_dict(), **terms.figures([one_event])}


@app.command("account")
@quoting
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
    listed = flat([from_dict(item) for item in (body if isinstance(body, list) else [body])])
    return {"events": [item.to_dict() for item in listed], **terms.figures(listed)}


@app.command("recommend")
@quoting
def recommend(
    terms: "Terms",
    image: Annotated[str, typer.Option(metavar="HxW", help="Height and width in pixels, such as 28x28.")],
    classes: Annotated[int, typer.Option(min=1, help="Number of classes.")],
    records: Annotated[int, typer.Option(min=1, help="Approximate number of records.")],
    device: Annotated[Device, typer.Option(help="Device of the training.")] = Device.CPU,
) -> dict[str, Any]:
    """Recommends a method for such images within --epsilon and --delta, says why, and prices it."""
    from sluice.cli.pricing import quote_plan
    from sluice.methods import PublicFacts, learnable, plan_from_options, recommended
    from sluice.privacy.problems import InvalidPlan, InvalidTarget

    target, sides = terms.target(), image_size(image)
    if target is None:
        raise InvalidTarget("The recommendation depends on the budget: give --epsilon and --delta.")
    if sides is None:
        raise InvalidTarget("Sides are two numbers with an x between them, such as 28x28.")
    height, width, channels = sides
    facts = PublicFacts(
        kind="image", records=records, height=height, width=width, channels=channels, classes=classes
    )
    method = recommended(facts)
    if method is None:
        raise InvalidPlan(f"Methods can learn {learnable()}; scale yours before they are registered.")
    options = method.defaults(facts, target)
    take = {"method": method.name, **options, "why": method.why(facts, target, device.value)}
    return {"recommended": take, **quote_plan(plan_from_options(method.name, options), terms, "renyi", None)}


def image_size(text: str) -> tuple[int, int, int] | None:
    """Height, width and channels of 28x28 or 32x32x3."""
    match = re.fullmatch(r"(\d+)x(\d+)(?:x([13]))?", text)
    return (int(match[1]), int(match[2]), int(match[3] or 1)) if match else None


def read(file: Path) -> str:
    from sluice.privacy.problems import UnknownEvent

    try:
        return sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UnknownEvent(f"{file} cannot be read ({reason}); name a JSON file.") from None
