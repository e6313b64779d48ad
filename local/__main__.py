"""`./sluice`: the commands of the client, and those that need the server."""

import sys
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer

from sluice.cli import connection
from sluice.cli.main import app, main

DataOption = Annotated[
    Path, typer.Option("--data", envvar="SLUICE_DATA", help="Directory for everything that is kept.")
]
PortOption = Annotated[
    int, typer.Option("--port", min=1, max=65535, help="Where the API listens, on loopback.")
]
WitnessOption = Annotated[
    Path | None,
    typer.Option(
        "--witness",
        envvar="SLUICE_WITNESS_DIR",
        help="Directory of the witness, outside the data and its backups; it is remembered. "
        "By default in $XDG_STATE_HOME/sluice/witness.",
    ),
]


@app.command()
def up(
    data: DataOption = Path(".sluice"),
    port: PortOption = 8000,
    witness: WitnessOption = None,
    accept_lost_witness: Annotated[
        bool,
        typer.Option(
            "--accept-lost-witness",
            help="Go on although the witness or its end is lost: spending that only it knew is forgotten.",
        ),
    ] = False,
) -> None:
    """Run the whole service on this machine until Ctrl-C."""
    from local import run

    run.up(data, port, witness=witness, lost_witness=accept_lost_witness)


@app.command()
def init(
    data: DataOption = Path(".sluice"),
    witness: WitnessOption = None,
    invite_admin: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Also invite this admin, new or without a key, in the name of the installation.",
        ),
    ] = None,
) -> None:
    """Prepare a data directory: servers, tables, buckets, a password for each role. Stop sluice first."""
    from local import run

    run.init(data, witness=witness, invite=invite_admin)


@app.command()
def restore(
    backup: Annotated[
        Path | None, typer.Argument(metavar="[BACKUP]", help="Copy of a data directory, on one machine.")
    ] = None,
    data: DataOption = Path(".sluice"),
    witness: WitnessOption = None,
    database: Annotated[
        str | None,
        typer.Option(
            envvar="SLUICE_OWNER_DATABASE_URL",
            help="On many machines, in place of BACKUP: the restored database, as its owner.",
        ),
    ] = None,
    charge: Annotated[
        bool, typer.Option("--charge", help="Charge what the witness knows was spent since the backup.")
    ] = False,
    reason: Annotated[str, typer.Option(help="Why; kept in the ledger for ever.")] = "restored from a backup",
    as_json: connection.AsJson = False,
) -> None:
    """Put a backup back without giving spent budget back.

    The backup is compared with the witness. If budget was spent since it was taken, the accounts are shown
    and nothing is changed (exit code 1), unless --charge is given: then that is charged. The present data
    directory is put aside, not deleted. Stop sluice first.

    On many machines, restore the database with pg_restore, leave the services stopped, and give --database;
    the witness is read with the S3 settings of the sweep role (SLUICE_S3_ENDPOINT and so on), or from
    --witness.
    """
    if (backup is None) == (database is None):
        raise typer.BadParameter("name a BACKUP on one machine, or --database on many")
    from local import restoring

    more: dict[str, Any] = {"witness": witness, "charge": charge, "reason": reason}
    if database:
        told = restoring.restore_database(database, **more)
    else:
        told = restoring.restore_directory(backup, data=data, **more)
    connection.print_json(told) if as_json else restoring.show(told)
    if not told["restored"]:
        raise typer.Exit(1)


@app.command()
def demo(
    port: PortOption = 8000,
    epsilon: Annotated[float, typer.Option(min=0.01, help="What the training may cost.")] = 10.0,
    images: Annotated[int, typer.Option(min=100, max=1_000_000, help="How many digits are drawn.")] = 20_000,
    keep: Annotated[Path | None, typer.Option(help="Keep all of it in this new directory.")] = None,
    as_json: connection.AsJson = False,
) -> None:
    """From nothing to a verified release: data, budget, training, review, signature, download; in minutes."""
    from local.demo import Settings, run

    with redirect_stdout(sys.stderr) if as_json else nullcontext():
        told = run(Settings(images=images, epsilon=epsilon), port=port, keep=keep)
    if as_json:
        connection.print_json(told)


@app.command()
def check() -> None:
    """Run the static checks on this checkout: lint, format, types, import contracts."""
    from local import checks

    raise typer.Exit(checks.check())


@app.command("test", context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def run_tests(
    context: typer.Context,
    long: Annotated[bool, typer.Option("--long", help="Also run the tests marked long.")] = False,
    fast: Annotated[bool, typer.Option("--fast", help="Run only the tests that need no server.")] = False,
) -> None:
    """Run the static checks and all tests of this checkout; further arguments go to pytest."""
    from local import checks

    raise typer.Exit(checks.test(context.args, long=long, fast=fast))


if __name__ == "__main__":
    main()
