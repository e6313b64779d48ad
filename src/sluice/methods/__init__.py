"""The methods, one module each, and what can be done with any of them by name.

A module of this package with a `METHOD` is a method; nothing else has to be edited to add one.
"""

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import fields, replace
from enum import StrEnum
from typing import Any

from sluice.methods.base import Clipping, Plan, PublishedReading, Target, rate_of
from sluice.methods.method import Method, Options, Output, PublicFacts
from sluice.privacy.accountant import Accountant
from sluice.privacy.events import probability, whole
from sluice.privacy.problems import InvalidPlan

_modules = (importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__))
METHODS: dict[str, Method] = {
    module.METHOD.name: module.METHOD for module in _modules if hasattr(module, "METHOD")
}
PLANS: dict[str, type[Plan]] = {name: method.plan for name, method in METHODS.items()}

__all__ = [
    "METHODS", "PLANS", "Clipping", "Method", "Output", "Plan", "PublicFacts", "PublishedReading", "Target",
    "default_plan", "find_method", "learnable", "plan_from_dict", "plan_from_options", "recommended",
]  # fmt: skip

# Short names that commands and requests may use for fields of a plan.
SHORT_NAMES = {"clip": "clip_norm", "noise": "noise_multiplier", "rate": "sampling_prob"}


def find_method(name: str) -> Method:
    """The method of that name; dashes count as underscores."""
    method = METHODS.get(name.replace("-", "_"))
    if method is None:
        raise InvalidPlan(f"There is no such method; there are {', '.join(METHODS)}.", given=name)
    return method


def plan_from_dict(body: object) -> Plan:
    """A plan from its JSON form. Unknown kinds and fields are refused; the plan checks its numbers."""
    if not isinstance(body, dict) or body.get("kind") not in METHODS:
        raise InvalidPlan(f"A plan is a JSON object whose kind is one of {', '.join(METHODS)}.")
    cls = METHODS[body["kind"]].plan
    plan_fields = {field.name: field for field in fields(cls)}
    values = {name: value for name, value in body.items() if name != "kind"}
    if unknown := sorted(map(str, set(values) - set(plan_fields))):
        raise InvalidPlan(f"A {cls.kind} plan has only the fields {', '.join(plan_fields)}.", given=unknown)
    if cls.recipes is not None:
        values["recipe"] = cls.recipes.read(values.get("recipe"))
    for name, value in values.items():
        enum = plan_fields[name].type
        if isinstance(enum, type) and issubclass(enum, StrEnum) and isinstance(value, str):
            values[name] = next((member for member in enum if member == value), value)
    try:
        return cls(**values)
    except TypeError:
        missing = "A number of the {} plan is missing; it has {}."
        raise InvalidPlan(missing.format(cls.kind, ", ".join(plan_fields))) from None


def plan_from_options(name: str, options: Mapping[str, Any]) -> Plan:
    """The plan that options describe: its fields by their own or short names, and records and batch.

    Where a plan has a sampling rate, records and batch may be given instead of it. None is no option.
    """
    cls = find_method(name).plan
    values = {SHORT_NAMES.get(key, key): value for key, value in options.items() if value is not None}
    names = {field.name for field in fields(cls)}
    if "sampling_prob" in names:
        records, batch = values.pop("records", None), values.pop("batch", None)
        if (batch is None) == ("sampling_prob" not in values) or (batch is not None and records is None):
            raise InvalidPlan("Give either the sampling rate, or records and batch.")
        if batch is not None:
            values["sampling_prob"] = rate_of(records=records, batch=batch)
        if "expected_batch" in names and records is not None:
            whole("records", records, most=10**12, problem=InvalidPlan)
            rate = values["sampling_prob"]
            probability("sampling_prob", float(rate) if rate == 1 else rate, problem=InvalidPlan)
            values["expected_batch"] = rate * records
    return plan_from_dict({"kind": cls.kind, **values})


def recommended(facts: PublicFacts, *, source: bool = False, relay: bool = False) -> Method | None:
    """The method to use for such data: of those that fit, the one with the lowest rank; None if none fits."""
    fitting = (
        method
        for method in METHODS.values()
        if method.can_learn(facts) and method.needs_source == source and (method.can_relay or not relay)
    )
    return min(fitting, key=lambda method: method.rank, default=None)


def learnable() -> str:
    """What methods can learn, in words."""
    return "; ".join(sorted({method.learns for method in METHODS.values()}))


def default_plan(
    method: Method, facts: PublicFacts, target: Target, options: Mapping[str, Any], *, relay: bool = False
) -> Plan:
    """The plan, without noise yet, of a method for declared facts; options replace defaults.

    The jobs of a relay have the same recipe, so their plans name one. The plan does not depend on the
    accountant that the noise is found by.
    """
    by_renyi = replace(target, accountant=Accountant.RENYI)
    defaults: Options = method.defaults(facts, by_renyi) | ({"recipe": "fast-cpu"} if relay else {})
    if {"rate", "sampling_prob"} & set(options):
        defaults.pop("batch", None)
    return plan_from_options(method.name, defaults | dict(options))
