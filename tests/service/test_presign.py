"""A signed URL is valid for one part of one upload, by PUT, for 15 minutes, and for nothing else."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime, timedelta
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from botocore.exceptions import ClientError

from core.stores import s3
from core.stores.uploads import SIGNED_SECONDS, UploadStore
from tests.service.house import signed_earlier


@pytest.fixture
def signed(house):
    """An unfinished upload with one part, and the signed URL of its second part."""
    id = house.register(house.curator)["id"]
    house.upload(house.curator, id, b"first part")
    url = house.curator.post(f"/v1/datasets/{id}/upload/urls", json={"numbers": [2]}).json()["parts"][0][
        "url"
    ]
    return id, url


@pytest.fixture
def reader(house):
    """A client with the credentials of the train worker, which may read."""
    environment = house.servers.environments["train"]
    client = s3.client(
        endpoint=house.servers.s3_endpoint, region="us-east-1",
        access_key=environment["SLUICE_S3_ACCESS_KEY"], secret_key=environment["SLUICE_S3_SECRET_KEY"],
    )  # fmt: skip
    with closing(client):
        yield client


def arrived(house, id):
    return house.curator.get(f"/v1/datasets/{id}/upload").json()["arrived"]


def key_of(house, id):
    [(key, upload)] = house.sql("SELECT object_key, upload_id FROM datasets WHERE id = %s", id)
    return key, upload


def absent(reader, key, bucket="sluice-private"):
    with pytest.raises(ClientError) as told:
        reader.get_object(Bucket=bucket, Key=key)
    return told.value.response["ResponseMetadata"]["HTTPStatusCode"] in (403, 404)


def altered(url, **query):
    """The same signature under other parameters."""
    return str(httpx.URL(url).copy_merge_params(query))


def test_it_works_once_as_it_was_meant(house, signed):
    id, url = signed
    assert httpx.put(url, content=b"second part").status_code == 200
    assert arrived(house, id) == [1, 2]
    asked = parse_qs(urlsplit(url).query)
    assert asked["X-Amz-Expires"] == ["900"]
    assert asked["partNumber"] == ["2"]


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "DELETE"])
def test_another_method_does_nothing(method, house, signed):
    id, url = signed
    answer = httpx.request(method, url)
    assert answer.status_code in (400, 403, 404, 405)
    assert b"first part" not in answer.content
    assert arrived(house, id) == [1]


@pytest.mark.parametrize("change", ["key", "bucket", "vault", "public", "traversal"])
def test_another_address_does_nothing(change, house, signed, reader):
    id, url = signed
    key, _ = key_of(house, id)
    other = {
        "key": url.replace(key, "datasets/" + "0" * 32),
        "bucket": url.replace("/sluice-private/", "/sluice-elsewhere/"),
        "vault": url.replace("/sluice-private/", "/sluice-vault/"),
        "public": url.replace("/sluice-private/", "/sluice-public/"),
        "traversal": url.replace("/sluice-private/", "/sluice-private/%2e%2e/sluice-vault/"),
    }[change]
    assert other != url
    answer = httpx.put(other, content=b"elsewhere")
    assert answer.status_code in (400, 403, 404)
    assert arrived(house, id) == [1]
    assert absent(reader, "datasets/" + "0" * 32)
    assert absent(reader, key, bucket="sluice-vault")


@pytest.mark.parametrize(
    "query",
    [
        {"partNumber": "3"}, {"uploadId": "0" * 32}, {"X-Amz-Expires": "90000"},
        {"X-Amz-Date": "20300101T000000Z"}, {"X-Amz-SignedHeaders": ""}, {"X-Amz-Signature": "0" * 64},
        {"versionId": "1"}, {"response-content-type": "text/html"},
    ],
)  # fmt: skip
def test_other_parameters_do_nothing(query, house, signed):
    id, url = signed
    answer = httpx.put(altered(url, **query), content=b"altered")
    assert answer.status_code in (400, 403, 404)
    assert arrived(house, id) == [1]


def test_the_upload_of_another_dataset_is_out_of_reach(house, signed):
    id, url = signed
    other = house.register(house.curator2)["id"]
    house.upload(house.curator2, other, b"theirs")
    key, upload = key_of(house, id)
    their_key, their_upload = key_of(house, other)
    for wrong in (
        url.replace(key, their_key),
        url.replace(upload, their_upload),
        url.replace(key, their_key).replace(upload, their_upload),
    ):
        assert httpx.put(wrong, content=b"not mine").status_code in (400, 403, 404)
    assert house.curator2.get(f"/v1/datasets/{other}/upload").json()["arrived"] == [1]
    assert house.seal(house.curator2, other, b"theirs").status_code == 202


def test_an_expired_address_does_nothing(house, signed):
    id, _ = signed
    key, upload = key_of(house, id)
    with closing(s3.client_for(house.settings)) as client, signed_earlier(SIGNED_SECONDS + 1):
        url = UploadStore(client, "sluice-private").sign_part(key, upload, 2)
    assert httpx.put(url, content=b"late").status_code == 403
    assert arrived(house, id) == [1]


def test_after_sealing_no_address_of_the_upload_works(house, reader):
    content = os.urandom(100)
    id = house.register(house.curator)["id"]
    house.upload(house.curator, id, content)
    urls = house.curator.post(f"/v1/datasets/{id}/upload/urls", json={"numbers": [1, 2]}).json()["parts"]
    assert house.seal(house.curator, id, content).status_code == 202
    for part in urls:
        assert httpx.put(part["url"], content=b"swapped").status_code in (400, 403, 404)
    key, _ = key_of(house, id)
    assert reader.get_object(Bucket="sluice-private", Key=key)["Body"].read() == content
    again = house.curator.post(f"/v1/datasets/{id}/upload/urls", json={"numbers": [1]})
    assert again.status_code == 409


def test_nothing_can_be_listed_or_joined_with_it(house, signed):
    id, url = signed
    base = url.partition("?")[0]
    query = url.partition("?")[2]
    bucket = base[: base.index("/sluice-private") + len("/sluice-private")]
    key, upload = key_of(house, id)
    for method, address in (
        ("GET", f"{bucket}?list-type=2&{query}"),
        ("GET", f"{bucket}?uploads&{query}"),
        ("GET", f"{base}?uploadId={upload}&{query}"),
        ("POST", f"{base}?uploadId={upload}"),
        ("DELETE", f"{base}?uploadId={upload}"),
        ("GET", bucket),
        ("GET", base),
        ("PUT", base),
    ):
        answer = httpx.request(method, address, content=b"x" if method in ("PUT", "POST") else None)
        assert answer.status_code in (400, 403, 404, 405), (method, address)
        assert key.encode() not in answer.content or answer.status_code >= 400
    assert arrived(house, id) == [1]


def test_the_service_itself_can_neither_read_nor_list_what_was_uploaded(house):
    content = os.urandom(20)
    id = house.sealed(house.curator, content)["id"]
    key, _ = key_of(house, id)
    with closing(s3.client_for(house.settings)) as client:
        for ask in (
            lambda: client.get_object(Bucket="sluice-private", Key=key),
            lambda: client.list_objects_v2(Bucket="sluice-private"),
            lambda: client.delete_object(Bucket="sluice-private", Key=key),
        ):
            with pytest.raises(ClientError) as told:
                ask()
            assert told.value.response["ResponseMetadata"]["HTTPStatusCode"] == 403


def test_a_part_longer_than_declared_cannot_be_sealed(house, signed):
    """Size is not part of such a signature; what arrived is measured when sealing."""
    id, url = signed
    assert httpx.put(url, content=os.urandom(1 << 20)).status_code == 200
    answer = house.seal(house.curator, id, b"first part" + b"second")
    assert (answer.status_code, answer.json()["slug"]) == (409, "size-mismatch")


def send(house, id, number, content):
    url = house.curator.post(f"/v1/datasets/{id}/upload/urls", json={"numbers": [number]}).json()["parts"][0]
    answer = httpx.put(url["url"], content=content)
    assert answer.status_code == 200
    return answer.headers["etag"]


def next_second(house, id, number):
    """Waits until the store's clock tells another second than that of the last part of this number."""
    key, upload = key_of(house, id)
    client = house.app.state.uploads._client
    listed = client.list_parts(Bucket="sluice-private", Key=key, UploadId=upload)["Parts"]
    last = max(part["LastModified"] for part in listed if part["PartNumber"] == number)
    while datetime.now(UTC) < last + timedelta(seconds=1):
        time.sleep(0.05)


@pytest.mark.parametrize("at_once", [False, True])
def test_a_part_sent_twice_counts_once(at_once, house, reader):
    """As the client does when an answer is lost. The store lists both."""
    first, second = os.urandom(5 << 20), os.urandom(100)
    id = house.register(house.curator)["id"]
    house.upload(house.curator, id, first, second)
    if at_once:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: send(house, id, 1, first), range(4)))
    else:
        send(house, id, 1, first)
    assert arrived(house, id) == [1, 2]
    assert house.seal(house.curator, id, first + second).status_code == 202
    key, _ = key_of(house, id)
    assert reader.get_object(Bucket="sluice-private", Key=key)["Body"].read() == first + second


@pytest.mark.parametrize(("before", "after"), [(b"short", b"longer than that"), (b"longer than", b"short")])
def test_of_a_part_sent_again_with_other_bytes_the_last_counts(before, after, house, reader):
    id = house.register(house.curator)["id"]
    house.upload(house.curator, id, before)
    next_second(house, id, 1)
    send(house, id, 1, after)
    assert house.seal(house.curator, id, before).json()["slug"] == "size-mismatch"
    assert house.seal(house.curator, id, after).status_code == 202
    key, _ = key_of(house, id)
    assert reader.get_object(Bucket="sluice-private", Key=key)["Body"].read() == after


def test_parts_that_differ_and_cannot_be_told_apart_are_sent_again(house, reader, monkeypatch):
    """SeaweedFS tells times in whole seconds: which of two came last may be unknown."""
    id = house.register(house.curator)["id"]
    house.upload(house.curator, id, b"before")
    send(house, id, 1, b"beyond")
    same_second(house, monkeypatch)
    assert arrived(house, id) == []
    refused = house.seal(house.curator, id, b"beyond")
    assert (refused.status_code, refused.json()["slug"]) == (409, "size-mismatch")
    monkeypatch.undo()
    next_second(house, id, 1)
    send(house, id, 1, b"beyond")
    assert house.seal(house.curator, id, b"beyond").status_code == 202
    key, _ = key_of(house, id)
    assert reader.get_object(Bucket="sluice-private", Key=key)["Body"].read() == b"beyond"


def same_second(house, monkeypatch):
    """Has the store say that all parts arrived in the same second, as they do on a fast machine."""
    client = house.app.state.uploads._client
    listed = client.list_parts

    def list_parts(**asked):
        answer = listed(**asked)
        for part in answer.get("Parts", []):
            part["LastModified"] = datetime(2026, 1, 1, tzinfo=UTC)
        return answer

    monkeypatch.setattr(client, "list_parts", list_parts)
