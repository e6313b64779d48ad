"""`sluice restore`: restores a backup and charges what was spent since, according to the witness."""

import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError
from sqlalchemy import select, update
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from core.database import connect
from core.errors import Problem
from core.ledger import Move
from core.settings import SettingsProblem, WitnessSettings, load
from core.stores.witness import DirectoryWitness, witness_store
from core.tables import Account, Witness
from core.witness import WitnessDamaged, WitnessLog, charge_lost, differences
from local import state as data_directory
from local.stack import Stack
from sluice.cli.connection import output, table_of
from sluice.client.problems import CannotRun

Json = dict[str, Any]


def restore_directory(backup: Path, *, data: Path, witness: Path | None, charge: bool, reason: str) -> Json:
    """Prepares a copy of the backup beside the data directory and swaps the two only on success."""
    backup, data = backup.resolve(), data.resolve()
    with _locked(backup, data):
        copy = data.with_name(data.name + ".restoring")
        try:
            _copy(backup, copy, _state_for(backup, data, witness))
            result = _compare_copy(copy, charge=charge, reason=reason)
            result |= {"data": str(data), "put_aside": None}
            if result["restored"]:
                if data.exists():
                    result["put_aside"] = f"{data}.before-restore-{datetime.now().astimezone():%Y%m%dT%H%M%S}"
                    data.rename(result["put_aside"])
                copy.rename(data)
        finally:
            shutil.rmtree(copy, ignore_errors=True)
    return result


def restore_database(url: str, *, witness: Path | None, charge: bool, reason: str) -> Json:
    """The part after pg_restore, for a site on many machines."""
    try:
        store = DirectoryWitness(witness) if witness else witness_store(load(WitnessSettings))
    except SettingsProblem as problem:
        raise CannotRun(f"the S3 settings of the sweep role are needed for the witness: {problem}") from None
    try:
        return _compare(url, WitnessLog(store), charge=charge, reason=reason)
    except OperationalError:
        raise CannotRun("the database does not answer: check --database") from None


@contextmanager
def _locked(backup: Path, data: Path) -> Iterator[None]:
    """Locks both directories; refuses if a sluice is running on either."""
    external = [n for n in ("DATABASE_URL", "S3_ENDPOINT") if os.environ.get(f"SLUICE_{n}")]
    if external:
        raise CannotRun(
            f"SLUICE_{external[0]} names a server outside the data directory: restore it there, then use "
            "sluice restore --database"
        )
    if backup == data or backup in data.parents or data in backup.parents:
        raise CannotRun(f"{backup} and {data} overlap: name a backup outside the data directory")
    with ExitStack() as locks:
        if (backup / "lock").exists():
            lock = locks.enter_context((backup / "lock").open())
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                raise CannotRun(f"a sluice is running on {backup}: stop it, or name a copy") from None
        if data.exists():
            locks.enter_context(data_directory.claim(data))
        yield


def _state_for(backup: Path, data: Path, witness: Path | None) -> Json:
    """The state of the backup, with the site's present witness."""
    old, present = data_directory.read(backup), data_directory.read(data)
    if "s3_internal" not in old:
        raise CannotRun(f"{backup} is not a copy of a data directory: it has no state.json of one")
    site = data_directory.site_of(old)
    if "s3_internal" in present and data_directory.site_of(present) != site:
        raise CannotRun(f"{backup} is a backup of another site than {data}: choose another --data")
    directory = (
        witness or present.get("witness") or old.get("witness") or data_directory.default_witness(site)
    )
    return old | {"witness": str(directory)}


def _copy(backup: Path, copy: Path, state: Json) -> None:
    shutil.rmtree(copy, ignore_errors=True)  # left by an interrupted attempt
    try:
        shutil.copytree(backup, copy, symlinks=True)
    except (OSError, shutil.Error):
        raise CannotRun(f"{backup} could not be copied to {copy}: check free space and permissions") from None
    data_directory.save(copy, state)


def _compare_copy(copy: Path, *, charge: bool, reason: str) -> Json:
    stack = Stack(copy)
    try:
        stack.start_servers()
        stack.prepare()
        log = WitnessLog(DirectoryWitness(Path(stack.state["witness"])))
        return _compare(stack.owner_url, log, charge=charge, reason=reason)
    finally:
        stack.stop()


def _compare(url: str, log: WitnessLog, *, charge: bool, reason: str) -> Json:
    """Compares a database with the witness and, with `charge`, charges the difference.

    The witness is only read; the sweeper appends to it once the restored site runs.
    """
    engine = connect(url, pool_size=1)
    try:
        log.catch_up()
        with Session(engine) as session:
            row = session.scalars(select(Witness)).one()
            if row.generation > log.generation:
                raise CannotRun(
                    f"the witness has {log.generation} entries, and this database was compared with "
                    f"{row.generation}: {data_directory.FIND_IT}"
                )
            changes = differences(session, log)
            _refuse_altered(changes)
            result: Json = {
                "restored": charge or not changes,
                "charged": charge,
                "accounts": [_difference(session, id, seen) for id, seen in sorted(changes.items())],
            }
            if result["restored"]:
                charge_lost(session, changes, Move(actor="restore", reason=f"behind its witness: {reason}"))
                # The backup's comparison is outdated: nothing is granted until the sweeper compares.
                session.execute(update(Witness).values(acknowledged=log.generation, checked_at=None))
                session.commit()
        return result
    except (OSError, WitnessDamaged, BotoCoreError, ClientError) as problem:
        raise CannotRun(
            f"the witness cannot be read ({problem}): check that it exists and is readable"
        ) from None
    except Problem as problem:
        raise CannotRun(f"{problem.title}: {problem.detail}") from None
    finally:
        engine.dispose()


def _refuse_altered(changes: Json) -> None:
    altered = [id for id, change in changes.items() if change["reason"] == "altered"]
    if altered:
        due = "; ".join(
            f"{id}: capacity {changes[id]['capacity']}, spent {changes[id]['spent']}" for id in altered
        )
        raise CannotRun(
            f"balances in this database do not follow from their ledger rows; by the rows they are {due}: "
            "take another backup, or correct the rows as docs/operations.md says"
        )


def _difference(session: Session, id: str, seen: Json) -> Json:
    account = session.get(Account, uuid.UUID(id))
    spent = account.held + account.settled if account else 0
    return {
        "account": id,
        "in_backup": account is not None,
        "spent_in_backup": spent,
        "spent_by_witness": seen["spent"],
        "charge": max(0, seen["spent"] - spent),
    }


def show(result: Json) -> None:
    out = output()
    if result["accounts"]:
        columns: dict[str, Any] = {
            "account": "account",
            "in the backup": lambda account: "yes" if account["in_backup"] else "no",
        }
        for name in ("spent_in_backup", "spent_by_witness", "charge"):
            columns[name.replace("_", " ")] = lambda account, name=name: f"{account[name] / 1e9:.9f}"
        table_of(columns)(result["accounts"])
    if not result["restored"]:
        out.print(
            "Nothing was changed: budget was spent after this backup was taken. With --charge the backup is "
            "restored and that budget is charged; jobs that still held budget end as lost.",
        )
        return
    if result.get("put_aside"):
        out.print(f"The data directory used so far is now {result['put_aside']}", soft_wrap=True)
    if result.get("data"):
        out.print(f"Restored. Start it with: sluice up --data {result['data']}", soft_wrap=True)
    else:
        out.print("The database agrees with the witness. Start the services.")
