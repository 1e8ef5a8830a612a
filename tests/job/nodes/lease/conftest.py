"""One etcd server for the whole session, and for tests that break it one of their own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gyrostat.job.nodes.lease import LeaseStore, open_store
from tests.job.nodes.lease.etcd_server import BINARY, MISSING, EtcdServer

_PREFIXES = itertools.count()

OpenStore = Callable[[], LeaseStore]


@pytest.fixture(scope="session")
def shared_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    if BINARY is None:
        pytest.skip(MISSING)
    server = EtcdServer(tmp_path_factory.mktemp("etcd"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def own_etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    if BINARY is None:
        pytest.skip(MISSING)
    server = EtcdServer(tmp_path)
    server.start()
    yield server
    server.stop()


@pytest.fixture(params=["file", "etcd"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Of an empty store, of either kind."""
    if request.param == "file":
        return f"file://{tmp_path}/store"
    server: EtcdServer = request.getfixturevalue("shared_etcd")
    return server.address(f"tests/{next(_PREFIXES)}")


@pytest.fixture
def open_another(address: str) -> Iterator[OpenStore]:
    """Each call opens the same store once more, as another process would."""
    stores: list[LeaseStore] = []

    def open_it() -> LeaseStore:
        stores.append(open_store(address))
        return stores[-1]

    yield open_it
    for store in stores:
        store.close()
