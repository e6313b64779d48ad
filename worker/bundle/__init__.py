"""Builds the files of a release: samples, what was trained, what is said of it. Knows no bucket and no row.

Guarantee: what goes in is a synthesizer or classifier on the allow-list and public facts, and every byte that
comes out is made from them here. The same facts give the same bytes on the same build.
docs/guarantees.md#releases
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from core.faults import Failure, Fault
from core.schema import ImageSchema
from sluice.generators.architecture import UnfitSynthesizer
from sluice.generators.classifier import Classifier
from sluice.generators.image import ImageSynthesizer
from sluice.privacy.events import from_dict
from sluice.release.manifest import DATA, MANIFEST, PRIVACY, SUMS, paths, sums
from worker.bundle.data import draw
from worker.bundle.facts import Facts, card, croissant

MOST_BYTES = 5 << 30  # what S3 takes in one piece
MOST_OF_A_SYNTHESIZER = 1 << 30
SHAPE = {
    "unit": None, "relation": None, "delta": None, "cost": None, "event": None,
    "epsilon": {"renyi", "pld"}, "total": {"cost", "epsilon"},
    "account": {"id", "epsilon", "delta", "order"}, "entry": {"number", "digest"},
    "head": {"number", "digest"},
}  # fmt: skip
SOURCE = {
    "name": None, "sha256": None, "declared_public": None, "records": None,
    "schema": {"kind", "height", "width", "channels"},
}  # fmt: skip

Model = TypeVar("Model", ImageSynthesizer, Classifier)


@dataclass(frozen=True, kw_only=True)
class Bundle:
    digest: bytes
    files: list[dict[str, Any]]
    manifest: dict[str, Any]
    preview: bytes | None


def opened(kind: type[Model], files: Mapping[str, bytes], schema: ImageSchema) -> Model:
    """A synthesizer that is exactly one generator for this schema, or a classifier that is exactly that.

    Guarantee: written again from its own tensors and architecture it is the same bytes, so there is no room
    in it for a discriminator, an optimizer, metadata or anything else that is not charged for.
    """
    if sum(map(len, files.values())) > MOST_OF_A_SYNTHESIZER:
        raise Failure(Fault.UNFIT_SYNTHESIZER)
    try:
        trained = kind.from_files(files)
    except (UnfitSynthesizer, ValueError):
        raise Failure(Fault.UNFIT_SYNTHESIZER) from None
    shape = trained.architecture
    declared = (schema.height, schema.width, schema.channels, len(schema.classes))
    if (shape.height, shape.width, shape.channels, shape.classes) != declared:
        raise Failure(Fault.UNFIT_SYNTHESIZER)
    if trained.to_files() != dict(files):
        raise Failure(Fault.UNFIT_SYNTHESIZER)
    return trained


def build(
    directory: Path, facts: Facts, files: Mapping[str, bytes], *, drawn: Callable[[int], None]
) -> Bundle:
    """Writes the whole bundle into an empty directory; `drawn` hears how many samples are made so far."""
    own = {name: each for name, each in facts.privacy.items() if name not in ("others", "sources")}
    for cost in (own, *facts.privacy["others"]):
        _require_shape(cost, SHAPE)
        from_dict(cost["event"])  # exactly the fields of an event
    for source in facts.privacy["sources"]:
        _require_shape(source, SOURCE)
    small = {
        **files,
        PRIVACY: _json(facts.privacy),
        "schema.json": _json(facts.schema.model_dump(mode="json")),
        "README.md": card(facts).encode(),
    }
    preview, trained = None, {}
    if facts.formats:
        synthesizer = opened(ImageSynthesizer, files, facts.schema)
        trained["synthesizer"] = synthesizer.architecture.to_dict()
        (directory / "data").mkdir(exist_ok=True)
        preview = draw(directory, facts, synthesizer, drawn)
        data = {DATA[each]: _described(directory, DATA[each]) for each in facts.formats}
        small |= {"croissant.json": _json(croissant(facts, data)), "preview.png": preview}
    else:
        trained["classifier"] = opened(Classifier, files, facts.schema).architecture.to_dict()
    for path, body in small.items():
        (directory / path).write_bytes(body)
    listed = [_described(directory, path) for path in _found(directory)]
    manifest = {
        "kind": "sluice-release", "version": 1, "release": facts.release, "name": facts.name,
        "note": facts.note, "licence": facts.licence, "created_at": facts.created_at,
        "code": {name: version(name) for name in ("sluice", "torch", "numpy", "pillow", "pyarrow")},
        "review": {"reviewers": facts.reviewers},
        "sample": {
            "count": facts.count, "seed": facts.seed, "labels": "balanced", "formats": list(facts.formats),
        },
        **trained,
        "sources": list(facts.privacy["sources"]),
        "schema": facts.schema.model_dump(mode="json"),
        "files": listed,
    }  # fmt: skip
    (directory / MANIFEST).write_bytes(_json(manifest))
    listed = [*listed, _described(directory, MANIFEST)]
    (directory / SUMS).write_bytes(sums({each["path"]: each["sha256"] for each in listed}))
    listed = [*listed, _described(directory, SUMS)]
    if set(_found(directory)) != paths(facts.formats):
        raise Failure(Fault.UNFIT_SYNTHESIZER)
    if any(each["size"] > MOST_BYTES for each in listed):
        raise Failure(Fault.TOO_LARGE)
    digest = bytes.fromhex(listed[-1]["sha256"])
    return Bundle(digest=digest, files=listed, manifest=manifest, preview=preview)


def _require_shape(stated: Mapping[str, Any], shape: Mapping[str, set[str] | None]) -> None:
    """Exactly these fields, so that nothing else gets out with them."""
    if {name: set(value) if shape.get(name) else None for name, value in stated.items()} != shape:
        raise Failure(Fault.UNFIT_SYNTHESIZER)


def hash_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _described(directory: Path, path: str) -> dict[str, Any]:
    file = directory / path
    return {"path": path, "size": file.stat().st_size, "sha256": hash_of(file)}


def _found(directory: Path) -> list[str]:
    return sorted(str(file.relative_to(directory)) for file in directory.rglob("*") if not file.is_dir())


def _json(body: Any) -> bytes:
    return (json.dumps(body, sort_keys=True, indent=2, allow_nan=False) + "\n").encode()
