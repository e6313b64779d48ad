"""A paid job ends trained or in a named fault, with one charge, whenever and however its worker dies."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import psutil
import psycopg
import pytest
from safetensors.torch import load
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from core.faults import Failure, Fault
from core.queue import celery_app, wake_worker
from core.stores.witness import DirectoryWitness
from core.tables import Diagnosis
from core.unwrap import FileKeys, KeyNotConfigured
from core.witness import WitnessLog
from sluice.envelope import CannotDecrypt, decrypt_wrapped
from sluice.generators.classifier import Classifier
from tests.worker.conftest import ADAPT, GSWGAN
from worker import sweep, training
from worker.lease import Fenced, JobLease
from worker.train import make_trainer
from worker.trainers.base import Progress
from worker.training import Trainer

SVG = "{http://www.w3.org/2000/svg}"
POINTS = [
    "claimed", "planned", "witnessed", "opened", "fetching", "fetched", "read", "built", "restored",
    "records", "stepped", "before checkpoint", "diagnostics", "after checkpoint", "checkpointed", "followed",
    "synthesizer", "stored", "settled", "wiped",
]  # fmt: skip
# (point, which time): first, somewhere in the middle, and on the second attempt where there is one
MOMENTS = [(point, 1) for point in POINTS] + [
    ("stepped", 3), ("stepped", 6), ("before checkpoint", 4), ("after checkpoint", 4), ("checkpointed", 4),
    ("checkpointed", 6), ("diagnostics", 7),
]  # fmt: skip


def finish(place, mortal, job, seconds=300):
    """Works on the job, as if every lease on it had expired, until it ends."""
    end = time.monotonic() + seconds
    while place.look(job).state in ("queued", "running"):
        assert time.monotonic() < end, "not finished in time"
        place.expire(job)
        mortal.order(job)
    return place.look(job)


def test_a_job_is_trained_settled_and_leaves_nothing_but_its_synthesizer(place, mortal):
    job = place.job(steps=6)
    assert mortal.order(job) == 0
    row = place.look(job)
    assert (row.state, row.fault, row.step, row.fence) == ("trained", None, 6, 1)
    assert row.opened_at < row.finished_at
    assert place.ledger_of(job) == ["reserve", "settle"]
    assert set(place.vault_keys(row.synthesizer_key)) == {
        row.synthesizer_key + "synthesizer.json",
        row.synthesizer_key + "synthesizer.safetensors",
    }
    assert place.vault_versions(f"checkpoints/{job}") == []
    kept = {key.rsplit(".")[-1]: place.vault_object(key) for key in place.vault_keys(f"diagnostics/{job}")}
    assert set(kept) == {"jsonl", "svg"}
    rows = [json.loads(line) for line in kept["jsonl"].splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    shown = [text.text.split(":")[0] for text in ElementTree.fromstring(kept["svg"]).iter(f"{SVG}text")]
    assert set(shown) == {name for row in rows for name in row} - {"step"}


def test_nothing_is_kept_of_how_a_job_learns_unless_the_site_says_so(place, mortal):
    """By default: no file in the vault, no row, although checkpoints are made."""
    job = place.job(steps=6)
    assert mortal.order(job, set={"diagnostics": False}) == 0
    assert place.look(job).state == "trained"
    assert place.vault_keys(f"diagnostics/{job}") == {}
    with Session(place.engines["service"]) as session:
        assert session.get(Diagnosis, job) is None


def test_losses_are_not_even_asked_for_unless_the_site_says_so(place):
    class Silent:
        def steps(self):
            yield Progress(1, 1)

        def diagnostics(self):
            raise AssertionError

    held = JobLease.claim(place.engines["train"], place.job())
    trainer = Trainer(engine=place.engines["train"], private=None, keys=None, vault=None, witness=None)
    trainer._follow(held, Silent())
    trainer.diagnostics = True
    with pytest.raises(AssertionError):
        trainer._follow(held, Silent())
    held.hand_back()


def test_an_adaptation_reads_two_datasets_and_leaves_a_classifier(place, mortal):
    job = place.adaptation()
    assert mortal.order(job, "stepped", count=4) == -signal.SIGKILL
    row = finish(place, mortal, job)
    assert (row.state, row.fault, row.step, row.steps) == ("trained", None, 8, 8)
    assert place.ledger_of(job) == ["reserve", "settle"]
    names = ("classifier.json", "classifier.safetensors")
    files = {name: row.synthesizer_key + name for name in names}
    assert set(place.vault_keys(row.synthesizer_key)) == set(files.values())
    read = {name: place.vault_object(key) for name, key in files.items()}
    assert Classifier.from_files(read).architecture.classes == 2  # those of the source


def test_a_relay_hands_its_generator_from_owner_to_owner(place, mortal):
    """Each trains on its own records under its own charge; what goes on is a function of noised sums."""
    first = place.job(of=GSWGAN, shared=True)
    assert mortal.order(first) == 0
    key = place.look(first).synthesizer_key + "handed-on.safetensors"
    handed = load(place.vault_object(key))
    assert {name.split(".")[0] for name in handed} == {"generator", "average", "generator_optimizer"}
    second = place.job(of=GSWGAN, after_id=first)
    assert mortal.order(second, "stepped", count=2) == -signal.SIGKILL
    row = finish(place, mortal, second)
    assert (row.state, row.fault) == ("trained", None)
    assert place.ledger_of(first) == place.ledger_of(second) == ["reserve", "settle"]
    assert place.look(first).account_id != row.account_id
    # It began where the first ended: Adam's count went on.
    ended = load(last_checkpoint(place, mortal, first))
    assert ended["generator_optimizer.0.step"].item() == 3 + 1
    names = {"synthesizer.json", "synthesizer.safetensors"}  # not shared, so nothing is handed on
    assert {name.rsplit("/", 1)[1] for name in place.vault_keys(row.synthesizer_key)} == names


def last_checkpoint(place, mortal, before):
    """Of a job that goes on from another, after its first step."""
    job = place.job(of=GSWGAN, after_id=before)
    assert mortal.order(job, "after checkpoint", count=1) == -signal.SIGKILL
    [key] = place.vault_keys(f"checkpoints/{job}")
    return place.vault_object(key)


def test_the_database_knows_what_may_be_handed_on(place):
    own = place.job(of=GSWGAN)  # not shared
    waiting = place.job(of=GSWGAN, shared=True)  # not trained
    for before in (own, waiting):
        with pytest.raises(DBAPIError, match="a relay goes on from a trained job that is shared"):
            place.job(of=GSWGAN, after_id=before)
    with pytest.raises(DBAPIError, match="a relay"):
        place.job(shared=True)  # of another kind
    with pytest.raises(psycopg.errors.RestrictViolation, match="stays as it is"):
        place.change("UPDATE jobs SET shared = true WHERE id = %s", own)


def test_the_database_lets_nothing_private_be_a_source(place):
    """Whatever a service believes: nobody is charged for what a source tells."""
    public, private, shared = place.dataset(public=True), place.dataset(), place.dataset(public=True)
    place.dataset(account=shared.account_id)  # private, and by declaration of the same people
    for source in (private.id, shared.id, uuid.uuid4()):
        with pytest.raises(DBAPIError, match="a source is public"):
            place.job(of=ADAPT, source_id=source)
    with pytest.raises(DBAPIError, match="a job has a source if its method needs one"):
        place.job(of=ADAPT)
    with pytest.raises(DBAPIError, match="and only then"):
        place.job(source_id=public.id)
    for change in (
        ("UPDATE jobs SET source_id = %s WHERE id = %s", private.id, place.adaptation()),
        ("UPDATE datasets SET public = true WHERE id = %s", private.id),
    ):
        with pytest.raises(psycopg.errors.RestrictViolation, match="stays as it is"):
            place.change(*change)


@pytest.mark.parametrize(("point", "count"), MOMENTS)
def test_kill_9_anywhere_and_the_job_ends_trained_under_one_charge(point, count, place, mortal):
    job = place.job(steps=6)
    assert mortal.order(job, point, count=count) == -signal.SIGKILL
    row = place.look(job)
    opened_before = POINTS.index(point) >= POINTS.index("opened")
    assert (row.opened_at is not None) == opened_before
    row = finish(place, mortal, job)
    assert (row.state, row.step) == ("trained", 6)
    assert place.ledger_of(job) == ["reserve", "settle"]
    assert row.fence == (1 if point in ("settled", "wiped") else 2)


@pytest.mark.long
@pytest.mark.parametrize("_", range(3))
@pytest.mark.parametrize(("point", "count"), MOMENTS)
def test_kill_9_anywhere_more_often(point, count, _, place, mortal):
    test_kill_9_anywhere_and_the_job_ends_trained_under_one_charge(point, count, place, mortal)


def test_it_goes_on_from_its_checkpoint_not_from_the_start(place, mortal):
    job = place.job(steps=6)
    assert mortal.order(job, "checkpointed", count=4) == -signal.SIGKILL
    assert place.look(job).checkpoint == 1
    assert mortal.order(job) == 0  # not while the lease lasts
    assert place.look(job).fence == 1
    place.expire(job)
    assert mortal.order(job, "stepped", count=3) == 0  # only two steps were left
    assert place.look(job).state == "trained"


def test_every_attempt_dying_ends_in_a_named_fault_and_one_charge(place, mortal):
    job = place.job(steps=6)
    assert mortal.order(job, "opened") == -signal.SIGKILL
    place.change("UPDATE jobs SET fence = 20, lease_until = now() - interval '1 s' WHERE id = %s", job)
    sweep.end_exhausted_jobs(place.engines["sweep"])
    row = place.look(job)
    assert (row.state, row.fault) == ("failed", "lost")
    assert place.ledger_of(job) == ["reserve", "settle"]


def test_a_job_lost_before_its_records_were_opened_costs_nothing(place, mortal):
    job = place.job(steps=6)
    assert mortal.order(job, "planned") == -signal.SIGKILL
    place.change("UPDATE jobs SET fence = 20, lease_until = now() - interval '1 s' WHERE id = %s", job)
    sweep.end_exhausted_jobs(place.engines["sweep"])
    assert (place.look(job).fault, place.ledger_of(job)) == ("lost", ["reserve", "void"])


def test_nothing_is_read_before_the_charge_is_witnessed_outside_the_database(place, mortal):
    """The witness is behind: the worker waits, opens nothing, and hands the job back."""
    dataset = place.dataset()
    place.keep_witness()
    kept, place.keep_witness = place.keep_witness, lambda: None
    try:
        job = place.job(dataset)
        assert mortal.order(job) == 10
        row = place.look(job)
        assert (row.state, row.opened_at) == ("queued", None)
    finally:
        place.keep_witness = kept
    place.keep_witness()
    assert finish(place, mortal, job).state == "trained"


def test_a_database_that_is_behind_the_witness_trains_nothing_a_second_time(place, monkeypatch, tmp_path):
    """A restored queue: by the witness the job was settled since, and its generator may be public."""
    monkeypatch.setattr(training, "_WITNESS_SECONDS", 0.1)
    job = place.job()
    row = place.look(job)
    seen = place.witness.accounts[str(row.account_id)]
    trainer = make_trainer(place.train_settings)
    for later in (
        {**seen, "moves": seen["moves"] + 1, "head": "ab" * 32},  # rows that this database has not
        {**seen, "head": "ab" * 32},  # or another row in the same place
    ):
        trainer.witness = WitnessLog(DirectoryWitness(tmp_path / uuid.uuid4().hex))
        trainer.witness._store._root.mkdir()
        assert trainer.witness.append({str(row.account_id): later})
        assert trainer.run(job) is True
        assert (place.look(job).state, place.look(job).opened_at) == ("queued", None)
    trainer.witness = place.witness
    assert trainer.run(job) is False
    assert place.look(job).state == "trained"
    trainer.engine.dispose()


def test_a_zombie_that_wakes_after_its_lease_changes_nothing(place, mortal):
    job = place.job(steps=6)
    zombie = mortal.order(job, "stepped", count=2, end="stop", wait=False)
    wait_stopped(zombie)
    place.expire(job)
    second = JobLease.claim(place.engines["train"], job)
    assert second.fence == 2
    second.hand_back()
    row = finish(place, mortal, job)
    assert (row.state, row.fence) == ("trained", 3)
    before = place.vault_keys("synthesizers/")
    os.kill(zombie, signal.SIGCONT)
    wait_gone(zombie)
    after = place.look(job)
    assert (after.state, after.fence, after.synthesizer_key, after.step) == (
        row.state,
        3,
        row.synthesizer_key,
        6,
    )
    assert place.ledger_of(job) == ["reserve", "settle"]
    assert place.vault_keys("synthesizers/") == before


def wait_stopped(pid):
    wait_for(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)


def wait_gone(pid):
    wait_for(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


def wait_for(what, seconds=300):
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_an_older_fence_is_refused_at_every_write(place):
    job = place.job()
    first = JobLease.claim(place.engines["train"], job)
    place.expire(job)
    second = JobLease.claim(place.engines["train"], job)
    for write in (
        first.renew,
        first.open,
        first.checkpointed,
        first.hand_back,
        lambda: first.trained(synthesizer_key="mine", synthesizer_sha256=b"", steps=6),
        lambda: first.failed(Fault.DIVERGED),
        lambda: first.diagnosed(lines="", picture=""),
    ):
        with pytest.raises(Fenced):
            write()
    assert place.look(job).fence == second.fence == 2
    assert place.ledger_of(job) == ["reserve"]


def test_a_second_delivery_a_forged_id_and_an_ended_job_find_nothing_to_do(place, mortal):
    job = place.job()
    held = JobLease.claim(place.engines["train"], job)
    assert JobLease.claim(place.engines["train"], job) is None
    assert JobLease.claim(place.engines["train"], uuid.uuid4()) is None
    held.hand_back()
    assert mortal.order(job) == 0
    synthesizer = place.look(job).synthesizer_key
    assert mortal.order(job) == 0
    row = place.look(job)
    assert (row.fence, row.synthesizer_key) == (2, synthesizer)
    assert place.ledger_of(job) == ["reserve", "settle"]


def test_a_drained_worker_saves_hands_back_and_the_next_one_goes_on(place, mortal):
    job = place.job(steps=6)
    assert mortal.order(job, "stepped", count=3, end="drain") == 10
    row = place.look(job)
    assert (row.state, row.checkpoint, row.lease_until) == ("queued", 1, None)
    row = finish(place, mortal, job)
    assert (row.state, row.fence) == ("trained", 2)


def test_cancel_stops_a_running_job_and_the_charge_stays(place, mortal):
    job = place.job(steps=200_000)
    pid = mortal.order(job, wait=False)
    wait_for(lambda: place.look(job).step > 0)
    place.change("UPDATE jobs SET cancel_asked_at = now() WHERE id = %s", job)
    wait_gone(pid)
    row = place.look(job)
    assert (row.state, row.fault) == ("cancelled", "cancelled")
    assert row.step < 200_000
    assert place.ledger_of(job) == ["reserve", "settle"]
    assert place.vault_versions(f"checkpoints/{job}") == []


def test_a_job_that_ran_out_of_time_is_stopped_within_a_step_and_stays_charged(place, mortal):
    job = place.job(steps=6, limit_seconds=60)
    place.change("UPDATE jobs SET ran_seconds = 60 WHERE id = %s", job)
    assert mortal.order(job, "stepped", count=2) == 0  # would be killed in a second step
    row = place.look(job)
    assert (row.state, row.fault, row.synthesizer_key) == ("failed", "time-limit", None)
    assert place.ledger_of(job) == ["reserve", "settle"]
    assert place.vault_versions(f"checkpoints/{job}") == []
    done = place.job(steps=1, limit_seconds=60)  # nothing is left to stop after the last step
    place.change("UPDATE jobs SET ran_seconds = 60 WHERE id = %s", done)
    assert mortal.order(done) == 0
    assert place.look(done).state == "trained"


def test_the_time_of_all_attempts_counts_and_that_in_the_queue_does_not(place):
    job = place.job(limit_seconds=100)
    first = JobLease.claim(place.engines["train"], job)
    replace(first, began=first.began - 30).renew()
    assert 30 <= place.look(job).ran_seconds < 100
    replace(first, began=first.began - 40).hand_back()
    place.change("UPDATE jobs SET started_at = started_at - interval '1 day' WHERE id = %s", job)
    second = JobLease.claim(place.engines["train"], job)
    second.require_time_left()
    with pytest.raises(Failure, match="time-limit"):
        replace(second, began=second.began - 60).require_time_left()
    with pytest.raises(DBAPIError), place.engines["train"].begin() as connection:
        connection.execute(text("UPDATE jobs SET limit_seconds = NULL"))


def test_a_plan_that_is_not_what_was_paid_for_opens_nothing(place, mortal):
    good = place.look(place.job(steps=6))
    cheaper = good.plan | {"noise_multiplier": good.plan["noise_multiplier"] / 2}
    longer = good.plan | {"steps": 7}
    for changes in ({"plan": cheaper}, {"plan": longer}, {"plan": {"kind": "dpgan"}}):
        job = place.job(steps=6, **changes)
        assert mortal.order(job) == 0
        row = place.look(job)
        assert (row.state, row.fault, row.opened_at) == ("failed", "accounting-mismatch", None)
        assert place.ledger_of(job) == ["reserve", "void"]


BROKEN = {
    "a larger balance": "UPDATE accounts SET capacity = capacity * 3 WHERE id = %s",
    "a row that was changed": "UPDATE entries SET reason = 'x' WHERE account_id = %s AND number = 1",
    "other terms": "UPDATE entries SET terms = terms || '{\"epsilon\": 9999}'"
    " WHERE account_id = %s AND number = 1",
}


@pytest.mark.parametrize("how", [*BROKEN, "a grant of more than its budget, hashed anew"])
def test_nothing_is_opened_on_a_ledger_that_does_not_hold(how, place, mortal):
    dataset = place.dataset()
    job = place.job(dataset)
    if how in BROKEN:
        place.spoil(BROKEN[how], dataset.account_id)
    else:
        place.rewrite(dataset.account_id, grant={"cost": 10**15})
    assert mortal.order(job) == 0
    row = place.look(job)
    assert (row.state, row.fault, row.opened_at) == ("failed", "ledger-broken", None)
    assert row.synthesizer_key is None


def test_nothing_is_opened_for_a_row_that_reserved_another_event(place, mortal):
    """The chain holds and the job says what its plan does, but the ledger was told of more noise."""
    dataset = place.dataset()
    job = place.job(dataset)
    event = place.look(job).event
    place.rewrite(dataset.account_id, reserve={"event": event | {"noise_stddev": 2 * event["noise_stddev"]}})
    assert place.ledger_of(job) == ["reserve"]
    assert mortal.order(job) == 0
    row = place.look(job)
    assert (row.state, row.fault, row.opened_at) == ("failed", "accounting-mismatch", None)


def test_records_that_are_not_the_declared_ones_end_the_job_in_a_fault(place, mortal):
    dataset = place.dataset()
    place.admin.put_object(Bucket="sluice-private", Key=dataset.object_key, Body=bytes(dataset.size))
    job = place.job(dataset)
    assert mortal.order(job) == 0
    row = place.look(job)
    assert (row.state, row.fault) == ("failed", "cannot-decrypt")
    assert place.ledger_of(job) == ["reserve", "settle"]


@pytest.mark.parametrize(
    ("wrong", "fault", "attempts"),
    [("gone", "upload-gone", 20), ("other size", "schema-mismatch", 1), ("disk full", "out-of-space", 20),
     ("disk small", "exceeds-disk", 1)],
)  # fmt: skip
def test_a_job_whose_upload_cannot_be_fetched_is_given_back_what_it_was_charged(
    wrong, fault, attempts, place, monkeypatch
):
    """Asked before records count as opened, a bounded number of times, and never after a byte was fetched."""
    dataset = place.dataset()
    job = place.job(dataset)
    trainer = make_trainer(place.train_settings)
    monkeypatch.setattr(trainer.stopping, "wait", lambda _: False)
    monkeypatch.setattr(trainer.private, "open", None)
    if wrong == "gone":
        place.admin.delete_object(Bucket="sluice-private", Key=dataset.object_key)
    elif wrong == "other size":
        place.admin.put_object(Bucket="sluice-private", Key=dataset.object_key, Body=b"something else")
    else:
        most = 2 * dataset.size - 1
        disk = (most, 0, most) if wrong == "disk small" else (1 << 40, 0, most)
        monkeypatch.setattr("worker.uploads.shutil.disk_usage", lambda _: usage(*disk))
    while trainer.run(job):
        pass
    row = place.look(job)
    assert (row.state, row.fault, row.fence, row.opened_at) == ("failed", fault, attempts, None)
    assert place.ledger_of(job) == ["reserve", "void"]
    trainer.engine.dispose()


def usage(total, used, free):
    return SimpleNamespace(total=total, used=used, free=free)


def test_what_is_fixed_about_a_job_cannot_be_changed_by_a_worker(place, mortal):
    job = place.job()
    assert mortal.order(job) == 0
    for statement in ("opened_at = NULL", "state = 'queued'", "fence = 0", "cost = 0"):
        with pytest.raises((DBAPIError, Exception), match="stays as it is"):
            place.change(f"UPDATE jobs SET {statement} WHERE id = %s", job)


@pytest.mark.parametrize(
    ("visible", "steps"),
    [(2, 400), pytest.param(5, 10_000, marks=pytest.mark.long)],
    ids=["short", "minute"],
)
def test_messages_that_come_back_during_a_job_start_nothing(visible, steps, place):
    """Two workers, and a job longer than the queue waits: one training, one charge."""
    job = place.job(steps=steps)
    command = [sys.executable, "-m", "tests.worker.impatient", str(visible)]
    kept = {k: v for k, v in os.environ.items() if not k.startswith("SLUICE_")}
    environment = kept | place.stack.environment("train")
    root = Path(__file__).resolve().parents[2]
    workers = [
        subprocess.Popen(command, env=environment, cwd=root, stderr=subprocess.PIPE, text=True) for _ in "ab"
    ]
    try:
        wake_worker(
            celery_app("train", place.stack.environment("service")["SLUICE_QUEUE_URL"]), "train.run", job
        )
        wait_for(lambda: place.look(job).state == "trained", seconds=300)
    finally:
        for worker in workers:
            worker.terminate()
        said = "".join(worker.communicate(timeout=60)[1] for worker in workers)
    assert said.count('"job_claimed"') == 1
    assert said.count('"nothing_to_do"') >= 1, "the message never came back: the test proves nothing"
    assert place.look(job).fence == 1
    assert place.ledger_of(job) == ["reserve", "settle"]


# -- encryption


def test_a_stolen_vault_tells_nothing(place, mortal):
    """Neither to a reader of the bucket, nor to the publisher; nor under another name."""
    job = place.job(of=GSWGAN, shared=True)
    assert mortal.order(job, "stored") == -signal.SIGKILL
    kinds = ("checkpoints", "diagnostics", "synthesizers")
    keys = [key for kind in kinds for key in place.vault_keys(f"{kind}/{job}/")]
    assert {key.split("/")[0] for key in keys} == set(kinds)
    publisher = FileKeys(place.stack.state["synthesizer_key"])
    for key in keys:
        body = place.admin.get_object(Bucket="sluice-vault", Key=key)["Body"].read()
        plain = place.vault_object(key)
        assert plain[:64] not in body
        assert not {b"generator", b"loss", b"architecture", b"step"} & set(re.findall(rb"[a-z]{4,}", body))
        opens = key.startswith("synthesizers/") and "handed-on" not in key
        if not opens:
            with pytest.raises((CannotDecrypt, KeyNotConfigured)):
                decrypt_wrapped(body, key, publisher.unwrap)
        with pytest.raises((CannotDecrypt, KeyNotConfigured)):
            decrypt_wrapped(body, key + "x", (publisher if opens else place.keys).unwrap)


def test_a_checkpoint_of_another_job_or_from_a_stranger_is_refused(place, mortal):
    first, second = place.job(), place.job()
    for job in (first, second):
        assert mortal.order(job, "checkpointed", count=1) == -signal.SIGKILL
    [mine], [other] = (place.vault_keys(f"checkpoints/{job}") for job in (first, second))
    body = place.admin.get_object(Bucket="sluice-vault", Key=other)["Body"].read()
    place.admin.put_object(Bucket="sluice-vault", Key=mine, Body=body)
    row = finish(place, mortal, first)
    assert (row.state, row.fault) == ("failed", "cannot-decrypt")
    assert finish(place, mortal, second).state == "trained"


def test_a_dataset_from_before_encryption_has_encrypted_checkpoints(place, mortal):
    job = place.job(place.dataset(encrypted=False))
    assert mortal.order(job, "checkpointed", count=1) == -signal.SIGKILL
    [key] = place.vault_keys(f"checkpoints/{job}")
    body = place.admin.get_object(Bucket="sluice-vault", Key=key)["Body"].read()
    assert b"generator" not in body
    assert load(decrypt_wrapped(body, key, place.keys.unwrap))
    assert finish(place, mortal, job).state == "trained"
