"""docs/api.md lists every route and every problem of the service, and no others."""

import re

import pytest

from core import errors
from core.stores.uploads import MOST_PARTS, SIGNED_SECONDS
from service.auth import OPEN
from service.limits import LARGEST_BODY
from tests.conftest import ROOT
from tests.service.test_permissions import OPEN_ROUTES

TEXT = (ROOT / "docs" / "api.md").read_text()


def table(heading: str) -> list[list[str]]:
    section = TEXT.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip().strip("`") for cell in row] for row in rows[2:]]


def named() -> dict[str, str]:
    """Every slug the service can answer with, and its status."""

    def below(kind):
        for each in kind.__subclasses__():
            # Problems of the client and of a downloaded release are no answers of the service.
            if each.__module__.startswith(("core.", "service.", "sluice.privacy.", "sluice.methods.")):
                yield each
                yield from below(each)

    found = {each.slug: str(each.status) for each in below(errors.Problem) if "slug" in vars(each)}
    return found | {"http-error": "any other"}


def test_every_problem_is_documented_with_its_status():
    documented = {slug: status for slug, status, *_ in table("Problems")}
    assert documented == named()
    assert all(means and way_out for _, _, means, way_out in table("Problems"))


def test_every_route_is_documented_with_who_may(house):
    documented = {f"{method} {path}": who for method, path, who, _ in table("Routes")}
    declared = {
        f"{method} {path}": ", ".join(sorted(roles))
        for (method, path), roles in house.app.state.permissions.items()
    }
    assert documented == declared | dict.fromkeys(OPEN_ROUTES, "anyone")


def test_routes_named_in_examples_exist(house):
    paths = {path for _, path in house.app.state.permissions} | OPEN
    known = {re.sub(r"\{\w+\}", "X", path) for path in paths}
    used = re.findall(r"\$SLUICE_URL(/[\w/-]+)", TEXT)
    assert len(used) >= 12
    for path in used:
        assert re.sub(r"/(ID|JOB|ACCOUNT|GRANT|PERSON)(?=/|$)", "/X", path) in known, path


@pytest.mark.parametrize(
    "number", ["15 minutes", "1 MiB", "1 to 200", "(1200 if not set)", "up to 100 parts", "10,000 parts"]
)
def test_numbers_in_the_text_are_those_in_the_code(number, house):
    assert number in TEXT
    assert (SIGNED_SECONDS, LARGEST_BODY, MOST_PARTS) == (900, 1 << 20, 10_000)
    assert type(house.settings).model_fields["requests_per_minute"].default == 1200
