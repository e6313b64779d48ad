"""Reference values computed elsewhere, by two implementations each, and claims that must not be matched."""

import csv
import json
from pathlib import Path

import pytest

from sluice.methods import Clipping, PublishedReading
from sluice.methods.gswgan import GSWGANPlan
from sluice.methods.sinkhorn import SinkhornPlan
from sluice.methods.swd import SWDPlan
from sluice.privacy import renyi
from sluice.privacy.accountant import Accountant, epsilon
from sluice.privacy.dominating_pairs import Plain, dominating
from sluice.privacy.events import Event, Gaussian, Geometry, PoissonGaussian, Query, SlicedProjection
from sluice.privacy.relation import Relation

VECTORS = Path(__file__).resolve().parent / "vectors"


def rows(name: str) -> list[dict[str, str]]:
    with (VECTORS / name).open(newline="") as file:
        return list(csv.DictReader(file))


def poisson(query: Query, params: dict) -> PoissonGaussian:
    multiplier = params.get("effective_noise_multiplier") or params["noise_multiplier"]
    return PoissonGaussian(
        query=query,
        bound=1.0,
        noise_stddev=multiplier * (2 if query is Query.FUNCTION else 1),
        steps=params["steps"],
        sampling_prob=params.get("sampling_rate") or 1 / params["num_discriminators"],
    )


def sliced(params: dict) -> SlicedProjection:
    return SlicedProjection(
        geometry=Geometry.SPHERE,
        directions=params["k"],
        dim=params["d"],
        records=params.get("N", 1),
        batch=params.get("batch", 1),
        noise_stddev=params["sigma"],
        steps=params.get("steps", 1),
    )


def events_of(mechanism: str, params: dict) -> list[Event]:
    if mechanism == "ledger":
        return [event for job in params["jobs"] for event in events_of(job["mechanism"], job)]
    if mechanism in ("poisson_subsampled_gaussian", "dpgan"):
        return [poisson(Query.SUM, params)]
    if mechanism == "gaussian":
        multiplier, steps = params["noise_multiplier"], params["steps"]
        return [Gaussian(query=Query.SUM, bound=1.0, noise_stddev=multiplier, steps=steps)]
    if mechanism in ("sinkhorn_joint_clip", "sinkhorn_per_image_clip", "gswgan_partition"):
        return [poisson(Query.FUNCTION, params)]
    if mechanism in ("swd_base", "swd_wor"):
        return [sliced(params)]
    raise AssertionError(f"no event for {mechanism}")


def accountant_of(method: str) -> Accountant:
    return Accountant.RENYI if method.startswith("rdp") else Accountant.PLD


@pytest.mark.parametrize("row", rows("accounting.csv"), ids=lambda r: f"{r['mechanism']}-{r['method'][:12]}")
def test_reference_epsilons_are_met_within_tolerance(row):
    params, relation = json.loads(row["params"]), Relation(row["adjacency"])
    events = events_of(row["mechanism"], params)
    if row["method"] == "rdp_value_at_alpha":
        ((pair, _),) = dominating(events[0], relation)
        assert isinstance(pair, Plain)
        found = [renyi.divergence(pair, params["alpha"]), renyi.second_divergence(pair, params["alpha"])]
    else:
        method = accountant_of(row["method"])
        found = [epsilon(events, delta=float(row["delta"]), accountant=method, relation=relation).epsilon]
    for value in found:
        # The table prints eight digits, which for one row is coarser than its tolerance.
        assert abs(float(f"{value:.8g}") - float(row["epsilon"])) <= float(row["tolerance"])


def test_every_reference_row_is_read():
    assert len(rows("accounting.csv")) == 25
    assert len(rows("unsound.csv")) == 3


@pytest.mark.parametrize("name", ["accounting.csv", "unsound.csv"])
def test_the_vectors_are_those_of_the_reference_material(shared, name):
    """The checkout has copies, so that no checkout goes without; where the originals are, they are equal."""
    assert (VECTORS / name).read_bytes() == (shared / "vectors" / name).read_bytes()


def unsound_plan(row: dict[str, str]):
    params = json.loads(row["params"])
    if row["mechanism"] == "sinkhorn_per_image_clip":
        return SinkhornPlan(
            steps=params["steps"],
            sampling_prob=params["sampling_rate"],
            images=params["n_images"],
            clipping=Clipping.PER_IMAGE,
            noise_multiplier=params["sigma"] / params["n_images"] ** 0.5,
        )
    if row["mechanism"] == "gswgan_partition":
        return GSWGANPlan(
            steps=params["steps"],
            parts=params["num_discriminators"],
            images=params["batch"],
            clipping=Clipping.PER_IMAGE,
            noise_multiplier=params["sigma"] / params["batch"] ** 0.5,
        )
    return SWDPlan(
        steps=params["steps"],
        records=params["N"],
        batch=params["batch"],
        directions=params["k"],
        dim=params["d"],
        noise_multiplier=params["sigma"],
    )


@pytest.mark.parametrize("row", rows("unsound.csv"), ids=lambda r: r["mechanism"])
def test_published_claims_are_shown_but_never_as_a_guarantee(row):
    plan, delta = unsound_plan(row), float(row["delta"])
    claim = float(row["paper_epsilon_reading"].split()[0])
    published = plan.published_reading(delta)
    assert isinstance(published, PublishedReading)
    assert published.claimed_epsilon == pytest.approx(claim, rel=0.01)
    for relation in Relation:
        for accountant in Accountant:
            reading = plan.reading(delta=delta, relation=relation, accountant=accountant)
            assert abs(reading.epsilon - claim) > 0.25 * claim
    if "sinkhorn" in row["mechanism"] or "gswgan" in row["mechanism"]:
        reading = plan.reading(delta=delta, relation=Relation.ADD_REMOVE, accountant=Accountant.PLD)
        assert reading.epsilon > 30 * claim


def test_the_rotation_of_gswgan_costs_what_an_index_in_the_open_costs():
    plan = GSWGANPlan(
        steps=20_000, parts=1000, images=32, clipping=Clipping.PER_IMAGE, noise_multiplier=1.07 / 32**0.5
    )
    reading = plan.reading(delta=1e-5, relation=Relation.REPLACE_ONE, accountant=Accountant.PLD)
    assert reading.epsilon > 347
