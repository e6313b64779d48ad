"""A house full of people for each file of tests."""

import os
from collections.abc import Iterator

import pytest
from kombu import pools

from tests.conftest import Servers
from tests.service.house import House, opened


@pytest.fixture(scope="session", autouse=True)
def _hang_up() -> Iterator[None]:
    """Bells keep their lines to the queue for as long as a process lives."""
    yield
    pools.reset()


@pytest.fixture(scope="module")
def shared_house(servers: Servers) -> Iterator[House]:
    for name in [name for name in os.environ if name.startswith("SLUICE_")]:
        del os.environ[name]
    with opened(servers, diagnostics=True) as house:
        yield house


@pytest.fixture
def house(shared_house: House) -> House:
    """Admins, curators, an analyst and three who may not; the sweeper has just been here."""
    shared_house.witnessed()
    return shared_house
