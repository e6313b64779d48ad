"""`sluice verify`: whether a downloaded release is what was approved and signed."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from sluice.cli.connection import AsJson, print_fields, print_result
from sluice.cli.jobs import readings
from sluice.client.problems import CannotRun

if TYPE_CHECKING:
    from sluice.client.api import Json


def show_reviewed(result: "Json") -> None:
    print_fields(
        ("directory", result["directory"]),
        ("files", f"exactly bundle {result['bundle']}"),
        ("signed, published", "no: this is the bundle under review"),
    )


def protection(
    owners: "list[Json]", together: "Json | None", *, of: str = "", by: str = ""
) -> list[tuple[str, str]]:
    """What a release costs each owner's records, and in total a person with records at several owners."""
    lines = []
    for i, owner in enumerate(owners, 1):
        suffix = f", owner {i}" if together else ""
        terms = f"{owner['delta']:g}, {owner['relation'].replace('_', '-')}{of}"
        lines += [(f"epsilon{suffix}", readings(owner["epsilon"]) + by), (f"delta, relation{suffix}", terms)]
        if total := owner.get("total"):
            spent = f"epsilon {total['epsilon']:.4f} of a budget of {owner['budget']:g}"
            lines.append((f"total{suffix}", f"{spent}, held or settled so far, for adaptively chosen plans"))
    if together:
        epsilon = "unknown" if together["epsilon"] is None else f"{together['epsilon']:.4f}"
        added = f"with all {len(owners)}, epsilon {epsilon} at delta {together['delta']:g}"
        lines.append(
            ("a person with several owners", f"is covered by the sum of their epsilons and deltas: {added}")
        )
    return lines


def show(result: "Json") -> None:
    people = len({approval["person"] for approval in result["review"]["approvals"]})
    number, list_from = result["revocations"]["number"], result["revocations"]["from"]
    print_fields(
        ("release", f"{result['name']}, {result['release']}"),
        ("files", f"as signed, bundle {result['bundle'][:16]}…, published {result['published_at'][:10]}"),
        *protection(
            result["owners"], result["together"], of=f", for {result['unit']}",
            by=": recomputed here from the event",
        ),
        *(
            ("learned from", f"{source['name']}, declared public, SHA-256 {source['sha256']}")
            for source in result["sources"]
        ),
        ("approved by", f"{people} {'person' if people == 1 else 'people'}"),
        ("key", f"{result['key']}, {result['keys_from']}"),
        ("withdrawn", list_from if number is None else f"no, by list {number} {list_from}"),
    )  # fmt: skip


def command(
    directory: Annotated[Path, Argument(metavar="DIR", help="Directory a release was downloaded to.")],
    key: Annotated[
        Path | None, Option(help="File with keys to trust: JSON of a service, PEM, base64.")
    ] = None,
    revocations: Annotated[
        Path | None, Option(help="File with the list of withdrawn releases to use.")
    ] = None,
    offline: Annotated[bool, Option("--offline", help="Fetch nothing from the network.")] = False,
    allow_expired_list: Annotated[
        bool,
        Option("--allow-expired-list", help="Accept an expired list, which lacks later withdrawals."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Verify a downloaded release: every byte, the signature, the epsilon, the budget, and that it was not
    withdrawn.

    Exit codes: 0 verified; 3 altered, forged, over budget, signed with an unknown key, or checked against a
    list of withdrawn releases that has expired; 4 withdrawn.
    """
    try:
        revocation_list = revocations.read_bytes() if revocations else None
    except OSError:
        raise CannotRun(f"{revocations} cannot be read: name a list of withdrawn releases") from None
    from sluice.client.verify import verify

    result = verify(
        directory,
        keys=key,
        revocations=revocation_list,
        online=not offline,
        allow_expired_list=allow_expired_list,
    )
    print_result(result, as_json, show)
