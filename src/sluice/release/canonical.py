"""The one JSON form of everything that is hashed or signed: sorted names, no spaces, ASCII."""

import json
from typing import Any


def canonical_text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def canonical(value: Any) -> bytes:
    """The bytes of a signed value: its canonical text and a line feed."""
    return canonical_text(value).encode() + b"\n"


def read_canonical(raw: bytes) -> dict[str, Any]:
    """Reads an object; raises ValueError for any other bytes than its canonical form."""
    body = json.loads(raw)
    if not isinstance(body, dict) or canonical(body) != raw:
        raise ValueError("not an object in canonical form")
    return body
