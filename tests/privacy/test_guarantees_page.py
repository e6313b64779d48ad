"""docs/guarantees.md and docs/security.md point at code and tests; all of it must be there."""

import ast
import re
from pathlib import Path

import pytest

from sluice.methods import METHODS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")
REFERENCES = sorted(set(re.findall(r"`((?:src/sluice|core|service|worker|tests)/[\w/]+\.py)::?(\w+)`", PAGE)))


def names(file: Path) -> set[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}


@pytest.mark.parametrize(("file", "name"), REFERENCES)
def test_every_reference_resolves(file, name):
    assert name in names(ROOT / file)


def test_every_promise_of_the_security_page_names_tests_that_exist():
    page = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith("| threat ")]
    assert len(rows) >= 50
    for row in rows:
        file, found = "", 0
        # `::name` alone is in the file named before it.
        for path, name in re.findall(r"`(tests/[\w/]+\.py)?::(\w+)`", row):
            file = path or file
            assert name in names(ROOT / file), (file, name)
            found += 1
        assert found, row


def test_every_section_points_at_code_and_test():
    sections = PAGE.split("\n## ")[2:]
    assert len(sections) >= 9
    for section in sections:
        assert re.search(r"`(src/sluice|core|worker|service)/[\w/]+\.py:\w+`", section), section[:40]
        assert re.search(r"`tests/\w+/\w+\.py::\w+`", section), section[:40]


ANCHORS = {
    re.sub(r"[^\w-]", "", line[3:].lower().replace(" ", "-"))
    for line in PAGE.splitlines()
    if line.startswith("## ")
}


@pytest.mark.parametrize("method", METHODS)
def test_every_plan_names_the_section_of_its_guarantee(method):
    [anchor] = re.findall(r"docs/guarantees\.md#([\w-]+)", METHODS[method].plan.__doc__)
    assert anchor in ANCHORS


def test_every_anchor_in_the_code_has_its_section():
    used = {
        anchor
        for package in ("src/sluice", "core", "service", "worker")
        for file in (ROOT / package).rglob("*.py")
        for anchor in re.findall(r"guarantees\.md#([\w-]+)", file.read_text(encoding="utf-8"))
    }
    assert used <= ANCHORS
