"""The `sluice` command."""

import sys

if sys.argv[1:2] == ["quote"] and "--help" not in sys.argv:
    from sluice.privacy import pld_process

    pld_process.warm_up()  # first, so that both processes load their modules in parallel

from collections.abc import Callable

import typer

from sluice.cli import audit_log, connection, datasets, jobs, keys, ledger, quote, releases, teams, verify
from sluice.client.problems import CannotRun
from sluice.client.terminal import dumps, inert

app = typer.Typer(
    help="Releases synthetic data under differential privacy, with a verifiable epsilon.",
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
app.add_typer(audit_log.app, name="audit-log")
app.add_typer(keys.people, name="people")
app.add_typer(teams.app, name="teams")
app.add_typer(keys.app, name="keys")

SERVER_COMMANDS = ("up", "init", "restore", "demo", "check", "test")


def _needs_checkout(name: str) -> Callable[[], None]:
    def command() -> None:
        raise CannotRun(
            f"sluice {name} needs the server: clone the repository of Sluice and run ./sluice {name} there"
        )

    command.__doc__ = "Needs a checkout of the repository, which has the server."
    return command


def main() -> None:
    """Runs the command. Errors are one sentence on standard error, and an exit code."""
    try:
        app(prog_name="sluice")
    except CannotRun as problem:
        if "--json" in sys.argv[1:]:
            print(dumps({"problem": problem.to_dict()}))
        print(f"sluice: {inert(problem)}", file=sys.stderr)
        sys.exit(problem.exit_code)


def installed() -> None:
    """The command as the wheel installs it; `python -m local` adds the server's commands."""
    for name in SERVER_COMMANDS:
        app.command(name, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})(
            _needs_checkout(name)
        )
    main()


if __name__ == "__main__":
    main()
