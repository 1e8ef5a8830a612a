"""Which tenants get opportunistic devices: the one with the fewest per weight first (HiveD §3.3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gyrostat.core.errors import UsageError
from gyrostat.sched.cells.allocator import CellCluster
from gyrostat.sched.cells.fairness import fair_shares
from gyrostat.sched.cells.request import OPPORTUNISTIC, CellRefusal, CellRequest, Grant


def lend_fairly(cluster: CellCluster, requests: Sequence[CellRequest]) -> list[Grant | CellRefusal]:
    """Serve waiting opportunistic requests, each tenant's in order; the tenant with the fewest devices per weight is next."""
    queues: dict[str, list[int]] = {}
    use: dict[str, int] = {}
    for place, request in enumerate(requests):
        if request.priority != OPPORTUNISTIC:
            raise UsageError(
                f"job {request.job} has priority {request.priority}; idle devices are lent to opportunistic jobs only"
            )
        if request.vc not in queues:
            use[request.vc] = sum(by_vc.get(request.vc, 0) for by_vc in cluster.opportunistic.values())
        queues.setdefault(request.vc, []).insert(0, place)
    results: dict[int, Grant | CellRefusal] = {}
    while queues:
        vc = min(queues, key=lambda vc: (use[vc] / _weight(cluster, vc), vc))
        place = queues[vc].pop()
        if not queues[vc]:
            del queues[vc]
        results[place] = result = cluster.allocate(requests[place])
        if isinstance(result, Grant):
            use[vc] += result.device_count
    return [results[place] for place in range(len(requests))]


def over_share(cluster: CellCluster, device_type: str, demands: Mapping[str, int]) -> list[str]:
    """Opportunistic jobs to evict so that no tenant exceeds its fair share of a type; of each tenant the newest first."""
    shares = opportunistic_shares(cluster, device_type, demands)
    over = {vc: has - shares.get(vc, 0) for vc, has in cluster.opportunistic.get(device_type, {}).items()}
    ending = []
    for job, grant in reversed(cluster.jobs.items()):
        opportunistic = grant.priority == OPPORTUNISTIC and grant.device_type == device_type
        if opportunistic and over[grant.vc] >= grant.device_count:
            over[grant.vc] -= grant.device_count
            ending.append(job)
    return ending


def _weight(cluster: CellCluster, vc: str) -> float:
    tenant = cluster.tenants.get(vc)
    return 1.0 if tenant is None else tenant.weight


def opportunistic_shares(
    cluster: CellCluster, device_type: str, demands: Mapping[str, int]
) -> dict[str, int]:
    """The fair share of each tenant if all opportunistic and idle devices were divided among the `demands`."""
    pools = [pool for pool in cluster.pools.values() if pool.hierarchy.device_type == device_type]
    capacity = sum(pool.idle.left + pool.low_devices for pool in pools)
    return fair_shares(capacity, demands, {name: tenant.weight for name, tenant in cluster.tenants.items()})
