"""The `sluice` command."""

import sys

if sys.argv[1:2] == ["quote"] and "--help" not in sys.argv:
    from privacy import limits

    limits.warm_up()  # before all else: the second process loads its arithmetic while this one loads its own

import json
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from client import connection, datasets, jobs, keys, ledger, quote, releases, verify
from client.problems import CannotRun

app = typer.Typer(
    help="Releases synthetic data under differential privacy, with an epsilon that is true.",
    epilog=connection.EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(connection.login)
app.add_typer(datasets.app, name="datasets")
app.add_typer(quote.app, name="quote")
app.command()(jobs.train)
app.add_typer(jobs.app, name="jobs")
app.add_typer(releases.app, name="releases")
app.command("verify")(verify.command)
app.add_typer(ledger.app, name="ledger")
app.add_typer(keys.people, name="people")
app.add_typer(keys.app, name="keys")

DataOption = Annotated[
    Path, typer.Option("--data", envvar="SLUICE_DATA", help="Directory for everything that is kept.")
]
PortOption = Annotated[
    int, typer.Option("--port", min=1, max=65535, help="Where the API listens, on loopback.")
]


@app.command()
def up(data: DataOption = Path(".sluice"), port: PortOption = 8000) -> None:
    """Run the whole service on this machine until Ctrl-C."""
    from client import run

    run.up(data, port)


@app.command()
def init(data: DataOption = Path(".sluice")) -> None:
    """Prepare a data directory: servers, tables, buckets, a password for each role."""
    from client import run

    run.init(data)


@app.command()
def demo(
    port: PortOption = 8000,
    epsilon: Annotated[float, typer.Option(min=0.01, help="What the training may cost.")] = 10.0,
    images: Annotated[int, typer.Option(min=100, max=1_000_000, help="How many digits are drawn.")] = 20_000,
    keep: Annotated[Path | None, typer.Option(help="Keep all of it in this new directory.")] = None,
    as_json: connection.AsJson = False,
) -> None:
    """From nothing to a verified release: data, budget, training, review, signature, download; in minutes."""
    from client.demo import Settings, run

    with redirect_stdout(sys.stderr) if as_json else nullcontext():
        told = run(Settings(images=images, epsilon=epsilon), port=port, keep=keep)
    if as_json:
        connection.print_json(told)


@app.command()
def check() -> None:
    """Run the static checks on this checkout: lint, format, types, import contracts."""
    from client import checks

    raise typer.Exit(checks.check())


@app.command("test", context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def run_tests(
    context: typer.Context,
    long: Annotated[bool, typer.Option("--long", help="Also the tests that run on request.")] = False,
) -> None:
    """Run the static checks and all tests on this checkout; further arguments go to pytest."""
    from client import checks

    raise typer.Exit(checks.test(context.args, long=long))


def main() -> None:
    try:
        app()
    except CannotRun as problem:
        if "--json" in sys.argv[1:]:
            print(json.dumps({"problem": problem.to_dict()}))
        print(f"sluice: {problem}", file=sys.stderr)
        sys.exit(problem.exit_code)


if __name__ == "__main__":
    main()
