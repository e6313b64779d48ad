"""What a plan costs one account. Arithmetic only: no session is open and no lock is held."""

from dataclasses import asdict, dataclass
from functools import lru_cache

from core.ledger import price
from core.tables import Account
from service.jobs.schemas import Published, QuoteView, Readings, Remaining
from sluice.methods import Plan, Target
from sluice.methods.base import largest_epsilon_that_fits
from sluice.privacy.account import left_as_epsilon
from sluice.privacy.accountant import Accountant, epsilon
from sluice.privacy.events import Event
from sluice.privacy.problems import Problem as PrivacyProblem
from sluice.privacy.problems import TooCostlyToAccount
from sluice.privacy.relation import Relation


@dataclass(frozen=True, kw_only=True)
class Priced:
    plan: Plan
    event: Event
    cost: int
    readings: Readings


def priced(account: Account, plan: Plan, target: Target | None) -> Priced:
    """The plan, with the least noise for the target if there is one, and what it costs this account."""
    if target is not None:
        plan = calibrated(plan, target)
    event = plan.event()
    readings = read((event,), delta=account.delta, relation=Relation(account.relation))
    return Priced(plan=plan, event=event, cost=price(event, account), readings=readings)


@lru_cache(maxsize=1024)
def calibrated(plan: Plan, target: Target) -> Plan:
    return plan.calibrated(target)


@lru_cache(maxsize=1024)
def read(events: tuple[Event, ...], *, delta: float, relation: Relation) -> Readings:
    def by(accountant: Accountant) -> float | None:
        try:
            return epsilon(events, delta=delta, accountant=accountant, relation=relation).epsilon
        except TooCostlyToAccount:
            return None

    return Readings(renyi=by(Accountant.RENYI), pld=by(Accountant.PLD))


def remaining(account: Account, cost: int) -> Remaining:
    return Remaining(cost=cost, epsilon=left_as_epsilon(cost, delta=account.delta, order=account.order))


@lru_cache(maxsize=1024)
def _largest(plan: Plan, left: int, order: int, delta: float, relation: Relation) -> float | None:
    try:
        return largest_epsilon_that_fits(plan, left, order=order, delta=delta, relation=relation)[0]
    except PrivacyProblem:
        return None


def largest_epsilon(account: Account, plan: Plan, left: int) -> float | None:
    return (
        _largest(plan, left, account.order, account.delta, Relation(account.relation)) if left > 0 else None
    )


def quote(account: Account, paid: tuple[Event, ...], plan: Plan, target: Target | None) -> QuoteView:
    """The price of a plan, and what the account would have left."""
    offer = priced(account, plan, target)
    fits, after = account.left // max(offer.cost, 1), account.left - offer.cost
    published = offer.plan.published_reading(account.delta)
    relation = Relation(account.relation)
    return QuoteView(
        plan=offer.plan.to_dict(),
        event=offer.event.to_dict(),
        relation=relation,
        delta=account.delta,
        order=account.order,
        cost=offer.cost,
        epsilon=offer.readings,
        total_after=read((*paid, offer.event), delta=account.delta, relation=relation),
        left=remaining(account, account.left),
        left_after=remaining(account, after) if after >= 0 else None,
        fits=fits,
        largest_epsilon=None if fits else largest_epsilon(account, offer.plan, account.left),
        published=Published(**asdict(published)) if published else None,
    )
