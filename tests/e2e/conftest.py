"""Starts `sluice up` for a test or for all tests of a module, and sees that it ends."""

import pytest

from tests.e2e.curating import Site
from tests.e2e.driving import Running, launcher


@pytest.fixture
def start(tmp_path):
    with launcher(tmp_path / "data") as start:
        yield start


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    data = tmp_path_factory.mktemp("running") / "data"
    with launcher(data) as start:
        yield Running(start, data)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    with launcher(tmp_path_factory.mktemp("site") / "data") as start:
        up = start(environment={"SLUICE_DIAGNOSTICS": "true"})
        admins = up.admins()
        up.expect("Ctrl-C stops")
        site = Site(up, *admins)
        yield site
        site.http.close()
