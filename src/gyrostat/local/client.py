"""Finds the cluster to talk to: by address, by $GYROSTAT_CLUSTER, or the one last started on this machine."""

from __future__ import annotations

from gyrostat.cluster.client import ClusterClient
from gyrostat.core.errors import ClusterUnreachable
from gyrostat.local.environment import ADDRESS, cluster_address, cluster_token
from gyrostat.local.home import default_home


def address(given: str | None = None) -> str | None:
    """The address of the cluster: as given, by $GYROSTAT_CLUSTER, or the one last started here; None: there is none."""
    if found := given or cluster_address():
        return found if "://" in found else f"http://{found}"
    endpoint = default_home().endpoint()
    return None if endpoint is None else endpoint.url


def connect(at: str | None = None, token: str | None = None) -> ClusterClient:
    """The cluster at this address (by default `address()`), with this token or $GYROSTAT_TOKEN."""
    found = address(at)
    if found is None:
        raise ClusterUnreachable(
            f"no cluster runs here: start one with `gyrostat up`, or give its address: --at HOST:PORT or ${ADDRESS}"
        )
    return ClusterClient(found, token or cluster_token())
