"""Which method to take for given images, records, epsilon and machine, and why."""

import math
from dataclasses import dataclass, replace

from privacy.plans.atlas import AtlasPlan
from privacy.plans.base import Target
from privacy.problems import InvalidPlan

# Charts to a class, at most, and how many times the noise of a chart's count the records on it should be.
MOST_CHARTS, ABOVE_NOISE = 10, 60


@dataclass(frozen=True)
class Images:
    """What is declared of a dataset of images."""

    height: int
    width: int
    classes: int
    records: int


@dataclass(frozen=True)
class Recommended:
    plan: AtlasPlan
    why: str


def recommended(images: Images, target: Target, device: str) -> Recommended:
    """Atlas, with as many charts as the noise leaves room for: it was ahead of every method in every measure of
    docs/benchmarks.md, with and without much noise, and takes seconds where the others take minutes."""
    if not all(8 <= side <= 64 for side in (images.height, images.width)):
        raise InvalidPlan("Images have sides of 8 to 64 pixels; scale yours before they are registered.")
    plan = AtlasPlan().calibrated(target)
    noise = math.sqrt(3) * plan.noise_stddev / plan.bound("shapes")
    each = images.records / images.classes
    charts = max(1, min(MOST_CHARTS, int(each / (ABOVE_NOISE * noise))))
    much = each / noise
    room = f"{each:,.0f} records of a class against a noise of {noise:.2g}"
    if much < ABOVE_NOISE:
        why = (
            f"{room}: little more than the mean of each class will be seen; more epsilon or records help most"
        )
    else:
        what = f"leave room for {charts} kinds of images in each class" if charts > 1 else "tell its shape"
        where = "a GPU is not needed" if device == "cuda" else "seconds without a GPU"
        why = f"best of all methods measured, {where}; {room} {what}"
    return Recommended(replace(plan, charts=charts), why)
