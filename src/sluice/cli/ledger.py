"""`sluice ledger`: what every account was granted, holds and has spent; checked here, row by row."""

import uuid
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sluice.cli.connection import connected, output, print_table, write_lines
from sluice.client.problems import CannotRun

if TYPE_CHECKING:
    from sluice.client.api import Json, Sluice

app = typer.Typer(no_args_is_help=True, help="Budgets and the ledger: look, check, raise.")


class FormatName(StrEnum):
    CSV = "csv"
    JSON = "json"


Id = Annotated[str, typer.Argument(metavar="ACCOUNT", help="Id of an account.")]
GrantId = Annotated[str, typer.Argument(metavar="GRANT", help="Id of a proposal.")]


def _units(cost: int) -> str:
    return f"{cost / 1e9:.6f}"


def show_accounts(accounts: "list[Json]") -> None:
    def row(one: "Json") -> tuple[str, ...]:
        terms = one["id"], f"{one['epsilon']:g}", f"{one['delta']:g}", str(one["order"])
        units = map(_units, (one["granted"], one["held"], one["settled"], one["left"]["cost"]))
        return *terms, *units, f"{one['left']['epsilon']:.4f}", str(one["moves"])

    columns = "account", "epsilon", "delta", "order", "granted", "held", "settled", "left", "worth", "moves"
    print_table(*columns, rows=map(row, accounts))


def show_shown(shown: Any) -> None:
    if isinstance(shown, list):
        return show_accounts(shown)
    show_accounts([shown.get("account", shown)])
    if "entries" in shown:
        show_rows(shown["entries"])


def show_rows(entries: "list[Json]") -> None:
    def row(one: "Json") -> tuple[str, ...]:
        epsilon = (one["readings"] or {}).get("renyi")
        shown = "" if epsilon is None else f"{epsilon:.4f}"
        at = one["at"][:19].replace("T", " ")
        return str(one["number"]), at, one["kind"], _units(one["cost"]), shown, one["actor"], one["reason"]

    print_table("row", "at", "move", "cost", "epsilon", "who", "why", rows=map(row, entries))


@app.command()
@connected(show_shown)
def show(
    service: "Sluice",
    account: Annotated[
        str | None, typer.Argument(metavar="ACCOUNT", help="One account with its rows.")
    ] = None,
    dataset: Annotated[
        str | None, typer.Option(help="The account this dataset draws on; also for curators.")
    ] = None,
) -> Any:
    """Every account, or one with all its rows."""
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
@connected(lambda done: output(stderr=True).print(f"{done['rows']} rows in {done['to']}"))
def export(
    service: "Sluice",
    account: Id,
    to: Annotated[
        Path | None, typer.Option("--out", help="File to write; standard output by default.")
    ] = None,
    format: Annotated[
        FormatName, typer.Option(help="csv for people, json to check it again.")
    ] = FormatName.CSV,
) -> "Json | None":
    """All rows of an account as a file."""
    if format is FormatName.CSV:
        parts = service.ledger_csv(account)
    else:
        parts = _json_lines(row for page in pages(service, account) for row in page["entries"])
    rows = write_lines(parts, to) - (format is FormatName.CSV)
    return {"account": account, "rows": rows, "to": str(to)} if to else None


def _json_lines(rows: "Iterator[Json]") -> Iterator[bytes]:
    import json

    for row in rows:
        yield json.dumps(row, allow_nan=False).encode() + b"\n"


def pages(service: "Sluice", account: str) -> "Iterator[Json]":
    """All of an account's ledger; goes on until rows and account agree, as it may move meanwhile."""
    after, patience = 0, 3
    while patience:
        page = service.ledger(account, after=after)
        yield page
        if page["entries"]:
            after = page["entries"][-1]["number"]
        else:
            patience -= 1
        if page["next"] is None and page["account"]["moves"] == after:
            return


def verify_account(
    service: "Sluice", account: str, *, head: str | None = None, reprice: bool = False
) -> "Json":
    """Recomputes chain and balance from the rows alone; the service's own verdict is not asked.

    `head` is a digest known from elsewhere, as a release carries one: the chain must run through it.
    """
    from sluice.release.chain import Broken
    from sluice.release.ledger import Balance, fold

    try:
        one = str(uuid.UUID(account))
    except ValueError:
        raise CannotRun(f"{account} is not the id of an account: sluice ledger show lists them") from None
    now: Any = {}
    terms: Any = None
    given, found_head = 0, head is None

    def walk() -> "Iterator[Json]":
        nonlocal now, terms, given, found_head
        for page in pages(service, one):
            now = page["account"]
            for row in page["entries"]:
                if row["account"] != one:
                    raise ValueError("of another account")
                terms = row["terms"] or terms
                found_head = found_head or row["digest"] == head
                yield row
                given += 1
                if reprice and row["kind"] == "reserve":
                    _paid_in_full(row, terms)

    try:
        balance, last, number, broken = fold(walk())
        claimed = Balance(capacity=now["granted"], held=now["held"], settled=now["settled"])
        if broken is None and (number, last.hex()) != (now["moves"], now["head"]):
            broken = Broken(number=number + 1, why="is missing at the end")
        elif broken is None and balance != claimed:
            broken = Broken(number=number, why="leads to another balance than the account claims")
        elif broken is None and terms != {
            name: now[name] for name in ("relation", "epsilon", "delta", "order")
        }:
            broken = Broken(number=number, why="was written under other terms than the account claims")
        elif broken is None and not found_head:
            broken = Broken(number=number, why="and all before it do not run through the head that was given")
    except Underpaid as problem:
        broken = Broken(number=given, why=str(problem))
    except (KeyError, TypeError, ValueError, AttributeError):
        broken = Broken(number=given + 1, why="does not have the shape of a row")
    return {
        "account": one,
        "ok": broken is None,
        "rows": given,
        "head": now.get("head"),
        "broken_row": broken.number if broken else None,
        "why": broken.why if broken else None,
    }


class Underpaid(Exception):
    pass


def _paid_in_full(row: "Json", terms: "Json") -> None:
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
    for one in verdicts:
        if one["ok"]:
            out.print(f"{one['account']}: {one['rows']} rows follow, head {one['head'][:16]}…")
        else:
            out.print(f"{one['account']}: BROKEN: row {one['broken_row']} {one['why']}")
    broken = sum(not one["ok"] for one in verdicts)
    out.print(
        f"{broken} of {len(verdicts)} accounts are broken" if broken else f"{len(verdicts)} accounts hold"
    )


@app.command()
@connected(show_verdicts, ok=lambda verdicts: all(one["ok"] for one in verdicts))
def verify(
    service: "Sluice",
    account: Annotated[
        str | None, typer.Argument(metavar="ACCOUNT", help="One account; all by default.")
    ] = None,
    head: Annotated[
        str | None, typer.Option(help="A head known from elsewhere, e.g. a release: must be in the chain.")
    ] = None,
    reprice: Annotated[
        bool, typer.Option("--reprice", help="Also work out each cost again from its event.")
    ] = False,
) -> "list[Json]":
    """Fetch all rows and recompute chain and balance here; exit code 1 names the first broken row."""
    if head is not None and account is None:
        raise CannotRun("a head belongs to one account: name it")
    which = [account] if account else [one["id"] for one in service.accounts()]
    return [verify_account(service, each, head=head, reprice=reprice) for each in which]


def show_grant(grant: "Json") -> None:
    show_grants([grant])


def show_grants(grants: "list[Json]") -> None:
    fields = ("state", "reason", "proposed_by")
    rows = ((one["id"], f"{one['epsilon']:g}", *(one[name] for name in fields)) for one in grants)
    print_table("grant", "epsilon", "state", "reason", "proposed by", rows=rows)


@app.command()
@connected(show_grant)
def grant(
    service: "Sluice",
    account: Id,
    epsilon: Annotated[float, typer.Option(help="The new, larger epsilon of the account.")],
    reason: Annotated[str, typer.Option(help="Why; kept in the ledger for ever.")],
) -> "Json":
    """Propose a larger budget; another person has to confirm it."""
    return service.propose_grant(account, epsilon=epsilon, reason=reason)


@app.command()
@connected(show_grants)
def grants(service: "Sluice", account: Id) -> "list[Json]":
    """Proposals for an account, open and decided."""
    return service.grants(account)


@app.command()
@connected(show_grant)
def confirm(service: "Sluice", account: Id, grant: GrantId) -> "Json":
    """Put in force what another person proposed."""
    return service.confirm_grant(account, grant)


@app.command()
@connected(show_grant)
def withdraw(service: "Sluice", account: Id, grant: GrantId) -> "Json":
    """Take an open proposal back."""
    return service.withdraw_grant(account, grant)
