"""Builds the files of a release from a trained model and public facts, in a local directory.

Guarantee: every byte is made here from a synthesizer or classifier on the allow-list and public facts. The
same facts give the same bytes with the same versions of the code. docs/guarantees.md#releases
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
from worker.bundle.data import write_samples
from worker.bundle.facts import Facts, card, croissant

MAX_FILE_BYTES = 5 << 30  # S3's limit for an object put in one piece
MAX_SYNTHESIZER_BYTES = 1 << 30
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
    """Loads a synthesizer or classifier whose files hold nothing else and whose shape fits the schema.

    Guarantee: written again from its own tensors and architecture it gives the same bytes, so the files hold
    no discriminator, optimizer, metadata or anything else that is not charged for.
    """
    if sum(map(len, files.values())) > MAX_SYNTHESIZER_BYTES:
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
    directory: Path, facts: Facts, files: Mapping[str, bytes], *, on_progress: Callable[[int], None]
) -> Bundle:
    """Writes the bundle into an empty directory; `on_progress` gets the number of samples so far."""
    own = {name: value for name, value in facts.privacy.items() if name not in ("others", "sources")}
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
        preview = write_samples(directory, facts, synthesizer, on_progress)
        data = {path: _described(directory, path) for path in (DATA[format] for format in facts.formats)}
        small |= {"croissant.json": _json(croissant(facts, data)), "preview.png": preview}
    else:
        trained["classifier"] = opened(Classifier, files, facts.schema).architecture.to_dict()
    for path, body in small.items():
        (directory / path).write_bytes(body)
    listed = [_described(directory, path) for path in _paths_in(directory)]
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
    (directory / SUMS).write_bytes(sums({file["path"]: file["sha256"] for file in listed}))
    listed = [*listed, _described(directory, SUMS)]
    if set(_paths_in(directory)) != paths(facts.formats):
        raise Failure(Fault.UNFIT_SYNTHESIZER)
    if any(file["size"] > MAX_FILE_BYTES for file in listed):
        raise Failure(Fault.TOO_LARGE)
    digest = bytes.fromhex(listed[-1]["sha256"])
    return Bundle(digest=digest, files=listed, manifest=manifest, preview=preview)


def _require_shape(stated: Mapping[str, Any], shape: Mapping[str, set[str] | None]) -> None:
    """Requires exactly these fields, so that nothing else is published with them."""
    if {name: set(value) if shape.get(name) else None for name, value in stated.items()} != shape:
        raise Failure(Fault.UNFIT_SYNTHESIZER)


def _described(directory: Path, path: str) -> dict[str, Any]:
    with (directory / path).open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return {"path": path, "size": file.tell(), "sha256": sha256}


def _paths_in(directory: Path) -> list[str]:
    return sorted(str(file.relative_to(directory)) for file in directory.rglob("*") if not file.is_dir())


def _json(body: Any) -> bytes:
    return (json.dumps(body, sort_keys=True, indent=2, allow_nan=False) + "\n").encode()
