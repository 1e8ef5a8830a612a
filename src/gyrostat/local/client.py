"""Finds the cluster to talk to: by address, by $GYROSTAT_CLUSTER, or the one last started on this machine."""

from __future__ import annotations

import os

from gyrostat.cluster.client import ClusterClient
from gyrostat.core.errors import ClusterUnreachable
from gyrostat.local.home import default_home

ADDRESS, TOKEN = "GYROSTAT_CLUSTER", "GYROSTAT_TOKEN"


def address(given: str | None = None) -> str | None:
    """Where the cluster is: as given, by $GYROSTAT_CLUSTER, or the one that was last started here; None: there is none."""
    if found := given or os.environ.get(ADDRESS):
        return found if "://" in found else f"http://{found}"
    endpoint = default_home().endpoint()
    return None if endpoint is None else endpoint.url


def connect(at: str | None = None, token: str | None = None) -> ClusterClient:
    """The cluster at this address (`address` says which otherwise), with this token or $GYROSTAT_TOKEN."""
    found = address(at)
    if found is None:
        raise ClusterUnreachable(
            f"no cluster runs here: start one with `gyrostat up`, or say where it is: --at HOST:PORT or ${ADDRESS}"
        )
    return ClusterClient(found, token or os.environ.get(TOKEN) or None)
