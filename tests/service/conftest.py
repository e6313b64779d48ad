"""One running service with people in it for each test module."""

import os
from collections.abc import Iterator

import pytest
from kombu import pools

from tests.conftest import Servers
from tests.service.house import House, opened


@pytest.fixture(scope="session", autouse=True)
def _hang_up() -> Iterator[None]:
    """Celery keeps its connections to the queue as long as the process lives."""
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
    """Admins, curators, an analyst and three people without access; the ledger was compared just now."""
    shared_house.witnessed()
    return shared_house
