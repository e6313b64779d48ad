"""Of an ended job the vault keeps the settled synthesizer, whatever versions the store kept of the rest."""

import os
import signal
import subprocess
import sys
import threading
import uuid
from collections import Counter
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from botocore.exceptions import ClientError

from core.stores.s3 import VersionsNotDeleted
from tests.worker.conftest import GSWGAN
from tests.worker.test_jobs import finish, wait_for
from worker import sweep
from worker.lease import JobLease
from worker.retention import clean_vault, repeat_until
from worker.train import make_trainer


@pytest.fixture(params=["unversioned", "versioned", "suspended"], scope="module")
def versioning(request, place):
    """The vault as a store keeps it: versioning cannot be undone, so it is turned on for the second."""
    status = {"versioned": "Enabled", "suspended": "Suspended"}.get(request.param)
    if status:
        place.admin.put_bucket_versioning(Bucket="sluice-vault", VersioningConfiguration={"Status": status})
    return request.param


@pytest.fixture(scope="module")
def trainer(place):
    trainer = make_trainer(place.train_settings)
    yield trainer
    trainer.engine.dispose()


def left(place, job):
    """How many versions there are of each key of a job, delete markers too."""
    return Counter(
        key for kind in ("checkpoints", "diagnostics", "synthesizers") for key in
        place.vault_versions(f"{kind}/{job}/")
    )  # fmt: skip


def what_stays(place, job, *more):
    """One version of each file of the settled synthesizer and of the last attempt's diagnostics."""
    row = place.look(job)
    names = ("synthesizer.json", "synthesizer.safetensors", *more)
    settled = [row.synthesizer_key + name for name in names] if row.synthesizer_key else []
    return Counter([*settled, *(f"diagnostics/{job}/{row.fence}.{ending}" for ending in ("jsonl", "svg"))])


def test_when_a_job_ends_no_other_version_is_left(versioning, place, mortal):
    """The first attempt dies with its synthesizer and its handed-on state put and not settled."""
    job = place.job(of=GSWGAN, shared=True)
    assert mortal.order(job, "stored") == -signal.SIGKILL
    before = left(place, job)
    assert before[f"synthesizers/{job}/1/encrypted/handed-on.safetensors"] == 1
    assert before[f"checkpoints/{job}/1"] == (3 if versioning == "versioned" else 1)  # one for each step
    row = finish(place, mortal, job)
    assert (row.state, row.fence) == ("trained", 2)
    assert left(place, job) == what_stays(place, job, "handed-on.safetensors")


def test_when_a_job_fails_or_is_cancelled_nothing_of_it_is_left(versioning, place, mortal):
    job = place.job(steps=6)
    assert mortal.order(job, "stored") == -signal.SIGKILL
    assert left(place, job)[f"synthesizers/{job}/1/encrypted/synthesizer.safetensors"] == 1
    place.change("UPDATE jobs SET cancel_asked_at = now() WHERE id = %s", job)
    assert finish(place, mortal, job).state == "cancelled"
    assert left(place, job) == Counter()  # its last attempt wrote no diagnostics


@pytest.mark.parametrize("point", ["settled", "failing"])
def test_what_a_worker_that_died_at_the_end_left_is_found(point, versioning, place, mortal, trainer):
    """Nobody comes back to a job that has ended."""
    job = place.job(steps=6)
    if point == "settled":
        assert mortal.order(job, "settled") == -signal.SIGKILL
    else:
        assert mortal.order(job, "stored") == -signal.SIGKILL
        place.change("UPDATE jobs SET fence = 20, lease_until = now() - interval '1 s' WHERE id = %s", job)
        sweep.end_exhausted_jobs(place.engines["sweep"])
    assert place.look(job).finished_at is not None
    assert left(place, job)[f"checkpoints/{job}/1"] >= 1
    assert clean_vault(trainer.engine, trainer.vault) > 0
    assert left(place, job) == (what_stays(place, job) if point == "settled" else Counter())


def test_what_is_written_after_the_end_is_found(versioning, place, mortal, trainer):
    """A worker thought dead writes on; somebody deletes by hand, which only hides versions."""
    job = place.job(steps=6)
    assert mortal.order(job) == 0
    stays = what_stays(place, job)
    for fence in (1, 2, 7):
        for body in (b"a discriminator", b"and again"):
            trainer.vault.put_checkpoint(job, fence, body, key=bytes(32))
    for fence in (2, 10):  # 1 is the settled one, and a beginning of 10
        prefix = trainer.vault.put_synthesizer(job, fence, {"synthesizer.safetensors": b"not settled"})
        trainer.vault.put_handed_on(prefix, b"nor this")
    trainer.vault.put_diagnostics(job, 10, {"jsonl": b"{}"}, key=bytes(32))
    if versioning != "suspended":  # SeaweedFS 4.48 cannot remove the marker that this would leave
        place.admin.delete_object(Bucket="sluice-vault", Key=f"checkpoints/{job}/7")
    assert len(left(place, job)) > len(stays)
    clean_vault(trainer.engine, trainer.vault)
    assert left(place, job) == stays
    assert clean_vault(trainer.engine, trainer.vault) == 0


def test_a_job_that_runs_keeps_what_it_goes_on_from(versioning, place, mortal, trainer):
    job = place.job(steps=6)
    assert mortal.order(job, "checkpointed", count=4) == -signal.SIGKILL
    before = left(place, job)
    clean_vault(trainer.engine, trainer.vault)
    clean_vault(trainer.engine, trainer.vault, job)
    assert left(place, job) == before
    place.expire(job)
    assert mortal.order(job, "stepped", count=3) == 0
    assert place.look(job).state == "trained"


def test_what_no_job_of_this_database_left_stays(versioning, place, trainer):
    """After a restore it may be all that is left of a paid training."""
    unknown = uuid.uuid4()
    trainer.vault.put_checkpoint(unknown, 1, b"of a job that the database has forgotten", key=bytes(32))
    trainer.vault.put_synthesizer(unknown, 1, {"synthesizer.json": b"{}"})
    place.admin.put_object(Bucket="sluice-vault", Key="checkpoints/notes.txt", Body=b"of somebody")
    place.admin.put_object(Bucket="sluice-vault", Key=f"bundles/{unknown}/1", Body=b"of the publisher")
    clean_vault(trainer.engine, trainer.vault)
    assert len(left(place, unknown)) == 2
    assert place.vault_keys("checkpoints/notes.txt")
    assert place.vault_keys(f"bundles/{unknown}")


def test_a_settled_synthesizer_that_somebody_deleted_can_be_brought_back(versioning, place, mortal, trainer):
    if versioning != "versioned":
        pytest.skip("nothing is kept of what is deleted")
    job = place.job(steps=6)
    assert mortal.order(job) == 0
    key = place.look(job).synthesizer_key + "synthesizer.safetensors"
    place.admin.delete_object(Bucket="sluice-vault", Key=key)
    clean_vault(trainer.engine, trainer.vault)
    found = place.admin.list_object_versions(Bucket="sluice-vault", Prefix=key)
    assert [one["Size"] > 0 for one in found["Versions"]] == [True]


def test_a_store_that_refuses_is_an_error_and_tried_again(place, trainer, mortal):
    job = place.job(steps=6)
    assert mortal.order(job, "settled") == -signal.SIGKILL
    with pytest.raises(ClientError):
        clean_vault(trainer.engine, place.vault(bucket="no-such-bucket"))
    refusing = place.vault()
    refusing._client = Refusing(place.admin)
    with pytest.raises(VersionsNotDeleted, match="AccessDenied"):
        clean_vault(trainer.engine, refusing, job)
    stopping = threading.Event()
    rounds = threading.Thread(
        target=repeat_until, args=(stopping, lambda: clean_vault(trainer.engine, refusing), 0.05)
    )
    rounds.start()
    wait_for(lambda: refusing._client.asked > 3)
    refusing._client = place.admin
    wait_for(lambda: left(place, job) == what_stays(place, job))
    stopping.set()
    rounds.join()


class Refusing:
    """A store that lists and does not delete; it says so key by key, under a 200."""

    def __init__(self, client):
        self.client, self.asked = client, 0

    def __getattr__(self, name):
        return getattr(self.client, name)

    def delete_objects(self, **_):
        self.asked += 1
        return {"Errors": [{"Code": "AccessDenied", "Key": "any"}]}


def test_a_train_worker_goes_round_by_itself(place, mortal):
    """Over the vault, and over datasets that were deleted."""
    job, deleted = place.job(steps=6), place.sealed()
    place.change("UPDATE datasets SET state = 'deleted' WHERE id = %s", deleted.id)
    assert mortal.order(job, "settled") == -signal.SIGKILL
    assert left(place, job)[f"checkpoints/{job}/1"] >= 1
    kept = {k: v for k, v in os.environ.items() if not k.startswith("SLUICE_")}
    worker = subprocess.Popen(
        [sys.executable, "-m", "worker.train"],
        env=kept | place.stack.environment("train"),
        cwd=Path(__file__).resolve().parents[2],
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(lambda: left(place, job) == what_stays(place, job))
        wait_for(lambda: place.see(deleted).removed_at is not None)
    finally:
        worker.terminate()
        worker.wait(60)


@pytest.mark.parametrize("ending", ["trained", "still running"])
@pytest.mark.parametrize("point", ["before checkpoint", "after checkpoint", "stored"])
def test_what_a_woken_worker_writes_is_refused_or_swept(point, ending, place, mortal, trainer):
    """It was stopped for longer than its lease, here or in the middle of a write; another one went on."""
    job = place.job(steps=6)
    zombie = mortal.order(job, point, end="stop", wait=False)
    wait_for(lambda: psutil.Process(zombie).status() == psutil.STATUS_STOPPED)
    place.expire(job)
    if ending == "trained":
        assert mortal.order(job) == 0
        stays = what_stays(place, job)
    else:
        held = JobLease.claim(trainer.engine, job, duration=timedelta(hours=1))
        assert held.fence == 2
        stays = Counter([f"checkpoints/{job}/1"] if held.row.checkpoint else [])  # what it goes on from
    os.kill(zombie, signal.SIGCONT)
    wait_for(lambda: psutil.Process(zombie).status() == psutil.STATUS_ZOMBIE)
    assert {key: count for key, count in left(place, job).items() if "diagnostics" not in key} == {
        key: count for key, count in stays.items() if "diagnostics" not in key
    }


def test_a_running_job_keeps_its_checkpoint_and_nothing_of_attempts_before(place, mortal, trainer):
    job = place.job(steps=6)
    assert mortal.order(job, "checkpointed", count=2) == -signal.SIGKILL
    for fence in (2, 3, 4):
        place.expire(job)
        JobLease.claim(trainer.engine, job)
        trainer.vault.put_checkpoint(job, fence, b"a discriminator", key=bytes(32))
        trainer.vault.put_synthesizer(job, fence, {"synthesizer.json": b"{}"})
    clean_vault(trainer.engine, trainer.vault)
    # 1 is what it goes on from, and 4 may be writing right now.
    assert set(left(place, job)) - {f"diagnostics/{job}/1.jsonl", f"diagnostics/{job}/1.svg"} == {
        f"checkpoints/{job}/1", f"checkpoints/{job}/4", f"synthesizers/{job}/4/encrypted/synthesizer.json",
    }  # fmt: skip
    clean_vault(trainer.engine, trainer.vault, checkpoints=timedelta(0))  # longer than this site keeps them
    assert not any(key.startswith("checkpoints/") for key in left(place, job))
    place.change("UPDATE jobs SET state = 'failed', finished_at = now() WHERE id = %s", job)
