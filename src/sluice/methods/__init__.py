"""The plans, one file per mechanism, and how to read one back."""

from dataclasses import fields
from enum import StrEnum

from sluice.methods.adapt import AdaptPlan
from sluice.methods.atlas import AtlasPlan
from sluice.methods.base import Clipping, Plan, PublishedReading, Target
from sluice.methods.dpgan import DPGANPlan
from sluice.methods.gswgan import GSWGANPlan
from sluice.methods.sinkhorn import SinkhornPlan
from sluice.methods.swd import SWDOneShotPlan, SWDPlan
from sluice.privacy.problems import InvalidPlan

PLANS: dict[str, type[Plan]] = {
    cls.kind: cls
    for cls in (DPGANPlan, SinkhornPlan, GSWGANPlan, SWDPlan, SWDOneShotPlan, AtlasPlan, AdaptPlan)
}

__all__ = ["PLANS", "Clipping", "Plan", "PublishedReading", "Target", "plan_from_dict"]


def plan_from_dict(body: object) -> Plan:
    """Reads a plan, refusing unknown kinds and fields; numbers are checked by the plan itself."""
    if not isinstance(body, dict) or body.get("kind") not in PLANS:
        raise InvalidPlan(f"A plan is a JSON object whose kind is one of {', '.join(PLANS)}.")
    cls = PLANS[body["kind"]]
    known = {field.name: field for field in fields(cls)}
    given = {name: value for name, value in body.items() if name != "kind"}
    if odd := sorted(set(map(str, given)) - set(known)):
        raise InvalidPlan(f"A {cls.kind} plan has no {', '.join(odd)}; it has {', '.join(known)}.")
    if cls.recipes is not None:
        given["recipe"] = cls.recipes.read(given.get("recipe"))
    for name, value in given.items():
        enum = known[name].type
        if (
            isinstance(enum, type)
            and issubclass(enum, StrEnum)
            and isinstance(value, str)
            and value in [*enum]
        ):
            given[name] = enum(value)
    try:
        return cls(**given)
    except TypeError:
        raise InvalidPlan(f"A {cls.kind} plan lacks a number; it has {', '.join(known)}.") from None
