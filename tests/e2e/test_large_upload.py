"""A large file goes from disk to the store through the real command, in little memory on both sides."""

import hashlib
import json
import subprocess
import threading
import time
from contextlib import closing

import psutil
import pytest
from sqlalchemy import text

from core.stores import s3
from core.unwrap import FileKeys
from sluice.envelope import Stream, encrypted_size, upload_context
from tests.e2e.driving import SLUICE, plain_environment
from tests.e2e.serving import Site, api_processes

LIMIT = 300 << 20


@pytest.fixture
def file(tmp_path):
    """So large a file, mostly a hole: the disk need not hold what is sent."""

    def make(size):
        path = tmp_path / "records.npz"
        with path.open("wb") as out:
            out.write(b"first")
            out.truncate(size)
        return path

    return make


def peak(pid):
    """Peak resident memory of a process, as the kernel counted it; where it does not, what it is now."""
    try:
        with open(f"/proc/{pid}/status") as status:
            return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        try:
            return psutil.Process(pid).memory_info().rss
        except psutil.NoSuchProcess:
            return 0


def sha256_of(blocks):
    digest = hashlib.sha256()
    for block in blocks:
        digest.update(block)
    return digest.digest()


@pytest.mark.parametrize("size", [300 << 20, pytest.param(1 << 30, marks=pytest.mark.long)])
def test_memory_stays_small_on_both_sides(servers, database, tmp_path, file, size, record_property):
    site, path = Site(database), file(size)
    site.level()
    _, key = site.person("carl", "curator")
    with api_processes(1, tmp_path, servers.environments["service"], database) as ([url], [service]):
        began = time.monotonic()
        declared = ["--name", "large", "--records", "1000", "--epsilon", "4", "--delta", "1e-5"]
        shape = ["--image", "28x28", "--classes", "0,1", "--detach", "--json"]
        client = subprocess.Popen(
            [*SLUICE, "datasets", "add", str(path), *declared, *shape],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=plain_environment(SLUICE_URL=url, SLUICE_KEY=key),
        )
        peaks = [0]

        def watch():
            while client.poll() is None:
                peaks.append(peak(client.pid))
                time.sleep(0.02)

        watcher = threading.Thread(target=watch)
        watcher.start()
        out, err = client.communicate(timeout=600)
        watcher.join()
        seconds, of_client, of_service = time.monotonic() - began, max(peaks), peak(service)
    assert client.returncode == 0, err
    for name, value in {"seconds": seconds, "client": of_client, "service": of_service}.items():
        record_property(name, value)
    store = s3.client(endpoint=servers.s3_endpoint, region="us-east-1", **servers.s3_identities["admin"])
    with site.engine.connect() as connection:
        query = text("SELECT id::text, state, size, sha256, object_key, key_id, wrapped_key FROM datasets")
        row = connection.execute(query).one()
    site.engine.dispose()
    try:
        assert (row.id, row.state) == (json.loads(out)["id"], "checking")
        stored = {"Bucket": "sluice-private", "Key": row.object_key}
        with closing(store.get_object(**stored)["Body"]) as body:
            assert (row.size, bytes(row.sha256)) == (
                encrypted_size(size),
                sha256_of(body.iter_chunks(1 << 20)),
            )
        data_key = FileKeys(servers.environments["train"]["SLUICE_UPLOAD_KEY"]).unwrap(
            bytes(row.wrapped_key), row.key_id
        )
        with closing(store.get_object(**stored)["Body"]) as body, path.open("rb") as file:
            sent = sha256_of(iter(lambda: file.read(1 << 20), b""))
            assert sha256_of(Stream(data_key, upload_context(row.id)).decrypted(body)) == sent
    finally:
        store.delete_object(Bucket="sluice-private", Key=row.object_key)
    assert 10 << 20 < of_client < LIMIT
    assert 10 << 20 < of_service < LIMIT
