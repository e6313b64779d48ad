"""Is a downloaded release what was approved and signed? Worked out from its files and public keys alone."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sluice.cli.connection import AsJson, print_fields, print_json
from sluice.cli.jobs import readings
from sluice.client.problems import CannotRun

if TYPE_CHECKING:
    from sluice.client.api import Json


def show_reviewed(result: "Json") -> None:
    print_fields(
        ("directory", result["directory"]),
        ("files", f"those of bundle {result['bundle']}"),
        ("signed, published", "no: this is the bundle under review"),
    )


def protection(
    owners: "list[Json]", together: "Json | None", *, of: str = "", by: str = ""
) -> list[tuple[str, str]]:
    """What a release costs the records of each owner, and what a relay says to a person with several."""
    lines = []
    for i, each in enumerate(owners, 1):
        whose = f", owner {i}" if together else ""
        terms = f"{each['delta']:g}, {each['relation'].replace('_', '-')}{of}"
        lines += [(f"epsilon{whose}", readings(each["epsilon"]) + by), (f"delta, relation{whose}", terms)]
        if total := each.get("total"):
            spent = f"epsilon {total['epsilon']:.4f} of a budget of {each['budget']:g}"
            lines.append((f"total{whose}", f"{spent}, promised or spent by then, however plans were chosen"))
    if together:
        epsilon = "unknown" if together["epsilon"] is None else f"{together['epsilon']:.4f}"
        added = f"with all {len(owners)}, epsilon {epsilon} at delta {together['delta']:g}"
        lines.append(
            ("a person with several owners", f"is covered by the sum of their epsilons and deltas: {added}")
        )
    return lines


def show(result: "Json") -> None:
    people = len({each["person"] for each in result["review"]["approvals"]})
    number, source = result["revocations"]["number"], result["revocations"]["from"]
    print_fields(
        ("release", f"{result['name']}, {result['release']}"),
        ("files", f"as signed, bundle {result['bundle'][:16]}…, published {result['published_at'][:10]}"),
        *protection(
            result["owners"], result["together"], of=f", for {result['unit']}",
            by=": worked out again here from the event",
        ),
        *(
            ("learned from", f"{each['name']}, declared public, SHA-256 {each['sha256']}")
            for each in result["sources"]
        ),
        ("approved by", f"{people} {'person' if people == 1 else 'people'}"),
        ("key", f"{result['key']}, {result['keys_from']}"),
        ("withdrawn", source if number is None else f"no, by list {number} {source}"),
    )  # fmt: skip


def command(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where a release was downloaded to.")],
    key: Annotated[
        Path | None, typer.Option(help="File with the keys to trust: the service's JSON, PEM or base64.")
    ] = None,
    revocations: Annotated[
        Path | None, typer.Option(help="File with a list of withdrawn releases; not fetched then.")
    ] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Fetch nothing.")] = False,
    allow_expired_list: Annotated[
        bool,
        typer.Option(
            "--allow-expired-list",
            help="Accept a list of withdrawn releases that has expired: later withdrawals are not on it.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check a downloaded release: every byte, the signature, the epsilon, the budget, and that it was not
    withdrawn.

    Exit codes: 0 it holds; 3 altered, forged, over budget, signed with an unknown key, or checked against a
    list of withdrawn releases that has expired; 4 withdrawn.
    """
    try:
        given = revocations.read_bytes() if revocations else None
    except OSError:
        raise CannotRun(f"{revocations} cannot be read: name a list of withdrawn releases") from None
    from sluice.client.verify import verify

    result = verify(
        directory,
        keys=key,
        revocations=given,
        online=not offline,
        allow_expired_list=allow_expired_list,
    )
    (print_json if as_json else show)(result)
