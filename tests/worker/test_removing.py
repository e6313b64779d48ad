"""Deleting deletes: no version of an upload stays, none comes back, and the account and its people do."""

import uuid
from datetime import UTC, datetime, timedelta

import pytest
from botocore.exceptions import ClientError
from sqlalchemy.orm import Session

from core.stores import s3
from core.stores.private import PrivateStore
from core.stores.s3 import VersionsNotDeleted
from core.stores.uploads import Part, UploadGone, UploadStore
from core.tables import Account, Diagnosis
from tests.worker.conftest import upload
from tests.worker.test_checking import checked, checker, curator2, reordered, unguarded  # noqa: F401
from tests.worker.test_tidying import Refusing, left
from worker.retention import Remover, Retention, clean_vault
from worker.train import make_remover, make_trainer

BUCKET = "sluice-private"


@pytest.fixture(params=["unversioned", "versioned", "suspended"], scope="module")
def versioning(request, place):
    """The private bucket as a store keeps it: versioning cannot be undone."""
    status = {"versioned": "Enabled", "suspended": "Suspended"}.get(request.param)
    if status:
        place.admin.put_bucket_versioning(Bucket=BUCKET, VersioningConfiguration={"Status": status})
    return request.param


@pytest.fixture
def remover(place):
    """As the train worker makes it, with its S3 identity and database role."""
    trainer = make_trainer(place.train_settings)
    yield make_remover(place.train_settings, trainer)
    trainer.engine.dispose()


@pytest.fixture
def inbox(place):
    environment = place.stack.environment("service")
    keys = {
        "access_key": environment["SLUICE_S3_ACCESS_KEY"],
        "secret_key": environment["SLUICE_S3_SECRET_KEY"],
    }
    return UploadStore(s3.client(endpoint=place.stack.s3_endpoint, region="us-east-1", **keys), BUCKET)


def keeping(remover, **retention):
    return Remover(
        engine=remover.engine, private=remover.private, vault=remover.vault, register=remover.register,
        retention=Retention(**retention),
    )  # fmt: skip


def delete(place, dataset):
    place.change("UPDATE datasets SET state = 'deleted' WHERE id = %s", dataset.id)


def versions(place, key):
    found = place.admin.list_object_versions(Bucket=BUCKET, Prefix=key)
    return [one["Key"] for kind in ("Versions", "DeleteMarkers") for one in found.get(kind, [])]


def test_no_version_of_a_deleted_upload_stays(versioning, place, remover):
    dataset, other = place.sealed(), place.sealed()
    for body in (b"put again", b"and again"):
        place.admin.put_object(Bucket=BUCKET, Key=dataset.object_key, Body=body)
    if versioning == "versioned":  # deleted by hand, which only hides what is there
        place.admin.delete_object(Bucket=BUCKET, Key=dataset.object_key)
        assert len(versions(place, dataset.object_key)) == 4
    remover.remove_due()
    assert versions(place, dataset.object_key)  # nobody deleted it yet
    delete(place, dataset)
    assert remover.remove_due() >= 1
    assert versions(place, dataset.object_key) == []
    assert versions(place, other.object_key)
    row = place.see(dataset)
    assert row.deleted_at <= row.removed_at
    assert place.see(other).removed_at is None
    assert remover.remove_due() == 0


def test_an_upload_that_comes_late_is_removed_too(versioning, place, remover, inbox):
    """Sealing had listed the parts, the dataset was deleted and removed, and then the parts are joined."""
    dataset = place.sealed()
    upload_id = inbox.begin(dataset.object_key)
    part = place.admin.upload_part(
        Bucket=BUCKET, Key=dataset.object_key, UploadId=upload_id, PartNumber=1, Body=b"late"
    )
    place.change("UPDATE datasets SET upload_id = %s WHERE id = %s", upload_id, dataset.id)
    delete(place, dataset)
    remover.remove_due()
    parts = [Part(number=1, etag=part["ETag"], size=4, at=datetime.now(UTC))]
    with pytest.raises(UploadGone):
        inbox.complete(dataset.object_key, upload_id, parts)
    assert versions(place, dataset.object_key) == []
    place.admin.put_object(Bucket=BUCKET, Key=dataset.object_key, Body=b"joined after all")
    unknown = f"datasets/{uuid.uuid4().hex}"
    place.admin.put_object(Bucket=BUCKET, Key=unknown, Body=b"of a dataset that the database has forgotten")
    remover.remove_late_uploads()
    assert versions(place, dataset.object_key) == []
    assert versions(place, unknown) == [unknown]


def test_the_people_of_a_deleted_dataset_keep_their_account(place, checker, remover, curator2):  # noqa: F811
    """Their fingerprints and their account outlive the bytes: a copy by somebody else is still held."""
    body = upload()
    first = checked(place, checker, body)
    delete(place, first)
    keeping_known = Remover(
        engine=remover.engine, private=remover.private, vault=remover.vault,
        register=checker.register_bindings,
    )  # fmt: skip
    keeping_known.remove_due()
    gone = place.see(first)
    assert versions(place, first.object_key) == []
    assert (gone.removed_at is not None, gone.report, gone.account_id) == (True, None, first.account_id)
    with Session(place.engines["service"]) as session:
        assert session.get(Account, first.account_id) is not None
    copy = checked(place, checker, reordered(body), owner=curator2)
    assert (copy.state, [match["account"] for match in copy.matches]) == ("held", [str(first.account_id)])


def test_people_nobody_had_remembered_are_remembered_before_their_records_are_removed(
    place, checker, remover, curator2  # noqa: F811
):  # fmt: skip
    """A dataset bound by an older version, whose records were never compared with anything."""
    body = upload()
    old = place.dataset(body=body, encrypted=False)
    delete(place, old)
    Remover(
        engine=remover.engine, private=remover.private, vault=remover.vault,
        register=checker.register_bindings,
    ).remove_due()  # fmt: skip
    assert versions(place, old.object_key) == []
    copy = checked(place, checker, reordered(body), owner=curator2)
    matches = [(match["dataset"], match["share"]) for match in copy.matches]
    assert (copy.state, matches) == ("held", [(str(old.id), "most")])


def test_what_was_learned_from_single_records_goes_with_them(place, mortal, remover):
    dataset = place.dataset()
    job = place.job(dataset, steps=6)
    assert mortal.order(job) == 0
    row = place.look(job)
    assert left(place, job)[f"diagnostics/{job}/1.jsonl"] >= 1
    delete(place, dataset)
    remover.remove_due()
    with Session(place.engines["service"]) as session:
        assert session.get(Diagnosis, job) is None
    assert {key.split("/")[0] for key in left(place, job)} == {"synthesizers"}
    assert place.vault_keys(row.synthesizer_key)


def test_a_store_that_refuses_is_tried_again(place, remover):
    dataset = place.sealed()
    delete(place, dataset)
    refusing = Remover(
        engine=remover.engine, private=PrivateStore(Refusing(place.admin), BUCKET), vault=remover.vault,
        register=remover.register,
    )  # fmt: skip
    with pytest.raises(VersionsNotDeleted):
        refusing.remove_due()
    assert place.see(dataset).removed_at is None
    remover.remove_due()
    assert place.see(dataset).removed_at is not None


def test_a_rejected_upload_is_removed_after_a_while(place, remover):
    dataset = place.sealed()
    rejected = "UPDATE datasets SET state = 'rejected', checked_at = now() - interval '25 h' WHERE id = %s"
    place.change(rejected, dataset.id)
    keeping(remover, rejected_upload=timedelta(hours=26)).remove_due()
    assert versions(place, dataset.object_key)
    remover.remove_due()  # a day, unless the site says otherwise
    row = place.see(dataset)
    assert (row.state, row.removed_at is not None) == ("rejected", True)
    assert versions(place, dataset.object_key) == []


def test_uploads_that_nobody_finishes_are_aborted(place, remover, inbox):
    going, deleted = place.sealed(state="uploading"), place.sealed(state="uploading")
    uploads = {dataset.object_key: inbox.begin(dataset.object_key) for dataset in (going, deleted)}
    unknown = f"datasets/{uuid.uuid4().hex}"
    uploads[unknown] = inbox.begin(unknown)
    delete(place, deleted)

    def there():
        found = set()
        for key, id in uploads.items():
            try:
                place.admin.list_parts(Bucket=BUCKET, Key=key, UploadId=id)
                found.add(key)
            except ClientError:
                pass
        return found

    assert there() == set(uploads)
    remover.remove_late_uploads()
    assert there() == {going.object_key, unknown}
    keeping(remover, unfinished_upload=timedelta(0)).remove_late_uploads()
    assert there() == set()


def test_a_dataset_that_is_not_used_is_deleted_where_the_site_says_so(place, remover):
    unused, used, busy, fresh = (place.dataset() for _ in range(4))
    done, _ = place.job(used), place.job(busy)
    place.change("UPDATE jobs SET state = 'failed', finished_at = now() - interval '5 d' WHERE id = %s", done)
    for dataset in (unused, used, busy):
        place.change("UPDATE datasets SET checked_at = now() - interval '40 d' WHERE id = %s", dataset.id)
    states = lambda: [place.see(dataset).state for dataset in (unused, used, busy, fresh)]  # noqa: E731
    remover.expire_datasets()
    assert states() == ["ready"] * 4
    keeping(remover, upload=timedelta(days=30)).expire_datasets()
    assert states() == ["deleted", "ready", "ready", "ready"]
    row = place.see(unused)
    assert (row.deletion_reason, row.deleted_by) == ("not used for 30 days (SLUICE_UPLOAD_DAYS)", None)


def test_a_synthesizer_is_removed_where_the_site_says_so(place, mortal, remover):
    job = place.job(steps=6)
    assert mortal.order(job) == 0
    key = place.look(job).synthesizer_key
    place.change("UPDATE jobs SET finished_at = now() - interval '40 d' WHERE id = %s", job)

    def rounds(**retention):
        kept = keeping(remover, **retention)
        kept.expire_synthesizers()
        clean_vault(kept.engine, kept.vault, job)
        return bool(place.vault_keys(key))

    assert rounds()
    assert rounds(synthesizer=timedelta(days=50))
    following = place.job(steps=6)
    unguarded(place, f"UPDATE jobs SET after_id = '{job}' WHERE id = '{following}'")  # it goes on from it
    assert rounds(synthesizer=timedelta(days=30))
    place.change("UPDATE jobs SET state = 'failed', finished_at = now() WHERE id = %s", following)
    assert not rounds(synthesizer=timedelta(days=30))
    assert place.look(job).synthesizer_removed_at is not None
