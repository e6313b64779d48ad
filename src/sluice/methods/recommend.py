"""Which method to take for given images, records, epsilon and machine, and why."""

import math
from dataclasses import dataclass

from sluice.methods.atlas import AtlasPlan
from sluice.methods.base import Target, trainable
from sluice.privacy.problems import InvalidPlan

# Charts to a class, at most, and how many times the noise of a chart's count the records on it should be.
MOST_CHARTS, ABOVE_NOISE = 10, 60


@dataclass(frozen=True)
class Images:
    """What is declared of a dataset of images."""

    height: int
    width: int
    classes: int
    records: int


def charts_for(records: float, target: Target) -> tuple[int, float]:
    """How many charts so many records of a class can fill, and the noise that a chart's count has."""
    plan = AtlasPlan().calibrated(target)
    noise = math.sqrt(3) * plan.noise_stddev / plan.bound("shapes")
    return max(1, min(MOST_CHARTS, int(records / (ABOVE_NOISE * noise)))), noise


def recommended(images: Images, target: Target, device: str) -> tuple[AtlasPlan, str]:
    """Atlas, with as many charts as the noise leaves room for, and why in one line.

    It was ahead of every other method in every measure of docs/benchmarks.md and takes seconds where they
    take minutes.
    """
    if not trainable(images.height, images.width):
        raise InvalidPlan("Images have sides of 8 to 64 pixels; scale yours before they are registered.")
    each = images.records / images.classes
    charts, noise = charts_for(each, target)
    room = f"{each:,.0f} records of a class against a noise of {noise:.2g}"
    if each < ABOVE_NOISE * noise:
        why = f"{room} show little more than the mean of each class; more epsilon or records help most"
    else:
        where = "needs no GPU" if device == "cuda" else "takes seconds on a CPU"
        kinds = (
            f"{charts} kinds of images in each class" if charts > 1 else "one kind of images in each class"
        )
        why = f"best of all methods measured, {where}; {room} leave room for {kinds}"
    return AtlasPlan(charts=charts), why
