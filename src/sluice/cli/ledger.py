"""`sluice ledger`: what every account was granted, holds and has spent; verified here, row by row."""

import uuid
from collections.abc import Iterator
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from sluice.cli.connection import Out, connected, json_lines, output, show_export, table_of, write_lines
from sluice.client.problems import CannotRun

if TYPE_CHECKING:
    from sluice.client.api import Json, Sluice

app = typer.Typer(no_args_is_help=True, help="Budgets and the ledger: show, verify, raise.")


class FormatName(StrEnum):
    CSV = "csv"
    JSON = "json"


Id = Annotated[str, Argument(metavar="ACCOUNT", help="Id of an account.")]
GrantId = Annotated[str, Argument(metavar="GRANT", help="Id of a proposal.")]


def _units(cost: int) -> str:
    return f"{cost / 1e9:.6f}"


show_accounts = table_of({
    "account": "id", "epsilon": lambda account: f"{account['epsilon']:g}",
    "delta": lambda account: f"{account['delta']:g}", "order": "order",
    "granted": lambda account: _units(account["granted"]),
    "held": lambda account: _units(account["held"]),
    "settled": lambda account: _units(account["settled"]),
    "left": lambda account: _units(account["left"]["cost"]),
    "left as epsilon": lambda account: f"{account['left']['epsilon']:.4f}", "rows": "moves",
})  # fmt: skip


def _renyi(row: "Json") -> str:
    epsilon = (row["readings"] or {}).get("renyi")
    return "" if epsilon is None else f"{epsilon:.4f}"


show_rows = table_of({
    "row": "number", "at": lambda row: row["at"][:19].replace("T", " "), "kind": "kind",
    "cost": lambda row: _units(row["cost"]), "epsilon": _renyi, "who": "actor", "why": "reason",
})  # fmt: skip

show_grants = table_of({
    "grant": "id", "epsilon": lambda grant: f"{grant['epsilon']:g}", "state": "state",
    "reason": "reason", "proposed by": "proposed_by",
})  # fmt: skip


def show_account(shown: Any) -> None:
    if isinstance(shown, list):
        return show_accounts(shown)
    show_accounts(shown.get("account", shown))
    if "entries" in shown:
        show_rows(shown["entries"])


@app.command()
@connected(show_account)
def show(
    service: "Sluice",
    account: Annotated[str | None, Argument(metavar="ACCOUNT", help="Show it with its rows.")] = None,
    dataset: Annotated[
        str | None, Option(help="Show the account of this dataset; also for curators.")
    ] = None,
) -> Any:
    """Show every account, or one with all its rows."""
    if dataset is not None:
        return service.budget(dataset)
    if account is None:
        return list(service.accounts())
    last: Any = None
    entries: list[Json] = []
    for last in pages(service, account):
        entries += last["entries"]
    return last | {"entries": entries, "next": None}


@app.command()
@connected(show_export)
def export(
    service: "Sluice",
    account: Id,
    to: Out = None,
    format: Annotated[FormatName, Option(help="json can be verified later.")] = FormatName.CSV,
) -> "Json | None":
    """Write all rows of an account to a file."""
    if format is FormatName.CSV:
        parts = service.ledger_csv(account)
    else:
        parts = json_lines(row for page in pages(service, account) for row in page["entries"])
    rows = write_lines(parts, to) - (format is FormatName.CSV)
    return {"account": account, "rows": rows, "to": str(to)} if to else None


def pages(service: "Sluice", account: str) -> "Iterator[Json]":
    """All pages of an account's ledger, until rows and account agree: rows may be added meanwhile."""
    after, empty_pages_left = 0, 3
    while empty_pages_left:
        page = service.ledger(account, after=after)
        yield page
        if page["entries"]:
            after = page["entries"][-1]["number"]
        else:
            empty_pages_left -= 1
        if page["next"] is None and page["account"]["moves"] == after:
            return


def verify_account(
    service: "Sluice", account: str, *, head: str | None = None, reprice: bool = False
) -> "Json":
    """Recomputes hash chain and balance from the rows alone, without the service's own check.

    `head` is a digest known from elsewhere, such as a release: the chain must contain it.
    """
    from sluice.release.chain import Broken
    from sluice.release.ledger import Balance, fold

    try:
        id = str(uuid.UUID(account))
    except ValueError:
        raise CannotRun(f"{account} is not the id of an account: sluice ledger show lists them") from None
    now: Any = {}
    terms: Any = None
    count, head_seen = 0, head is None

    def rows() -> "Iterator[Json]":
        nonlocal now, terms, count, head_seen
        for page in pages(service, id):
            now = page["account"]
            for row in page["entries"]:
                if row["account"] != id:
                    raise ValueError("row of another account")
                terms = row["terms"] or terms
                head_seen = head_seen or row["digest"] == head
                yield row
                count += 1
                if reprice and row["kind"] == "reserve":
                    _require_full_price(row, terms)

    try:
        balance, last, number, broken = fold(rows())
        claimed = Balance(capacity=now["granted"], held=now["held"], settled=now["settled"])
        if broken is None and (number, last.hex()) != (now["moves"], now["head"]):
            broken = Broken(number=number + 1, why="is missing at the end")
        elif broken is None and balance != claimed:
            broken = Broken(number=number, why="leads to another balance than the account claims")
        elif broken is None and terms != {
            name: now[name] for name in ("relation", "epsilon", "delta", "order")
        }:
            broken = Broken(number=number, why="was written under other terms than the account claims")
        elif broken is None and not head_seen:
            broken = Broken(number=number, why="and all before it do not run through the head that was given")
    except Underpaid as problem:
        broken = Broken(number=count, why=str(problem))
    except (KeyError, TypeError, ValueError, AttributeError):
        broken = Broken(number=count + 1, why="does not have the shape of a row")
    return {
        "account": id,
        "ok": broken is None,
        "rows": count,
        "head": now.get("head"),
        "broken_row": broken.number if broken else None,
        "why": broken.why if broken else None,
    }


class Underpaid(Exception):
    """A row was charged less than its event costs."""


def _require_full_price(row: "Json", terms: "Json") -> None:
    from sluice.privacy.accountant import cost
    from sluice.privacy.events import from_dict
    from sluice.privacy.problems import Problem
    from sluice.privacy.relation import Relation

    try:
        due = cost(from_dict(row["event"]), order=terms["order"], relation=Relation(terms["relation"]))
    except Problem as problem:
        raise Underpaid(f"has an event that cannot be priced here ({problem.slug})") from None
    if row["cost"] < due:
        raise Underpaid(f"was charged {_units(row['cost'])}, and its event costs {_units(due)}")


def show_verdicts(verdicts: "list[Json]") -> None:
    out = output()
    for verdict in verdicts:
        if verdict["ok"]:
            out.print(f"{verdict['account']}: {verdict['rows']} rows, head {verdict['head'][:16]}…")
        else:
            out.print(f"{verdict['account']}: BROKEN: row {verdict['broken_row']} {verdict['why']}")
    if broken := sum(not verdict["ok"] for verdict in verdicts):
        out.print(f"{broken} of {len(verdicts)} accounts are broken")
    else:
        out.print(f"{len(verdicts)} accounts verified: hash chain and balances are consistent")


@app.command()
@connected(show_verdicts, ok=lambda verdicts: all(verdict["ok"] for verdict in verdicts))
def verify(
    service: "Sluice",
    account: Annotated[str | None, Argument(metavar="ACCOUNT", help="Account; default: all.")] = None,
    head: Annotated[str | None, Option(help="Digest that the chain must contain, e.g. of a release.")] = None,
    reprice: Annotated[bool, Option("--reprice", help="Also recompute costs from events.")] = False,
) -> "list[Json]":
    """Fetch all rows and recompute hash chain and balance here; exit code 1 names the first broken row."""
    if head is not None and account is None:
        raise CannotRun("--head belongs to one account: name that account")
    ids = [account] if account else [found["id"] for found in service.accounts()]
    return [verify_account(service, id, head=head, reprice=reprice) for id in ids]


@app.command()
@connected(show_grants)
def grant(
    service: "Sluice",
    account: Id,
    epsilon: Annotated[float, Option(help="New, larger epsilon of the account.")],
    reason: Annotated[str, Option(help="Reason; stays in the ledger permanently.")],
) -> "Json":
    """Propose a larger budget; another person has to confirm it."""
    return service.propose_grant(account, epsilon=epsilon, reason=reason)


@app.command()
@connected(show_grants)
def grants(service: "Sluice", account: Id) -> "list[Json]":
    """List proposals for an account, open and decided."""
    return service.grants(account)


@app.command()
@connected(show_grants)
def confirm(service: "Sluice", account: Id, grant: GrantId) -> "Json":
    """Confirm a larger budget that another person proposed."""
    return service.confirm_grant(account, grant)


@app.command()
@connected(show_grants)
def withdraw(service: "Sluice", account: Id, grant: GrantId) -> "Json":
    """Withdraw an open proposal."""
    return service.withdraw_grant(account, grant)
