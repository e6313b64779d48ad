"""Everything about a release that can be verified without I/O.

Guarantee: a bundle that passes `check_release` is the one that was approved, with an epsilon that follows
from its event and a total within the budget of its account.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sluice.privacy.account import cost_as_epsilon, exceeds
from sluice.privacy.accountant import Accountant, cost, epsilon
from sluice.privacy.events import from_dict
from sluice.privacy.problems import Problem, TooCostlyToAccount
from sluice.privacy.relation import Relation
from sluice.release import owners
from sluice.release.manifest import MANIFEST, PRIVACY, SUMS, paths, release_statement, sums
from sluice.release.revocations import refuse_withdrawn
from sluice.release.statement import STATEMENT_TYPE, open_envelope

# Two machines may differ in the last digits of a logarithm. Stated numbers are not rounded.
ROUNDING, AGREEMENT = 1e-9, 1e-6


class BundleAltered(Problem):
    slug, title = "bundle-altered", "The files differ from the signed statement"


class EpsilonNotReproduced(Problem):
    slug, title = "epsilon-not-reproduced", "The stated epsilon does not follow from the event"


class OverBudget(Problem):
    slug, title = "over-budget", "The stated total is more than the budget of its account"


class OwnersDiffer(Problem):
    slug, title = "owners-differ", "The owners of a relay have different deltas or relations"


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A verified release, and the epsilon computed here from its event, by each accountant."""

    release: str
    bundle: str
    published_at: str
    epsilon: dict[str, float | None]
    manifest: dict[str, Any]
    privacy: dict[str, Any]
    review: dict[str, Any]


def check_release(
    envelope: bytes,
    *,
    hashes: Mapping[str, str],
    small: Mapping[str, bytes],
    keys: Mapping[str, bytes],
    revocations: Mapping[str, Any] | None,
) -> Checked:
    """Verifies a bundle: `hashes` of all its files but the statement, `small` the bytes of manifest.json,
    privacy.json and SHA256SUMS, `revocations` a list that `open_revocations` returned.
    """
    statement = open_envelope(envelope, STATEMENT_TYPE, keys)
    try:
        predicate = statement["predicate"]
        if release_statement(**{**predicate, "hashes": _subjects(statement)}) != statement:
            raise BundleAltered("The statement has unknown parts; use a newer client.")
        manifest = _agreeing(predicate, _subjects(statement), hashes, small)
        again = _owners(predicate["privacy"])
        refuse_withdrawn(predicate, revocations)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise BundleAltered(
            "The statement or a file does not have the form of a release; fetch it again."
        ) from None
    return Checked(
        release=predicate["release"], bundle=predicate["bundle"], published_at=predicate["published_at"],
        epsilon=again, manifest=manifest, privacy=predicate["privacy"], review=predicate["review"],
    )  # fmt: skip


def _subjects(statement: Mapping[str, Any]) -> dict[str, str]:
    return {item["name"]: item["digest"]["sha256"] for item in statement["subject"]}


def _agreeing(
    predicate: Mapping[str, Any],
    stated: Mapping[str, str],
    hashes: Mapping[str, str],
    small: Mapping[str, bytes],
) -> dict[str, Any]:
    """The manifest, if statement, files, sums, manifest, privacy.json and approvals all agree."""
    if dict(hashes) != stated:
        odd = sorted({path for path, _ in set(hashes.items()) ^ set(stated.items())})
        raise BundleAltered(f"These files were changed, removed or added: {', '.join(odd)}.", paths=odd)
    for path in (MANIFEST, PRIVACY, SUMS):
        if hashlib.sha256(small[path]).hexdigest() != stated[path]:
            raise BundleAltered(f"{path} is not the file that was signed.", paths=[path])
    if small[SUMS] != sums(stated) or stated[SUMS] != predicate["bundle"]:
        raise BundleAltered("SHA256SUMS is not the list of the files.", paths=[SUMS])
    manifest = json.loads(small[MANIFEST])
    listed = {file["path"]: file["sha256"] for file in manifest["files"]}
    if listed != {path: hash for path, hash in stated.items() if path not in (MANIFEST, SUMS)}:
        raise BundleAltered("manifest.json lists other files.", paths=[MANIFEST])
    same = ("release", "code")
    if any(manifest[name] != predicate[name] for name in same) or set(stated) != paths(
        manifest["sample"]["formats"]
    ):
        raise BundleAltered("manifest.json is that of another release.", paths=[MANIFEST])
    if json.loads(small[PRIVACY]) != predicate["privacy"]:
        raise BundleAltered("privacy.json is not what was signed.", paths=[PRIVACY])
    if manifest.get("sources", []) != predicate["privacy"].get("sources", []):  # older releases name none
        raise BundleAltered("manifest.json names other sources than privacy.json.", paths=[MANIFEST])
    review = predicate["review"]
    approving = {item["person"] for item in review["approvals"] if item["digest"] == predicate["bundle"]}
    if review["reviewers"] != 1:  # with two reviewers the author's own approval does not count
        approving -= {review["author"]}
    if not approving or manifest["review"] != {"reviewers": review["reviewers"]}:
        raise BundleAltered("Nobody with that right approved this bundle; do not use it.", paths=[MANIFEST])
    return dict(manifest)


def _owners(privacy: Mapping[str, Any]) -> dict[str, float | None]:
    """The epsilons of the release's own account, if the numbers of every owner follow from their events."""
    stated = owners.of(privacy)
    terms = (privacy["relation"], privacy["delta"])
    if any((owner["relation"], owner["delta"]) != terms for owner in stated):
        raise OwnersDiffer(
            "Their epsilons cannot be compared or added; ask the publisher for another release."
        )
    computed = [_reproduced(owner) for owner in stated]
    for owner in stated:
        _require_within_budget(owner)
    return computed[0]


def _require_within_budget(privacy: Mapping[str, Any]) -> None:
    """The total follows from its cost at the account's order, and is no more than the account's epsilon."""
    account = privacy["account"]
    budget, terms = account["epsilon"], {"delta": account["delta"], "order": account["order"]}
    if "total" in privacy:
        total, spent = privacy["total"]["epsilon"], privacy["total"]["cost"]
        again = cost_as_epsilon(spent, **terms)
        if not (isinstance(spent, int) and spent >= privacy["cost"] and _follows(again, total)):
            raise EpsilonNotReproduced(
                "The stated total does not follow from its cost.", stated=total, again=again
            )
        try:
            over = exceeds(spent, epsilon=budget, **terms)
        except Problem as problem:
            raise EpsilonNotReproduced(f"The account has no such budget: {problem.text}") from None
    else:
        # Statements of older versions have readings of everything charged, which hold for plans that were
        # chosen in advance and cannot be computed again here.
        total = owners.best(privacy["total_after"])
        over = total is None or total > budget * (1 + ROUNDING)
    if over:
        detail = "The account had reserved or spent more than its budget; do not rely on this release."
        raise OverBudget(detail, total=total, budget=budget)


def _reproduced(privacy: Mapping[str, Any]) -> dict[str, float | None]:
    """The epsilons of the event, if they are those stated, and its cost at the account's order."""
    try:
        event, relation = from_dict(privacy["event"]), Relation(privacy["relation"])
        delta, account = privacy["delta"], privacy["account"]
        again = {by.value: readable(by, event=event, delta=delta, relation=relation) for by in Accountant}
        price = cost(event, order=account["order"], relation=relation)
    except Problem as problem:
        raise EpsilonNotReproduced(f"The event cannot be accounted for here: {problem.text}") from None
    stated = privacy["epsilon"]
    wrong = [name for name, value in again.items() if not _follows(value, stated[name])]
    if (
        wrong
        or set(stated) != set(again)
        or account["delta"] != delta
        or not _follows(price, privacy["cost"])
    ):
        raise EpsilonNotReproduced(
            "The event gives another epsilon or cost than is stated.", stated=stated, again=again
        )
    return again


def readable(accountant: Accountant, *, event: Any, delta: float, relation: Relation) -> float | None:
    """The epsilon of one or more events, or None if they exceed the limits of the accountant."""
    try:
        return epsilon(event, delta=delta, accountant=accountant, relation=relation).epsilon
    except TooCostlyToAccount:
        return None


def _follows(again: float | None, stated: float | None) -> bool:
    if again is None or stated is None:
        return again is stated
    return stated * (1 - AGREEMENT) <= again <= stated * (1 + ROUNDING)
