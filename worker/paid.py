"""What the ledger says a job paid, read from rows that were verified first.

Guarantee: nothing is stated, opened or signed on the word of an account whose rows do not follow from each
other, or grant more than its budget holds. docs/guarantees.md#releases
"""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from core import ledger, log
from core.faults import Failure, Fault
from core.tables import Account, Entry, Job
from sluice.privacy.account import cost_as_epsilon
from sluice.privacy.accountant import Accountant
from sluice.privacy.events import Composition, Event, from_dict
from sluice.privacy.problems import Problem
from sluice.privacy.relation import Relation
from sluice.release import attest, owners

_log = log.get("paid")


@dataclass(frozen=True, kw_only=True)
class Paid:
    """What a job cost one account; of a relay, all that the account paid for on the way.

    `total` is the cost of everything the account had promised or spent up to and including row `entry`.
    """

    account: Account
    entry: Entry
    cost: int
    total: int
    event: Event

    def statement(self) -> dict[str, Any]:
        """privacy.json. Epsilons are read from the events here, not taken from anybody's word."""
        account, relation = self.account, Relation(self.account.relation)
        readings = {
            each.value: attest.readable(each, event=self.event, delta=account.delta, relation=relation)
            for each in Accountant
        }
        # At the account's own order costs add up also when a plan is chosen after looking at earlier results.
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
        """A statement is about these very rows, and its total is not less than theirs."""
        entry = {"number": self.entry.number, "digest": self.entry.digest.hex()}
        same = stated["account"]["id"] == str(self.account.id) and stated["entry"] == entry
        # A promise given back since the bundle was built makes the total smaller. Older bundles have none.
        total = stated["total"]["cost"] if "total" in stated else self.total
        return bool(same and stated["cost"] == self.cost and total >= self.total)


def all_paid(session: Session, job: Job) -> list[Paid]:
    """What every owner paid, the job's own account first: of a relay, all jobs that it goes on from count."""
    by_account: dict[uuid.UUID, list[Job]] = {}
    last: Job | None = job
    while last is not None:
        by_account.setdefault(last.account_id, []).append(last)
        last = session.get_one(Job, last.after_id) if last.after_id else None
    accounts = [verified(session, id) for id in by_account]
    # Epsilons at different deltas or under different relations can be neither compared nor added.
    if len({(account.relation, account.delta) for account in accounts}) > 1:
        raise Failure(Fault.UNFIT_RELAY)
    return [_paid(session, account, by_account[account.id]) for account in accounts]


def require_stated(paid: list[Paid], privacy: Mapping[str, Any]) -> None:
    """What is about to be signed is what the ledger says now."""
    stated = owners.of(privacy)
    if len(paid) != len(stated) or not all(map(Paid.is_stated, paid, stated)):
        raise Failure(Fault.ACCOUNTING_MISMATCH)


def verified(session: Session, account_id: uuid.UUID) -> Account:
    """The account, if its whole chain of rows, its balance and its capacity hold."""
    account = session.get_one(Account, account_id)
    broken = ledger.verify(session, account)
    if broken is not None:
        _log.error("ledger_broken", account_id=str(account_id), row=broken.number, why=broken.why)
        raise Failure(Fault.LEDGER_BROKEN)
    return account


def require_reserved(account: Account, entry: Entry | None, event: Event) -> None:
    """The ledger's own row reserved this event, at no less than it costs."""
    try:
        paid = entry is not None and from_dict(entry.event) == event
        paid = paid and ledger.price(event, account) <= entry.cost
    except Problem:
        paid = False
    if not paid:
        raise Failure(Fault.ACCOUNTING_MISMATCH)


def _paid(session: Session, account: Account, jobs: list[Job]) -> Paid:
    """The rows that paid for jobs of one account, if they did pay for what these did, and for good."""
    rows = select(Entry).where(Entry.account_id == account.id, Entry.kind != "grant").order_by(Entry.number)
    entries = list(session.scalars(rows))
    reserves = []
    for job in jobs:
        mine = {entry.kind: entry for entry in entries if entry.job_id == job.id}
        if job.state != "trained" or set(mine) != {"reserve", "settle"}:
            raise Failure(Fault.NOT_SETTLED)
        require_reserved(account, mine["reserve"], from_dict(job.event))
        reserves.append(mine["reserve"])
    reserves.sort(key=lambda each: each.number)
    last, paid_for = reserves[-1], tuple(from_dict(each.event) for each in reserves)
    given_back = {each.job_id for each in entries if each.kind == "void"}
    # A settle without a job is what a restored backup had forgotten.
    total = sum(
        each.cost
        for each in entries
        if each.number <= last.number
        and (each.job_id is None or (each.kind == "reserve" and each.job_id not in given_back))
    )
    return Paid(
        account=account, entry=last, cost=sum(each.cost for each in reserves), total=total,
        event=paid_for[0] if len(paid_for) == 1 else Composition(events=paid_for),
    )  # fmt: skip
