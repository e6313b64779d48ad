"""A message changes nothing unless a row waits: every task, for rows of every kind in every state."""

import json
import os
import uuid
from datetime import UTC, datetime

import psycopg
import pytest
from psycopg.types.json import Jsonb

from core.database import connect
from core.queue import celery_app
from sluice.release.statement import SeedSigner
from worker import publish, train
from worker.checking import Checker
from worker.publish import Publisher
from worker.training import Trainer

DATASETS = ("draft", "uploading", "held", "ready", "rejected", "deleted")
JOBS = ("running", "trained", "failed", "cancelled")
RELEASES = (
    "building", "in_review", "approved", "publishing", "published", "superseded", "withdrawing", "withdrawn",
    "discarded", "failed",
)  # fmt: skip
TABLES = ("datasets", "jobs", "releases", "entries", "accounts", "revocations")


@pytest.fixture
def owner(database):
    """May write any row, without triggers."""
    with psycopg.connect(database("owner"), autocommit=True) as connection:
        connection.execute("SET session_replication_role = replica")
        yield connection


def add(owner, table, **values):
    id = uuid.uuid4()
    columns = {"id": id, **values}
    names, marks = ", ".join(columns), ", ".join(["%s"] * len(columns))
    owner.execute(f"INSERT INTO {table} ({names}) VALUES ({marks})", list(columns.values()))
    return id


def add_rows(owner):
    """A row in every state in which no worker has anything to do; whoever is at work has a lease."""
    now, any_id, none = datetime.now(UTC), uuid.uuid4(), Jsonb({})
    leases = dict.fromkeys(
        ("running", "building", "publishing", "withdrawing"), datetime(2099, 1, 1, tzinfo=UTC)
    )
    for state in DATASETS:
        add(
            owner, "datasets", state=state, owner_id=any_id, name="d", schema=none, nominal_size=1,
            relation="add_remove", epsilon=1.0, delta=1e-5, renyi_order=4, object_key=uuid.uuid4().hex,
            size=1, sha256=bytes(32), sealed_at=now, account_id=any_id,
        )  # fmt: skip
    for state in JOBS:
        add(
            owner, "jobs", state=state, owner_id=any_id, dataset_id=any_id, account_id=any_id, plan=none,
            event=none, cost=1, readings=none, steps=1, lease_until=leases.get(state),
        )  # fmt: skip
    for state in RELEASES:
        add(
            owner, "releases", state=state, job_id=any_id, author_id=any_id, name="r", note="", licence="x",
            count=1, seed=1, formats=["npz"], audience="everyone", reviewers=2, lease_until=leases.get(state),
            digest=bytes(32), files=Jsonb([]), manifest=none, privacy=none, attestation="{}",
            published_at=now,
        )  # fmt: skip


@pytest.fixture
def tasks(database, servers):
    """The tasks of both kinds of workers. They have no stores: whoever opens one fails."""
    queue = {role: servers.environments[role]["SLUICE_QUEUE_URL"] for role in ("train", "publish")}
    engines = [connect(database("train")), connect(database("publish"))]
    trainer = Trainer(engine=engines[0], private=None, keys=None, vault=None, witness=None)
    checker = Checker(engine=engines[0], private=None, keys=None, registry=None, key=bytes(32))
    # The list of withdrawn releases is of today, signed with the key of another publisher.
    other, publisher = (
        Publisher(engine=engines[1], bundles=None, public=None, signer=SeedSigner(os.urandom(32)))
        for _ in range(2)
    )
    other.start()
    apps = [celery_app("train", queue["train"]), celery_app("publish", queue["publish"])]
    train.register(apps[0], trainer, checker)
    publish.register(apps[1], publisher)
    yield [task for app in apps for name, task in app.tasks.items() if not name.startswith("celery.")]
    for engine in engines:
        engine.dispose()


def everything(owner):
    rows = {}
    for table in TABLES:
        rows[table] = owner.execute(f"SELECT to_jsonb(t) FROM {table} AS t ORDER BY 1").fetchall()
    return json.dumps(rows, sort_keys=True)


def test_no_message_restarts_what_does_not_wait(tasks, owner):
    add_rows(owner)
    before = everything(owner)
    ids = [id for table in TABLES[:3] for (id,) in owner.execute(f"SELECT id FROM {table}").fetchall()]
    assert len(ids) == len(DATASETS) + len(JOBS) + len(RELEASES)
    assert {task.name for task in tasks} == {"train.run", "train.check", "publish.run", "publish.revocations"}
    for task in tasks:
        for id in [*ids, uuid.uuid4()]:
            task(str(id))
            task(str(id), "more", than="an id")
        for bad in (None, 7, "", [], {}, "x" * 10_000, "\x00"):
            task(bad)
    assert everything(owner) == before
