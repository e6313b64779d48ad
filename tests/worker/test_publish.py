"""What becomes public was approved and paid for, byte for byte, whenever and however its publisher dies."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path

import numpy as np
import psutil
import psycopg
import pytest
import torch
from safetensors.torch import load, save
from sqlalchemy import select, update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session, undefer

from core import ledger
from core.database import connect
from core.ledger import Move
from core.queue import celery_app, wake_worker
from core.settings import PublishSettings, TrainSettings
from core.stores import s3
from core.tables import Account, Approval, Dataset, Job, Person, Release, Revocations, SigningKey
from core.unwrap import FileKeys
from sluice.generators.classifier import Classifier, ClassifierShape
from sluice.generators.dcgan import DCGAN
from sluice.generators.image import WEIGHTS, ImageSynthesizer
from sluice.privacy.account import cost_as_epsilon
from sluice.privacy.accountant import epsilon
from sluice.privacy.events import from_dict
from sluice.privacy.relation import Relation
from sluice.release.manifest import paths, sums
from sluice.release.revocations import ReleaseWithdrawn, open_revocations
from sluice.release.statement import SeedSigner
from sluice.release.verify import check_release
from tests.worker.conftest import GSWGAN, Mortal
from worker import sweep
from worker.lease import MAX_ATTEMPTS, JobLease
from worker.publish import make_publisher
from worker.sweep import unpublished

ROOT = Path(__file__).resolve().parents[2]
FORMATS = ["npz", "png"]
FILES = paths(FORMATS)
OPEN = ("building", "publishing", "withdrawing")


def trained_files():
    torch.manual_seed(3)
    shape = DCGAN(height=8, width=8, channels=1, classes=2, latent=4, features=4)
    return ImageSynthesizer(shape).to_files()


def digest_of(files):
    """As a train worker states it."""
    return hashlib.sha256(b"".join(hashlib.sha256(files[name]).digest() for name in sorted(files))).digest()


class Desk:
    """What a service asks of the publisher, on the servers of `place`, and a publisher to kill."""

    def __init__(self, place):
        self.place, self.admin = place, place.admin
        self.service = place.engines["service"]
        environment = place.stack.environment("publish")
        self.settings = PublishSettings(
            **{k.removeprefix("SLUICE_").lower(): v for k, v in environment.items()}
        )
        values = {k.removeprefix("SLUICE_").lower(): v for k, v in place.stack.environment("train").items()}
        self.vault = place.vault(s3.client_for(TrainSettings(**values)))
        self.publisher = make_publisher(self.settings)
        self.publisher.start()
        self.author, self.reviewer = place.person, uuid.uuid4()
        with Session(place.engines["owner"]) as session, session.begin():
            session.add(Person(id=self.reviewer, name=f"rob-{self.reviewer}", role="admin"))
        self.shared = self.job()  # any number of releases of one job
        event = json.dumps(place.look(self.shared).event)
        self.mortal = Mortal(place, "publish", event)
        self.order = self.mortal.order

    def close(self):
        self.mortal.close()
        self.publisher.engine.dispose()

    def job(self, dataset=None, files=None, job=None):
        """A job that is trained and settled, with a synthesizer in the vault."""
        job, files = job or self.place.job(dataset), files or trained_files()
        held = JobLease.claim(self.place.engines["train"], job)
        held.open()
        key = self.vault.put_synthesizer(job, held.fence, files)
        held.trained(
            synthesizer_key=key, synthesizer_sha256=digest_of(files), steps=self.place.look(job).steps
        )
        return job

    def release(self, job=None, **changes):
        values = {
            "id": uuid.uuid4(), "job_id": job or self.shared, "author_id": self.author, "name": "Digits",
            "note": "", "licence": "CC-BY-4.0", "count": 300, "seed": 5, "formats": FORMATS,
            "audience": "everyone", "reviewers": 2, "state": "building",
        } | changes  # fmt: skip
        with Session(self.service) as session, session.begin():
            session.add(Release(**values))
        return values["id"]

    def built(self, **changes):
        release = self.release(**changes)
        self.publisher.run(release)
        assert self.look(release).state == "in_review"
        return release

    def approve(self, release, person=None):
        with Session(self.service) as session, session.begin():
            row = session.get_one(Release, release)
            session.add(
                Approval(release_id=release, digest=row.digest, person_id=person or self.reviewer, note="")
            )
            session.flush()
            row.state = "approved"

    def ask(self, release, state, **values):
        with Session(self.service) as session, session.begin():
            change = update(Release).where(Release.id == release)
            session.execute(change.values(state=state, lease_until=None, **values))

    def publishing(self, **changes):
        release = self.built(**changes)
        self.approve(release)
        self.ask(release, "publishing")
        return release

    def published(self, **changes):
        release = self.publishing(**changes)
        self.publisher.run(release)
        assert self.look(release).state == "published"
        return release

    def withdraw(self, release):
        self.ask(release, "withdrawing", reason="wrong data", withdrawn_at=datetime.now(UTC))

    def look(self, release):
        with Session(self.service, expire_on_commit=False) as session:
            options = [undefer(Release.attestation), undefer(Release.preview)]
            return session.get_one(Release, release, options=options)

    def finish(self, release):
        """As a sweeper that finds every lease run out would have it finished."""
        for _ in range(5):
            if self.look(release).state not in OPEN:
                break
            self.expire(release)
            self.publisher.run(release)
        return self.look(release)

    def expire(self, release):
        past = "UPDATE releases SET lease_until = now() - interval '1 s' WHERE id = %s"
        self.place.change(past, release)

    def unguarded(self, statement, *values):
        """What only somebody who is past the database's own triggers could do."""
        with psycopg.connect(self.place.stack.owner_url, autocommit=True) as connection:
            connection.execute("SET session_replication_role = replica")
            connection.execute(statement, values)

    @contextmanager
    def trusting(self):
        """A database that no longer looks at releases by itself."""
        self.place.change("ALTER TABLE releases DISABLE TRIGGER releases_keep")
        try:
            yield
        finally:
            self.place.change("ALTER TABLE releases ENABLE TRIGGER releases_keep")

    def public(self, release):
        """Paths and bytes of whatever lies in the public bucket for a release."""
        prefix = f"releases/{release}/"
        found = self.admin.list_objects_v2(Bucket="sluice-public", Prefix=prefix).get("Contents", [])
        bodies = {
            entry["Key"]: self.admin.get_object(Bucket="sluice-public", Key=entry["Key"])["Body"].read()
            for entry in found
        }
        return {key.removeprefix(prefix).split("/", 1)[1]: body for key, body in bodies.items()}

    def copies(self, release):
        """Keys of whatever lies in the public bucket for the reviewers of a release."""
        prefix = f"review/{release}/"
        found = self.admin.list_objects_v2(Bucket="sluice-public", Prefix=prefix).get("Contents", [])
        return [entry["Key"].removeprefix(prefix) for entry in found]

    def copy(self, release, build, digest):
        prefix = f"{build}/{digest.hex()}/"
        return {
            key.removeprefix(prefix): self.admin.get_object(
                Bucket="sluice-public", Key=f"review/{release}/{key}"
            )["Body"].read()
            for key in self.copies(release)
            if key.startswith(prefix)
        }

    def rings(self):
        """What the sweeper would ring for."""
        with Session(self.place.engines["sweep"]) as session:
            return {id for task, id in unpublished(session) if task == "publish.run"}

    def keys(self):
        with Session(self.service) as session:
            return {key.id: key.public for key in session.scalars(select(SigningKey))}

    def lists(self):
        with Session(self.service) as session:
            envelopes = session.scalars(select(Revocations.envelope).order_by(Revocations.number))
            return [open_revocations(each.encode(), self.keys()) for each in envelopes]

    def checked(self, release, listed=None):
        """What an analyst concludes from the public bucket and the published keys."""
        files = self.public(release)
        envelope = files.pop("attestation.json")
        hashes = {path: hashlib.sha256(body).hexdigest() for path, body in files.items()}
        return check_release(envelope, hashes=hashes, small=files, keys=self.keys(), revocations=listed)


@pytest.fixture(scope="module")
def desk(place):
    desk = Desk(place)
    yield desk
    desk.close()


def test_a_release_is_built_reviewed_published_and_verifies(desk):
    dataset = desk.place.dataset()
    release = desk.release(job=desk.job(dataset))
    desk.publisher.run(release)
    row = desk.look(release)
    assert (row.state, row.fault, row.done, row.lease_until) == ("in_review", None, 300, None)
    assert {file["path"] for file in row.files} == FILES
    kept = desk.place.vault_keys(f"bundles/{release}/")
    assert kept == {
        f"bundles/{release}/{row.digest.hex()}/{file['path']}": file["size"] for file in row.files
    }
    assert row.preview.startswith(b"\x89PNG")
    assert desk.public(release) == {}
    copy = {
        path: hashlib.sha256(body).hexdigest() for path, body in desk.copy(release, 1, row.digest).items()
    }
    assert copy == {file["path"]: file["sha256"] for file in row.files}

    desk.approve(release)
    desk.ask(release, "publishing")
    desk.publisher.run(release)
    row = desk.look(release)
    assert (row.state, row.fault, row.lease_until) == ("published", None, None)
    files = desk.public(release)
    assert set(files) == FILES | {"attestation.json"}
    assert desk.copies(release) == []  # reviewed and out: the copy is gone
    assert files["attestation.json"] == row.attestation.encode()
    checked = desk.checked(release)
    assert (checked.release, checked.bundle) == (str(release), row.digest.hex())
    assert datetime.fromisoformat(checked.published_at) == row.published_at
    assert checked.manifest == row.manifest
    assert checked.privacy == row.privacy
    assert checked.manifest["sources"] == checked.privacy["sources"] == []
    [approval] = checked.review["approvals"]
    assert (approval["person"], approval["digest"]) == (str(desk.reviewer), row.digest.hex())
    assert checked.review["author"] == str(desk.author)
    for body in files.values():  # nothing says whose data it was, nor how much there was
        for secret in (str(dataset.id), dataset.object_key, str(row.job_id)):
            assert secret.encode() not in body


@pytest.mark.parametrize("end", ["discarded", "failed"])
def test_the_copy_for_reviewers_goes_when_a_release_is_given_up(desk, end):
    release = desk.built()
    assert len(desk.copies(release)) == len(FILES)
    if end == "discarded":
        desk.ask(release, "discarded")
    else:
        desk.ask(release, "building", digest=None, build=2)
        desk.place.change("UPDATE releases SET attempts = 20 WHERE id = %s", release)  # no more than that
    assert release in desk.rings() or end == "failed"
    desk.publisher.run(release)
    assert desk.look(release).state == end
    assert (desk.copies(release), release in desk.rings()) == ([], False)


def test_a_new_build_has_a_copy_of_its_own_and_the_old_one_goes(desk):
    release = desk.built()
    digest = desk.look(release).digest
    desk.ask(release, "building", digest=None, build=2)
    desk.publisher.run(release)
    assert desk.look(release).digest == digest  # the same facts give the same bytes
    assert {key.split("/")[0] for key in desk.copies(release)} == {"2"}
    assert set(desk.copy(release, 2, digest)) == FILES


def test_a_publisher_killed_while_it_puts_a_copy_leaves_none_behind(desk):
    """Discarded meanwhile: nobody would ever build it again, and the sweeper rings all the same."""
    release = desk.release()
    assert desk.order(release, "kept", count=3) == -signal.SIGKILL
    assert len(desk.copies(release)) == 3
    desk.ask(release, "discarded")
    desk.expire(release)
    assert release in desk.rings()
    desk.publisher.run(release)
    assert (desk.copies(release), release in desk.rings()) == ([], False)


def test_a_copy_that_is_being_put_is_left_alone(desk):
    """While a publisher holds the release, whatever became of it: the copy goes when the lease is over."""
    release = desk.built()
    desk.ask(release, "discarded")
    desk.place.change("UPDATE releases SET lease_until = now() + interval '1 hour' WHERE id = %s", release)
    desk.publisher.run(release)
    assert (len(desk.copies(release)), release in desk.rings()) == (len(FILES), False)
    desk.expire(release)
    desk.publisher.run(release)
    assert desk.copies(release) == []


def classifier(**changes):
    torch.manual_seed(4)
    shape = {"height": 8, "width": 8, "channels": 1, "classes": 2, "features": 4, "latent": 6}
    return Classifier(ClassifierShape(**shape | changes))


def test_a_classifier_is_released_without_samples(desk):
    trained = classifier()
    job = desk.job(job=desk.place.adaptation(), files=trained.to_files())
    release = desk.published(job=job, formats=[], count=0, seed=0)
    row, files, checked = desk.look(release), desk.public(release), desk.checked(release)
    assert set(files) == paths([]) | {"attestation.json"}
    assert not [path for path in files if path.startswith("data/") or "synthesizer" in path]
    assert row.preview is None
    assert checked.manifest["classifier"] == trained.architecture.to_dict()
    assert checked.manifest["schema"]["classes"] == ["dark", "light"]  # of the public source
    assert checked.privacy["event"] == desk.place.look(job).event
    with Session(desk.service) as session:
        source = session.get_one(Dataset, desk.place.look(job).source_id)
        named = {
            "name": source.name, "sha256": source.sha256.hex(), "declared_public": True, "records": 200,
            "schema": {"kind": "image", "height": 8, "width": 8, "channels": 1},
        }  # fmt: skip
    assert checked.manifest["sources"] == checked.privacy["sources"] == [named]
    assert source.sha256.hex().encode() in files["README.md"]
    for body in files.values():
        assert str(source.id).encode() not in body
    assert b"A classifier of images of 8 x 8 x 1 into 2 classes" in files["README.md"]
    images = np.arange(5 * 64, dtype=np.uint8).reshape(5, 8, 8, 1)
    again = Classifier.from_files({name: files[name] for name in trained.to_files()})
    assert (again.predict(images) == trained.predict(images)).all()


@pytest.mark.parametrize("spoiled", ["another shape", "one more tensor", "a synthesizer"])
def test_what_is_not_exactly_a_classifier_is_not_released_as_one(desk, spoiled):
    files = (classifier(classes=3) if spoiled == "another shape" else classifier()).to_files()
    if spoiled == "one more tensor":
        more = load(files["classifier.safetensors"]) | {"lens.frame": torch.eye(2, 3)}
        files["classifier.safetensors"] = save(more)
    if spoiled == "a synthesizer":
        files = {name.replace("synthesizer", "classifier"): body for name, body in trained_files().items()}
    release = desk.release(job=desk.job(job=desk.place.adaptation(), files=files), formats=[], count=0)
    desk.publisher.run(release)
    assert (desk.look(release).state, desk.look(release).fault) == ("failed", "unfit-synthesizer")


def test_the_database_knows_which_releases_have_samples(desk):
    adapted = desk.job(job=desk.place.adaptation(), files=classifier().to_files())
    for changes in ({"job": adapted}, {"formats": [], "count": 0}):
        with pytest.raises(DBAPIError, match="a release has samples if its method makes them"):
            desk.release(**changes)


def test_a_relay_states_what_every_owner_paid(desk):
    """Two owners, three jobs: the first owner's two count together."""
    datasets = desk.place.dataset(), desk.place.dataset()
    before, jobs = None, []
    for owner in (0, 1, 0):
        job = desk.place.job(datasets[owner], of=GSWGAN, shared=True, after_id=before)
        before = desk.job(job=job)
        jobs.append(desk.place.look(job))
    release = desk.published(job=jobs[-1].id)
    checked = desk.checked(release)
    own, [other] = checked.privacy, checked.privacy["others"]
    assert own["account"]["id"] == str(datasets[0].account_id)
    assert own["event"] == {"version": 1, "kind": "composition", "events": [jobs[0].event, jobs[2].event]}
    assert own["cost"] == jobs[0].cost + jobs[2].cost
    assert other["account"]["id"] == str(datasets[1].account_id)
    assert (other["event"], other["cost"]) == (jobs[1].event, jobs[1].cost)
    for said, events in ((own, (jobs[0].event, jobs[2].event)), (other, (jobs[1].event,))):
        read = {"delta": 1e-5, "relation": "add_remove", "accountant": "renyi"}
        again = epsilon([from_dict(event) for event in events], **read).epsilon
        assert said["epsilon"]["renyi"] == again
        total = cost_as_epsilon(said["cost"], delta=1e-5, order=4)
        assert said["total"] == {"cost": said["cost"], "epsilon": total}
    assert own["epsilon"]["renyi"] > 1.2 * other["epsilon"]["renyi"]
    card = desk.public(release)["README.md"].decode()
    described = json.loads(desk.public(release)["croissant.json"])["description"]
    best = [min(said["epsilon"].values()) for said in (own, other)]
    for text in (card, described):
        assert f"{best[0]:.4g} for the records of owner 1, {best[1]:.4g} for the records of owner 2" in text
        assert f"with all 2, epsilon {sum(best):.4g} at delta 2e-05" in text
    for number, said in enumerate((own, other), 1):
        assert f"| Rényi, owner {number} | {said['epsilon']['renyi']:.6g} |" in card
    assert "several turns" in card


@pytest.mark.parametrize(
    "other", [{"delta": 1e-6}, {"relation": Relation.REPLACE_ONE}], ids=["delta", "relation"]
)
def test_a_relay_of_different_deltas_or_relations_is_neither_built_nor_published(other, desk):
    """As one could have been made before it was refused: their epsilons cannot stand side by side."""
    first = desk.job(job=desk.place.job(desk.place.dataset(**other), of=GSWGAN, shared=True))
    release = desk.release(job=desk.job(job=desk.place.job(of=GSWGAN, after_id=first)))
    desk.publisher.run(release)
    assert (desk.look(release).state, desk.look(release).fault) == ("failed", "unfit-relay")
    good = desk.job(job=desk.place.job(of=GSWGAN, shared=True))
    release = desk.publishing(job=desk.job(job=desk.place.job(of=GSWGAN, after_id=good)))
    desk.unguarded("UPDATE jobs SET after_id = %s WHERE id = %s", first, desk.look(release).job_id)
    desk.publisher.run(release)
    row = desk.look(release)
    assert (row.state, row.fault, row.attestation) == ("publishing", "unfit-relay", None)
    assert desk.public(release) == {}


def test_a_relay_with_an_unpaid_leg_is_not_published(desk):
    first = desk.job(job=desk.place.job(of=GSWGAN, shared=True))
    last = desk.job(job=desk.place.job(of=GSWGAN, after_id=first))
    desk.unguarded("UPDATE jobs SET state = 'failed' WHERE id = %s", first)
    release = desk.release(job=last)
    desk.publisher.run(release)
    assert (desk.look(release).state, desk.look(release).fault) == ("failed", "not-settled")


def test_a_relay_with_a_broken_ledger_anywhere_is_not_built(desk):
    datasets = desk.place.dataset(), desk.place.dataset()
    first = desk.job(job=desk.place.job(datasets[0], of=GSWGAN, shared=True))
    release = desk.release(job=desk.job(job=desk.place.job(datasets[1], of=GSWGAN, after_id=first)))
    desk.place.spoil("UPDATE accounts SET capacity = 2 * capacity WHERE id = %s", datasets[0].account_id)
    desk.publisher.run(release)
    assert (desk.look(release).state, desk.look(release).fault) == ("failed", "ledger-broken")


def test_privacy_json_follows_from_the_ledger(desk):
    dataset = desk.place.dataset()
    first = desk.job(dataset)
    given_back = desk.place.job(dataset)
    with Session(desk.service) as session, session.begin():
        ledger.void(session, dataset.account_id, job=given_back, move=Move(actor="carla", reason="test"))
    with Session(desk.service) as session, session.begin():
        account = session.get_one(Account, dataset.account_id)
        ledger.forfeit(session, account, cost=7, move=Move(actor="carla", reason="a restored backup"))
    second = desk.job(dataset)
    desk.job(dataset)  # later than the release's own row
    row = desk.look(desk.built(job=second))
    with Session(desk.service) as session:
        account = session.get_one(Account, dataset.account_id)
        events = [from_dict(session.get_one(Job, job).event) for job in (first, second)]
        entries = {each["number"]: each for each in ledger.rows(session, account.id)}
    said = row.privacy
    number = said["entry"]["number"]
    assert (entries[number]["job"], entries[number]["kind"]) == (str(second), "reserve")
    assert said["entry"]["digest"] == entries[number]["digest"]
    assert said["head"] == {"number": account.moves, "digest": account.head.hex()}
    assert said["account"] == {"id": str(account.id), "epsilon": 1000.0, "delta": 1e-5, "order": 4}
    assert (said["unit"], said["relation"], said["delta"]) == ("one record", "add_remove", 1e-5)
    for name in ("renyi", "pld"):
        read = {"delta": 1e-5, "relation": "add_remove", "accountant": name}
        assert said["epsilon"][name] == epsilon(events[1], **read).epsilon
    # Paid for, and lost before a backup; neither what was given back nor what came later.
    spent = sum(ledger.price(event, account) for event in events) + 7
    assert said["cost"] == ledger.price(events[1], account)
    assert said["total"] == {"cost": spent, "epsilon": cost_as_epsilon(spent, delta=1e-5, order=4)}
    assert "total_after" not in said


def break_ledger(desk, release, how):
    """Gives the account's id. What each does would let more be spent than was granted."""
    account = desk.place.look(desk.look(release).job_id).account_id
    if how == "hashed anew":
        desk.place.rewrite(account, grant={"cost": 10**15})
    else:
        statement = {
            "a larger capacity": "UPDATE accounts SET capacity = 10 * capacity WHERE id = %s",
            "less spent": "UPDATE accounts SET settled = 0 WHERE id = %s",
            "a settle deleted": "DELETE FROM entries WHERE account_id = %s AND kind = 'settle'",
            "a row changed": "UPDATE entries SET reason = 'other' WHERE account_id = %s AND number = 2",
        }[how]
        desk.place.spoil(statement, account)


@pytest.mark.parametrize(
    "how", ["a larger capacity", "less spent", "a settle deleted", "a row changed", "hashed anew"]
)
def test_nothing_is_built_or_signed_from_a_ledger_that_does_not_hold(how, desk):
    release = desk.publishing(job=desk.job())
    break_ledger(desk, release, how)
    desk.publisher.run(release)
    row = desk.look(release)
    assert (row.state, row.fault, row.attestation) == ("publishing", "ledger-broken", None)
    assert desk.public(release) == {}
    release = desk.release(desk.job())
    break_ledger(desk, release, how)
    desk.publisher.run(release)
    row = desk.look(release)
    assert (row.state, row.fault, row.digest) == ("failed", "ledger-broken", None)


def test_a_bundle_about_rows_that_are_no_longer_in_the_ledger_is_not_signed(desk):
    """The ledger holds by itself, but it is another than the one the bundle was built from."""
    release = desk.publishing(job=desk.job())
    desk.place.rewrite(desk.place.look(desk.look(release).job_id).account_id, reserve={"reason": "other"})
    desk.publisher.run(release)
    row = desk.look(release)
    assert (row.state, row.fault, row.attestation) == ("publishing", "accounting-mismatch", None)
    assert desk.public(release) == {}


def test_a_promise_given_back_after_the_build_does_not_stand_in_the_way(desk):
    """The stated total is then larger than need be, which misleads nobody."""
    dataset = desk.place.dataset()
    waiting = desk.place.job(dataset)
    release = desk.publishing(job=desk.job(dataset))
    with Session(desk.service) as session, session.begin():
        ledger.void(session, dataset.account_id, job=waiting, move=Move(actor="carla", reason="test"))
    desk.publisher.run(release)
    assert desk.look(release).state == "published"
    assert desk.checked(release).privacy["total"]["cost"] == 2 * desk.checked(release).privacy["cost"]


def test_a_bundle_of_an_older_version_is_still_published(desk):
    """With readings of everything paid for in place of a total, and without sources."""
    release = desk.built(job=desk.job())
    row = desk.look(release)
    files = {
        file["path"]: desk.admin.get_object(
            Bucket="sluice-vault", Key=f"bundles/{release}/{row.digest.hex()}/{file['path']}"
        )["Body"].read()
        for file in row.files
    }
    privacy = {k: v for k, v in row.privacy.items() if k not in ("total", "sources")}
    privacy["total_after"] = privacy["epsilon"]
    files["privacy.json"] = (json.dumps(privacy, sort_keys=True, indent=2) + "\n").encode()
    manifest = {k: v for k, v in row.manifest.items() if k != "sources"}
    for listed in manifest["files"]:
        body = files[listed["path"]]
        listed |= {"size": len(body), "sha256": hashlib.sha256(body).hexdigest()}
    files["manifest.json"] = json.dumps(manifest).encode()
    hashes = {path: hashlib.sha256(body).hexdigest() for path, body in files.items() if path != "SHA256SUMS"}
    files["SHA256SUMS"] = sums(hashes)
    digest = hashlib.sha256(files["SHA256SUMS"]).digest()
    for path, body in files.items():
        key = f"bundles/{release}/{digest.hex()}/{path}"
        desk.admin.put_object(Bucket="sluice-vault", Key=key, Body=body)
    desk.unguarded("UPDATE releases SET digest = %s WHERE id = %s", digest, release)
    desk.approve(release)
    desk.ask(release, "publishing")
    desk.publisher.run(release)
    assert desk.look(release).state == "published"
    assert desk.checked(release).privacy == privacy


BUILDING = [
    ("claimed", 1), ("paid", 1), ("fetched", 1), ("drawn", 1), ("built", 1), ("kept", 1), ("kept", 11),
    ("in review", 1),
]  # fmt: skip
PUBLISHING = [
    ("claimed", 1), ("refetched", 1), ("signed", 1), ("put", 1), ("put", 5), ("put", 11), ("put", 12),
    ("published", 1),
]  # fmt: skip
WITHDRAWING = [("claimed", 1), ("removed", 1), ("buried", 1), ("listed", 1)]


@pytest.mark.parametrize(("point", "count"), BUILDING)
def test_kill_9_while_building_and_one_whole_bundle_comes_to_review(point, count, desk):
    release = desk.release()
    assert desk.order(release, point, count=count) == -signal.SIGKILL
    row = desk.look(release)
    assert row.state == ("in_review" if point == "in review" else "building")
    row = desk.finish(release)
    assert (row.state, row.fence) == ("in_review", 1 if point == "in review" else 2)
    kept = desk.place.vault_keys(f"bundles/{release}/{row.digest.hex()}/")
    assert sorted(kept.values()) == sorted(file["size"] for file in row.files)
    assert desk.public(release) == {}


@pytest.mark.parametrize(("point", "count"), PUBLISHING)
def test_kill_9_while_publishing_and_it_ends_with_one_statement(point, count, desk):
    release = desk.publishing()
    assert desk.order(release, point, count=count) == -signal.SIGKILL
    row, files = desk.look(release), desk.public(release)
    assert row.state == ("published" if point == "published" else "publishing")
    assert (row.attestation is not None) == (point not in ("claimed", "refetched"))
    assert len(files) == (12 if point == "published" else count if point == "put" else 0)
    assert ("attestation.json" in files) == (len(files) == 12)  # last of all
    assert (row.published_at is not None) == (point == "published")
    after = desk.finish(release)
    assert after.state == "published"
    if row.attestation is not None:
        assert after.attestation == row.attestation
    now = desk.public(release)
    assert now["attestation.json"] == after.attestation.encode()
    assert {path: now[path] for path in files} == files
    assert desk.checked(release).bundle == after.digest.hex()


@pytest.mark.parametrize(("point", "count"), WITHDRAWING)
def test_kill_9_while_withdrawing_and_it_is_gone_and_on_the_list(point, count, desk):
    release = desk.published()
    before = desk.lists()[-1]
    desk.withdraw(release)
    assert desk.order(release, point, count=count) == -signal.SIGKILL
    if point != "claimed":
        assert set(desk.public(release)) <= {"WITHDRAWN.json"}
    row = desk.finish(release)
    assert row.state == "withdrawn"
    assert set(desk.public(release)) == {"WITHDRAWN.json"}
    lists = desk.lists()
    assert lists[-1]["number"] == before["number"] + 1
    added = [each for each in lists[-1]["withdrawn"] if each not in before["withdrawn"]]
    assert added == [
        {
            "release": str(release), "bundle": row.digest.hex(), "reason": "wrong data",
            "at": row.withdrawn_at.astimezone(UTC).isoformat(timespec="microseconds"),
        }
    ]  # fmt: skip
    with pytest.raises(ReleaseWithdrawn):
        check_release(
            row.attestation.encode(), keys=desk.keys(), revocations=lists[-1],
            **kept_in_the_vault(desk, row),
        )  # fmt: skip


def kept_in_the_vault(desk, row):
    prefix = f"bundles/{row.id}/{row.digest.hex()}/"
    small = {
        path: desk.admin.get_object(Bucket="sluice-vault", Key=prefix + path)["Body"].read() for path in FILES
    }
    return {
        "small": small,
        "hashes": {path: hashlib.sha256(body).hexdigest() for path, body in small.items()},
    }


@pytest.mark.long
@pytest.mark.parametrize("_", range(3))
@pytest.mark.parametrize(("point", "count"), PUBLISHING)
def test_kill_9_while_publishing_more_often(point, count, _, desk):
    test_kill_9_while_publishing_and_it_ends_with_one_statement(point, count, desk)


def test_a_bundle_that_nobody_who_may_approved_is_not_published(desk):
    """Past the database's triggers, the publisher asks again by itself."""
    nobody = desk.built()
    author = desk.built()
    other = desk.built()
    for release, person, digest in (
        (author, desk.author, desk.look(author).digest),
        (other, desk.reviewer, bytes(32)),
    ):
        approve = "INSERT INTO approvals (release_id, digest, person_id, note) VALUES (%s, %s, %s, '')"
        desk.unguarded(approve, release, digest, person)
    for release in (nobody, author, other):
        with desk.trusting():
            desk.ask(release, "publishing")
            desk.publisher.run(release)
        row = desk.look(release)
        assert (row.state, row.fault, row.attestation) == ("publishing", "not-approved", None)
        assert row.lease_until > datetime.now(UTC)
        assert desk.public(release) == {}


def test_one_person_may_publish_where_the_release_says_so(desk):
    release = desk.built(reviewers=1)
    desk.approve(release, desk.author)
    desk.ask(release, "publishing")
    desk.publisher.run(release)
    checked = desk.checked(release)
    assert checked.review["reviewers"] == checked.manifest["review"]["reviewers"] == 1


def test_a_job_that_is_not_settled_is_neither_built_nor_published(desk):
    """Trained, if one believes its row, and the ledger has a promise but no settlement."""
    unsettled = desk.place.job()
    desk.unguarded("UPDATE jobs SET state = 'trained' WHERE id = %s", unsettled)
    swap = "UPDATE releases SET job_id = %s WHERE id = %s"
    release = desk.publishing()
    desk.unguarded(swap, unsettled, release)
    desk.publisher.run(release)
    row = desk.look(release)
    assert (row.state, row.fault) == ("publishing", "not-settled")
    assert desk.public(release) == {}
    release = desk.release()
    desk.unguarded(swap, unsettled, release)
    desk.publisher.run(release)
    row = desk.look(release)
    assert (row.state, row.fault, row.digest) == ("failed", "not-settled", None)


def test_an_event_other_than_the_one_paid_for_is_not_published(desk):
    job = desk.job()
    release = desk.release(job)
    cheaper = "UPDATE jobs SET event = jsonb_set(event, '{noise_stddev}', '99.0') WHERE id = %s"
    desk.unguarded(cheaper, job)
    desk.publisher.run(release)
    assert (desk.look(release).state, desk.look(release).fault) == ("failed", "accounting-mismatch")


@pytest.mark.parametrize(
    "path", ["data/images.npz", "manifest.json", "privacy.json", "SHA256SUMS", "README.md"]
)
def test_a_bundle_changed_after_approval_is_not_published(path, desk):
    release = desk.publishing()
    row = desk.look(release)
    key = f"bundles/{release}/{row.digest.hex()}/{path}"
    good = desk.admin.get_object(Bucket="sluice-vault", Key=key)["Body"].read()
    body = bytearray(good)
    body[len(body) // 2] ^= 1
    desk.admin.put_object(Bucket="sluice-vault", Key=key, Body=bytes(body))
    desk.publisher.run(release)
    row = desk.look(release)
    assert (row.state, row.fault, row.attestation) == ("publishing", "bundle-altered", None)
    assert desk.public(release) == {}
    desk.admin.put_object(Bucket="sluice-vault", Key=key, Body=good)
    assert (desk.finish(release).state, desk.look(release).fault) == ("published", None)


def test_a_whole_other_bundle_in_its_place_is_not_published(desk):
    """All of it fits together, but it is not what was approved."""
    mine, other = desk.publishing(), desk.built()
    row, theirs = desk.look(mine), desk.look(other)
    for file in theirs.files:
        source = f"bundles/{other}/{theirs.digest.hex()}/{file['path']}"
        body = desk.admin.get_object(Bucket="sluice-vault", Key=source)["Body"].read()
        target = f"bundles/{mine}/{row.digest.hex()}/{file['path']}"
        desk.admin.put_object(Bucket="sluice-vault", Key=target, Body=body)
    desk.publisher.run(mine)
    assert (desk.look(mine).state, desk.look(mine).fault) == ("publishing", "bundle-altered")
    assert desk.public(mine) == {}


@pytest.mark.parametrize("path", ["data/images.npz", "attestation.json"])
def test_what_is_public_is_never_overwritten(path, desk):
    release = desk.publishing()
    key = f"releases/{release}/{desk.look(release).digest.hex()}/{path}"
    desk.admin.put_object(Bucket="sluice-public", Key=key, Body=b"something else")
    desk.publisher.run(release)
    row = desk.look(release)
    assert (row.state, row.fault, row.published_at) == ("publishing", "bundle-altered", None)
    assert desk.public(release)[path] == b"something else"


def test_publishing_again_what_is_published_changes_nothing(desk):
    release = desk.published()
    before, files = desk.look(release), desk.public(release)
    assert desk.publisher.run(release) is False
    assert desk.look(release).fence == before.fence
    desk.unguarded("UPDATE releases SET state = 'publishing' WHERE id = %s", release)
    desk.publisher.run(release)
    assert desk.look(release).attestation == before.attestation
    assert desk.public(release) == files


def test_a_swapped_synthesizer_fails_and_may_be_built_again_once_it_is_right(desk):
    job = desk.job()
    release = desk.release(job)
    prefix = desk.place.look(job).synthesizer_key
    good = desk.admin.get_object(Bucket="sluice-vault", Key=prefix + WEIGHTS)["Body"].read()
    other = save({name: value + 1 for name, value in load(trained_files()[WEIGHTS]).items()})
    public = FileKeys(desk.place.stack.state["synthesizer_key"]).public
    bodies = (trained_files()[WEIGHTS], good[:-1], public.encrypt(prefix + WEIGHTS, other))
    for build, body in enumerate(bodies, start=2):  # not encrypted, cut off, encrypted but of other weights
        desk.admin.put_object(Bucket="sluice-vault", Key=prefix + WEIGHTS, Body=body)
        desk.publisher.run(release)
        row = desk.look(release)
        assert (row.state, row.fault, row.digest) == ("failed", "unfit-synthesizer", None)
        desk.ask(release, "building", build=build, fault=None)
    desk.admin.put_object(Bucket="sluice-vault", Key=prefix + WEIGHTS, Body=good)
    desk.publisher.run(release)
    assert desk.look(release).state == "in_review"


def test_a_trained_synthesizer_with_a_discriminator_in_it_is_refused(desk):
    files = trained_files()
    files[WEIGHTS] = save(load(files[WEIGHTS]) | {"discriminator.weight": torch.zeros(3)})
    release = desk.release(job=desk.job(files=files))
    desk.publisher.run(release)
    assert (desk.look(release).state, desk.look(release).fault) == ("failed", "unfit-synthesizer")
    assert desk.place.vault_keys(f"bundles/{release}/") == {}


def test_a_release_supersedes_the_one_before_it(desk):
    old = desk.published()
    new = desk.published(supersedes=old)
    assert (desk.look(old).state, desk.look(new).state) == ("superseded", "published")
    assert desk.checked(old).release == str(old)


def test_a_zombie_that_wakes_after_a_withdrawal_leaves_nothing_public(desk):
    release = desk.publishing()
    zombie = desk.order(release, "put", count=3, end="stop", wait=False)
    wait_for(lambda: psutil.Process(zombie).status() == psutil.STATUS_STOPPED)
    desk.withdraw(release)
    desk.publisher.run(release)
    assert desk.look(release).state == "withdrawn"
    key = f"releases/{release}/{desk.look(release).digest.hex()}/README.md"
    desk.admin.put_object(Bucket="sluice-public", Key=key, Body=b"as if its last request came through late")
    os.kill(zombie, signal.SIGCONT)
    wait_for(lambda: psutil.Process(zombie).status() == psutil.STATUS_ZOMBIE)
    assert desk.look(release).state == "withdrawn"
    assert set(desk.public(release)) == {"WITHDRAWN.json"}


def test_a_zombie_builder_changes_nothing_that_its_successor_built(desk):
    release = desk.release()
    zombie = desk.order(release, "built", end="stop", wait=False)
    wait_for(lambda: psutil.Process(zombie).status() == psutil.STATUS_STOPPED)
    row = desk.finish(release)
    desk.approve(release)
    os.kill(zombie, signal.SIGCONT)
    wait_for(lambda: psutil.Process(zombie).status() == psutil.STATUS_ZOMBIE)
    after = desk.look(release)
    assert (after.state, after.fence, after.digest) == ("approved", 2, row.digest)


def wait_for(what, seconds=300):
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_lease_is_kept_while_work_takes_long(desk):
    """Stopped for longer than it may be silent, it is taken over; while it beats, nobody can."""
    release = desk.release(count=200_000, formats=["npz"])
    pid = desk.order(release, set={"lease": 2}, wait=False)
    wait_for(lambda: desk.look(release).done > 0)
    assert desk.publisher.run(release) is False
    assert desk.look(release).fence == 1
    desk.ask(release, "discarded")  # its author thinks again: the worker notices and stops
    wait_for(lambda: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    row = desk.look(release)
    assert (row.state, row.digest) == ("discarded", None)
    assert 0 < row.done < 200_000
    assert desk.place.vault_keys(f"bundles/{release}/") == {}


def test_a_drained_publisher_hands_back_at_once(desk):
    release = desk.release()
    assert desk.order(release, "drawn", end="drain") == 10
    row = desk.look(release)
    assert (row.state, row.lease_until) == ("building", None)
    assert desk.finish(release).state == "in_review"


def test_a_build_that_keeps_dying_ends_in_a_named_fault(desk):
    release = desk.release()
    desk.place.change("UPDATE releases SET attempts = 20 WHERE id = %s", release)
    desk.publisher.run(release)
    assert (desk.look(release).state, desk.look(release).fault) == ("failed", "lost")


def test_a_forged_id_and_a_release_that_waits_for_people_find_nothing_to_do(desk):
    assert desk.publisher.run(uuid.uuid4()) is False
    release = desk.built()
    assert desk.publisher.run(release) is False
    assert desk.look(release).fence == 1


def test_a_key_is_made_known_and_lists_only_grow(desk, monkeypatch):
    assert desk.keys()[desk.publisher.signer.key_id] == desk.publisher.signer.public
    lists = desk.lists()
    assert [each["number"] for each in lists] == list(range(1, len(lists) + 1))
    for older, newer in pairwise(lists):
        assert all(each in newer["withdrawn"] for each in older["withdrawn"])
    desk.publisher.renew_list()
    desk.publisher.start()
    assert len(desk.lists()) == len(lists)  # the last is of today
    monkeypatch.setattr("worker.publish.LIST_AGE", timedelta(0))
    desk.publisher.renew_list()
    assert desk.lists()[-1]["number"] == len(lists) + 1
    assert desk.lists()[-1]["withdrawn"] == lists[-1]["withdrawn"]


def test_a_new_key_signs_a_list_of_its_own_and_the_old_one_stays_known(desk):
    other = make_publisher(desk.settings)
    other.signer = SeedSigner(os.urandom(32))
    before = desk.lists()[-1]["number"]
    other.start()
    other.engine.dispose()
    assert {other.signer.key_id, desk.publisher.signer.key_id} <= set(desk.keys())
    assert desk.lists()[-1]["number"] == before + 1
    with Session(desk.service) as session:
        newest = select(Revocations.envelope).order_by(Revocations.number.desc()).limit(1)
        envelope = session.scalars(newest).one().encode()
    assert open_revocations(envelope, {other.signer.key_id: other.signer.public})["number"] == before + 1


def test_a_statement_signed_before_the_key_was_changed_is_the_one_that_is_published(desk):
    release = desk.publishing()
    assert desk.order(release, "signed") == -signal.SIGKILL
    signed = desk.look(release).attestation
    other = make_publisher(desk.settings)
    other.signer = SeedSigner(os.urandom(32))
    desk.expire(release)
    other.run(release)
    other.engine.dispose()
    assert (desk.look(release).state, desk.look(release).attestation) == ("published", signed)
    assert desk.checked(release).release == str(release)


def test_the_process_answers_the_bell_from_draft_to_withdrawal(desk):
    kept = {k: v for k, v in os.environ.items() if not k.startswith("SLUICE_")}
    worker = subprocess.Popen(
        [sys.executable, "-m", "worker.publish"], cwd=ROOT, stderr=subprocess.DEVNULL,
        env=kept | desk.place.stack.environment("publish"),
    )  # fmt: skip
    app = celery_app("publish", desk.place.stack.environment("service")["SLUICE_QUEUE_URL"])
    release = desk.release()
    try:
        app.send_task("publish.run", args=["not an id"])
        wake_worker(app, "publish.revocations", release)
        wake_worker(app, "publish.run", release)
        wait_for(lambda: desk.look(release).state == "in_review")
        desk.approve(release)
        desk.ask(release, "publishing")
        wake_worker(app, "publish.run", release)
        wait_for(lambda: desk.look(release).state == "published")
        assert desk.checked(release).release == str(release)
        desk.withdraw(release)
        wake_worker(app, "publish.run", release)
        wait_for(lambda: desk.look(release).state == "withdrawn")
    finally:
        worker.terminate()
        assert worker.wait(60) == 0


def test_the_publisher_may_not_approve_nor_rewrite_what_it_built(desk):
    release = desk.built()
    engine = connect(str(desk.settings.database_url))
    for statement in (
        f"INSERT INTO approvals VALUES ('{release}', '\\x00', '{desk.author}', '')",
        "UPDATE releases SET reviewers = 1",
        "UPDATE releases SET digest = '\\x00' WHERE state = 'in_review'",
        "UPDATE releases SET state = 'published' WHERE state = 'in_review'",
        "DELETE FROM revocations",
    ):
        refused = pytest.raises(DBAPIError, match=r"permission denied|stays as it|does not go|violates")
        with refused, engine.begin() as connection:
            connection.exec_driver_sql(statement)
    engine.dispose()
    assert desk.look(release).state == "in_review"


@pytest.mark.parametrize("asked", ["publishing", "withdrawing"])
def test_attempts_after_review_are_counted_and_a_person_can_ask_again(asked, desk, monkeypatch):
    """A store that refuses: publishing ends after so many attempts, a withdrawal never does."""
    release = desk.publishing()
    if asked == "withdrawing":
        desk.publisher.run(release)
        desk.withdraw(release)
    store = "put" if asked == "publishing" else "remove"
    monkeypatch.setattr(desk.publisher.public, store, refusing)
    waits = []
    for _ in range(MAX_ATTEMPTS + 3):
        desk.publisher.run(release)
        row = desk.look(release)
        waits.append(row.lease_until - datetime.now(UTC))
        desk.expire(release)
    assert waits[0] < timedelta(seconds=31)
    assert waits[1] < timedelta(seconds=61)
    assert max(waits) <= timedelta(hours=1)
    with Session(desk.place.engines["sweep"]) as session:
        rung = release in [id for _, id in sweep.unpublished(session)]
    if asked == "publishing":
        assert (row.state, row.fault, row.attempts, rung) == ("publishing", "lost", MAX_ATTEMPTS + 1, False)
        monkeypatch.undo()
        assert desk.publisher.run(release) is False
        desk.place.change("UPDATE releases SET attempts = 0 WHERE id = %s", release)
    else:
        assert (row.state, row.attempts, rung) == ("withdrawing", MAX_ATTEMPTS + 3, True)
        monkeypatch.undo()
    desk.publisher.run(release)
    row = desk.look(release)
    assert (row.state, row.attempts) == ("published" if asked == "publishing" else "withdrawn", 0)


def refusing(*_):
    raise ConnectionError


def test_a_drained_publisher_has_not_tried(desk):
    release = desk.release()
    assert desk.order(release, "drawn", end="drain") == 10
    assert desk.look(release).attempts == 0
