"""A release in an analyst's hands: fetched whole, loaded without running code, sampled from."""

import io
import json
import os
import pickle
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import numpy as np
import pytest

from sluice.client.api import Sluice
from sluice.client.problems import CannotRun
from sluice.client.release import Release
from tests.client.bundles import SIGNER, Service, bundle, keys_json, listed
from tests.client.test_verify import sluice  # noqa: F401 (a fixture)

ROOT = Path(__file__).resolve().parents[2]
SERVER_PACKAGES = (
    "fastapi", "uvicorn", "starlette", "sqlalchemy", "celery", "kombu", "redis", "boto3", "botocore",
    "psycopg", "opacus", "geomloss", "alembic", "pydantic", "structlog",
)  # fmt: skip


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    directory = tmp_path_factory.mktemp("published") / "pets"
    return directory, *bundle(directory, formats=("npz", "parquet", "png"))


@pytest.fixture
def service(published, tmp_path, monkeypatch):
    monkeypatch.setenv("SLUICE_HOME", str(tmp_path / "home"))
    with Service(*published[:2]).serving() as service:
        yield service


@pytest.fixture
def release(service):
    with Sluice(service.url, "sl_x") as client:
        yield client.release("pets")


def same(one, two):
    def read(at):
        return {path.relative_to(at): path.read_bytes() for path in at.rglob("*") if path.is_file()}

    return read(one) == read(two)


# -- downloads


def test_a_release_is_found_by_name_downloaded_and_verified(service, release, published, tmp_path):
    told = []
    release.download(tmp_path / "pets", on_progress=lambda done, total: told.append((done, total)))
    assert same(tmp_path / "pets", published[0])
    total = sum(each["size"] for each in service.files)
    assert told[-1] == (total, total)
    assert told == sorted(told)
    assert release.verify()["bundle"] == published[2]
    store = [path for path in service.asked if path.startswith("/store/")]
    release.download(tmp_path / "pets")  # nothing is fetched twice
    assert [path for path in service.asked if path.startswith("/store/")] == store


def test_a_name_nobody_gave(service):
    with Sluice(service.url, "sl_x") as client, pytest.raises(CannotRun, match="no release is called cats"):
        client.release("cats")


def test_a_line_cut_again_and_again_is_picked_up_where_it_ended(service, release, published, tmp_path):
    service.cut_after = 4000
    release.download(tmp_path / "pets", sleep=lambda _: None)
    assert same(tmp_path / "pets", published[0])
    starts = [start for path, start in service.ranges if path == "data/images.zip"]
    assert starts == list(range(4000, (published[0] / "data/images.zip").stat().st_size, 4000))


@pytest.mark.parametrize("resume", [True, False])
def test_a_download_that_ended_goes_on_with_the_next(resume, service, release, published, tmp_path):
    class Enough(Exception):
        pass

    def end(done, _):
        if service.ranges and service.ranges[-1] == ("data/images.zip", 8000):
            raise Enough

    service.cut_after = 4000
    with pytest.raises(Enough):
        release.download(tmp_path / "pets", sleep=lambda _: None, on_progress=end)
    whole = sum(path.is_file() and path.suffix != ".part" for path in (tmp_path / "pets").rglob("*"))
    service.cut_after, service.ranges, service.asked = None, [], []
    release.download(tmp_path / "pets", resume=resume)
    assert service.ranges == ([("data/images.zip", 12_000)] if resume else [])
    assert len([path for path in service.asked if path.startswith("/store/")]) == len(service.files) - whole
    assert same(tmp_path / "pets", published[0])


def test_a_store_without_ranges_gives_all_of_a_file_again(service, release, published, tmp_path):
    service.cut_after, pauses = 4000, []

    def heal(seconds):
        pauses.append(seconds)
        service.cut_after, service.has_ranges = None, False

    release.download(tmp_path / "pets", sleep=heal)
    assert pauses == [0.5]
    assert same(tmp_path / "pets", published[0])


def test_a_store_that_gives_nothing_is_not_asked_for_ever(service, release, tmp_path):
    service.cut_after, pauses = 0, []
    with pytest.raises(CannotRun, match="run the same command again to resume"):
        release.download(tmp_path / "pets", sleep=pauses.append)
    assert pauses == [1, 2, 4, 8, 16, 32]


def test_other_bytes_than_promised_never_take_the_place_of_a_file(service, release, tmp_path):
    honest = (service.directory / "privacy.json").read_bytes()
    service.instead["privacy.json"] = honest.replace(b"1", b"2")
    with pytest.raises(CannotRun, match=r"privacy\.json did not arrive completely"):
        release.download(tmp_path / "pets", sleep=lambda _: None)
    assert not (tmp_path / "pets/privacy.json").exists()


def test_an_address_that_expired_is_asked_for_again(service, release, published, tmp_path):
    service.expired = {1}
    release.download(tmp_path / "pets", sleep=lambda _: None)
    assert same(tmp_path / "pets", published[0])


@pytest.mark.parametrize("path", ["../x", "/etc/x", "data/../../x", "", "a//b", "..", ".ssh/x", "a\\..\\x\n"])
def test_a_service_cannot_write_outside_of_the_directory(service, release, tmp_path, path):
    service.files = [service.files[0] | {"path": path}]
    service.answer = lambda *_: json.dumps(
        {"files": [service.files[0] | {"url": f"{service.url}/x"}], "keys": []}
    ).encode()
    with pytest.raises(CannotRun, match="is not a path inside a release"):
        release.download(tmp_path / "pets", sleep=lambda _: None)
    assert not [each for each in tmp_path.rglob("*") if each.is_file() and "home" not in each.parts]


def test_the_command_downloads_verifies_and_tells_a_withdrawn_one(service, published, tmp_path, sluice):  # noqa: F811
    arguments = ["releases", "download", "pets", tmp_path / "pets", "--url", service.url, "--key", "sl_x"]
    code, out, err = sluice(*arguments)
    assert code == 0, err
    assert "recomputed here" in out
    service.revocations = listed(2, published[1:])
    assert sluice(*arguments)[0] == 4


# -- loading


def test_every_format_loads_the_same_images(published, tmp_path):
    x, y = Release(published[0]).load()
    assert (x.shape, x.dtype, y.dtype) == ((90, 8, 8), np.uint8, np.int64)
    for kept in ("images.parquet", "images.zip"):
        (tmp_path / kept / "data").mkdir(parents=True)
        for name in (f"data/{kept}", "schema.json"):
            (tmp_path / kept / name).write_bytes((published[0] / name).read_bytes())
        other, labels = Release(tmp_path / kept).load()
        assert np.array_equal(x, other)
        assert y.tolist() == labels.tolist()


def test_as_a_torch_dataset_and_as_a_pandas_frame(published):
    release = Release(published[0])
    x, y = release.load()
    dataset = release.load("torch")
    image, label = dataset[4]
    assert (len(dataset), tuple(image.shape), int(label)) == (90, (1, 8, 8), y[4])
    assert np.array_equal((image[0] * 255).round().numpy(), x[4])
    frame = release.load("pandas")
    assert frame.columns.tolist() == ["image", "label", "label_index"]
    assert frame["label"].tolist() == [("cat", "dog", "a/b")[each] for each in y]
    assert np.array_equal(frame["image"][4], x[4])
    with pytest.raises(CannotRun, match="choose numpy, torch or pandas"):
        release.load("excel")


class Hostile:
    def __reduce__(self):
        return os.system, ("touch /tmp/sluice-was-here",)


def test_loading_runs_no_code(published, tmp_path):
    (tmp_path / "data").mkdir()
    with zipfile.ZipFile(tmp_path / "data/images.npz", "w") as archive:
        head = io.BytesIO()
        np.lib.format.write_array_header_1_0(head, {"descr": "|O", "fortran_order": False, "shape": (1,)})
        archive.writestr("x.npy", head.getvalue() + pickle.dumps(Hostile()))
        archive.writestr("y.npy", head.getvalue() + pickle.dumps(Hostile()))
    with pytest.raises(ValueError, match="allow_pickle=False"):
        Release(tmp_path).load()
    for name in ("synthesizer.json", "synthesizer.safetensors"):
        (tmp_path / name).write_bytes(pickle.dumps(Hostile()))
    with pytest.raises(ValueError, match="cannot be read as a synthesizer"):
        Release(tmp_path).synthesizer()
    assert not Path("/tmp/sluice-was-here").exists()


# -- sampling


def test_the_synthesizer_of_a_release_draws_what_the_publisher_drew(published):
    release = Release(published[0])
    assert [*release.manifest["sample"]] == ["count", "formats", "labels", "seed"]
    made = release.synthesizer().sample(100, label=2, seed=7)
    assert made.images.shape == (100, 8, 8, 1)
    assert set(made.labels) == {2}
    again = release.synthesizer().sample(50, label=2, seed=7)
    assert np.array_equal(again.images, made.images[:50])
    x, y = release.load()
    drawn = next(release.synthesizer().draws(90, seed=7, balanced=True))
    assert np.array_equal(drawn.images[..., 0], x)
    assert np.array_equal(drawn.labels, y)


def test_the_command_draws_more_samples(published, tmp_path, sluice):  # noqa: F811
    files = [tmp_path / "one.npz", tmp_path / "two.npz"]
    for file in files:
        code, out, err = sluice(
            "releases",
            "sample",
            published[0],
            "--count",
            20,
            "--label",
            "dog",
            "--seed",
            3,
            "--out",
            file,
            "--json",
        )
        assert code == 0, err
        assert json.loads(out)["count"] == 20
    assert files[0].read_bytes() == files[1].read_bytes()
    with np.load(files[0]) as held:
        assert (held["x"].shape, set(held["y"])) == ((20, 8, 8, 1), {1})
    code, _, err = sluice("releases", "sample", published[0], "--label", "bird", "--out", files[0])
    assert code == 1
    assert "there is no class bird: there are cat, dog, a/b" in err
    assert sluice("releases", "sample", tmp_path, "--out", files[0])[0] == 1
    assert sluice("releases", "sample", published[0], "--out", tmp_path / "no/where.npz")[0] == 1


def test_a_classifier_is_verified_and_asked(tmp_path, sluice):  # noqa: F811
    bundle(tmp_path / "c", formats=(), count=0)
    (tmp_path / "keys.json").write_text(json.dumps(keys_json(SIGNER)))
    code, out, err = sluice("verify", tmp_path / "c", "--key", tmp_path / "keys.json", "--offline", "--json")
    assert (code, json.loads(out)["ok"]) == (0, True), err
    release = Release(tmp_path / "c")
    x = np.random.default_rng(1).integers(0, 256, (40, 8, 8), dtype=np.uint8)
    x[::2] //= 50
    found = release.classifier().predict(x[..., None])
    assert len(set(found)) > 1
    np.savez(tmp_path / "x.npz", x=x)
    asked = ("releases", "classify", tmp_path / "c")
    code, _, err = sluice(*asked, tmp_path / "x.npz", "--out", tmp_path / "y")
    assert code == 0, err
    lines = (tmp_path / "y").read_text().splitlines()
    names = ("cat", "dog", "a/b")
    assert lines == ["image,label_index,label", *(f"{i},{y},{names[y]}" for i, y in enumerate(found))]
    for wrong in (release.load, release.synthesizer):
        with pytest.raises(CannotRun, match="classifier"):
            wrong()
    np.savez(tmp_path / "x.npz", x=x[:, :4])
    for file in (tmp_path / "x.npz", tmp_path / "none.npz"):
        code, _, err = sluice(*asked, file, "--out", tmp_path / "y")
        assert (code, "cannot be classified" in err) == (1, True), err


def test_samples_are_no_classifier(published):
    with pytest.raises(CannotRun, match="not a classifier"):
        Release(published[0]).classifier()


# -- at home, without the server

AT_HOME = """
import hashlib, importlib.abc, json, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in FORBIDDEN:
            raise ImportError(f"{name} is not here")

FORBIDDEN = set(json.loads(sys.argv[3]))
sys.meta_path.insert(0, Absent())
import sluice
directory, url = sys.argv[1:3]
if url:
    release = sluice.Sluice(url, "sl_x").release("pets")
    release.download(directory)
else:
    release = sluice.Release(directory)
verified = release.verify(online=bool(url))
x, y = release.load()
made = release.synthesizer().sample(300, seed=7)
told = {"bundle": verified["bundle"], "epsilon": verified["epsilon"]["renyi"], "count": len(x)}
told["sample"] = hashlib.sha256(made.images.tobytes() + made.labels.tobytes()).hexdigest()
told["frame"] = len(release.load("pandas"))
if "sklearn" not in FORBIDDEN:
    from sklearn.linear_model import LogisticRegression
    model = LogisticRegression(max_iter=50).fit(x.reshape(len(x), -1) / 255, y)
    told["score"] = model.score(made.images.reshape(300, -1) / 255, made.labels)
told["loaded"] = sorted(FORBIDDEN & set(sys.modules))
print(json.dumps(told))
"""


def at_home(python, directory, url, absent, home, **options):
    command = [str(python), "-W", "ignore", "-c", AT_HOME, str(directory), url, json.dumps(absent)]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("SLUICE_", "PYTHON"))}
    environment |= {"SLUICE_HOME": str(home)}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=300, check=False, **options
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_an_analyst_needs_nothing_of_the_server(service, published, tmp_path):
    """Downloaded, verified, loaded, sampled and learnt from, where no package of the server is."""
    told = at_home(
        sys.executable, tmp_path / "pets", service.url, SERVER_PACKAGES, tmp_path / "home", cwd=ROOT
    )
    assert told["bundle"] == published[2]
    assert (told["count"], told["frame"], told["loaded"]) == (90, 90, [])
    assert told["score"] > 0.3
    absent = [*SERVER_PACKAGES, "sklearn"]  # learnt from already
    again = at_home(sys.executable, tmp_path / "pets", "", absent, tmp_path / "home", cwd=ROOT)
    assert again["sample"] == told["sample"]


@pytest.mark.long
def test_the_client_extra_alone_is_enough(service, published, tmp_path):
    """A fresh environment with `pip install sluice[client]` and no more."""
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env/bin/python"
    torch = next(
        line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch==")
    )
    index = ["--index-url", "https://download.pytorch.org/whl/cpu"]
    for prefix in ("/usr/local/share", "/srv", "/opt"):
        if Path(prefix, "wheels").is_dir():
            index += ["--find-links", f"{prefix}/wheels"]
    pip = [str(python), "-m", "pip", "install", "-q"]
    source = tmp_path / "source"  # a copy: building leaves traces beside what it builds
    ignored = shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__", "tests")
    shutil.copytree(ROOT, source, ignore=ignored)
    try:
        subprocess.run([*pip, "--no-deps", f"{torch}+cpu", *index, "--retries", "1"], check=True, timeout=900)
        subprocess.run(
            [*pip, "-c", str(ROOT / "constraints.txt"), f"{source}[client]"], check=True, timeout=900
        )
    except subprocess.CalledProcessError:
        pytest.skip("packages cannot be had here")
    listed = subprocess.run([*pip[:3], "list"], capture_output=True, text=True, check=True).stdout.lower()
    assert not {"fastapi", "sqlalchemy", "celery", "boto3", "opacus"} & set(listed.split())
    told = at_home(python, tmp_path / "pets", service.url, ["sklearn"], tmp_path / "home", cwd=tmp_path)
    assert (told["bundle"], told["count"]) == (published[2], 90)
    shown = subprocess.run(
        [str(tmp_path / "env/bin/sluice"), "--help"], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert "verify" in shown.stdout
