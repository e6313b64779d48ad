"""What a job was charged, read from ledger rows that are verified first.

Guarantee: nothing is stated, opened or signed for an account whose hash chain does not verify or whose rows
grant more than its budget. docs/guarantees.md#releases
"""

import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from core import ledger, log
from core.faults import Failure, Fault
from core.tables import Account, Entry, Job, JobState
from sluice.privacy.account import cost_as_epsilon
from sluice.privacy.accountant import Accountant
from sluice.privacy.events import Composition, Event, from_dict
from sluice.privacy.problems import Problem
from sluice.privacy.relation import Relation
from sluice.release import owners
from sluice.release.verify import readable

_log = log.get("charges")


@dataclass(frozen=True, kw_only=True)
class Charge:
    """What a job cost one account; for a relay, the sum of all its jobs on that account.

    `total` is the cost of everything the account had reserved or spent up to and including row `entry`.
    """

    account: Account
    entry: Entry
    cost: int
    total: int
    event: Event

    def statement(self) -> dict[str, Any]:
        """The content of privacy.json. Epsilons are computed from the events here."""
        account, relation = self.account, Relation(self.account.relation)
        readings = {
            accountant.value: readable(accountant, event=self.event, delta=account.delta, relation=relation)
            for accountant in Accountant
        }
        # At the account's fixed order costs add up also when a plan is chosen after seeing earlier results.
        total = cost_as_epsilon(self.total, delta=account.delta, order=account.order)
        return {
            "unit": "one record", "relation": relation.value, "delta": account.delta,
            "event": self.event.to_dict(), "cost": self.cost, "epsilon": readings,
            "total": {"cost": self.total, "epsilon": total},
            "account": {
                "id": str(account.id), "epsilon": account.epsilon, "delta": account.delta,
                "order": account.order,
            },
            "entry": {"number": self.entry.number, "digest": self.entry.digest.hex()},
            "head": {"number": account.moves, "digest": account.head.hex()},
        }  # fmt: skip

    def is_stated(self, stated: Mapping[str, Any]) -> bool:
        """Whether a statement names these ledger rows, and a total that is not below theirs."""
        entry = {"number": self.entry.number, "digest": self.entry.digest.hex()}
        same = stated["account"]["id"] == str(self.account.id) and stated["entry"] == entry
        # A reserve voided since the bundle was built makes the total smaller. Older bundles state none.
        total = stated["total"]["cost"] if "total" in stated else self.total
        return bool(same and stated["cost"] == self.cost and total >= self.total)


def charges_of(session: Session, job: Job) -> list[Charge]:
    """The charge of every owner, the job's own account first. A relay counts all jobs it continues from."""
    by_account: dict[uuid.UUID, list[Job]] = {}
    last: Job | None = job
    while last is not None:
        by_account.setdefault(last.account_id, []).append(last)
        last = session.get_one(Job, last.after_id) if last.after_id else None
    accounts = [verified_account(session, id) for id in by_account]
    # Epsilons at different deltas or relations can be neither compared nor added.
    if len({(account.relation, account.delta) for account in accounts}) > 1:
        raise Failure(Fault.UNFIT_RELAY)
    return [_charge(session, account, by_account[account.id]) for account in accounts]


def require_stated(charges: list[Charge], privacy: Mapping[str, Any]) -> None:
    """Refuses to sign a statement that differs from the ledger as it is now."""
    stated = owners.of(privacy)
    if len(charges) != len(stated) or not all(map(Charge.is_stated, charges, stated)):
        raise Failure(Fault.ACCOUNTING_MISMATCH)


def verified_account(session: Session, account_id: uuid.UUID) -> Account:
    """The account, if its hash chain, balance and capacity verify."""
    account = session.get_one(Account, account_id)
    broken = ledger.verify(session, account)
    if broken is not None:
        _log.error("ledger_broken", account_id=str(account_id), row=broken.number, why=broken.why)
        raise Failure(Fault.LEDGER_BROKEN)
    return account


def require_reserved(account: Account, entry: Entry | None, event: Event) -> None:
    """Requires a ledger row that reserved this event at no less than its price."""
    with suppress(Problem):
        if entry and from_dict(entry.event) == event and ledger.price(event, account) <= entry.cost:
            return
    raise Failure(Fault.ACCOUNTING_MISMATCH)


def _charge(session: Session, account: Account, jobs: list[Job]) -> Charge:
    """The sum of the settled charges of jobs on one account; each must be for the job's own event."""
    rows = select(Entry).where(Entry.account_id == account.id, Entry.kind != "grant").order_by(Entry.number)
    entries = list(session.scalars(rows))
    reserves = []
    for job in jobs:
        by_kind = {entry.kind: entry for entry in entries if entry.job_id == job.id}
        if job.state != JobState.TRAINED or set(by_kind) != {"reserve", "settle"}:
            raise Failure(Fault.NOT_SETTLED)
        require_reserved(account, by_kind["reserve"], from_dict(job.event))
        reserves.append(by_kind["reserve"])
    reserves.sort(key=lambda entry: entry.number)
    last, events = reserves[-1], tuple(from_dict(entry.event) for entry in reserves)
    voided = {entry.job_id for entry in entries if entry.kind == "void"}
    # A settle without a job charges what a restored backup had lost.
    total = sum(
        entry.cost
        for entry in entries
        if entry.number <= last.number
        and (entry.job_id is None or (entry.kind == "reserve" and entry.job_id not in voided))
    )
    return Charge(
        account=account, entry=last, cost=sum(entry.cost for entry in reserves), total=total,
        event=events[0] if len(events) == 1 else Composition(events=events),
    )  # fmt: skip
