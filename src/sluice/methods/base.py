"""Base of all plans: numbers fixed before data is touched, their event, and the search for noise or steps."""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any, ClassVar, Self

from sluice.methods.recipe import Recipe
from sluice.privacy.account import check_epsilon
from sluice.privacy.accountant import Accountant, Reading, check_delta, cost, epsilon
from sluice.privacy.events import MOST_STEPS, Event, positive, whole
from sluice.privacy.problems import (
    InvalidAccount,
    InvalidPlan,
    NotCalibrated,
    TargetOutOfReach,
    TooCostlyToAccount,
)
from sluice.privacy.relation import Relation

# A search for noise stops when epsilon is between this fraction of its limit and the limit.
CLOSE = 0.998


class Clipping(StrEnum):
    """What is clipped to `clip_norm`: the gradient of all generated images together, or of each image.

    SEMIDUAL: the contribution of each record to a sum.
    """

    JOINT = "joint"
    PER_IMAGE = "per_image"
    SEMIDUAL = "semidual"


@dataclass(frozen=True, kw_only=True)
class Target:
    """The privacy a plan must have: at most `epsilon` at `delta`, under a relation, by an accountant."""

    epsilon: float
    delta: float
    relation: Relation
    accountant: Accountant

    def __post_init__(self) -> None:
        check_epsilon(self.epsilon)
        check_delta(self.delta)


# Sides of images, in pixels, that there are networks for.
SIDES = range(8, 65)


def trainable(height: int, width: int) -> bool:
    return height in SIDES and width in SIDES


@dataclass(frozen=True, kw_only=True)
class PublishedReading:
    """The epsilon of a paper's own formula, for comparison. Not a guarantee, and never charged."""

    claimed_epsilon: float
    formula: str
    flaw: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Every number training will use. `noise_multiplier` is noise / sensitivity, as each plan defines it."""

    kind: ClassVar[str]  # name of the method
    recipes: ClassVar[type[Recipe] | None] = None  # type of the field `recipe`, in plans that have one
    by_steps: ClassVar[bool] = True  # whether the plan with fewer steps is valid and costs less
    steps: int | None = None
    noise_multiplier: float | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type in (float, float | None) and type(value) is int and abs(value) <= 2**53:
                object.__setattr__(self, field.name, float(value))
        if self.steps is not None:
            whole("steps", self.steps, most=MOST_STEPS, problem=InvalidPlan)
        if self.noise_multiplier is not None:
            positive("noise_multiplier", self.noise_multiplier, problem=InvalidPlan)
        self.check()

    def check(self) -> None:
        """Raises InvalidPlan for numbers that cannot be trained with."""
        raise NotImplementedError

    def require_fit(self, height: int, width: int, channels: int, classes: int) -> None:
        """Raises InvalidPlan for images that the trainer would refuse, before the budget is charged."""

    def event(self) -> Event:
        """The event to charge. Needs steps and noise."""
        raise NotImplementedError

    @property
    def unit_noise(self) -> float:
        """The noise standard deviation at a noise multiplier of one."""
        raise NotImplementedError

    def published_reading(self, delta: float) -> PublishedReading | None:
        """The epsilon of the paper's own formula where that differs from ours. Not a guarantee."""
        del delta
        return None

    @property
    def noise_stddev(self) -> float:
        if self.noise_multiplier is None:
            raise NotCalibrated(
                "The plan has no noise yet; give noise_multiplier or call calibrated(target)."
            )
        return self.noise_multiplier * self.unit_noise

    @property
    def known_steps(self) -> int:
        if self.steps is None:
            raise NotCalibrated("The plan has no steps yet; give steps or call with_max_steps(target).")
        return self.steps

    @property
    def progress_steps(self) -> int:
        """Steps that a job reports: those that read records, and any that follow without reading them."""
        return self.known_steps

    def reading(self, *, delta: float, relation: Relation, accountant: Accountant) -> Reading:
        return epsilon(self.event(), delta=delta, relation=relation, accountant=accountant)

    def calibrated(self, target: Target) -> Self:
        """The same steps with the least noise whose measured epsilon is at or below the target."""

        def measure(noise: float) -> float:
            return replace(self, noise_multiplier=noise).epsilon_for(target)

        guess = 1.0
        if target.accountant is Accountant.PLD:
            by_renyi = replace(target, accountant=Accountant.RENYI)
            try:
                guess = self.calibrated(by_renyi).noise_multiplier or 1.0
            except TargetOutOfReach:
                guess = 100.0
        return replace(self, noise_multiplier=least_noise(measure, limit=target.epsilon, guess=guess))

    def with_max_steps(self, target: Target) -> Self:
        """The same noise with the most steps that stay within the target."""
        if not self.by_steps:
            raise InvalidPlan(
                f"The steps of a plan for {self.kind} are fixed; use calibrated(target) to choose its noise."
            )

        def fits(steps: int) -> bool:
            return replace(self, steps=steps).epsilon_for(target) <= target.epsilon

        return replace(self, steps=most_steps(fits, guess=self.steps or 1000))

    def epsilon_for(self, target: Target) -> float:
        try:
            return self.reading(
                delta=target.delta, relation=target.relation, accountant=target.accountant
            ).epsilon
        except TooCostlyToAccount:
            return math.inf

    def to_dict(self) -> dict[str, Any]:
        def plain(value: Any) -> Any:
            if isinstance(value, StrEnum):
                return value.value
            return value.to_dict() if hasattr(value, "to_dict") else value

        return {"kind": self.kind, **{field.name: plain(getattr(self, field.name)) for field in fields(self)}}


def rounded_up(noise: float) -> float:
    """Six significant digits, so that a plan prints what it uses; never less noise."""
    digits = 5 - math.floor(math.log10(noise))
    rounded = round(noise, digits)
    return rounded if rounded >= noise else round(rounded + 10.0**-digits, digits)


def least_noise(measure: Callable[[float], float], *, limit: float, guess: float) -> float:
    """The least noise with measure(noise) <= limit, to within 0.2 % of the limit; measure falls with noise.

    False position on logarithms, where epsilon against noise is nearly a straight line; bisection every third
    turn. Guarantee: the noise returned was measured and is within the limit.
    """
    enough, too_little, shrink = guess, guess, 0.9
    at_enough = at_too_little = measure(rounded_up(guess))
    while at_enough > limit:
        too_little, at_too_little, enough = enough, at_enough, enough * 2
        if enough > 1e9:
            raise TargetOutOfReach(
                f"No noise brings this plan to {limit:g}; take fewer steps, or raise epsilon or delta."
            )
        at_enough = measure(rounded_up(enough))
    while at_too_little <= limit:
        enough, at_enough, too_little = too_little, at_too_little, too_little * shrink
        shrink *= shrink
        if too_little < 1e-3:
            return rounded_up(enough)
        at_too_little = measure(rounded_up(too_little))
    for turn in range(60):
        if at_enough >= CLOSE * limit or enough / too_little < 1 + 2e-6:
            break
        share = 0.5
        if turn % 3 < 2 and math.isfinite(at_too_little) and at_enough > 0:
            aim = limit * (1 + CLOSE) / 2
            share = math.log(at_too_little / aim) / math.log(at_too_little / at_enough)
        middle = rounded_up(too_little * (enough / too_little) ** min(max(share, 0.02), 0.98))
        at_middle = measure(middle)
        if at_middle <= limit:
            enough, at_enough = middle, at_middle
        else:
            too_little, at_too_little = middle, at_middle
    return rounded_up(enough)


def most_steps(fits: Callable[[int], bool], *, guess: int) -> int:
    """The largest number of steps that fits; more steps never cost less."""
    low, high = 0, guess
    while fits(high):
        low, high = high, high * 2
        if high > MOST_STEPS:
            return low
    while high - low > max(1, low // 2000):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    if low == 0:
        raise TargetOutOfReach("Not even one step fits the target; add noise, or raise epsilon or delta.")
    return low


def rate_of(*, records: int, batch: int) -> float:
    """The sampling rate for batches of about `batch` records: one over a whole number of batches."""
    whole("records", records, most=10**12, problem=InvalidPlan)
    whole("batch", batch, most=10**12, problem=InvalidPlan)
    if batch > records:
        raise InvalidPlan("batch is larger than records; draw at most all of them.")
    return 1 / -(-records // batch)


def largest_epsilon_that_fits(
    plan: Plan, left: int, *, order: float, delta: float, relation: Relation
) -> tuple[float, Plan]:
    """The plan with the least noise whose cost is at most `left`, and the epsilon of that plan alone.

    Guarantee: cost(plan.event()) <= left at the account's order, so its reservation succeeds.
    """
    if left <= 0:
        raise InvalidAccount("Nothing is left in the account; ask for a larger budget.")

    def measure(noise: float) -> float:
        try:
            return float(cost(replace(plan, noise_multiplier=noise).event(), order=order, relation=relation))
        except TooCostlyToAccount:
            return math.inf

    fitted = replace(plan, noise_multiplier=least_noise(measure, limit=float(left), guess=1.0))
    reading = fitted.reading(delta=delta, relation=relation, accountant=Accountant.RENYI)
    return reading.epsilon, fitted
