"""Real API processes on a database of the test's own, with a doorbell nobody answers."""

import secrets
import sys
import urllib.request
import uuid
from contextlib import contextmanager
from datetime import UTC, datetime

import psycopg
from sqlalchemy import func, text, update
from sqlalchemy.orm import Session

from core import ledger
from core.database import connect
from core.people import Role, add_person, invite, redeem
from core.tables import Dataset, Review, Witness
from local.child import Child
from local.ports import free_port
from local.servers import Valkey
from local.state import ROLES
from sluice.privacy.account import cost_as_epsilon
from sluice.privacy.relation import Relation
from tests.conftest import new_database

DELTA, ORDER = 1e-5, 8


@contextmanager
def crowd_database(servers):
    """A new database for many API processes; one such test at a time, since connections are limited."""
    url = servers.owner_url.rsplit("/", 1)[0] + "/postgres"  # the template itself must stay unused
    with psycopg.connect(url, autocommit=True) as admin:
        admin.execute("SELECT pg_advisory_lock(2)")
        with new_database(servers) as url:
            yield url


@contextmanager
def api_processes(count, directory, environment, database):
    """So many `python -m service`, ready to be asked; gives their addresses and process ids."""
    (directory / "log").mkdir()
    children, addresses = [], []
    # A doorbell of their own: what is rung here must not reach the workers of other tests.
    queue = {"ports": [0, free_port()], "queue": {role: secrets.token_urlsafe() for role in ROLES}}
    valkey = Valkey(directory, queue, durable=False)
    own = {"SLUICE_DATABASE_URL": database("service"), "SLUICE_QUEUE_URL": valkey.url("service")}
    try:
        children.append(valkey.child())
        children[0].start()
        for number in range(count):
            port = free_port()
            addresses.append(f"http://127.0.0.1:{port}")
            children.append(
                Child(
                    name=f"service {number}",
                    command=[sys.executable, "-m", "service", "--port", str(port)],
                    log=directory / f"log/service-{number}.log",
                    probe=lambda at=addresses[-1]: urllib.request.urlopen(f"{at}/healthz", timeout=2).close(),
                    environment=environment | own,
                )
            )
            children[-1].start()
        for child in children:
            child.wait_ready(lambda: False)
        yield addresses, [child.process.pid for child in children[1:]]
    finally:
        for child in reversed(children):
            child.stop()


DIGITS = {"kind": "image", "height": 28, "width": 28, "channels": 1, "classes": [*"0123456789"]}


class Site:
    """What an admin and a curator would have set up before, written straight to the tables."""

    def __init__(self, database):
        self.engine = connect(database("owner"))

    def person(self, name, role):
        """A new person's id and the text of a key."""
        with Session(self.engine) as session, session.begin():
            person = add_person(session, name=name, role=Role(role))
            return person.id, redeem(session, invite(session, person, by=None)[1], label="test", days=1)[1]

    def level(self):
        """As if the sweeper had just compared the ledger with its witness."""
        with Session(self.engine) as session, session.begin():
            session.execute(update(Witness).values(checked_at=func.clock_timestamp()))

    def ready_dataset(self, owner, *, capacity, public=False):
        """A checked dataset whose account has room for this cost, or the least bit more."""
        epsilon = cost_as_epsilon(capacity, delta=DELTA, order=ORDER) * (1 + 1e-9)
        with Session(self.engine, expire_on_commit=False) as session, session.begin():
            account = ledger.open_account(
                session,
                relation=Relation.ADD_REMOVE,
                epsilon=epsilon,
                delta=DELTA,
                order=ORDER,
                move=ledger.Move(actor="test", reason="set up"),
            )
            dataset = Dataset(
                id=uuid.uuid4(), owner_id=owner, name="made for a test", schema=DIGITS, nominal_size=1000,
                relation="add_remove", epsilon=epsilon, delta=DELTA, order=ORDER, account_id=account.id,
                state="ready", public=public, object_key=uuid.uuid4().hex, size=1,
                sha256=secrets.token_bytes(32), sealed_at=datetime.now(UTC),
            )  # fmt: skip
            session.add(dataset)
            if public:  # as a second person confirmed it
                officer = add_person(session, name=f"officer-{uuid.uuid4()}", role=Role.ADMIN)
                session.execute(text("SET LOCAL session_replication_role = replica"))
                review = {"decision": "accept", "reason": "public", "decided_by": officer.id}
                session.add(Review(dataset_id=dataset.id, **review))
        return dataset, account
