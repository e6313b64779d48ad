"""Small jobs on a real ledger, for the tests beside this file."""

import math
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction

from sqlalchemy import Connection, Engine, func, update
from sqlalchemy.orm import Session

from core import ledger
from core.database import connect
from core.people import Role, add_person
from core.tables import Account, Dataset, Job
from privacy.events import Gaussian, Query
from privacy.relation import Relation

MOVE = ledger.Move(actor="someone", reason="a test")
ORDER, DELTA = 8, 1e-5
READINGS = {"renyi": 0.25, "pld": 0.125, "note": "kept as given"}


def gaussian(noise: float) -> Gaussian:
    return Gaussian(query=Query.SUM, bound=1.0, noise_stddev=noise)


def closed_cost(noise: float) -> int:
    """order / (2 noise²) in 1e-9 units, rounded up: what one release costs, by the textbook."""
    return math.ceil(Fraction(ORDER) / (2 * Fraction(noise) ** 2) * 10**9)


class Books:
    """One database with a curator and a dataset in it, opened as any role."""

    def __init__(self, url: Callable[[str], str], *, alone: bool = False) -> None:
        self._url, self._alone = url, alone
        self._engines: dict[str, Engine] = {}
        self._lines: dict[str, Connection] = {}
        with self.session() as session:
            person = add_person(session, name=f"curator {uuid.uuid4()}", role=Role.CURATOR)
            dataset = Dataset(
                id=uuid.uuid4(), owner_id=person.id, name="digits", schema={}, nominal_size=1000,
                relation="add_remove", epsilon=1.0, delta=DELTA, order=ORDER, state="draft",
                object_key=uuid.uuid4().hex,
            )  # fmt: skip
            session.add(dataset)
            self.person, self.dataset = person.id, dataset.id

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
        with self.session() as session:
            return ledger.open_account(
                session, relation=Relation.ADD_REMOVE, epsilon=epsilon, delta=DELTA, order=ORDER, move=MOVE
            )

    def add_job(self, session: Session, account: Account, noise: float, *, id: uuid.UUID, cost: int) -> None:
        job = Job(
            id=id, dataset_id=self.dataset, account_id=account.id, owner_id=self.person, plan={},
            event=gaussian(noise).to_dict(), cost=cost, readings=READINGS, state="queued", steps=1,
        )  # fmt: skip
        session.add(job)

    def reserve(self, account: Account, noise: float, *, job: uuid.UUID | None = None) -> uuid.UUID:
        """What the service does to start a job: the promise and the job, in one transaction."""
        id = job or uuid.uuid4()
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
