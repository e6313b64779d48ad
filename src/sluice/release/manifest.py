"""The files of a release, and the statement about them that is signed."""

from collections.abc import Iterable, Mapping
from typing import Any

PREDICATE = "urn:sluice:release:v1"
MANIFEST, PRIVACY, SUMS, ATTESTATION = "manifest.json", "privacy.json", "SHA256SUMS", "attestation.json"
DATA = {"parquet": "data/images.parquet", "npz": "data/images.npz", "png": "data/images.zip"}
ALWAYS = frozenset([MANIFEST, PRIVACY, SUMS, "schema.json", "README.md"])
IMAGES = frozenset(["synthesizer.safetensors", "synthesizer.json", "croissant.json", "preview.png"])
CLASSIFIER = frozenset(["classifier.safetensors", "classifier.json"])


def sums(hashes: Mapping[str, str]) -> bytes:
    """SHA256SUMS of a bundle, as `sha256sum -c` reads it. The hash of these bytes is the bundle's digest."""
    listed = sorted(path for path in hashes if path not in (SUMS, ATTESTATION))
    return "".join(f"{hashes[path]}  {path}\n" for path in listed).encode()


def paths(formats: Iterable[str]) -> frozenset[str]:
    """Every file of a bundle with samples in these formats, except the signed statement.

    A bundle without samples is that of a classifier.
    """
    data = {DATA[format] for format in formats}
    return ALWAYS | (IMAGES | data if data else CLASSIFIER)


def release_statement(
    *,
    release: str,
    bundle: str,
    hashes: Mapping[str, str],
    privacy: Mapping[str, Any],
    review: Mapping[str, Any],
    code: Mapping[str, str],
    published_at: str,
) -> dict[str, Any]:
    """An in-toto statement: these files, this cost, approved by these people."""
    subject = [{"name": path, "digest": {"sha256": hashes[path]}} for path in sorted(hashes)]
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": subject,
        "predicateType": PREDICATE,
        "predicate": {
            "release": release, "bundle": bundle, "privacy": dict(privacy), "review": dict(review),
            "code": dict(code), "published_at": published_at,
        },
    }  # fmt: skip
