"""Checking an upload binds it to the account of its people: by its records, whatever file they come in."""

import hashlib
import io
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import numpy as np
import psycopg
import pytest
from sqlalchemy import func, select, text
from sqlalchemy.orm import Session

from core.faults import Failure
from core.stores.private import PrivateStore
from core.stores.witness import DirectoryWitness
from core.tables import Account, Dataset, Person, Review
from core.unwrap import FileKeys
from tests.worker.conftest import npz, upload
from worker import sweep, uploads
from worker.checking import Checker
from worker.lease import MAX_ATTEMPTS, DatasetLease
from worker.record_registry import KeyChanged, RecordRegistry
from worker.train import make_checker, make_trainer

KEY = bytes(range(32))


@pytest.fixture
def checker(place, tmp_path):
    """A private side that has seen no records yet; the ledger is level with its witness."""
    place.keep_witness()
    (tmp_path / "witness").mkdir()
    registry = RecordRegistry(DirectoryWitness(tmp_path / "witness"), KEY)
    forget(place)
    private = PrivateStore(place.admin, "sluice-private")
    return Checker(
        engine=place.engines["train"], private=private, keys=place.keys, registry=registry, key=KEY
    )


def forget(place):
    """Datasets of other tests are of no account, so that nobody compares with them."""
    unguarded(place, "UPDATE datasets SET account_id = NULL, state = 'deleted'")


def unguarded(place, statement):
    place.change(f"SET session_replication_role = replica; {statement}")


@pytest.fixture
def curator2(place):
    id = uuid.uuid4()
    with Session(place.engines["owner"]) as session, session.begin():
        session.add(Person(id=id, name=f"cora-{id}", role="curator"))
    return id


def another(checker):
    """A second worker, with the same key and the same store."""
    return replace(checker, registry=RecordRegistry(checker.registry._store, KEY))


def checked(place, checker, body=None, **more):
    dataset = place.sealed(body, **more)
    checker.check(dataset.id)
    return place.see(dataset)


def accounts(place):
    with Session(place.engines["service"]) as session:
        return session.scalars(select(func.count()).select_from(Account)).one()


def arrays(body):
    with np.load(io.BytesIO(body)) as held:
        return held["x"], held["y"]


def zipped_anew(body):
    return npz(*arrays(body), compressed=True)


def members_swapped(body):
    return npz(*arrays(body), reverse=True)


def reordered(body):
    x, y = arrays(body)
    return npz(x[::-1], y[::-1])


def half(body):
    x, y = arrays(body)
    return npz(x[::2], y[::2])


def doubled(body):
    x, y = arrays(body)
    more, labels = arrays(upload())
    return npz(np.concatenate([more, x]), np.concatenate([labels, y]))


def noisy(body):
    x, y = arrays(body)
    return npz(x + np.random.default_rng(1).integers(0, 2, x.shape, dtype=np.uint8), y)


COPIES = [zipped_anew, members_swapped, reordered, half, doubled, noisy]


def test_a_first_upload_gets_an_account_once_its_records_were_read(place, checker):
    before = accounts(place)
    waiting = place.sealed(epsilon=3.0)
    assert (waiting.account_id, accounts(place)) == (None, before)
    checker.check(waiting.id)
    ready = place.see(waiting)
    assert (ready.state, ready.causes, ready.report) == ("ready", [], {"clamped": 0, "mapped": 0})
    with Session(place.engines["service"]) as session:
        account = session.get_one(Account, ready.account_id)
    assert (account.epsilon, account.delta, account.order, account.held) == (3.0, 1e-5, 4, 0)
    checker.check(waiting.id)  # said again: nothing more is opened
    assert accounts(place) == before + 1


@pytest.mark.parametrize("copy", COPIES)
def test_a_copy_by_another_curator_is_held_in_whatever_file(copy, place, checker, curator2):
    body = upload()
    first = checked(place, checker, body)
    before = accounts(place)
    second = checked(place, checker, copy(body), owner=curator2)
    assert (second.state, second.account_id, second.causes) == ("held", None, ["overlap"])
    assert [match["account"] for match in second.matches] == [str(first.account_id)]
    assert accounts(place) == before


@pytest.mark.parametrize("copy", COPIES)
def test_a_copy_by_the_same_curator_draws_on_the_same_account(copy, place, checker):
    body = upload()
    first = checked(place, checker, body, epsilon=2.0)
    before = accounts(place)
    second = checked(place, checker, copy(body), epsilon=50.0, over_cap=True)
    assert (second.state, second.account_id) == ("ready", first.account_id)
    assert accounts(place) == before


def test_a_copy_declared_public_is_held_and_matched_with_the_private_one(place, checker):
    body = upload()
    private = checked(place, checker, body)
    public = checked(place, checker, members_swapped(body), public=True)
    assert (public.state, public.account_id, sorted(public.causes)) == ("held", None, ["overlap", "public"])
    assert [match["dataset"] for match in public.matches] == [str(private.id)]


def test_other_people_are_not_held(place, checker, curator2):
    first = checked(place, checker)
    second = checked(place, checker, owner=curator2)
    assert (second.state, second.matches) == ("ready", [])
    assert second.account_id != first.account_id


@pytest.mark.parametrize(
    ("declared", "causes"),
    [({"over_cap": True}, ["budget"]), ({"public": True}, ["public"]), ({"relation": "replace_one"}, [])],
)
def test_what_is_declared_may_hold_it_too(declared, causes, place, checker):
    dataset = checked(place, checker, **declared)
    assert (dataset.state, dataset.causes) == ("held" if causes else "ready", causes)


def test_few_people_are_held_however_often_they_occur(place, checker):
    x, y = arrays(upload())
    assert checked(place, checker, npz(x[:19], y[:19])).causes == ["few"]
    assert checked(place, checker, npz(np.repeat(x[40:59], 20, 0), np.repeat(y[40:59], 20))).causes == ["few"]
    assert checked(place, checker, npz(x[100:120], y[100:120])).state == "ready"


def test_a_rejected_upload_leaves_no_trace(place, checker, curator2):
    body, before = upload(), accounts(place)
    wrong = checked(place, checker, body, sha256=bytes(32))
    assert (wrong.state, wrong.fault, wrong.account_id) == ("rejected", "hash-mismatch", None)
    assert accounts(place) == before
    checker.registry.catch_up()
    assert checker.registry.datasets == set()
    assert checked(place, checker, body, owner=curator2).state == "ready"


def decide(place, dataset, decision, account=None):
    with Session(place.engines["service"]) as session, session.begin():
        review = {"decision": decision, "reason": "a test", "decided_by": place.officer}
        session.add(Review(dataset_id=dataset.id, account_id=account, **review))
        session.flush()
        session.get_one(Dataset, dataset.id).state = "rejected" if decision == "reject" else "checking"


def test_a_decision_is_carried_out(place, checker, curator2):
    body = upload()
    first = checked(place, checker, body)
    join, accept, reject = (checked(place, checker, body, owner=curator2) for _ in range(3))
    for dataset, decision, account in (
        (join, "join", first.account_id), (accept, "accept", None), (reject, "reject", None),
    ):  # fmt: skip
        decide(place, dataset, decision, account)
        checker.check(dataset.id)
    assert place.see(join).account_id == first.account_id
    own = place.see(accept)
    assert own.state == "ready"
    assert own.account_id not in (None, first.account_id)
    assert (place.see(reject).state, place.see(reject).account_id) == ("rejected", None)
    # What was rejected is held against nobody; what was accepted is.
    forgotten = {match["dataset"] for match in checked(place, checker, body, owner=place.officer).matches}
    assert forgotten == {str(first.id), str(join.id), str(accept.id)}


def test_copies_checked_at_the_same_moment_get_one_account_between_them(place, checker, curator2):
    body, before = upload(), accounts(place)
    datasets = [place.sealed(copy(body), owner=who) for copy in COPIES for who in (place.person, curator2)]
    workers = [another(checker) for _ in datasets]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda worker, dataset: worker.check(dataset.id), workers, datasets))
    states = [place.see(dataset).state for dataset in datasets]
    assert accounts(place) == before + 1
    assert set(states) <= {"ready", "held"}
    assert "checking" not in states


def test_a_copy_waits_until_the_one_before_it_is_remembered(place, checker, curator2, monkeypatch):
    """The second check begins after the first has compared and before it has written anything."""
    body, before = upload(), accounts(place)
    first, second = place.sealed(body), place.sealed(reordered(body), owner=curator2)
    add, begun = checker.registry.add, []

    def add_late(dataset, sketch):
        begun.append(pool.submit(another(checker).check, second.id))
        waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
        with place.engines["owner"].connect() as connection:
            while not (begun[0].done() or connection.scalar(text(waiting))):
                connection.rollback()
        add(dataset, sketch)

    monkeypatch.setattr(checker.registry, "add", add_late)
    with ThreadPoolExecutor(1) as pool:
        checker.check(first.id)
        begun[0].result()
    assert (place.see(first).state, place.see(second).state) == ("ready", "held")
    assert accounts(place) == before + 1


def test_records_are_known_after_the_database_forgot_them(place, checker, curator2):
    """A restored backup does not know the dataset; what was remembered outside it still names the account."""
    body = upload()
    first = checked(place, checker, body)
    unguarded(place, f"DELETE FROM datasets WHERE id = '{first.id}'")
    again = checked(place, another(checker), body, owner=curator2)
    assert (again.state, again.causes) == ("held", ["overlap"])
    assert [match["account"] for match in again.matches] == [str(first.account_id)]


def test_records_of_datasets_from_before_fingerprints_are_remembered_first(place, checker, curator2):
    body = upload()
    old = place.dataset(body=body)  # ready, and never fingerprinted
    copy = checked(place, checker, reordered(body), owner=curator2)
    assert (copy.state, [match["dataset"] for match in copy.matches]) == ("held", [str(old.id)])


def test_what_an_older_version_bound_at_sealing_stays_bound(place, checker):
    account, before = place.dataset().account_id, accounts(place)
    waiting = checked(place, checker, account_id=account)
    public = place.sealed(account_id=account, state="held", causes=["public"], public=True)
    decide(place, public, "accept")
    checker.check(public.id)
    for dataset in (waiting, place.see(public)):
        assert (dataset.state, dataset.account_id) == ("ready", account)
    assert accounts(place) == before


def test_what_cannot_be_compared_is_held(place, checker, curator2):
    old = place.dataset()
    place.admin.delete_object(Bucket="sluice-private", Key=old.object_key)
    new = checked(place, checker, owner=curator2)
    assert (new.state, new.causes) == ("held", ["overlap"])
    assert new.matches == [{"dataset": str(old.id), "account": str(old.account_id), "share": "unknown"}]


def test_another_key_recognises_nobody_and_so_nothing_is_checked(place, checker):
    checked(place, checker)
    other = RecordRegistry(checker.registry._store, bytes(32))
    with pytest.raises(KeyChanged):
        other.catch_up()
    worker = replace(checker, registry=other, key=bytes(32))
    waiting = place.sealed()
    worker.check(waiting.id)
    assert place.see(waiting).state == "checking"
    checker.check(waiting.id)
    assert place.see(waiting).state == "ready"


def test_no_account_is_opened_by_a_ledger_that_may_have_forgotten(place, checker):
    place.change("UPDATE witness SET checked_at = now() - interval '2 minutes'")
    waiting, before = place.sealed(), accounts(place)
    checker.check(waiting.id)
    assert (place.see(waiting).state, accounts(place)) == ("checking", before)
    place.keep_witness()
    checker.check(waiting.id)
    assert place.see(waiting).state == "ready"


def test_the_worker_is_made_with_the_sites_key_and_store(place):
    trainer = make_trainer(place.train_settings)
    made = make_checker(place.train_settings, trainer)
    made.registry.catch_up()
    assert len(made.key) == 32
    trainer.engine.dispose()


def tried(place, checker, dataset, *, most=30):
    """Checks as rung for again and again, whenever the dataset is due; gives how long each wait was."""
    waits = []
    for _ in range(most):
        checker.check(dataset.id)
        row = place.see(dataset)
        if row.state != "checking":
            break
        checker.check(dataset.id)  # rung for too early: no attempt
        assert place.see(dataset).attempts == row.attempts
        waits.append((row.retry_at - datetime.now(UTC)).total_seconds())
        place.change("UPDATE datasets SET retry_at = now() - interval '1 s' WHERE id = %s", dataset.id)
    return waits


@pytest.mark.parametrize(
    ("wrong", "fault", "attempts"),
    [("never completed", "upload-gone", MAX_ATTEMPTS), ("disk full", "out-of-space", MAX_ATTEMPTS),
     ("unforeseen", "check-failed", MAX_ATTEMPTS), ("disk small", "exceeds-disk", 1),
     ("other size", "size-mismatch", 1)],
)  # fmt: skip
def test_a_check_is_tried_a_bounded_number_of_times(wrong, fault, attempts, place, checker, monkeypatch):
    """What may pass waits longer each time; nothing that does not fit is fetched at all."""
    dataset = place.sealed()
    monkeypatch.setattr(PrivateStore, "open", refusing)
    if wrong == "never completed":
        place.admin.delete_object(Bucket="sluice-private", Key=dataset.object_key)
    elif wrong == "other size":
        place.admin.put_object(Bucket="sluice-private", Key=dataset.object_key, Body=b"another")
    elif wrong.startswith("disk"):
        most = 2 * dataset.size - 1
        disk = SimpleNamespace(total=most if wrong == "disk small" else 1 << 40, free=most)
        monkeypatch.setattr("worker.uploads.shutil.disk_usage", lambda _: disk)
    waits = tried(place, checker, dataset)
    row = place.see(dataset)
    assert (row.state, row.fault, row.attempts, row.account_id) == ("rejected", fault, attempts, None)
    assert len(waits) == attempts - 1
    if waits:
        assert max(waits) <= 3600
        assert waits[0] <= 2
        assert waits[-1] > 3590


def refusing(*_):
    raise RuntimeError("the text of an error may quote a record")


def test_a_check_that_kills_its_worker_is_counted_too(place, checker, monkeypatch):
    dataset = place.sealed()
    for _ in range(MAX_ATTEMPTS):
        assert DatasetLease.claim(checker.engine, dataset.id) is not None  # and its worker dies
        assert DatasetLease.claim(checker.engine, dataset.id) is None
        place.change("UPDATE datasets SET retry_at = now() - interval '1 s' WHERE id = %s", dataset.id)
    checker.check(dataset.id)
    row = place.see(dataset)
    assert (row.state, row.fault) == ("rejected", "check-failed")


def test_a_check_that_failed_for_a_passing_reason_succeeds_later(place, checker, monkeypatch):
    dataset = place.sealed()
    with monkeypatch.context() as full:
        full.setattr("worker.uploads.shutil.disk_usage", lambda _: SimpleNamespace(total=1 << 40, free=0))
        checker.check(dataset.id)
    row = place.see(dataset)
    assert (row.state, row.fault, row.attempts) == ("checking", "out-of-space", 1)
    with Session(place.engines["sweep"]) as session:
        assert ("train.check", dataset.id) not in sweep.waiting(session)
        place.change("UPDATE datasets SET retry_at = now() - interval '1 s' WHERE id = %s", dataset.id)
        assert ("train.check", dataset.id) in sweep.waiting(session)
    checker.check(dataset.id)
    row = place.see(dataset)
    assert (row.state, row.fault, row.attempts) == ("ready", None, 2)


def test_a_long_check_keeps_others_from_a_second_one(place, checker, monkeypatch):
    """Its lease is renewed while it reads."""
    dataset = place.sealed()
    checker.lease, checker.beat_seconds = timedelta(seconds=20), 0.05
    read = checker._read

    def read_long(row):
        first = place.see(row).retry_at
        while place.see(row).retry_at < first + timedelta(seconds=0.4):
            assert DatasetLease.claim(checker.engine, row.id) is None
        return read(row)

    monkeypatch.setattr(Checker, "_read", lambda _, row: read_long(row))
    checker.check(dataset.id)
    assert (place.see(dataset).state, place.see(dataset).attempts) == ("ready", 1)


def test_waiting_for_the_ledger_reads_nothing_and_is_no_attempt(place, checker, monkeypatch):
    place.change("UPDATE witness SET checked_at = now() - interval '2 minutes'")
    dataset = place.sealed()
    monkeypatch.setattr(PrivateStore, "open", refusing)
    for _ in range(MAX_ATTEMPTS + 1):
        checker.check(dataset.id)
    assert (place.see(dataset).state, place.see(dataset).attempts) == ("checking", 0)
    place.keep_witness()


# -- encryption


def refused(place, checker, dataset):
    checker.check(dataset.id)
    row = place.see(dataset)
    return row.state, row.fault


def test_uploads_from_before_encryption_still_open(place, checker):
    body = upload()
    old = place.sealed(body, encrypted=False)
    checker.check(old.id)
    assert place.see(old).state == "ready"
    new = place.sealed(body)
    checker.check(new.id)
    assert place.see(new).account_id == place.see(old).account_id


def test_what_is_not_encrypted_for_this_dataset_is_rejected(place, checker):
    """Bytes sent plain; an object and its key given to another dataset; a key for somebody else."""
    plain, other, foreign = place.sealed(), place.sealed(), place.sealed()
    place.admin.put_object(Bucket="sluice-private", Key=plain.object_key, Body=(upload() * 2)[: plain.size])
    assert refused(place, checker, plain) == ("rejected", "cannot-decrypt")
    row = {"size": other.size, "sha256": other.sha256, "wrapped_key": other.wrapped_key}
    thief = place.sealed(**row)
    taken = place.admin.get_object(Bucket="sluice-private", Key=other.object_key)["Body"].read()
    place.admin.put_object(Bucket="sluice-private", Key=thief.object_key, Body=taken)
    assert refused(place, checker, thief) == ("rejected", "cannot-decrypt")
    place.change(
        "UPDATE datasets SET state = 'checking', wrapped_key = %s WHERE id = %s",
        FileKeys(place.stack.state["synthesizer_key"]).public.wrap(bytes(32)), foreign.id, guards=False,
    )  # fmt: skip
    assert refused(place, checker, foreign) == ("rejected", "cannot-decrypt")


@pytest.mark.parametrize(
    ("change", "fault"), [("cut", "size-mismatch"), ("bit", "cannot-decrypt"), ("more", "size-mismatch")]
)
def test_a_changed_object_is_rejected(place, checker, change, fault):
    dataset = place.sealed()
    body = place.admin.get_object(Bucket="sluice-private", Key=dataset.object_key)["Body"].read()
    bad = {"cut": body[:-1], "bit": body[:99] + bytes([body[99] ^ 1]) + body[100:], "more": body + b"x"}
    place.admin.put_object(Bucket="sluice-private", Key=dataset.object_key, Body=bad[change])
    assert refused(place, checker, dataset) == ("rejected", fault)


def test_bytes_that_open_but_are_not_those_that_were_sealed_are_rejected(place, checker):
    claimed = place.sealed(sha256=bytes(32))
    assert refused(place, checker, claimed) == ("rejected", "hash-mismatch")
    longer = place.sealed(size=5)
    assert refused(place, checker, longer) == ("rejected", "size-mismatch")


def test_a_worker_without_the_key_rejects_nothing(place, checker):
    """A fault of the settings is not the dataset's: it waits until the key is there."""
    dataset = place.sealed()
    without = replace(checker, keys=FileKeys(place.stack.state["synthesizer_key"]))
    assert refused(place, without, dataset) == ("checking", None)
    assert place.see(dataset).attempts == 0
    both = place.stack.state["synthesizer_key"] + place.stack.state["upload_key"]
    checker_with_old_key = replace(checker, keys=FileKeys(both))
    assert refused(place, checker_with_old_key, dataset) == ("ready", None)


def test_a_deleted_dataset_cannot_be_opened_by_those_who_have_every_key(place, checker, tmp_path):
    dataset = place.sealed()
    checker.check(dataset.id)
    copy = place.admin.get_object(Bucket="sluice-private", Key=dataset.object_key)["Body"].read()
    place.change("UPDATE datasets SET state = 'deleted' WHERE id = %s", dataset.id)
    assert place.admin.get_object(Bucket="sluice-private", Key=dataset.object_key)["Body"].read() == copy
    with pytest.raises(Failure, match="key-destroyed"):
        uploads.fetch(place.see(dataset), checker.private, place.keys, tmp_path / "upload")
    assert not (tmp_path / "upload").exists()


def test_only_of_public_datasets_the_hash_of_the_file_is_kept(place, checker):
    """Of private ones it would tell a reader of the database whether it is a file they have."""
    body = upload()
    public, private = place.sealed(body, public=True), place.sealed()
    for dataset in (public, private):
        checker.check(dataset.id)
    assert place.see(public).content_sha256 == hashlib.sha256(body).digest()
    assert place.see(private).content_sha256 is None
    with pytest.raises(psycopg.errors.CheckViolation, match="datasets_content_sha256"):
        place.change("UPDATE datasets SET content_sha256 = sha256 WHERE id = %s", private.id)
