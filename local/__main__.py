"""`./sluice`: the commands of the library, and those that need a checkout."""

import sys
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer

from sluice.cli import connection
from sluice.cli.main import app, main

DataOption = Annotated[Path, typer.Option("--data", envvar="SLUICE_DATA", help="Directory for all data.")]
PortOption = Annotated[int, typer.Option("--port", min=1, max=65535, help="Port of the API, on loopback.")]
WitnessOption = Annotated[
    Path | None,
    typer.Option(
        "--witness",
        envvar="SLUICE_WITNESS_DIR",
        help="Directory of the witness, outside the data and its backups; stored for later runs. "
        "Default: $XDG_STATE_HOME/sluice/witness.",
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
            help="Continue although the witness is lost; spending that only it recorded is forgotten.",
        ),
    ] = False,
) -> None:
    """Run the service with all its servers and workers on this machine until Ctrl-C."""
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
            help="Also invite this admin, who is new or has no key.",
        ),
    ] = None,
) -> None:
    """Prepare a data directory: tables, buckets, a password for each role. Stop sluice first."""
    from local import run

    run.init(data, witness=witness, invite=invite_admin)


@app.command()
def restore(
    backup: Annotated[
        Path | None, typer.Argument(metavar="[BACKUP]", help="Copy of a data directory (single machine).")
    ] = None,
    data: DataOption = Path(".sluice"),
    witness: WitnessOption = None,
    database: Annotated[
        str | None,
        typer.Option(
            envvar="SLUICE_OWNER_DATABASE_URL",
            help="Instead of BACKUP, on many machines: URL of the restored database, as its owner.",
        ),
    ] = None,
    charge: Annotated[
        bool,
        typer.Option("--charge", help="Charge what was spent since the backup according to the witness."),
    ] = False,
    reason: Annotated[
        str, typer.Option(help="Reason; stays in the ledger permanently.")
    ] = "restored from a backup",
    as_json: connection.AsJson = False,
) -> None:
    """Restore a backup without returning spent budget.

    The backup is compared with the witness. If budget was spent since the backup, the accounts are shown and
    nothing is changed (exit code 1); with --charge the backup is restored and the difference is charged. The
    present data directory is renamed, not deleted. Stop sluice first.

    On many machines, restore the database with pg_restore, leave the services stopped, and give --database;
    the witness is read with the S3 settings of the sweep role (SLUICE_S3_ENDPOINT and so on), or from
    --witness.
    """
    from local import restoring

    options: dict[str, Any] = {"witness": witness, "charge": charge, "reason": reason}
    if database and not backup:
        result = restoring.restore_database(database, **options)
    elif backup and not database:
        result = restoring.restore_directory(backup, data=data, **options)
    else:
        raise typer.BadParameter("name a BACKUP on one machine, or --database on many")
    connection.print_result(result, as_json, restoring.show)
    if not result["restored"]:
        raise typer.Exit(1)


@app.command()
def demo(
    port: PortOption = 8000,
    epsilon: Annotated[float, typer.Option(min=0.01, help="Epsilon of the training.")] = 10.0,
    images: Annotated[int, typer.Option(min=100, max=1_000_000, help="Number of digits to draw.")] = 20_000,
    keep: Annotated[Path | None, typer.Option(help="Keep all data in this new directory.")] = None,
    as_json: connection.AsJson = False,
) -> None:
    """Make a release from start to end: data, budget, training, review, signature, download, verification."""
    from local.demo import Settings, run

    with redirect_stdout(sys.stderr) if as_json else nullcontext():
        result = run(Settings(images=images, epsilon=epsilon), port=port, keep=keep)
    if as_json:
        connection.print_json(result)


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
