"""Bytes that earlier versions hashed, signed or answered with stay valid.

The files beside this module were written by commit 3f98980, before the library moved to `sluice`: a stack was
started with `sluice demo`'s classes; three datasets of 200 images of 8 x 8 pixels were trained on by DPGAN,
atlas, adapt and a relay of two GS-WGAN jobs; each result was published and downloaded, and the service was
asked for its keys, revocation lists, ledger, audit log and OpenAPI document. Events, plans, problems and the
output of offline commands came from its Python modules. Nothing here is regenerated: a difference is
an incompatible change.
"""

import hashlib
import importlib
import json
import pkgutil
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

import core
import service
import sluice
from core import errors
from core.settings import ServiceSettings
from service.app import create_app
from sluice.cli.ledger import verify_account
from sluice.cli.main import app
from sluice.client.problems import NotVerified
from sluice.client.release import Release
from sluice.client.verify import verify
from sluice.methods import METHODS, Target, plan_from_dict
from sluice.privacy import problems as privacy_problems
from sluice.privacy.accountant import Accountant, cost, epsilon
from sluice.privacy.events import KINDS, from_dict, from_json
from sluice.privacy.relation import Relation
from sluice.release import audit_log, chain, ledger
from tests.core.test_settings import COMPLETE

HERE = Path(__file__).parent
RELEASES = HERE / "releases"
KEYS, REVOCATIONS, REVOKED = HERE / "keys.json", HERE / "revocations.json", HERE / "revocations-after.json"


def golden(name):
    text = (HERE / name).read_text()
    return [json.loads(line) for line in text.splitlines()] if name.endswith("jsonl") else json.loads(text)


def same(new, old):
    """Equal in every key and type; floats to 1e-9, since the last bits depend on the machine's libraries."""
    if isinstance(old, dict):
        return isinstance(new, dict) and new.keys() == old.keys() and all(same(new[k], old[k]) for k in old)
    if isinstance(old, list):
        return isinstance(new, list) and len(new) == len(old) and all(map(same, new, old))
    if isinstance(old, float):
        return type(new) is float and new == pytest.approx(old, rel=1e-9)
    return type(new) is type(old) and new == old


# Events and plans

EVENTS, PLANS_BEFORE = golden("events.json"), golden("plans.json")


@pytest.mark.parametrize("before", EVENTS, ids=lambda before: before["event"]["kind"])
def test_events_have_the_same_json_and_cost(before):
    event = from_dict(before["event"])
    assert event == from_json(before["text"])
    assert event.to_dict() == before["event"]
    assert event.to_json() == before["text"]
    for at in before["costs"]:
        assert cost(event, order=at["order"], relation=Relation(at["relation"])) == at["cost"]
    for relation, value in before["epsilon"].items():
        reading = epsilon(event, delta=1e-5, accountant=Accountant.RENYI, relation=Relation(relation))
        assert reading.epsilon == pytest.approx(value, rel=1e-9)


def test_every_kind_of_event_and_plan_is_still_there():
    assert {before["event"]["kind"] for before in EVENTS} <= set(KINDS)
    assert {before["plan"]["kind"] for before in PLANS_BEFORE} <= set(METHODS)


@pytest.mark.parametrize("before", PLANS_BEFORE, ids=lambda before: before["plan"]["kind"])
def test_plans_have_the_same_json_events_and_noise(before):
    plan = plan_from_dict(before["given"])
    assert plan_from_dict(before["plan"]) == plan
    assert json.dumps(plan.to_dict(), sort_keys=True) == json.dumps(before["plan"], sort_keys=True)
    for calibrated in before["calibrated"]:
        limit, delta, relation = calibrated["target"]
        target = Target(epsilon=limit, delta=delta, relation=Relation(relation), accountant=Accountant.RENYI)
        if "problem" in calibrated:
            with pytest.raises(privacy_problems.Problem) as refused:
                plan.calibrated(target)
            assert refused.value.slug == calibrated["problem"]
            continue
        priced = plan.calibrated(target)
        assert same(json.loads(json.dumps(priced.to_dict())), calibrated["plan"])
        assert same(priced.event().to_dict(), calibrated["event"])
        assert priced.progress_steps == calibrated["progress_steps"]
        published = priced.published_reading(delta)
        assert same(published and published.claimed_epsilon, calibrated["published"])


# Ledger and audit log


def checked(rows, account):
    """What `sluice ledger verify` says of exported rows."""

    def pages(_, *, after=0):
        return {"account": account, "entries": rows if after == 0 else [], "next": None}

    return verify_account(SimpleNamespace(ledger=pages), account["id"], reprice=True)


@pytest.mark.parametrize("name", ["one", "two"])
def test_an_exported_ledger_still_verifies(name):
    rows, account = golden(f"ledger-{name}.jsonl"), golden(f"account-{name}.json")
    if name == "one":
        assert {row["kind"] for row in rows} == {"grant", "reserve", "settle", "void"}
        assert [row["kind"] for row in rows].count("grant") == 2
    previous = chain.GENESIS
    for row in rows:
        assert ledger.digest(previous, row).hex() == row["digest"]
        previous = bytes.fromhex(row["digest"])
    assert checked(rows, account) == {
        "account": account["id"],
        "ok": True,
        "rows": len(rows),
        "head": account["head"],
        "broken_row": None,
        "why": None,
    }


def test_a_changed_ledger_does_not_verify():
    account = golden("account-one.json")
    for number, row in enumerate(golden("ledger-one.jsonl"), 1):
        for field, value in row.items():
            if field in ("previous", "account"):
                continue
            changed = golden("ledger-one.jsonl")
            other = value + 1 if isinstance(value, int) else "0" if isinstance(value, str) else {"other": 1}
            changed[number - 1][field] = other
            verdict = checked(changed, account)
            assert (verdict["ok"], verdict["broken_row"]) == (False, number), field
    assert not checked(golden("ledger-one.jsonl")[:-1], account)["ok"]


def test_an_exported_audit_log_still_verifies_and_a_changed_one_does_not():
    rows = golden("audit.jsonl")
    count, head, broken = audit_log.check(rows)
    assert (count, head.hex(), broken) == (len(rows), rows[-1]["digest"], None)
    for field in sorted(set(rows[0]) - {"previous", "number"}):
        changed = golden("audit.jsonl")
        changed[3][field] = ["other"] if field == "objects" else "other"
        _, _, broken = audit_log.check(changed)
        assert broken is not None, field
        assert broken.number == rows[3]["number"]


# Releases


def verified(directory, revocations=REVOCATIONS):
    offline = {"online": False, "allow_expired_list": True}
    return verify(directory, keys=KEYS, revocations=revocations.read_bytes(), **offline)


NAMES = sorted(path.name for path in RELEASES.iterdir())


@pytest.mark.parametrize("name", NAMES)
def test_a_published_release_still_verifies(name):
    statement = verified(RELEASES / name)
    assert (statement["ok"], statement["name"]) == (True, name)
    assert len(statement["owners"]) == (2 if name == "relay" else 1)
    assert len(statement["sources"]) == (1 if name == "classifier" else 0)


@pytest.mark.parametrize("name", NAMES)
def test_a_release_with_one_byte_changed_does_not_verify(name, tmp_path):
    files = [path for path in (RELEASES / name).rglob("*") if path.is_file()]
    assert len(files) > 5
    for path in files:
        copy = tmp_path / path.name
        shutil.copytree(RELEASES / name, copy)
        altered = copy / path.relative_to(RELEASES / name)
        body = bytearray(altered.read_bytes())
        body[len(body) // 2] ^= 1
        altered.write_bytes(body)
        with pytest.raises(NotVerified):
            verified(copy)


def test_a_withdrawn_release_is_known_from_the_list_of_the_time():
    with pytest.raises(NotVerified) as refused:
        verified(RELEASES / "relay", REVOKED)
    assert refused.value.slug == "release-withdrawn"
    assert verified(RELEASES / "atlas", REVOKED)["ok"]


def hashed(*arrays):
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()


@pytest.mark.parametrize("name", NAMES)
def test_released_models_give_the_same_bytes(name):
    release = Release(RELEASES / name)
    if release.is_classifier:
        images = np.random.default_rng(5).integers(0, 256, (40, 8, 8, 1)).astype(np.uint8)
        results = [hashed(np.asarray(release.classifier().predict(images)).astype("<i8"))]
    else:
        synthesizer = release.synthesizer()
        samples = synthesizer.sample(6, seed=7), synthesizer.sample(4, seed=8, label=1)
        results = [hashed(sample.images, sample.labels.astype("<i8")) for sample in samples]
    assert results == golden("samples.json")[name]


# What programs depend on: problem slugs, JSON of commands, the REST document


def problem_classes(parent):
    for child in parent.__subclasses__():
        yield child
        yield from problem_classes(child)


def test_every_problem_keeps_its_slug_and_status():
    for package in (core, service, sluice):
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    answers = {(cls.slug, cls.status) for cls in problem_classes(errors.Problem)}
    missing = {(before["slug"], before["status"]) for before in golden("problems.json")} - answers
    assert not missing


def arguments(text, tmp_path):
    """A command's words, with the files it reads put in."""
    events = [before["event"] for before in EVENTS]
    files = {"EVENT": events[3], "EVENTS": events[:4], "BROKEN": [events[0] | {"kind": "other"}]}
    places = {
        "RELEASE": RELEASES / "dpgan", "CLASSIFIER": RELEASES / "classifier", "RELAY": RELEASES / "relay",
        "KEYS": KEYS, "REVOCATIONS": REVOCATIONS, "REVOKED": REVOKED, "ALTERED": tmp_path / "altered",
    }  # fmt: skip
    for name, body in files.items():
        places[name] = tmp_path / f"{name.lower()}.json"
        places[name].write_text(json.dumps(body))
    shutil.copytree(RELEASES / "dpgan", places["ALTERED"])
    (places["ALTERED"] / "README.md").write_text("other")
    return [str(places.get(word, word)) for word in text.split()]


PROSE = ("title", "detail", "why", "flaw", "formula", "directory", "keys_from", "from")  # may be reworded


def without_prose(body):
    if isinstance(body, dict):
        return {
            name: type(value).__name__ if name in PROSE else without_prose(value)
            for name, value in body.items()
        }
    return [without_prose(item) for item in body] if isinstance(body, list) else body


@pytest.mark.parametrize("before", golden("cli.json"), ids=lambda before: before["command"][:40])
def test_offline_commands_print_the_same_json(before, tmp_path, monkeypatch):
    monkeypatch.setenv("SLUICE_HOME", str(tmp_path / "home"))
    done = CliRunner().invoke(app, [*arguments(before["command"], tmp_path), "--json"])
    problem = getattr(done.exception, "to_dict", None)  # the entry point prints it
    body = {"problem": problem()} if problem else json.loads(done.stdout)
    code = getattr(done.exception, "exit_code", done.exit_code)
    assert code == before["exit_code"], done.output
    assert same(without_prose(body), without_prose(before["json"]))


def test_the_rest_document_has_every_route_and_field_it_had(monkeypatch):
    for name, value in COMPLETE.items():
        monkeypatch.setenv(name, value)
    now, before = create_app(ServiceSettings()).openapi(), golden("openapi.json")
    for path, methods in before["paths"].items():
        assert set(methods) <= set(now["paths"].get(path, {})), path
    schemas = [
        (_plain(name), set(schema.get("properties", {})))
        for name, schema in now["components"]["schemas"].items()
    ]
    for name, fields in before["schemas"].items():
        assert any(_plain(name) == other and set(fields) <= there for other, there in schemas), name


def _plain(name):
    """Without the module that FastAPI adds where two classes have the same name."""
    return name.rpartition("__")[2]
