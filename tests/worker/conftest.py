"""A stack of servers for the tests of workers alone: it has one witness, for one database."""

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import uuid
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import psycopg
import pytest
from psycopg.types.json import Jsonb
from sqlalchemy import select, text
from sqlalchemy.orm import Session

import core.witness
from core import ledger
from core.database import connect
from core.ledger import Move
from core.settings import SweepSettings, TrainSettings
from core.stores import s3
from core.stores.private import Vault
from core.stores.witness import witness_store
from core.tables import Account, Dataset, Entry, Job, Person, Review
from core.unwrap import FileKeys
from core.witness import WitnessLog
from local.stack import Stack
from sluice.envelope import Stream, decrypt_wrapped, new_key, upload_context
from sluice.methods import Target, plan_from_dict
from sluice.privacy.relation import Relation
from sluice.release.chain import GENESIS
from sluice.release.ledger import Balance, digest
from worker import sweep
from worker.uploads import data_key

SCHEMA = {"kind": "image", "height": 8, "width": 8, "channels": 1, "classes": ["dark", "light"]}
DPGAN = {"kind": "dpgan", "sampling_prob": 0.05, "expected_batch": 10}
ADAPT = {
    "kind": "adapt", "records": 200, "batch": 20, "directions": 4, "dim": 6, "steps": 5,
    "recipe": {"features": 4, "source_steps": 3},
}  # fmt: skip
GSWGAN = {
    "kind": "gswgan", "parts": 4, "panel": 4, "images": 4, "steps": 3,
    "recipe": {
        "frequencies": 4, "discriminator_features": 4, "generator_features": 8, "latent": 4,
        "first_steps": 2, "part_batch": 4,
    },
}  # fmt: skip


def upload(*, labelled=True, seed=None):
    """Two classes that any generator can tell apart, as the bytes of an npz. Other people with every call."""
    labels = np.arange(200) % 2
    people = np.random.default_rng(seed).integers(-30, 31, (200, 8, 8))
    pixels = np.where(labels[:, None, None] == 1, 220, 30) + people
    return npz(pixels, labels if labelled else None)


def npz(pixels, labels=None, *, compressed=False, reverse=False):
    body = io.BytesIO()
    held = {"x": np.asarray(pixels).astype(np.uint8)} | ({} if labels is None else {"y": labels})
    save = np.savez_compressed if compressed else np.savez
    save(body, **dict(sorted(held.items(), reverse=reverse)))
    return body.getvalue()


def _settings(kind, environment):
    return kind(**{name.removeprefix("SLUICE_").lower(): value for name, value in environment.items()})


class Place:
    """The servers and what a service and a sweeper would do on them."""

    def __init__(self, stack):
        self.stack = stack
        self.engines = {
            role: connect(stack.environment(role)["SLUICE_DATABASE_URL"])
            for role in ("service", "train", "sweep")
        } | {"owner": connect(stack.owner_url)}
        self.train_settings = _settings(TrainSettings, stack.environment("train"))
        self.keys = FileKeys(stack.state["upload_key"])
        self.witness = WitnessLog(witness_store(_settings(SweepSettings, stack.environment("sweep"))))
        self.admin = s3.client(endpoint=stack.s3_endpoint, region="us-east-1", **stack.state["s3"]["admin"])
        self.person, self.officer = uuid.uuid4(), uuid.uuid4()
        self.spoiled = set()
        with Session(self.engines["owner"]) as session, session.begin():
            session.add(Person(id=self.person, name=f"carla-{self.person}", role="curator"))
            session.add(Person(id=self.officer, name=f"otto-{self.officer}", role="admin"))

    def keep_witness(self):
        sweep.keep_witness(self.engines["sweep"], self.witness)

    def dataset(
        self,
        *,
        epsilon=1000.0,
        delta=1e-5,
        relation=Relation.ADD_REMOVE,
        state="ready",
        body=None,
        schema=SCHEMA,
        public=False,
        account=None,
        encrypted=True,
    ):
        stored = self.stored(upload() if body is None else body, encrypted=encrypted)
        with Session(self.engines["owner"], expire_on_commit=False) as session, session.begin():
            opened = {"relation": relation, "epsilon": epsilon, "delta": delta, "order": 4}
            account = (
                session.get_one(Account, account)
                if account
                else ledger.open_account(session, **opened, move=Move(actor="carla", reason="test"))
            )
            dataset = Dataset(
                **stored, owner_id=self.person, name="test", schema=schema, nominal_size=200,
                relation=relation, epsilon=epsilon, delta=delta, order=4, account_id=account.id,
                state=state, public=public, sealed_at=account.created_at,
            )  # fmt: skip
            session.add(dataset)
            if public:  # as somebody else confirmed it
                session.flush()
                session.execute(text("SET LOCAL session_replication_role = replica"))
                review = {"decision": "accept", "reason": "public", "decided_by": self.officer}
                session.add(Review(dataset_id=dataset.id, **review))
        return dataset

    def stored(self, body, *, encrypted=True):
        """An upload in the private bucket, and what its row says of it; without a key as from before."""
        id, key, secret = uuid.uuid4(), f"datasets/{uuid.uuid4().hex}", new_key()
        more = {}
        if encrypted:
            body = Stream(secret, upload_context(id)).encrypt(body)
            more = {"key_id": self.keys.public.id, "wrapped_key": self.keys.public.wrap(secret)}
        self.admin.put_object(Bucket="sluice-private", Key=key, Body=body)
        digest = hashlib.sha256(body).digest()
        return {"id": id, "object_key": key, "size": len(body), "sha256": digest, **more}

    def sealed(
        self, body=None, *, schema=SCHEMA, owner=None, epsilon=4.0, relation="add_remove", encrypted=True,
        **more,
    ):  # fmt: skip
        """An upload that waits for its check: no account yet."""
        stored = self.stored(upload() if body is None else body, encrypted=encrypted)
        values = stored | {
            "name": "test", "schema": schema, "nominal_size": 200, "relation": relation, "epsilon": epsilon,
            "delta": 1e-5, "order": 4, "state": "checking", "sealed_at": datetime.now(UTC),
        } | more  # fmt: skip
        with Session(self.engines["owner"], expire_on_commit=False) as session, session.begin():
            dataset = Dataset(owner_id=owner or self.person, **values)
            session.add(dataset)
        return dataset

    def see(self, dataset):
        with Session(self.engines["service"], expire_on_commit=False) as session:
            return session.get_one(Dataset, dataset.id)

    def adaptation(self):
        """A job on images that have no labels, beside public ones that have."""
        target = self.dataset(body=upload(labelled=False), schema=SCHEMA | {"classes": ["unknown"]})
        return self.job(target, of=ADAPT, source_id=self.dataset(public=True).id)

    def job(self, dataset=None, *, steps=6, epsilon=4.0, of=None, **changes):
        dataset = dataset or self.dataset()
        plan = plan_from_dict(of or {**DPGAN, "steps": steps})
        plan = plan.calibrated(
            Target(epsilon=epsilon, delta=1e-5, relation=Relation.ADD_REMOVE, accountant="renyi")
        )
        id = uuid.uuid4()
        with Session(self.engines["service"]) as session, session.begin():
            account = session.get_one(Account, dataset.account_id)
            cost = ledger.reserve(
                session, account, plan.event(), job=id, readings={"renyi": epsilon, "pld": None},
                move=Move(actor="carla", reason="test"),
            )  # fmt: skip
            values = {
                "plan": plan.to_dict(), "event": plan.event().to_dict(), "cost": cost,
                "steps": plan.progress_steps, "readings": {"renyi": epsilon, "pld": None}, "state": "queued",
            } | changes  # fmt: skip
            session.add(
                Job(id=id, dataset_id=dataset.id, account_id=account.id, owner_id=self.person, **values)
            )
        self.keep_witness()
        return id

    def look(self, job):
        with Session(self.engines["service"], expire_on_commit=False) as session:
            return session.get_one(Job, job)

    def ledger_of(self, job):
        """Kinds of the rows that speak of a job, in order, with the account verified."""
        with Session(self.engines["service"], expire_on_commit=False) as session:
            found = session.get_one(Job, job)
            account = session.get_one(Account, found.account_id)
            assert ledger.verify(session, account) is None
            rows = session.scalars(select(Entry.kind).where(Entry.job_id == job).order_by(Entry.number))
            return list(rows)

    def spoil(self, statement, account):
        """What a superuser could do to one account, with all guards off."""
        self.spoiled.add(account)
        with psycopg.connect(self.stack.owner_url, autocommit=True) as connection:
            connection.execute("SET session_replication_role = replica")
            connection.execute(statement, (account,))

    def forget_spoiled(self):
        """Has the witness take spoiled accounts as they are, so that other tests find a level ledger."""
        self.witness.catch_up()
        with Session(self.engines["sweep"]) as session:
            now = {str(id): core.witness._state(session.get_one(Account, id)) for id in self.spoiled}
        if now:
            assert self.witness.append(self.witness.accounts | now)
        self.spoiled.clear()

    def rewrite(self, account, **changes):
        """What the owner of database and vault could do: other rows, hashed and witnessed anew.

        `changes` are new values of fields, by the kind of row.
        """
        self.spoiled.add(account)
        with psycopg.connect(self.stack.owner_url, autocommit=True) as connection:
            connection.execute("SET session_replication_role = replica")
            with Session(self.engines["service"]) as session:
                rows = list(ledger.rows(session, account))
            head, balance = GENESIS, Balance()
            for row in rows:
                row |= changes.get(row["kind"], {})
                before, head = head, digest(head, row)
                connection.execute(
                    "UPDATE entries SET cost = %s, reason = %s, event = %s, previous = %s, digest = %s"
                    " WHERE account_id = %s AND number = %s",
                    (
                        row["cost"],
                        row["reason"],
                        row["event"] and Jsonb(row["event"]),
                        before,
                        head,
                        account,
                        row["number"],
                    ),
                )
                balance = balance.after(row)
            connection.execute(
                "UPDATE accounts SET capacity = %s, held = %s, settled = %s, head = %s WHERE id = %s",
                (balance.capacity, balance.held, balance.settled, head, account),
            )
        self.witness.catch_up()
        seen = self.witness.accounts[str(account)]
        spent = balance.held + balance.settled
        now = seen | {"moves": len(rows), "head": head.hex(), "spent": spent, "capacity": balance.capacity}
        assert self.witness.append(self.witness.accounts | {str(account): now})

    def change(self, statement, *values, guards=True):
        with psycopg.connect(self.stack.owner_url, autocommit=True) as connection:
            if not guards:
                connection.execute("SET session_replication_role = replica")
            connection.execute(statement, values)

    def expire(self, job):
        """Ends the lease on a job, as if its holder had been silent for too long."""
        past = "UPDATE jobs SET lease_until = now() - interval '1 s' WHERE id = %s AND state = 'running'"
        self.change(past, job)

    def vault_keys(self, prefix):
        found = self.admin.list_objects_v2(Bucket="sluice-vault", Prefix=prefix).get("Contents", [])
        return {entry["Key"]: entry["Size"] for entry in found}

    def vault(self, client=None, bucket="sluice-vault"):
        publisher = FileKeys(self.stack.state["synthesizer_key"]).public
        return Vault(client or self.admin, bucket, own=self.keys, publisher=publisher)

    def vault_object(self, key):
        """What an object of the vault says to those for whom it is encrypted."""
        body = self.admin.get_object(Bucket="sluice-vault", Key=key)["Body"].read()
        kind, job = key.split("/")[:2]
        if kind != "synthesizers":
            dataset = self.see(Dataset(id=self.look(uuid.UUID(job)).dataset_id))
            return Stream(data_key(dataset, self.keys), key).decrypt(body)
        publisher = FileKeys(self.stack.state["synthesizer_key"])
        return decrypt_wrapped(body, key, (self.keys if "handed-on" in key else publisher).unwrap)

    def vault_versions(self, prefix):
        """Keys of every version and delete marker, each as often as there are."""
        pages = self.admin.get_paginator("list_object_versions").paginate(
            Bucket="sluice-vault", Prefix=prefix
        )
        found = [page.get(kind, []) for page in pages for kind in ("Versions", "DeleteMarkers")]
        return sorted(one["Key"] for part in found for one in part)


@pytest.fixture(scope="package")
def place(tmp_path_factory):
    memory = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else tmp_path_factory.mktemp("stack")
    at = memory / f"sluice-test-{uuid.uuid4().hex[:8]}"
    stack = Stack(at / "data", durable=False, witness=at / "witness")
    try:
        stack.start_servers()
        stack.prepare()
        place = Place(stack)
        yield place
        for engine in place.engines.values():
            engine.dispose()
    finally:
        stack.stop()
        shutil.rmtree(at, ignore_errors=True)


class Mortal:
    """A worker process that forks one worker per order and reports how each ended; see mortal.py."""

    def __init__(self, place, role, *arguments, **environment):
        kept = {k: v for k, v in os.environ.items() if not k.startswith("SLUICE_")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.worker.mortal", role, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=Path(__file__).resolve().parents[2],
            env=kept | place.stack.environment(role) | environment,
        )

    def order(self, id, moment=None, *, wait=True, **more):
        """The exit status of a worker on this row (10: woken again), or its pid without waiting."""
        order = {"id": str(id), "moment": moment, "wait": wait, **more}
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        pid = json.loads(self.process.stdout.readline())["pid"]
        return json.loads(self.process.stdout.readline())["status"] if wait else pid

    def close(self):
        self.process.stdin.close()
        self.process.wait(30)
        self.process.stdout.close()


@pytest.fixture(autouse=True)
def _level(request):
    yield
    if "place" in request.fixturenames:
        request.getfixturevalue("place").forget_spoiled()


@pytest.fixture(scope="package")
def mortal(place):
    mortal = Mortal(place, "train", SLUICE_DIAGNOSTICS="true")
    yield mortal
    mortal.close()
