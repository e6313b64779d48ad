"""`sluice quote`: the numbers, the stable keys, and refusals in one sentence."""

import json
import xml.etree.ElementTree as ET

import pytest
from typer.testing import CliRunner

from sluice.cli.quote import app
from sluice.privacy.account import capacity
from sluice.privacy.events import Geometry, PoissonGaussian, Query, SlicedProjection

KEYS = {"epsilon", "cost", "order", "capacity", "left", "relation", "delta", "fits", "admits", "best_order"}
DPGAN = ["dpgan", "--records", "60000", "--batch", "512", "--delta", "1e-5"]
MIX = [
    PoissonGaussian(query=Query.SUM, bound=1.0, noise_stddev=4.4124, steps=50_000, sampling_prob=1 / 118),
    PoissonGaussian(query=Query.SUM, bound=1.0, noise_stddev=1.6986, steps=100_000, sampling_prob=1 / 469),
    PoissonGaussian(
        query=Query.FUNCTION, bound=0.5, noise_stddev=0.7968, steps=50_000, sampling_prob=1 / 1200
    ),
    SlicedProjection(
        geometry=Geometry.SPHERE,
        directions=1000,
        dim=784,
        records=60_000,
        batch=100,
        noise_stddev=1.3068,
        steps=60_100,
    ),
]


def quote(*arguments):
    return CliRunner().invoke(app, [str(each) for each in arguments])


def as_json(*arguments):
    result = quote(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_the_published_row_of_dpgan():
    body = as_json(*DPGAN, "--noise", 2, "--steps", 174_000)
    assert set(body) > KEYS
    assert body["epsilon"]["renyi"] == pytest.approx(9.995, abs=0.002)
    assert body["epsilon"]["pld"] == pytest.approx(9.306, abs=0.02)
    assert body["multiplier"] == 2
    assert body["rate"] == 1 / 118
    assert body["left"] == body["capacity"] - body["cost"]
    assert body["published"] is None


@pytest.mark.parametrize("accountant", ["renyi", "pld"])
def test_a_target_finds_the_noise(accountant):
    body = as_json(*DPGAN, "--epsilon", 10, "--steps", 50_000, "--accountant", accountant)
    assert 9.9 <= body["epsilon"][accountant] <= 10
    assert body["account"] == {"epsilon": 10, "delta": 1e-5}
    assert body["capacity"] == capacity(10, 1e-5, body["order"])
    assert isinstance(body["cost"], int)


def test_a_target_and_a_noise_find_the_steps():
    body = as_json(*DPGAN, "--epsilon", 10, "--noise", 2)
    assert 174_000 <= body["steps"] <= 174_300
    assert body["epsilon"]["renyi"] <= 10


def test_the_relation_changes_the_reading():
    sizes = [
        as_json(
            "sinkhorn",
            "--rate",
            1 / 1200,
            "--clipping",
            "joint",
            "--noise",
            0.75,
            "--steps",
            160_000,
            "--delta",
            1e-5,
            "--relation",
            r,
        )
        for r in ("add-remove", "replace-one")
    ]
    assert sizes[0]["epsilon"]["pld"] == pytest.approx(3.179, abs=0.02)
    assert sizes[1]["epsilon"]["pld"] == pytest.approx(4.373, abs=0.0219)


def test_a_published_claim_is_shown_as_no_guarantee():
    published = ["--clipping", "per-image", "--images", 50, "--steps", 160_000, "--noise", 1.5 / 50**0.5]
    arguments = [*published, "--delta", 1e-5]
    body = as_json("sinkhorn", "--rate", 1 / 1200, *arguments)
    assert body["published"]["epsilon"] == pytest.approx(10.05, abs=0.02)
    assert body["published"]["guarantee"] is False
    assert body["epsilon"]["pld"] == pytest.approx(844.4, abs=16.9)
    assert "no guarantee" in quote("sinkhorn", "--rate", 1 / 1200, *arguments).stdout


def test_gswgan_and_swd_and_one_shot():
    body = as_json(
        "gswgan", "--parts", 1000, "--steps", 20_000, "--epsilon", 10, "--delta", 1e-5, "--accountant", "pld"
    )
    assert body["multiplier"] == pytest.approx(2.24, abs=0.01)
    sampled = ["swd", "--records", 60_000, "--batch", 100, "--dim", 784, "--noise", 0.84, "--steps", 60_100]
    body = as_json(*sampled, "--delta", 1e-5)
    assert body["epsilon"]["renyi"] == pytest.approx(4.591, abs=0.002)
    body = as_json("swd", "--one-shot", "--epsilon", 1, "--delta", 1e-5)
    assert body["event"]["kind"] == "gaussian"
    assert 0.99 <= body["epsilon"]["renyi"] <= 1


def test_an_event_from_a_file(tmp_path):
    file = tmp_path / "event.json"
    file.write_text(MIX[0].to_json())
    body = as_json("event", file, "--delta", 2.5e-6)
    assert set(body) > KEYS
    assert body["epsilon"]["renyi"] == pytest.approx(2, abs=0.002)
    assert 0 <= body["left"] < 100  # without a budget, the account just holds it


def test_four_jobs_in_one_account(tmp_path):
    file = tmp_path / "events.json"
    file.write_text(json.dumps([event.to_dict() for event in MIX]))
    body = as_json("account", "--epsilon", 8, "--delta", 1e-5, "--events", file)
    assert body["epsilon"]["renyi"] == pytest.approx(3.87, abs=0.005)
    assert body["epsilon"]["pld"] == pytest.approx(3.57, abs=0.01)
    assert body["order"] == 4
    assert body["admits"] == 14
    assert body["left"] == body["capacity"] - body["cost"] > 0
    assert body["cost"] == sum(body["costs"])


def test_a_table_and_a_drawing_for_people(tmp_path):
    picture = tmp_path / "steps.svg"
    result = quote(*DPGAN, "--noise", 2, "--steps", 1000, "--plot", picture)
    assert result.exit_code == 0
    for word in ("epsilon, Rényi", "epsilon, PLD", "multiplier", "cost", "capacity", "left", "█", "steps"):
        assert word in result.stdout
    assert ET.parse(picture).getroot().tag.endswith("svg")


@pytest.mark.parametrize(
    ("arguments", "slug"),
    [
        ([*DPGAN, "--noise", "2"], "invalid-target"),
        ([*DPGAN, "--noise", "2", "--steps", "10", "--epsilon", "3"], "invalid-target"),
        ([*DPGAN, "--noise", "-2", "--steps", "10"], "invalid-plan"),
        ([*DPGAN, "--noise", "nan", "--steps", "10"], "invalid-plan"),
        ([*DPGAN, "--epsilon", "0", "--steps", "10"], "invalid-target"),
        ([*DPGAN, "--epsilon", "nan", "--steps", "10"], "invalid-target"),
        ([*DPGAN, "--epsilon", "1", "--steps", "0"], "invalid-plan"),
        ([*DPGAN, "--epsilon", "1", "--steps", "10", "--order", "1"], "invalid-target"),
        ([*DPGAN, "--epsilon", "0.00001", "--steps", "10"], "target-out-of-reach"),
        (["dpgan", "--delta", "1e-5", "--noise", "2", "--steps", "10"], "invalid-plan"),
        (["dpgan", "--rate", "2", "--delta", "1e-5", "--noise", "2", "--steps", "10"], "invalid-plan"),
        (["dpgan", "--rate", "0.1", "--noise", "2", "--steps", "10"], "invalid-target"),
        (["dpgan", "--rate", "0.1", "--delta", "0", "--noise", "2", "--steps", "10"], "invalid-target"),
        (["swd", "--delta", "1e-5", "--noise", "2", "--steps", "10"], "invalid-plan"),
        (["event", "/nowhere.json", "--delta", "1e-5"], "unknown-event"),
        (["account", "--events", "/nowhere.json", "--delta", "1e-5"], "invalid-target"),
        (
            ["sinkhorn", "--rate", "0.9", "--noise", "0.001", "--steps", "1000000000", "--delta", "1e-5"],
            "too-costly-to-account",
        ),
    ],
)
def test_bad_input_gets_one_sentence_with_a_way_out(arguments, slug):
    plain, structured = quote(*arguments), quote(*arguments, "--json")
    assert plain.exit_code == structured.exit_code == 2
    assert plain.stdout == ""
    assert "Traceback" not in plain.stderr
    assert len(plain.stderr.strip().splitlines()) == 1
    problem = json.loads(structured.stdout)["problem"]
    assert problem["slug"] == slug
    assert problem["title"]
    assert problem["detail"]


@pytest.mark.parametrize("text", ["", "[]", "[1]", "{}", '{"version": 1, "kind": "laplace"}', "\xff", "[[[["])
def test_files_that_hold_no_event_are_refused(tmp_path, text):
    file = tmp_path / "event.json"
    file.write_bytes(text.encode("latin-1"))
    for arguments in (["event", file], ["account", "--epsilon", 8, "--events", file]):
        result = quote(*arguments, "--delta", 1e-5, "--json")
        assert result.exit_code == 2
        assert json.loads(result.stdout)["problem"]["detail"]


def test_help_does_not_load_the_arithmetic():
    import subprocess
    import sys

    heavy = ("numpy", "scipy", "rich.table")
    script = f"import sys, sluice.cli.quote; sys.exit(any(m in sys.modules for m in {heavy}))"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


# -- every method, and which to take

WHOLE = {
    "dpgan": [*DPGAN[1:], "--steps", "2000"],
    "sinkhorn": ["--rate", "0.001", "--steps", "2000", "--delta", "1e-5"],
    "gswgan": ["--parts", "1000", "--steps", "2000", "--delta", "1e-5"],
    "swd": [*DPGAN[1:], "--dim", "794", "--steps", "2000"],
    "atlas": ["--delta", "1e-5"],
}


@pytest.mark.parametrize("kind", WHOLE)
def test_every_method_is_priced_in_words(kind):
    done = quote(kind, *WHOLE[kind], "--epsilon", 3)
    assert done.exit_code == 0, done.output
    assert "epsilon, Rényi" in done.output


def test_what_costs_the_same_after_every_step_is_not_plotted(tmp_path):
    done = quote("atlas", "--delta", "1e-5", "--epsilon", 3, "--plot", tmp_path / "plot.svg")
    assert done.exit_code == 2
    assert "nothing to plot" in done.output
    assert not (tmp_path / "plot.svg").exists()


DIGITS = ["recommend", "--image", "28x28", "--classes", 10, "--records", 60_000, "--delta", "1e-5"]


def test_a_recommendation_names_a_method_prices_it_and_says_why_in_one_line():
    body = as_json(*DIGITS, "--epsilon", 10)
    assert body["recommended"]["method"] == body["plan"]["kind"] == "atlas"
    assert body["plan"]["charts"] == body["recommended"]["charts"] == 10
    assert 9.9 < body["epsilon"]["renyi"] <= 10
    assert "6,000 records of a class" in body["recommended"]["why"]
    assert "CPU" in body["recommended"]["why"]
    assert "\n" not in body["recommended"]["why"]
    on_gpu = as_json(*DIGITS, "--epsilon", 10, "--device", "cuda")["recommended"]
    assert "no GPU" in on_gpu["why"]


def test_less_is_promised_where_noise_leaves_less_room():
    def take(records, epsilon):
        few = [*DIGITS[:6], records, *DIGITS[7:]]
        return as_json(*few, "--epsilon", epsilon)["recommended"]

    charts = [take(records, 1)["charts"] for records in (60_000, 20_000, 8_000)]
    assert charts == sorted(charts, reverse=True)
    assert charts[0] > charts[-1] == 1
    assert "more epsilon or records" in take(500, 0.1)["why"]


@pytest.mark.parametrize(
    ("odd", "sentence"),
    [
        (["--image", "100x28"], "8 to 64 pixels"),
        (["--image", "28"], "such as 28x28"),
        (["--image", "28x²"], "such as 28x28"),
    ],
)
def test_a_recommendation_for_what_cannot_be_trained_is_refused(odd, sentence):
    done = quote("recommend", *odd, *DIGITS[3:], "--epsilon", 1)
    assert done.exit_code == 2
    assert sentence in done.output
    without = quote(*DIGITS)
    assert without.exit_code == 2
    assert "give --epsilon" in without.output
