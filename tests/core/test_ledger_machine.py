"""The ledger beside a model of it that is a few integers, over long random histories."""

import uuid
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import Connection, bindparam, func, select, update
from sqlalchemy.exc import IntegrityError

from core import ledger
from core.errors import Problem
from core.ledger import as_row
from core.tables import Account, Entry, Job
from sluice.privacy.account import capacity
from sluice.release.ledger import fold
from tests.core.ledgers import DELTA, MOVE, ORDER, READINGS, Books, closed_cost, gaussian

MOVES = 50
NOISES = (10.0, 7.0, 5.0, 4.0, 3.0, 2.5, 2.0, 1.5)  # of a budget of 4.0, from a hundredth to most of it
EPSILONS = (4.0, 4.25, 4.5, 5.0, 5.5)

noises = st.sampled_from(NOISES)
NOW = (
    select(Account.capacity, Account.held, Account.settled, Account.moves, Account.epsilon, Account.head)
    .add_columns(*Entry.__table__.columns)
    .join(Entry, Entry.account_id == Account.id)
    .where(Account.id == bindparam("of"))
    .order_by(Entry.number)
)


@dataclass
class Promise:
    id: uuid.UUID
    cost: int
    opened: bool = False
    end: str | None = None


@dataclass
class Model:
    epsilon: float
    capacity: int
    moves: int = 1
    forfeited: int = 0
    promises: list[Promise] = field(default_factory=list)

    def total(self, *ends):
        return sum(promise.cost for promise in self.promises if promise.end in ends)

    @property
    def held(self):
        return self.total(None)

    @property
    def settled(self):
        return self.total("settle") + self.forfeited

    @property
    def left(self):
        return self.capacity - self.held - self.settled


class Ledger(RuleBasedStateMachine):
    books: Books
    other: Account
    eye: Connection
    done: Counter[str]
    jobs = Bundle("jobs")

    @initialize(epsilon=st.sampled_from((4.0, 3.0)))
    def start(self, epsilon):
        self.account = self.books.account(epsilon)
        self.model = Model(epsilon=epsilon, capacity=capacity(epsilon, DELTA, ORDER))
        self.rows, self.left, self.may_rise = [], self.model.capacity, False
        self.steps = -1  # the opening is none

    def attempt(self, what, wanted, action, *problems):
        """Does it, and sees it happen exactly when the model says so."""
        self.done[f"{what} {'done' if wanted else 'refused'}"] += 1
        if wanted:
            action()
            self.model.moves += what != "open"
        else:
            with pytest.raises(problems):
                action()
        return wanted

    @rule(target=jobs, noise=noises)
    def reserve(self, noise):
        cost, id = closed_cost(noise), uuid.uuid4()

        def action():
            self.books.reserve(self.account, noise, job=id)

        if not self.attempt("reserve", cost <= self.model.left, action, ledger.BudgetExceeded):
            return multiple()
        self.model.promises.append(Promise(id, cost))
        return self.model.promises[-1]

    @rule(job=jobs, noise=noises)
    def reserve_for_a_job_that_has_its_promise(self, job, noise):
        def action():
            self.books.reserve(self.account, noise, job=job.id)

        self.attempt("reserve again", False, action, IntegrityError, ledger.BudgetExceeded)

    @rule(job=jobs)
    def open(self, job):
        wanted = job.end is None and not job.opened
        if self.attempt("open", wanted, lambda: self.books.open(job.id), IntegrityError):
            job.opened = True

    @rule(job=jobs)
    def settle(self, job):
        def action():
            self.books.settle(self.account, job.id)

        if self.attempt("settle", job.end is None, action, ledger.NothingReserved):
            job.end = "settle"

    @rule(job=jobs)
    def void(self, job):
        def action():
            self.books.void(self.account, job.id)

        wanted = job.end is None and not job.opened
        if self.attempt("void", wanted, action, ledger.NothingReserved, ledger.RecordsOpened):
            job.end, self.may_rise = "void", True

    @rule(job=jobs)
    def cancel(self, job):
        """As the service does: a queued job is taken off the queue and its promise given back at once."""
        if job.end is not None:
            return
        with self.books.session() as session:
            queued = (Job.id == job.id, Job.state == "queued", Job.opened_at.is_(None))
            off = update(Job).where(*queued).values(state="cancelled", finished_at=func.now())
            taken = session.execute(off.returning(Job.id)).one_or_none() is not None
            assert taken is not job.opened
            if taken:
                ledger.void(session, self.account.id, job=job.id, move=MOVE)
                self.done["cancel done"] += 1
                self.model.moves += 1
                job.end, self.may_rise = "void", True

    @precondition(lambda self: len(self.model.promises) >= 3)
    @rule(epsilon=st.sampled_from(EPSILONS))
    def raise_budget(self, epsilon):
        def action():
            self.books.raise_budget(self.account, epsilon)

        if self.attempt("raise", epsilon > self.model.epsilon, action, ledger.BudgetNotRaised):
            self.model.epsilon, self.may_rise = epsilon, True
            self.model.capacity = capacity(epsilon, DELTA, ORDER)

    @rule(job=jobs, noise=noises)
    def a_crash_before_the_commit_leaves_nothing(self, job, noise):
        self.done["crash"] += 1
        with self.books.session() as session:
            with suppress(Problem):
                event = gaussian(noise)
                ledger.reserve(session, self.account, event, job=uuid.uuid4(), readings=READINGS, move=MOVE)
            with suppress(Problem):
                ledger.void(session, self.account.id, job=job.id, move=MOVE)
            session.rollback()

    @rule(job=jobs, move=st.sampled_from((ledger.settle, ledger.void)))
    def another_account_knows_nothing_of_a_job(self, job, move):
        def action():
            with self.books.session() as session:
                move(session, self.other.id, job=job.id, move=MOVE)

        self.attempt("elsewhere", False, action, ledger.NothingReserved)

    @precondition(lambda self: len(self.model.promises) >= 6 and not self.model.forfeited)
    @rule(cost=st.integers(min_value=-5, max_value=2_000_000_000))
    def forfeit(self, cost):
        with self.books.session() as session:
            account = session.get_one(Account, self.account.id)
            ended = ledger.forfeit(session, account, cost=cost, move=MOVE)
        promised = [promise for promise in self.model.promises if promise.end is None]
        assert set(ended) == {promise.id for promise in promised}
        for promise in promised:
            promise.end = "settle"
        self.model.forfeited += max(0, min(cost, self.model.left))
        self.model.moves += len(promised) + 1
        self.done["forfeit done"] += 1

    @invariant()
    def the_ledger_says_what_the_model_says(self):
        model = self.model
        found = self.eye.execute(NOW, {"of": self.account.id}).all()
        account, rows = found[0], [as_row(row) for row in found]
        balance = (account.capacity, account.held, account.settled)
        assert (*balance, account.moves, account.epsilon) == (
            model.capacity, model.held, model.settled, model.moves, model.epsilon
        )  # fmt: skip
        assert account.held + account.settled <= account.capacity, "I1"

        def total(*kinds, of=lambda job: True):
            return sum(row["cost"] for row in rows if row["kind"] in kinds and of(row["job"]))

        held = total("reserve") - total("settle", "void", of=bool)
        assert balance == (total("grant"), held, total("settle")), "I2"
        ends = [row["job"] for row in rows if row["kind"] in ("settle", "void") and row["job"]]
        assert len(ends) == len(set(ends)), "I3"
        assert fold(rows)[1:] == (account.head, account.moves, None), "I4: the chain holds"
        assert rows[: len(self.rows)] == self.rows, "I4: what was written stays"
        left = account.capacity - account.held - account.settled
        assert self.may_rise or left <= self.left, "I7"
        self.rows, self.left, self.may_rise = rows, left, False
        self.steps += 1

    def teardown(self):
        if hasattr(self, "account"):
            assert self.books.broken(self.account) is None
            self.done["histories"] += 1
            self.done["moves"] += self.steps
            self.done["whole"] += self.steps >= MOVES


@pytest.mark.parametrize("runs", [40, pytest.param(200, marks=pytest.mark.long)])
def test_long_random_histories_follow_the_model(runs, database):
    done: Counter[str] = Counter()
    books = Books(database, alone=True)
    try:
        eye = books.engine("owner").connect().execution_options(isolation_level="AUTOCOMMIT")
        has = {"books": books, "done": done, "other": books.account(), "eye": eye}
        machine = type("Machine", (Ledger,), has)
        while done["whole"] < runs:  # Hypothesis cuts some histories short: they do not count
            run_state_machine_as_test(
                machine,
                settings=settings(
                    max_examples=runs + 10 - done["whole"], stateful_step_count=MOVES + 1, deadline=None,
                    database=None, suppress_health_check=list(HealthCheck),
                ),
            )  # fmt: skip
    finally:
        eye.close()
        books.close()
    print(done)  # noqa: T201 (shown on request)
    # A machine that only ever did easy things would prove nothing.
    for what in ("reserve", "open", "settle", "void", "raise"):
        assert min(done[f"{what} done"], done[f"{what} refused"]) >= runs / 4, done
    assert min(done["cancel done"], done["forfeit done"], done["crash"]) >= runs / 20, done
