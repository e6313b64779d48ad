"""The demo's whole way with little of everything: each stage really happened, and nothing runs on."""

import io
import signal
import subprocess

import psutil
import pytest
from PIL import Image

from core.stores import s3
from local.demo import Demo, Settings
from local.ports import free_port, port_is_free
from sluice.client.problems import Refused
from sluice.client.release import Release
from tests.e2e.driving import PATIENCE, SLUICE, plain_environment, survivors, wait_for

TINY = Settings(images=300, samples=120, epsilon=10, method="dpgan", options={"batch": 30, "steps": 5})


def published_objects(stack, release):
    admin = s3.client(
        endpoint=stack.s3_endpoint, region="us-east-1", attempts=1, **stack.state["s3"]["admin"]
    )
    prefix = f"releases/{release['id']}/{release['digest']}/"
    found = admin.list_objects_v2(Bucket="sluice-public", Prefix=prefix)["Contents"]
    return {one["Key"].removeprefix(prefix): one["Size"] for one in found}


def test_from_nothing_to_a_verified_release(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    with Demo(TINY, port=free_port(), keep=tmp_path / "demo") as demo:
        demo.start()
        wait_for(lambda: set(demo.stack.health().values()) == {"ok"})

        demo.register()
        assert demo.dataset["state"] == "ready"
        assert not list(tmp_path.rglob("digits.npz"))  # the records are in the private bucket alone

        demo.train()
        assert (demo.job["state"], demo.job["progress"]["step"]) == ("trained", 5)
        ledger = demo.admin.ledger(demo.job["account"])
        assert ledger["chain"]["ok"]
        assert [row["kind"] for row in ledger["entries"]] == ["grant", "reserve", "settle"]
        assert ledger["account"]["settled"] == demo.job["cost"]

        demo.release()
        assert demo.released["state"] == "published"
        [yes] = demo.released["approvals"]
        assert (yes["person"], yes["digest"]) == (demo.second.me()["id"], demo.released["digest"])
        objects = published_objects(demo.stack, demo.released)
        promised = {each["path"]: each["size"] for each in demo.released["files"]}
        assert objects == promised | {"attestation.json": objects["attestation.json"]}

        demo.analyse()
        assert demo.verified["ok"]
        assert demo.verified["epsilon"]["renyi"] == pytest.approx(demo.job["epsilon"]["renyi"], rel=1e-9)
        assert demo.verified["epsilon"]["renyi"] <= 10
        assert demo.verified["revocations"]["number"] is not None
        assert [one["id"] for one in demo.analyst.releases()] == [demo.released["id"]]
        with pytest.raises(Refused):
            demo.analyst.diagnostics(demo.job["id"])
        assert 0 <= demo.accuracy <= 1
        assert Image.open(io.BytesIO(demo.preview.read_bytes())).format == "PNG"

        demo.conclude()
        told = capsys.readouterr().out
        for part in (
            f"{demo.job['epsilon']['renyi']:.4f} by Rényi",
            "1e-05",
            f"{demo.accuracy:.1%}",
            "/docs",
        ):
            assert part in told
        parts = [*demo.stack.servers, *demo.stack.processes]
        family = [psutil.Process(part.process.pid) for part in parts]
        assert len(family) == 7
    assert survivors(family) == []
    assert port_is_free(demo.stack.port)
    x, y = Release(tmp_path / "demo/release").load()
    assert (len(x), sorted(set(y))) == (120, list(range(10)))


def test_an_interrupted_demo_leaves_nothing_behind(tmp_path):
    port = free_port()
    demo = subprocess.Popen(
        [*SLUICE, "demo", "--port", str(port)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=plain_environment(TMPDIR=str(tmp_path), PYTHONUNBUFFERED="1"),
    )
    try:
        while not demo.stdout.readline().startswith("2. Carla"):
            assert demo.poll() is None
        family = psutil.Process(demo.pid).children(recursive=True)
        demo.send_signal(signal.SIGINT)
        assert demo.wait(PATIENCE) == 130
    finally:
        demo.kill()
        demo.stdout.close()
    assert survivors(family) == []
    assert port_is_free(port)
    assert not list(tmp_path.glob("sluice-demo*"))
