"""The public facts of a release, and the card and Croissant description made from them."""

import html
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from core.schema import ImageSchema
from sluice.privacy.accountant import UNITS
from sluice.release import owners
from sluice.release.manifest import DATA


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Everything a release states. All of it is public."""

    release: str
    name: str
    note: str
    licence: str
    created_at: str
    reviewers: int
    count: int
    seed: int
    formats: tuple[str, ...]
    schema: ImageSchema
    privacy: Mapping[str, Any]


def croissant(facts: Facts, data: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The Croissant 1.0 description: the files with their hashes, and where image and label are in them."""
    kinds = {"parquet": "application/x-parquet", "npz": "application/zip", "png": "application/zip"}
    objects = [
        {
            "@type": "cr:FileObject", "@id": path, "name": path, "contentUrl": path,
            "contentSize": f"{data[path]['size']} B", "encodingFormat": kinds[format],
            "sha256": data[path]["sha256"],
        }
        for format, path in ((format, DATA[format]) for format in facts.formats)
    ]  # fmt: skip
    format = next(format for format in kinds if format in facts.formats)
    source: dict[str, Any] = {"fileObject": {"@id": DATA[format]}}
    image, label = {"parquet": ("image", "label"), "npz": ("x", "y")}.get(format, ("", ""))
    locations = [source | {"extract": {"column": column}} for column in (image, label)]
    if format == "png":
        inside = {"@type": "cr:FileSet", "@id": "pictures", "name": "pictures", "includes": "*/*.png"}
        objects.append(inside | {"containedIn": {"@id": DATA["png"]}, "encodingFormat": "image/png"})
        folder = {"extract": {"fileProperty": "fullpath"}, "transform": {"regex": r"^\d+-([^/]*)/.*$"}}
        source = {"fileSet": {"@id": "pictures"}}
        locations = [source | {"extract": {"fileProperty": "content"}}, source | folder]
    types = ("sc:ImageObject", "sc:Integer" if format == "npz" else "sc:Text")
    fields = [
        {"@type": "cr:Field", "@id": f"images/{name}", "name": name, "dataType": type, "source": location}
        for name, type, location in zip(("image", "label"), types, locations, strict=True)
    ]
    return {
        "@context": {
            "@language": "en", "@vocab": "https://schema.org/", "sc": "https://schema.org/",
            "cr": "http://mlcommons.org/croissant/", "dct": "http://purl.org/dc/terms/",
            "conformsTo": "dct:conformsTo", "recordSet": "cr:recordSet", "field": "cr:field",
            "source": "cr:source", "extract": "cr:extract", "column": "cr:column",
            "transform": "cr:transform", "regex": "cr:regex", "fileObject": "cr:fileObject",
            "fileSet": "cr:fileSet", "fileProperty": "cr:fileProperty", "includes": "cr:includes",
            "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
        },
        "@type": "sc:Dataset", "conformsTo": "http://mlcommons.org/croissant/1.0", "name": facts.name,
        "description": _summary(facts), "license": facts.licence, "version": "1.0.0",
        "datePublished": facts.created_at[:10], "identifier": facts.release, "isLiveDataset": False,
        "distribution": objects,
        "recordSet": [{"@type": "cr:RecordSet", "@id": "images", "name": "images", "field": fields}],
    }  # fmt: skip


def _summary(facts: Facts) -> str:
    privacy, schema = facts.privacy, facts.schema
    size, kinds = f"{schema.height} x {schema.width} x {schema.channels}", len(schema.classes)
    content = (
        f"{facts.count} synthetic images of {size} in {kinds} classes, drawn from a generator trained"
        if facts.formats
        else f"A classifier of images of {size} into {kinds} classes, learned from public images and adapted"
    )
    costs = [_number(owners.best(cost["epsilon"]), 4) for cost in owners.of(privacy)]
    whose = [f" for the records of owner {i}" for i in range(1, len(costs) + 1)] if costs[1:] else [""]
    epsilons = ", ".join(f"{epsilon}{owner}" for epsilon, owner in zip(costs, whose, strict=True))
    return (
        f"{content} under differential privacy: epsilon {epsilons} at delta {privacy['delta']:g}, "
        f"neighbouring relation {privacy['relation']}, unit {privacy['unit']}.{_sum_of_owners(privacy)}"
    )


def _sum_of_owners(privacy: Mapping[str, Any]) -> str:
    """The privacy loss of a person whose records more than one owner of a relay has."""
    together = owners.together(privacy)
    if together is None:
        return ""
    count, epsilon = len(owners.of(privacy)), _number(together["epsilon"], 4)
    return (
        " A person whose records are with several owners is covered by the sum of their epsilons and of "
        f"their deltas: with all {count}, epsilon {epsilon} at delta {together['delta']:g}."
    )


def _number(value: float | None, digits: int = 6) -> str:
    return "unknown" if value is None else f"{value:.{digits}g}"


def card(facts: Facts) -> str:
    """README.md in the form of dataset hubs. The curator's words are escaped: text, never markup."""
    privacy = facts.privacy
    note = "".join(f"> {_escaped(line)}\n" for line in facts.note.splitlines())
    names = {"renyi": "Rényi", "pld": "PLD"}
    readings = "".join(
        f"| {name}{whose} | {_number(cost['epsilon'][accountant])} |\n"
        for whose, cost in _by_owner(privacy)
        for accountant, name in names.items()
    )
    if facts.formats:
        content = "".join(f"- `{DATA[format]}`\n" for format in facts.formats) + (
            f"""- `synthesizer.safetensors`, `synthesizer.json`: the generator, to draw more

{facts.count} images, seed {facts.seed}, classes in turn: how often a class occurs says nothing about the
records. The images are synthetic and marked as such."""
        )
        more, tag = "drawing more samples from the synthesizer costs nothing more", "synthetic"
    else:
        content = (
            "- `classifier.safetensors`, `classifier.json`: the classifier; `schema.json` names its classes"
        )
        more, tag = "asking the classifier about images costs nothing more", "image-classification"
    people = {1: "one person", 2: "two people, of whom one is not its author"}[facts.reviewers]
    return f"""---
pretty_name: {json.dumps(facts.name)}
license: {json.dumps(facts.licence.lower())}
tags: [{tag}, differential-privacy]
---
# {_escaped(facts.name)}

{_summary(facts)}

{note}
## What it costs the people in the data

| accountant | epsilon of this release |
|---|---|
{readings}
At delta {privacy["delta"]:g}. `privacy.json` has the event these follow from; {more}.

{_totals(privacy)}
{_sources(privacy)}
## What is in it

{content}

Licence: {_escaped(facts.licence)}. Reviewed by {people}.

`sha256sum -c SHA256SUMS` checks the files, `sluice verify` the signed statement in `attestation.json` too.
"""


def _by_owner(privacy: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """The cost of each owner; a relay has several."""
    costs = owners.of(privacy)
    return [("", privacy)] if len(costs) == 1 else [(f", owner {i}", cost) for i, cost in enumerate(costs, 1)]


def _totals(privacy: Mapping[str, Any]) -> str:
    """The total cost of each owner's account at that time, and what that number means."""
    lines = "".join(
        f"- Total{whose}: epsilon {_number(cost['total']['epsilon'])} of a budget of "
        f"{cost['account']['epsilon']:g}, at delta {cost['delta']:g}. This is everything the account had "
        f"promised or spent up to ledger row {cost['entry']['number']}, at a cost of "
        f"{cost['total']['cost'] / UNITS:.9f} at Rényi order {cost['account']['order']}.\n"
        for whose, cost in _by_owner(privacy)
    )
    turns = (
        " Where an owner had several turns, its epsilons in the table hold if the plans of all of them were "
        "chosen in advance."
        if any(_several_turns(cost["event"]) for cost in owners.of(privacy))
        else ""
    )
    return (
        f"{lines}\nCosts at one fixed order add up also when a plan is chosen after looking at earlier "
        f"results, so a total does not depend on how the plans were chosen.{turns}\n"
    )


def _several_turns(event: Mapping[str, Any]) -> bool:
    """Whether an event is of a relay: only its jobs are composed of rotations."""
    return event["kind"] == "composition" and any(part["kind"] == "rotation" for part in event["events"])


def _sources(privacy: Mapping[str, Any]) -> str:
    """The public records that an adaptation learned from."""
    lines = "".join(
        f"- {_escaped(source['name'])}: about {source['records']} images of {source['schema']['height']} x "
        f"{source['schema']['width']} x {source['schema']['channels']}, "
        f"SHA-256 of the file `{source['sha256']}`\n"
        for source in privacy["sources"]
    )
    if not lines:
        return ""
    return (
        "\n## What it learned from without a charge\n\nThese records were declared public when they were "
        f"registered, and no epsilon covers them.\n\n{lines}"
    )


def _escaped(text: str) -> str:
    return re.sub(r"([\\`*_\[\]|#!])", r"\\\1", html.escape(text, quote=False))
