"""Starts `sluice up` for a test, and sees that it ends."""

import pytest

from local.ports import port_is_free
from tests.e2e.curating import Site
from tests.e2e.driving import Up


@pytest.fixture
def start(tmp_path):
    """Starts `sluice up`; whatever a test leaves running is ended."""
    started = []

    def begin(data=tmp_path / "data", **options):
        started.append(Up(data, **options))
        return started[-1]

    yield begin
    for up in started:
        if up.process.poll() is None:
            up.stop()
        assert port_is_free(up.port)
        up.process.stdout.close()


@pytest.fixture
def site(start):
    up = start(environment={"SLUICE_DIAGNOSTICS": "true"})
    admins = up.admins()
    up.expect("Ctrl-C stops")
    site = Site(up, *admins)
    yield site
    site.http.close()
