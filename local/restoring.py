"""`sluice restore`: puts a backup back and charges what the witness knows was spent since it was taken."""

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
from sluice.cli.connection import output, print_table
from sluice.client.problems import CannotRun

Json = dict[str, Any]


def restore_directory(backup: Path, *, data: Path, witness: Path | None, charge: bool, reason: str) -> Json:
    """Prepares a copy of the backup beside the data directory; changes places only if all went well."""
    backup, data = backup.resolve(), data.resolve()
    with _held(backup, data):
        copy = data.with_name(data.name + ".restoring")
        try:
            _copy(backup, copy, _state_for(backup, data, witness))
            told = _compared_in(copy, charge=charge, reason=reason)
            told |= {"data": str(data), "put_aside": None}
            if told["restored"]:
                if data.exists():
                    told["put_aside"] = f"{data}.before-restore-{datetime.now().astimezone():%Y%m%dT%H%M%S}"
                    data.rename(told["put_aside"])
                copy.rename(data)
        finally:
            shutil.rmtree(copy, ignore_errors=True)
    return told


def restore_database(url: str, *, witness: Path | None, charge: bool, reason: str) -> Json:
    """The part after pg_restore, for a site on many machines."""
    try:
        store = DirectoryWitness(witness) if witness else witness_store(load(WitnessSettings))
    except SettingsProblem as problem:
        raise CannotRun(f"the S3 settings of the sweep role are needed for the witness: {problem}") from None
    try:
        return _compared(url, WitnessLog(store), charge=charge, reason=reason)
    except OperationalError:
        raise CannotRun("the database does not answer: check --database") from None


@contextmanager
def _held(backup: Path, data: Path) -> Iterator[None]:
    """Refuses while a sluice runs on either directory, and keeps new ones out."""
    elsewhere = [n for n in ("DATABASE_URL", "S3_ENDPOINT") if os.environ.get(f"SLUICE_{n}")]
    if elsewhere:
        raise CannotRun(
            f"SLUICE_{elsewhere[0]} names a server outside the data directory: restore it there, then use "
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
    """The state of the backup, with the witness that the site has now."""
    old, present = data_directory.read(backup), data_directory.read(data)
    if "s3_internal" not in old:
        raise CannotRun(f"{backup} is not a copy of a data directory: it has no state.json of one")
    site = data_directory.site_of(old)
    if "s3_internal" in present and data_directory.site_of(present) != site:
        raise CannotRun(f"{backup} is a backup of another site than {data}: choose another --data")
    known = witness or present.get("witness") or old.get("witness") or data_directory.default_witness(site)
    return old | {"witness": str(known)}


def _copy(backup: Path, copy: Path, state: Json) -> None:
    shutil.rmtree(copy, ignore_errors=True)  # of an attempt that was cut off
    try:
        shutil.copytree(backup, copy, symlinks=True)
    except (OSError, shutil.Error):
        raise CannotRun(
            f"{backup} could not be copied to {copy}: see that there is room and that you may read it all"
        ) from None
    data_directory.save(copy, state)


def _compared_in(copy: Path, *, charge: bool, reason: str) -> Json:
    stack = Stack(copy)
    try:
        stack.start_servers()
        stack.prepare()
        log = WitnessLog(DirectoryWitness(Path(stack.state["witness"])))
        return _compared(stack.owner_url, log, charge=charge, reason=reason)
    finally:
        stack.stop()


def _compared(url: str, log: WitnessLog, *, charge: bool, reason: str) -> Json:
    """Compares a database with the witness and, if asked to, charges the difference.

    The witness is only read: the sweeper appends when the restored site runs.
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
            found = differences(session, log)
            _refuse_altered(found)
            told: Json = {
                "restored": charge or not found,
                "charged": charge,
                "accounts": [_difference(session, id, seen) for id, seen in sorted(found.items())],
            }
            if told["restored"]:
                charge_lost(session, found, Move(actor="restore", reason=f"behind its witness: {reason}"))
                # The backup's own comparison is old: nothing is granted before the sweeper compares again.
                session.execute(update(Witness).values(acknowledged=log.generation, checked_at=None))
                session.commit()
        return told
    except (OSError, WitnessDamaged, BotoCoreError, ClientError) as problem:
        raise CannotRun(
            f"the witness cannot be read ({problem}): see that it is there and readable"
        ) from None
    except Problem as problem:
        raise CannotRun(f"{problem.title}: {problem.detail}") from None
    finally:
        engine.dispose()


def _refuse_altered(found: Json) -> None:
    altered = [id for id, one in found.items() if one["reason"] == "altered"]
    if altered:
        due = "; ".join(
            f"{id}: capacity {found[id]['capacity']}, spent {found[id]['spent']}" for id in altered
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


def show(told: Json) -> None:
    out = output()
    if told["accounts"]:
        costs = ("spent_in_backup", "spent_by_witness", "charge")
        print_table(
            "account",
            "in the backup",
            *(name.replace("_", " ") for name in costs),
            rows=(
                (
                    one["account"],
                    "yes" if one["in_backup"] else "no",
                    *(f"{one[name] / 1e9:.9f}" for name in costs),
                )
                for one in told["accounts"]
            ),
        )
    if not told["restored"]:
        out.print(
            "Nothing was changed: budget was spent after this backup was taken. With --charge the backup is "
            "restored and that is charged; jobs that still held budget end as lost.",
        )
        return
    if told.get("put_aside"):
        out.print(f"The data directory used so far is now {told['put_aside']}", soft_wrap=True)
    if told.get("data"):
        out.print(f"Restored. Start it with: sluice up --data {told['data']}", soft_wrap=True)
    else:
        out.print("The database agrees with the witness. Start the services.")
