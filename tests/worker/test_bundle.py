"""A bundle is what its synthesizer and its public facts make, the same bytes each time, and nothing else."""

import hashlib
import io
import json
import re
import resource
import struct
import subprocess
import zipfile
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from safetensors.torch import load, save

from core.faults import Failure
from core.schema import ImageSchema
from sluice.generators.dcgan import DCGAN
from sluice.generators.image import ARCHITECTURE, WEIGHTS, ImageSynthesizer
from sluice.privacy.events import Composition, PoissonGaussian, Query, Rotation
from sluice.release.manifest import paths
from worker import bundle
from worker.bundle import Facts, build, data, opened
from worker.trainers.networks import Discriminator

SCHEMA = ImageSchema(height=8, width=8, channels=1, classes=("dark", "a/b <c>", "light"))
COLOUR = ImageSchema(height=9, width=8, channels=3, classes=("one", "two"))
READ = {"renyi": 1.25, "pld": 1.125}
PAID = {
    "unit": "one record", "relation": "add_remove", "delta": 1e-5, "cost": 12,
    "event": PoissonGaussian(
        query=Query.SUM, bound=1.0, noise_stddev=2.0, sampling_prob=0.01, steps=100
    ).to_dict(),
    "epsilon": READ, "total": {"cost": 123_456, "epsilon": 2.5},
    "account": {"id": "a", "epsilon": 8.0, "delta": 1e-5, "order": 8},
    "entry": {"number": 2, "digest": "00"}, "head": {"number": 3, "digest": "11"}, "others": [],
    "sources": [],
}  # fmt: skip
FACTS = Facts(
    release="11111111-2222-3333-4444-555555555555", name="Digits [x](y)", note="First\n# second <script>",
    licence="CC-BY-4.0", created_at="2026-01-02T03:04:05.000000+00:00", reviewers=2, count=1000, seed=7,
    formats=("npz", "parquet", "png"), schema=SCHEMA, privacy=PAID,
)  # fmt: skip


def trained(schema=SCHEMA):
    torch.manual_seed(1)
    shape = DCGAN(
        height=schema.height, width=schema.width, channels=schema.channels, classes=len(schema.classes),
        latent=4, features=4,
    )  # fmt: skip
    return ImageSynthesizer(shape)


FILES = trained().to_files()


def made_in(directory, facts=FACTS, files=FILES, on_progress=lambda _: None):
    directory.mkdir(exist_ok=True)
    return build(directory, facts, files, on_progress=on_progress)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    directory = tmp_path_factory.mktemp("bundle")
    return directory, made_in(directory)


def contents(directory):
    return {str(f.relative_to(directory)): f.read_bytes() for f in directory.rglob("*") if f.is_file()}


def test_it_has_exactly_the_files_of_a_release_and_sha256sum_agrees(here):
    directory, made = here
    assert set(contents(directory)) == paths(FACTS.formats) == {file["path"] for file in made.files}
    subprocess.run(["sha256sum", "-c", "--strict", "SHA256SUMS"], cwd=directory, check=True, stdout=-3)
    listed = (directory / "SHA256SUMS").read_text().splitlines()
    assert [line[66:] for line in listed] == sorted(paths(FACTS.formats) - {"SHA256SUMS"})
    assert made.digest == hashlib.sha256((directory / "SHA256SUMS").read_bytes()).digest()
    for file in made.files:
        body = (directory / file["path"]).read_bytes()
        assert (file["size"], file["sha256"]) == (len(body), hashlib.sha256(body).hexdigest())


def test_building_twice_gives_the_same_bytes_and_another_seed_does_not(here, tmp_path):
    directory, made = here
    again = made_in(tmp_path / "again")
    assert (again.digest, contents(tmp_path / "again")) == (made.digest, contents(directory))
    other = made_in(tmp_path / "other", replace(FACTS, seed=8))
    assert other.digest != made.digest


def test_all_formats_hold_the_same_images_with_classes_in_turn(here):
    directory, _ = here
    with np.load(directory / "data/images.npz") as file:
        x, y = file["x"], file["y"]
    assert (x.shape, x.dtype, y.dtype) == ((1000, 8, 8), np.uint8, np.int64)
    assert y.tolist() == [i % 3 for i in range(1000)]
    assert np.bincount(y).tolist() == [334, 333, 333]
    table = pq.read_table(directory / "data/images.parquet")
    assert table.column_names == ["image", "label", "label_index"]
    assert table["label_index"].to_pylist() == y.tolist()
    assert table["label"].to_pylist() == [SCHEMA.classes[label] for label in y]
    pictures = table["image"].to_pylist()
    assert all(np.array_equal(pixels(each), image) for each, image in zip(pictures, x, strict=True))
    with zipfile.ZipFile(directory / "data/images.zip") as archive:
        names = archive.namelist()
        assert [archive.read(name) for name in names] == pictures
    folders = {0: "000-dark", 1: "001-a_b__c_", 2: "002-light"}
    assert names == [f"{folders[label]}/{i:07d}.png" for i, label in enumerate(y)]


def pixels(png):
    return np.asarray(Image.open(io.BytesIO(png)))


def test_the_images_are_those_the_synthesizer_draws_and_fewer_come_first(here, tmp_path):
    """What an analyst draws at home from the published weights and seed is what was published."""
    directory, _ = here
    files = {name: (directory / name).read_bytes() for name in (WEIGHTS, ARCHITECTURE)}
    draws = list(ImageSynthesizer.from_files(files).draws(1000, seed=7, balanced=True))
    mine = np.concatenate([each.images for each in draws])[..., 0]
    with np.load(directory / "data/images.npz") as file:
        assert np.array_equal(file["x"], mine)
    made_in(tmp_path / "few", replace(FACTS, count=300, formats=("npz",)))
    with np.load(tmp_path / "few/data/images.npz") as file:
        assert np.array_equal(file["x"], mine[:300])


def test_colour_images_keep_their_channels(tmp_path):
    facts = replace(FACTS, schema=COLOUR, count=5)
    made_in(tmp_path, facts, trained(COLOUR).to_files())
    with np.load(tmp_path / "data/images.npz") as file:
        assert file["x"].shape == (5, 9, 8, 3)
        first = file["x"][0]
    assert np.array_equal(pixels(pq.read_table(tmp_path / "data/images.parquet")["image"][0].as_py()), first)


def test_every_image_says_that_it_is_synthetic(here):
    directory, made = here
    for each in pq.read_table(directory / "data/images.parquet")["image"].to_pylist()[::97]:
        text = Image.open(io.BytesIO(each)).text
        assert text["Comment"].startswith("Synthetic")
        assert text["Source"] == f"Sluice release {FACTS.release}"
    picture = Image.open(io.BytesIO(made.preview))
    assert "digitalsourcetype/trainedAlgorithmicMedia" in picture.text["XML:com.adobe.xmp"]
    # A row per class, ten across, six times as large as 8 x 8 and two white points between.
    assert picture.size == (10 * 50 + 2, 3 * 50 + 2)
    with np.load(directory / "data/images.npz") as file:
        assert np.array_equal(pixels(made.preview)[2:50:6, 52:100:6], file["x"][3])


def test_the_manifest_has_exactly_these_facts(here):
    directory, made = here
    manifest = json.loads((directory / "manifest.json").read_text())
    assert manifest == made.manifest
    assert set(manifest) == {
        "kind", "version", "release", "name", "note", "licence", "created_at", "code", "review", "sample",
        "synthesizer", "sources", "schema", "files",
    }  # fmt: skip
    assert manifest["sources"] == []
    assert manifest["sample"] == {
        "count": 1000, "seed": 7, "labels": "balanced", "formats": ["npz", "parquet", "png"],
    }  # fmt: skip
    assert (manifest["kind"], manifest["version"], manifest["review"]) == (
        "sluice-release", 1, {"reviewers": 2},
    )  # fmt: skip
    assert manifest["synthesizer"] == json.loads(FILES[ARCHITECTURE])
    assert {"sluice", "torch", "numpy"} <= set(manifest["code"])
    assert json.loads((directory / "privacy.json").read_text()) == PAID
    assert json.loads((directory / "schema.json").read_text()) == SCHEMA.model_dump(mode="json")


def test_card_and_croissant_say_what_the_manifest_says(here):
    directory, made = here
    hashes = {file["path"]: file for file in made.files}
    croissant = json.loads((directory / "croissant.json").read_text())
    assert croissant["conformsTo"] == "http://mlcommons.org/croissant/1.0"
    described = {each["contentUrl"]: each for each in croissant["distribution"]}
    assert set(described) == {"data/images.npz", "data/images.parquet", "data/images.zip"}
    for path, each in described.items():
        assert (each["sha256"], each["contentSize"]) == (
            hashes[path]["sha256"], f"{hashes[path]['size']} B",
        )  # fmt: skip
    [records] = croissant["recordSet"]
    assert [field["name"] for field in records["field"]] == ["image", "label"]
    columns = pq.read_schema(directory / "data/images.parquet").names
    for field in records["field"]:
        assert field["source"]["fileObject"]["@id"] in described
        assert field["source"]["extract"]["column"] in columns
    card = (directory / "README.md").read_text()
    assert "epsilon 1.125 at delta 1e-05, neighbouring relation add_remove, unit one record" in card
    assert "| Rényi | 1.25 |\n| PLD | 1.125 |\n" in card
    assert "Total: epsilon 2.5 of a budget of 8, at delta 1e-05." in card
    assert "up to ledger row 2, at a cost of 0.000123456 at Rényi order 8" in card
    assert "does not depend on how the plans were chosen" in card
    for of_relays in ("owner", "turns", "without a charge"):
        assert of_relays not in card
    assert "<script>" not in card
    assert "\n# second" not in card
    assert "[x](y)" not in card.split("---")[2]


OTHER = {name: value for name, value in PAID.items() if name not in ("others", "sources")} | {
    "epsilon": {"renyi": 0.5, "pld": None}, "total": {"cost": 9, "epsilon": 0.75},
}  # fmt: skip


def test_a_relay_s_card_has_every_owner_and_their_sum(tmp_path):
    """Two owners: neither number stands for the other, and a person with both is told the sum."""
    made_in(tmp_path, replace(FACTS, privacy=PAID | {"others": [OTHER]}))
    card = (tmp_path / "README.md").read_text()
    assert "| Rényi, owner 1 | 1.25 |\n| PLD, owner 1 | 1.125 |\n" in card
    assert "| Rényi, owner 2 | 0.5 |\n| PLD, owner 2 | unknown |\n" in card
    assert "Total, owner 1: epsilon 2.5" in card
    assert "Total, owner 2: epsilon 0.75" in card
    described = json.loads((tmp_path / "croissant.json").read_text())["description"]
    for text in (card, described):
        assert (
            "epsilon 1.125 for the records of owner 1, 0.5 for the records of owner 2 at delta 1e-05" in text
        )
        assert "with all 2, epsilon 1.625 at delta 2e-05" in text
        assert "at most" not in text


def test_turns_of_one_owner_are_said_to_be_read_as_chosen_in_advance(tmp_path):
    turn = Rotation(query=Query.SUM, bound=1.0, noise_stddev=2.0, steps=8, parts=4)
    privacy = PAID | {"event": Composition(events=(turn, turn)).to_dict()}
    made_in(tmp_path, replace(FACTS, privacy=privacy))
    assert "several turns" in (tmp_path / "README.md").read_text()


SOURCE = {
    "name": "Pictures [x](y)", "sha256": "ab" * 32, "declared_public": True, "records": 60000,
    "schema": {"kind": "image", "height": 8, "width": 8, "channels": 1},
}  # fmt: skip


def test_the_card_and_the_manifest_name_the_sources(tmp_path):
    made = made_in(tmp_path, replace(FACTS, privacy=PAID | {"sources": [SOURCE]}))
    assert made.manifest["sources"] == [SOURCE]
    assert json.loads((tmp_path / "privacy.json").read_text())["sources"] == [SOURCE]
    card = (tmp_path / "README.md").read_text()
    assert "## What it learned from without a charge" in card
    assert f"about 60000 images of 8 x 8 x 1, SHA-256 of the file `{'ab' * 32}`" in card
    assert "Pictures [x](y)" not in card


@pytest.mark.parametrize("formats", [("png",), ("npz",)])
def test_croissant_points_into_the_files_there_are(formats, tmp_path):
    made_in(tmp_path, replace(FACTS, formats=formats, count=4))
    croissant = json.loads((tmp_path / "croissant.json").read_text())
    known = {each["@id"] for each in croissant["distribution"]}
    for field in croissant["recordSet"][0]["field"]:
        source = field["source"]
        assert (source.get("fileObject") or source["fileSet"])["@id"] in known
    if formats == ("png",):
        pattern = croissant["recordSet"][0]["field"][1]["source"]["transform"]["regex"]
        with zipfile.ZipFile(tmp_path / "data/images.zip") as archive:
            assert re.match(pattern, archive.namelist()[0])[1] == "dark"


def test_progress_counts_samples_up_to_all(tmp_path):
    heard = []
    made_in(tmp_path, replace(FACTS, count=4097, formats=("npz",)), on_progress=heard.append)
    assert heard == [4096, 4097]


def changed(**tensors):
    return FILES | {WEIGHTS: save(load(FILES[WEIGHTS]) | tensors)}


def described(**more):
    return FILES | {ARCHITECTURE: json.dumps(json.loads(FILES[ARCHITECTURE]) | more).encode()}


def with_header(change):
    """The same tensors behind a header that says more."""
    (size,) = struct.unpack("<Q", FILES[WEIGHTS][:8])
    header = change(FILES[WEIGHTS][8 : 8 + size])
    return FILES | {WEIGHTS: struct.pack("<Q", len(header)) + header + FILES[WEIGHTS][8 + size :]}


def hostile():
    torch.manual_seed(2)
    weights = load(FILES[WEIGHTS])
    first = next(iter(weights))
    discriminator = {
        f"discriminator.{k}": v for k, v in Discriminator(trained().architecture, 4).state_dict().items()
    }
    moments = {f"optimizer.{k}.exp_avg": torch.zeros_like(v) for k, v in weights.items()}
    meta = b'{"__metadata__":{"records":"60000","loss":"0.31"},'
    spaced = FILES[ARCHITECTURE].replace(b": ", b":  ")
    twice = FILES[ARCHITECTURE].replace(b'"kind"', b'"latent": 60000,\n  "kind"', 1)
    return {
        "discriminator": changed(**discriminator),
        "optimizer": changed(**moments),
        "one number more": changed(loss=torch.tensor(0.31)),
        "tensor missing": FILES | {WEIGHTS: save({k: v for k, v in weights.items() if k != first})},
        "larger tensor": changed(**{first: torch.cat([weights[first], weights[first]])}),
        "other precision": changed(**{first: weights[first].double()}),
        "nan": changed(**{first: weights[first] * float("nan")}),
        "infinity": changed(**{first: weights[first] / 0}),
        "metadata": with_header(lambda header: meta + header[1:]),
        "spaces in the header": with_header(lambda header: header + b" " * 8),
        "bytes at the end": FILES | {WEIGHTS: FILES[WEIGHTS] + b"loss"},
        "loss in the architecture": described(loss=0.31),
        "records in the architecture": described(records=60000),
        "spaces in the architecture": FILES | {ARCHITECTURE: spaced},
        "a name twice": FILES | {ARCHITECTURE: twice},
        "another kind": described(kind="conditional-dcgan-discriminator"),
        "another size": trained(COLOUR).to_files(),
        "a pickle": FILES | {WEIGHTS: b"\x80\x05K\x01."},
        "nothing": FILES | {WEIGHTS: b""},
        "no architecture": {WEIGHTS: FILES[WEIGHTS]},
        "a file more": FILES | {"discriminator.safetensors": b""},
    }  # fmt: skip


@pytest.mark.parametrize("name", hostile())
def test_the_packer_refuses_whatever_is_not_exactly_a_generator(name, tmp_path):
    with pytest.raises(Failure, match="unfit-synthesizer"):
        made_in(tmp_path, files=hostile()[name])
    assert contents(tmp_path) == {}


def test_a_synthesizer_that_is_too_large_is_refused(monkeypatch):
    assert opened(ImageSynthesizer, FILES, SCHEMA)
    monkeypatch.setattr(bundle, "MAX_SYNTHESIZER_BYTES", sum(map(len, FILES.values())) - 1)
    with pytest.raises(Failure, match="unfit-synthesizer"):
        opened(ImageSynthesizer, FILES, SCHEMA)


@pytest.mark.parametrize("path", ["diagnostics.jsonl", "data/records.npz", ".hidden", "more/deep/loss.json"])
def test_a_file_that_is_not_of_a_release_is_refused(path, tmp_path):
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_text("0.31")
    with pytest.raises(Failure, match="unfit-synthesizer"):
        made_in(tmp_path)


@pytest.mark.parametrize(
    "privacy",
    [
        PAID | {"loss": 0.31},
        PAID | {"entry": PAID["entry"] | {"dataset": "patients"}},
        PAID | {"epsilon": READ | {"empirical": 0.1}},
        {name: value for name, value in PAID.items() if name != "head"},
        PAID | {"total_after": READ},
        PAID | {"others": [OTHER | {"dataset": "patients"}]},
        PAID | {"sources": [SOURCE | {"report": {"clamped": 3}}]},
        PAID | {"sources": [SOURCE | {"schema": SOURCE["schema"] | {"mean": 0.5}}]},
    ],
)
def test_privacy_json_has_exactly_its_fields(privacy, tmp_path):
    with pytest.raises(Failure, match="unfit-synthesizer"):
        made_in(tmp_path, replace(FACTS, privacy=privacy))


def test_a_file_larger_than_s3_takes_in_one_piece_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(bundle, "MAX_FILE_BYTES", 1000)
    with pytest.raises(Failure, match="too-large"):
        made_in(tmp_path)


def test_memory_does_not_grow_with_the_number_of_samples(monkeypatch, tmp_path):
    """Sixteen thousand more images of 32 x 32 x 3 are 50 MB, and as many again as pictures."""
    schema = ImageSchema(height=32, width=32, channels=3, classes=("one", "two"))
    files, facts = trained(schema).to_files(), replace(FACTS, schema=schema, formats=("npz", "parquet"))
    monkeypatch.setattr(data, "GROUP", 2)

    def peak():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    made_in(tmp_path / "warm", replace(facts, count=4096), files)
    before = peak()
    made_in(tmp_path / "more", replace(facts, count=5 * 4096), files)
    assert peak() - before < 30e6  # an allocator keeps some of what it had
