"""`sluice verify`: what was signed passes; whichever byte of whichever file is other, it does not."""

import base64
import hashlib
import json
import random
import shutil
import sys
from datetime import datetime, timedelta

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from sluice.cli.main import main
from sluice.client import trust
from sluice.client.api import Sluice
from sluice.client.problems import NotVerified
from sluice.client.verify import verify, verify_reviewed
from sluice.privacy.account import cost_as_epsilon
from sluice.privacy.accountant import Accountant, cost
from sluice.privacy.events import PoissonGaussian, Query
from sluice.release.statement import SeedSigner
from sluice.release.verify import readable
from tests.client.bundles import (
    DELTA,
    EPSILON,
    EVENT,
    PRIVACY,
    RELATION,
    SIGNER,
    Service,
    bundle,
    issued_at,
    keys_json,
    listed,
)

OTHER = SeedSigner(bytes(32))
CHANGES = 1000


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """Two releases, so that parts of one can be put into the other."""
    directory = tmp_path_factory.mktemp("releases")
    return directory, {
        name: bundle(directory / name, name=name, seed=seed) for name, seed in (("a", 1), ("b", 2))
    }


@pytest.fixture
def here(originals, tmp_path, monkeypatch):
    """A copy of both to do damage to, the file with the keys, and a home where nothing is remembered."""
    monkeypatch.setenv("SLUICE_HOME", str(tmp_path / "home"))
    directory, ids = originals
    for name in ids:
        shutil.copytree(directory / name, tmp_path / name)
    (tmp_path / "keys.json").write_text(json.dumps(keys_json()))
    return tmp_path


@pytest.fixture
def sluice(monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["sluice", *map(str, arguments)])
        capsys.readouterr()
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code or 0
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return code, out, err

    return run


def refused(directory, keys, revocations=None):
    with pytest.raises(NotVerified) as caught:
        verify(directory, keys=keys, revocations=revocations, online=False)
    return caught.value


def test_a_release_holds_offline_with_the_keys_alone(here, originals, sluice):
    release, digest = originals[1]["a"]
    pem = Ed25519PublicKey.from_public_bytes(SIGNER.public).public_bytes(
        Encoding.PEM, PublicFormat.SubjectPublicKeyInfo
    )
    (here / "key.pem").write_bytes(pem)
    (here / "key.b64").write_text(base64.b64encode(SIGNER.public).decode() + "\n")
    for keys in ("keys.json", "key.pem", "key.b64"):
        code, out, err = sluice("verify", here / "a", "--key", here / keys, "--offline", "--json")
        assert code == 0, err
        told = json.loads(out)
        assert (told["release"], told["bundle"], told["ok"]) == (release, digest, True)
        assert told["epsilon"] == pytest.approx(EPSILON, rel=1e-9)
        assert told["revocations"]["number"] is None
    code, out, _ = sluice("releases", "verify", here / "a", "--key", here / "keys.json", "--offline")
    assert code == 0
    assert f"{EPSILON['renyi']:.4f} by Rényi" in out
    assert "not checked: no list is known" in out


def stated(**changes):
    """Of one owner: the fields of a statement that are not about the release as a whole."""
    own = {name: value for name, value in PRIVACY.items() if name not in ("others", "sources")}
    return own | changes


def other_owner():
    event = PoissonGaussian(query=Query.SUM, bound=1.0, noise_stddev=1.0, sampling_prob=0.01, steps=100)
    spent = cost(event, order=8, relation=RELATION)
    epsilon = {each.value: readable(each, event=event, delta=DELTA, relation=RELATION) for each in Accountant}
    return stated(event=event.to_dict(), epsilon=epsilon, cost=spent, total=total_of(spent))


def total_of(spent):
    return {"cost": spent, "epsilon": cost_as_epsilon(spent, delta=DELTA, order=8)}


def test_a_relay_is_shown_owner_by_owner_with_the_sum(here, sluice):
    other = other_owner()
    bundle(here / "relay", name="relay", privacy=PRIVACY | {"others": [other]})
    ask = ["verify", here / "relay", "--key", here / "keys.json", "--offline"]
    told = json.loads(sluice(*ask, "--json")[1])
    assert [one["epsilon"] for one in told["owners"]] == [EPSILON, other["epsilon"]]
    assert [one["total"] for one in told["owners"]] == [PRIVACY["total"], other["total"]]
    best = [min(EPSILON.values()), min(other["epsilon"].values())]
    assert told["together"] == {"epsilon": pytest.approx(sum(best)), "delta": 2 * DELTA}
    code, out, _ = sluice(*ask)
    assert code == 0
    lines = {line.split("  ")[0]: " ".join(line.split()) for line in out.splitlines()}
    for i, epsilon in enumerate((EPSILON, other["epsilon"]), 1):
        assert f"{epsilon['renyi']:.4f} by Rényi, {epsilon['pld']:.4f} by PLD" in lines[f"epsilon, owner {i}"]
    assert f"with all 2, epsilon {sum(best):.4f} at delta 2e-05" in " ".join(out.split())


def test_a_relay_of_different_deltas_is_refused(here, sluice):
    read = {each.value: readable(each, event=EVENT, delta=1e-6, relation=RELATION) for each in Accountant}
    total = {"cost": 10**9, "epsilon": cost_as_epsilon(10**9, delta=1e-6, order=8)}
    account = PRIVACY["account"] | {"delta": 1e-6}
    other = stated(delta=1e-6, epsilon=read, total=total, account=account)
    bundle(here / "mixed", name="mixed", privacy=PRIVACY | {"others": [other]})
    ask = ["verify", here / "mixed", "--key", here / "keys.json", "--offline"]
    code, out, _ = sluice(*ask, "--json")
    assert (code, json.loads(out)["problem"]["slug"]) == (3, "owners-differ")


def test_a_total_of_more_than_the_budget_is_refused(here, sluice):
    """Signed, and every byte as it was signed: a total of 3.2 under a budget of 1.0."""
    spent = next(units for units in range(0, 10**11, 10**6) if total_of(units)["epsilon"] >= 3.2)
    account = PRIVACY["account"] | {"epsilon": 1.0}
    bundle(here / "over", name="over", privacy=PRIVACY | {"total": total_of(spent), "account": account})
    ask = ["verify", here / "over", "--key", here / "keys.json", "--offline"]
    code, out, err = sluice(*ask, "--json")
    problem = json.loads(out)["problem"]
    assert (code, problem["slug"], problem["budget"]) == (3, "over-budget", 1.0)
    assert problem["total"] == pytest.approx(3.2, abs=0.01)
    assert "more than the budget" in err


def test_the_sources_of_a_classifier_are_shown(here, sluice):
    source = {
        "name": "street numbers", "sha256": "cd" * 32, "declared_public": True, "records": 70_000,
        "schema": {"kind": "image", "height": 8, "width": 8, "channels": 1},
    }  # fmt: skip
    bundle(here / "c", name="c", formats=(), count=0, privacy=PRIVACY | {"sources": [source]})
    ask = ["verify", here / "c", "--key", here / "keys.json", "--offline"]
    assert json.loads(sluice(*ask, "--json")[1])["sources"] == [source]
    assert "street numbers, declared public" in " ".join(sluice(*ask)[1].split())


def test_a_thousand_single_bytes_changed_are_a_thousand_refused(here):
    """Spread over every file of the bundle, its statement and the list of withdrawn releases."""
    keys, a, chance = here / "keys.json", here / "a", random.Random(4)
    good = listed(3, ("other", "ab" * 32))
    assert verify(a, keys=keys, revocations=good, online=False)["revocations"]["number"] == 3
    files = sorted(path for path in a.rglob("*") if path.is_file())
    assert len(files) == 12
    for number in range(CHANGES):
        place = [*files, None][number % (len(files) + 1)]
        body = bytearray(place.read_bytes() if place else good)
        body[chance.randrange(len(body))] ^= chance.randrange(1, 256)
        if place is None:
            problem = refused(a, keys, bytes(body))
        else:
            before = place.read_bytes()
            place.write_bytes(body)
            problem = refused(a, keys, good)
            place.write_bytes(before)
        assert problem.exit_code == 3, (place, problem)
        assert problem.slug in ("bad-signature", "bundle-altered", "unknown-key")
    assert verify(a, keys=keys, revocations=good, online=False)["ok"]


def truncate(a, _b):
    body = (a / "data/images.npz").read_bytes()
    (a / "data/images.npz").write_bytes(body[:-1])


def empty(a, _b):
    (a / "privacy.json").write_bytes(b"")


def add(a, _b):
    (a / "data/more.npz").write_bytes(b"")


def hide(a, _b):
    (a / ".hidden").write_bytes(b"x")


def leave_a_part(a, _b):
    (a / ".preview.png.0123456789abcdef.part").write_bytes(b"x")


def remove(a, _b):
    (a / "data/images.parquet").unlink()


def swap(a, _b):
    one, two = (a / "data/images.npz").read_bytes(), (a / "data/images.parquet").read_bytes()
    (a / "data/images.npz").write_bytes(two)
    (a / "data/images.parquet").write_bytes(one)


def link(a, b):
    (a / "preview.png").unlink()
    (a / "preview.png").symlink_to(b.parent / "a-preview.png")


def others(*names):
    def replace(a, b):
        for name in names:
            shutil.copy(b / name, a / name)

    replace.__name__ = "-".join(names)
    return replace


@pytest.mark.parametrize(
    "damage",
    [
        truncate, empty, add, hide, leave_a_part, remove, swap, link,
        others("attestation.json"), others("manifest.json"), others("manifest.json", "SHA256SUMS"),
        others("data/images.npz"), others("manifest.json", "SHA256SUMS", "attestation.json"),
    ],
    ids=lambda damage: damage.__name__,
)  # fmt: skip
def test_a_bundle_that_is_not_whole_or_not_one(here, damage, sluice):
    shutil.copy(here / "a/preview.png", here / "a-preview.png")
    damage(here / "a", here / "b")
    assert refused(here / "a", here / "keys.json").slug == "bundle-altered"
    code, out, err = sluice("verify", here / "a", "--key", here / "keys.json", "--offline", "--json")
    assert code == 3
    assert json.loads(out)["problem"]["slug"] == "bundle-altered"
    assert err.startswith("sluice: The files differ from the signed statement: ")


def test_a_bundle_fetched_for_review_is_not_signed(here, sluice):
    """It has no statement: it can be compared with the digest under review, and passes for nothing else."""
    (here / "a/attestation.json").unlink()
    assert refused(here / "a", here / "keys.json").slug == "not-signed"
    code, _, err = sluice("verify", here / "a", "--key", here / "keys.json", "--offline")
    assert (code, "neither signed nor published yet" in err) == (3, True)
    digest = hashlib.sha256((here / "a/SHA256SUMS").read_bytes()).hexdigest()
    assert verify_reviewed(here / "a", digest)["published"] is False
    with pytest.raises(NotVerified):
        verify_reviewed(here / "a", "ab" * 32)
    (here / "a/README.md").write_text("other")
    with pytest.raises(NotVerified):
        verify_reviewed(here / "a", digest)


def test_a_key_that_nobody_trusts(here, sluice):
    (here / "other.json").write_text(json.dumps(keys_json(OTHER)))
    for more in (["--key", here / "other.json"], []):
        code, _, err = sluice("verify", here / "a", "--offline", *more)
        assert code == 3
        assert err.startswith("sluice: The statement was signed with an unknown key: ")
    assert "sluice login" in err


@pytest.mark.parametrize("text", ["", "{}", "{", '{"keys": []}', "AAAA", "-----BEGIN PUBLIC KEY-----\nx"])
def test_a_file_that_holds_no_key(here, sluice, text):
    (here / "bad").write_text(text)
    code, _, err = sluice("verify", here / "a", "--key", here / "bad")
    assert code == 1
    assert "holds no Ed25519 key" in err


def test_a_directory_that_is_none(here, sluice):
    code, _, err = sluice("verify", here / "nowhere")
    assert code == 1
    assert "is not a directory" in err


# -- withdrawn releases


def test_a_withdrawn_release_ends_with_a_code_of_its_own(here, originals, sluice):
    (here / "list.json").write_bytes(listed(2, originals[1]["a"]))
    arguments = ["--key", here / "keys.json", "--revocations", here / "list.json"]
    code, out, err = sluice("verify", here / "a", *arguments, "--json")
    assert code == 4
    assert json.loads(out)["problem"]["slug"] == "release-withdrawn"
    assert (
        err == "sluice: The release was withdrawn: It was withdrawn at 2026-02-01T00:00:00+00:00: a mistake\n"
    )
    assert sluice("verify", here / "b", *arguments)[0] == 0


@pytest.fixture
def service(here, originals):
    with Service(here / "a", originals[1]["a"][0], "a").serving() as service:
        with Sluice(service.url) as client:
            trust.pin_signing_keys(client)
        yield service


def test_remembered_keys_and_the_newest_list_are_used_and_said(here, service, sluice):
    code, out, _ = sluice("verify", here / "a")
    assert code == 0
    assert f"remembered for {service.url}" in out.replace("\n", "")
    assert f"by list 1 of {issued_at(1):%Y-%m-%d}" in out
    assert "fetched now" in out
    service.revocations = None  # out of reach: the one it gave last counts, with its age
    code, out, _ = sluice("verify", here / "a", "--json")
    assert code == 0
    told = json.loads(out)["revocations"]
    assert told["number"] == 1
    assert told["from"].startswith(f"of {issued_at(1):%Y-%m-%dT%H:%M:%S}+00:00, fetched 20")


def test_a_list_once_seen_is_not_forgotten(here, originals, service, sluice):
    a, b = originals[1]["a"], originals[1]["b"]
    service.revocations = listed(5, a)
    assert sluice("verify", here / "a")[0] == 4
    # Older, without an entry, or the same number with other entries: somebody is hiding something.
    for replayed in (listed(1), listed(4, a), listed(6), listed(6, b), listed(5, b)):
        service.revocations = replayed
        code, out, _ = sluice("verify", here / "b", "--json")
        assert code == 3
        assert json.loads(out)["problem"]["slug"] == "revocations-rolled-back"
        (here / "old.json").write_bytes(replayed)
        assert sluice("verify", here / "b", "--revocations", here / "old.json")[0] == 3
    service.revocations = None
    assert sluice("verify", here / "a")[0] == 4
    assert sluice("verify", here / "a", "--key", here / "keys.json", "--offline")[0] == 4
    assert sluice("verify", here / "b")[0] == 0


@pytest.mark.parametrize("how", ["given", "fetched", "remembered"])
def test_an_expired_list_is_refused_unless_that_is_allowed(
    how, here, originals, service, sluice, monkeypatch
):
    """Whoever can hold back newer lists must not keep a withdrawn release looking good for ever."""
    arguments = []
    if how == "given":
        (here / "list.json").write_bytes(listed(1))
        arguments = ["--key", here / "keys.json", "--revocations", here / "list.json"]
    assert sluice("verify", here / "b", *arguments)[0] == 0
    if how == "remembered":
        arguments = ["--offline"]
    travel(monkeypatch, timedelta(days=6))
    assert sluice("verify", here / "b", *arguments)[0] == 0
    travel(monkeypatch, timedelta(days=7, minutes=11))
    code, out, err = sluice("verify", here / "b", *arguments, "--json")
    assert (code, json.loads(out)["problem"]["slug"]) == (3, "revocations-expired")
    assert "expired at" in err
    code, out, _ = sluice("verify", here / "b", *arguments, "--allow-expired-list", "--json")
    assert (code, json.loads(out)["revocations"]["number"]) == (0, 1)
    assert sluice("verify", here / "a", *arguments, "--allow-expired-list")[0] == 0
    if how == "fetched":
        service.revocations = listed(2, originals[1]["a"])
        assert sluice("verify", here / "a")[0] == 4  # a list that has expired still tells what it names


def travel(monkeypatch, time):
    """Verifies as if that much time had gone by."""

    class Later(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.now(tz) + time

    monkeypatch.setattr("sluice.client.verify.datetime", Later)


def test_a_service_cannot_slip_in_a_key_after_the_first_meeting(here, originals, service, sluice):
    shutil.rmtree(here / "a")
    bundle(here / "a", name="a", seed=1, signer=OTHER)
    service.keys, service.revocations = keys_json(SIGNER, OTHER), listed(2, signer=OTHER)
    with Sluice(service.url) as client:
        trust.pin_signing_keys(client)
        assert sluice("verify", here / "a")[0] == 3
        trust.pin_signing_keys(client, accept_changes=True)  # as sluice login does: a person decided
        assert sluice("verify", here / "a")[0] == 0


def test_a_list_signed_by_a_stranger_is_no_list(here, service, sluice):
    service.revocations = listed(9, signer=OTHER)
    assert sluice("verify", here / "a")[0] == 3
