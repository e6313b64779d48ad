"""Small jobs on a real ledger, for the tests beside this file."""

import math
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from fractions import Fraction

from sqlalchemy import Connection, Engine, func, update
from sqlalchemy.orm import Session

from core import ledger
from core.database import connect
from core.people import Role, add_person
from core.tables import Account, Dataset, Grant, Job
from sluice.privacy.events import Gaussian, Query
from sluice.privacy.relation import Relation

MOVE = ledger.Move(actor="someone", reason="a test")
ORDER, DELTA = 8, 1e-5
READINGS = {"renyi": 0.25, "pld": 0.125, "note": "kept as given"}


def gaussian(noise: float) -> Gaussian:
    return Gaussian(query=Query.SUM, bound=1.0, noise_stddev=noise)


def closed_cost(noise: float) -> int:
    """order / (2 noise²) in 1e-9 units, rounded up: what one release costs, by the textbook."""
    return math.ceil(Fraction(ORDER) / (2 * Fraction(noise) ** 2) * 10**9)


def ready_dataset(owner: uuid.UUID, account: Account) -> Dataset:
    return Dataset(
        id=uuid.uuid4(), owner_id=owner, name="digits", schema={}, nominal_size=1000,
        relation=account.relation, epsilon=account.epsilon, delta=account.delta, order=account.order,
        account_id=account.id, state="ready", object_key=uuid.uuid4().hex, size=1, sha256=bytes(32),
        sealed_at=datetime.now(UTC),
    )  # fmt: skip


class Books:
    """One database with two curators in it, and a dataset for each account, opened as any role."""

    def __init__(self, url: Callable[[str], str], *, alone: bool = False) -> None:
        self._url, self._alone = url, alone
        self._engines: dict[str, Engine] = {}
        self._lines: dict[str, Connection] = {}
        self._datasets: dict[uuid.UUID, uuid.UUID] = {}
        with self.session("owner") as session:
            people = [
                add_person(session, name=f"curator {uuid.uuid4()}", role=Role.CURATOR) for _ in range(2)
            ]
            self.person, self.colleague = (person.id for person in people)

    def engine(self, role: str = "service", pool_size: int = 5) -> Engine:
        if role not in self._engines:
            self._engines[role] = connect(self._url(role), pool_size=pool_size)
        return self._engines[role]

    def close(self) -> None:
        for line in self._lines.values():
            line.close()
        self._lines.clear()
        for engine in self._engines.values():
            engine.dispose()
        self._engines.clear()

    @contextmanager
    def session(self, role: str = "service") -> Iterator[Session]:
        """One transaction of a role. Who is alone keeps one connection per role, which is quicker."""
        bind: Engine | Connection = self.engine(role)
        if self._alone:
            bind = self._lines[role] = self._lines.get(role) or self.engine(role).connect()
        with Session(bind, expire_on_commit=False) as session, session.begin():
            yield session

    def account(self, epsilon: float = 4.0) -> Account:
        with self.session("train") as session:
            return ledger.open_account(
                session, relation=Relation.ADD_REMOVE, epsilon=epsilon, delta=DELTA, order=ORDER, move=MOVE
            )

    def dataset(self, account: Account) -> uuid.UUID:
        """A ready dataset of this account, made when it is first asked for."""
        if account.id not in self._datasets:
            with self.session("owner") as session:
                dataset = ready_dataset(self.person, account)
                session.add(dataset)
            self._datasets[account.id] = dataset.id
        return self._datasets[account.id]

    def raise_budget(self, account: Account, epsilon: float) -> None:
        """What the service does when a second person confirms a larger budget."""
        with self.session() as session:
            grant = Grant(
                id=uuid.uuid4(), account_id=account.id, epsilon=epsilon, reason="a test",
                proposed_by=self.person, decided_by=self.colleague, state="confirmed",
            )  # fmt: skip
            session.add(grant)
            session.flush()
            ledger.raise_budget(session, account, epsilon=epsilon, move=MOVE)

    def add_job(self, session: Session, account: Account, noise: float, *, id: uuid.UUID, cost: int) -> None:
        job = Job(
            id=id, dataset_id=self.dataset(account), account_id=account.id, owner_id=self.person, plan={},
            event=gaussian(noise).to_dict(), cost=cost, readings=READINGS, state="queued", steps=1,
        )  # fmt: skip
        session.add(job)

    def reserve(self, account: Account, noise: float, *, job: uuid.UUID | None = None) -> uuid.UUID:
        """What the service does to start a job: the promise and the job, in one transaction."""
        id = job or uuid.uuid4()
        self.dataset(account)
        with self.session() as session:
            cost = ledger.reserve(session, account, gaussian(noise), job=id, readings=READINGS, move=MOVE)
            self.add_job(session, account, noise, id=id, cost=cost)
        return id

    def open(self, job: uuid.UUID) -> None:
        """What a worker does before it reads."""
        with self.session("train") as session:
            session.execute(update(Job).where(Job.id == job).values(opened_at=func.clock_timestamp()))

    def settle(self, account: Account, job: uuid.UUID) -> None:
        with self.session("train") as session:
            ledger.settle(session, account.id, job=job, move=MOVE)

    def void(self, account: Account, job: uuid.UUID) -> None:
        with self.session() as session:
            ledger.void(session, account.id, job=job, move=MOVE)

    def now(self, account: Account) -> Account:
        with self.session() as session:
            return session.get_one(Account, account.id)

    def broken(self, account: Account, role: str = "service") -> object:
        with self.session(role) as session:
            return ledger.verify(session, account)
