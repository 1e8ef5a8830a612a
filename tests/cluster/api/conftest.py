"""The API of a cluster that runs nothing, listening on a loopback address."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gyrostat.cluster.api.server import ApiServer, serving
from gyrostat.cluster.client import ClusterClient
from tests.cluster.quiet_cluster import Guarded, Quiet, guarded_cluster, quiet_cluster


@pytest.fixture
def quiet(tmp_path: Path) -> Iterator[Quiet]:
    with quiet_cluster(tmp_path) as found:
        yield found


@pytest.fixture
def server(quiet: Quiet) -> Iterator[ApiServer]:
    """Without tokens."""
    with serving(quiet.service, "127.0.0.1:0") as listening:
        yield listening


@pytest.fixture
def cluster(server: ApiServer) -> Iterator[ClusterClient]:
    with ClusterClient(server.url) as client:
        yield client


@pytest.fixture
def guarded(quiet: Quiet, tmp_path: Path) -> Iterator[Guarded]:
    with guarded_cluster(quiet, tmp_path) as found:
        yield found
