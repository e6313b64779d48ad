"""docs/architecture.md: the files that one release passes through."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_listed_file_exists_and_there_are_at_most_25():
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    files = re.findall(r"^\d+\. `([^`]+)`", text, re.MULTILINE)
    assert 15 < len(files) <= 25
    assert len(set(files)) == len(files)
    assert [name for name in files if not (ROOT / name).is_file()] == []


def test_the_recipes_name_existing_places():
    """Paths in CONTRIBUTING.md, with NAME and GROUP for what is added."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    paths = {path for path in re.findall(r"`([\w./-]+)`", text) if "/" in path and not path.startswith("./")}
    assert len(paths) > 15
    for path in paths:
        known = path if not re.search("NAME|GROUP", path) else re.sub("/[^/]*(NAME|GROUP).*", "", path)
        assert (ROOT / known).exists(), path
