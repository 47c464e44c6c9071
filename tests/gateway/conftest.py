"""Real Valkey servers for the tests of the shared store. Tests of other servers name their own `server`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gateway.storing import valkey
from tests.valkey import Valkey


@pytest.fixture(scope="module")
def server_of_all(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Valkey]:
    with valkey(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture
def server(server_of_all: Valkey) -> Valkey:
    """A server without keys, and without counts of what was asked before."""
    server_of_all.client.flushall()
    server_of_all.client.config_resetstat()
    return server_of_all


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Valkey]:
    """A server that the test may kill."""
    with valkey(tmp_path) as server:
        yield server
