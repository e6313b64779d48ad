"""What a release states for each owner of records, read from its privacy statement.

There is one owner, except in a relay. Owners of a relay have the same relation and delta, so their epsilons
can be compared and added; `sluice.release.verify` refuses others, which older versions could publish.
"""

from collections.abc import Mapping
from typing import Any


def of(privacy: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """The statement of each owner, the release's own account first."""
    return (privacy, *privacy.get("others", ()))


def best(epsilon: Mapping[str, float | None]) -> float | None:
    """The smallest of the readings, each of which is an upper bound; None if no accountant has one."""
    return min((value for value in epsilon.values() if value is not None), default=None)


def together(privacy: Mapping[str, Any]) -> dict[str, Any] | None:
    """Epsilon and delta for a person whose records are with every owner; None where there is one owner.

    Guarantee: mechanisms on different records of one person compose, so epsilons and deltas add up.
    """
    owners = of(privacy)
    if len(owners) == 1:
        return None
    readings = [best(owner["epsilon"]) for owner in owners]
    finite = [value for value in readings if value is not None]
    comparable = len(finite) == len(owners) and len({owner["relation"] for owner in owners}) == 1
    return {"epsilon": sum(finite) if comparable else None, "delta": sum(owner["delta"] for owner in owners)}
