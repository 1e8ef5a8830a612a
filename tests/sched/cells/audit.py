"""All of a cluster's counts and lists, recomputed from its jobs and bindings by slow and plain means."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy

from gyrostat.sched.cells.allocator import CellCluster
from gyrostat.sched.cells.forest import Forest
from gyrostat.sched.cells.free_lists import TAKEN
from gyrostat.sched.cells.physical import PhysicalCells
from gyrostat.sched.cells.request import OPPORTUNISTIC
from gyrostat.sched.cells.shortfall import gaps
from gyrostat.sched.cells.virtual import VirtualCells


def audit(cluster: CellCluster) -> None:
    """Fails if anything that is kept incrementally is not what it should be."""
    for pool in cluster.pools.values():
        _audit_pool(cluster, pool)
    for tenant in cluster.tenants.values():
        for group in tenant.all_groups():
            _audit_group(cluster, group)
    use: dict[tuple[str, str], int] = {}
    for grant in cluster.jobs.values():
        if grant.priority == OPPORTUNISTIC:
            place = (grant.device_type, grant.vc)
            use[place] = use.get(place, 0) + len(grant.devices)
    kept = {(kind, vc): n for kind, by_vc in cluster.opportunistic.items() for vc, n in by_vc.items() if n}
    assert kept == use


def invariant_holds(pool: PhysicalCells) -> bool:
    """r_k - a_k <= f_k + F_k at all levels, on healthy cells."""
    return min(gaps(pool.free, pool.needed, pool.splits)) >= 0


def _pieces(cluster: CellCluster, pool: PhysicalCells) -> Iterator[tuple[str, bool, int, int]]:
    for job, grant in cluster.jobs.items():
        for pod in grant.pods:
            if pod.pool is pool:
                for piece in pod.pieces:
                    yield job, grant.priority == OPPORTUNISTIC, piece.level, piece.at


def _audit_pool(cluster: CellCluster, pool: PhysicalCells) -> None:
    sizes, width = pool.sizes, pool.layout.roots * pool.sizes[-1]
    absent = {
        device
        for place, node in enumerate(pool.layout.nodes)
        if node is None
        for device in _range(pool, pool.hierarchy.node_level, place)
    }
    low: set[int] = set()
    used: set[int] = set()
    for job, is_low, level, at in _pieces(cluster, pool):
        mine = set(_range(pool, level, at))
        assert not mine & (low | used), f"{job} shares a device"
        (low if is_low else used).update(mine)
        assert (pool.lent if is_low else pool.used)[level][at] == job
    assert sum(map(len, pool.lent)) + sum(map(len, pool.used)) == len(list(_pieces(cluster, pool)))
    bound = set(absent)
    for level, owners in enumerate(pool.owners):
        for at, (group, root) in owners.items():
            assert group.physical[level][root] == at
            mine = set(_range(pool, level, at))
            assert not mine & bound, "two tenants have one device"
            bound |= mine
    assert used <= bound - absent
    bad = pool.bad_devices
    assert pool.low_devices == len(low)

    def counts(devices: set[int], level: int) -> list[int]:
        return [len(devices.intersection(_range(pool, level, at))) for at in range(width // sizes[level])]

    clear: list[list[int]] = []
    for level in range(len(sizes)):
        assert pool.low[level] == counts(low, level)
        assert pool.bound[level] == counts(bound, level)
        assert pool.bad[level] == counts(bad, level)
        assert pool.blocked[level] == counts(bound | bad, level)
        below = clear[-1] if clear else []
        split = pool.splits[level]
        clear.append(
            [
                level + 1
                if not count
                else max(below[at * split : (at + 1) * split], default=0)
                if level
                else 0
                for at, count in enumerate(pool.low[level])
            ]
        )
        assert list(pool.clear[level]) == clear[level]
        assert list(pool.nonzero[level]) == [cost > 0 for cost in pool.within[level]]
        assert [cost % TAKEN for cost in pool.within[level]] == pool.low[level]
    for level in range(len(sizes)):
        listed = {
            (pool.clear[level][at], pool.low[level][at], at)
            for at in range(width // sizes[level])
            if not pool.blocked[level][at]
            and (level == pool.top or pool.blocked[level + 1][at // pool.splits[level + 1]])
        }
        found = [
            (clear_level, *divmod(key, pool.width))
            for clear_level, keys in enumerate(pool.lists[level])
            for key in keys
        ]
        assert all(keys == sorted(keys) for keys in pool.lists[level])
        assert set(found) == listed
        assert len(found) == len(listed) == pool.free[level]
        total = sum(
            not pool.bound[level][at]
            and (level == pool.top or pool.bound[level + 1][at // pool.splits[level + 1]] > 0)
            for at in range(width // sizes[level])
        )
        assert pool.total[level] == total
        assert pool.needed[level] == sum(
            group.count - group.bound
            for tenant in cluster.tenants.values()
            for group in tenant.groups.get(pool.hierarchy.name, ())
            if group.root == level
        )
    _audit_forest(pool.idle, set(range(width)) - absent - low - used - bad)
    assert min(gaps(pool.total, pool.needed, pool.splits)) >= 0, "legal requests may fail"


def _audit_group(cluster: CellCluster, group: VirtualCells) -> None:
    pool, devices = group.pool, group.count * group.sizes[-1]
    held: dict[int, int] = {}
    users = [0] * group.count
    for grant in cluster.jobs.values():
        for pod in grant.pods:
            for piece in pod.pieces:
                if (pod.vc, pod.pool, pod.pinned, piece.root) == (group.vc, pool, group.pinned, group.root):
                    assert group.physical[piece.level][piece.virtual] == piece.at
                    size = group.sizes[piece.level]
                    users[piece.virtual * size // group.sizes[-1]] += 1
                    for device in range(piece.virtual * size, (piece.virtual + 1) * size):
                        assert device not in held
                        held[device] = grant.priority
    assert users == group.users
    for root, count in enumerate(users):
        assert (group.physical[group.root][root] >= 0) == (count > 0 or group.pinned is not None)
    assert group.bound == sum(at >= 0 for at in group.physical[group.root])
    for at, virtual in group.bad_idle.items():
        assert group.physical[0][virtual] == at
        assert virtual not in held
        assert at in pool.bad_devices
        held[virtual] = 1 << 30
    shown = {
        device
        for at in group.physical[group.root]
        if at >= 0
        for device in pool.bad_within(group.root, at)
        if device not in group.bad_idle
    }
    assert shown == group.bad_in_use.keys()
    for device in shown:
        user = pool.user_of(device)
        assert user is not None
        assert cluster.jobs[user].priority != OPPORTUNISTIC
    bad_in_use = {virtual for virtual, _ in group.bad_in_use.values()}
    for priority, forest in group.views.items():
        free = {device for device in range(devices) if held.get(device, -1) < priority}
        _audit_forest(forest, free - bad_in_use)
    for level in range(group.root):
        size, ratio = group.sizes[level], pool.splits[level + 1]
        partners: list[int] = []
        for index, at in enumerate(group.physical[level]):
            if at >= 0:
                partners.append(at)
                assert at // ratio == group.physical[level + 1][index // ratio]
                assert pool.within[level][at] >= TAKEN
                assert any(device in held for device in range(index * size, (index + 1) * size))
        assert len(partners) == len(set(partners))
    for level in range(len(pool.sizes)):
        bindings = sum(
            at >= 0
            for tenant in cluster.tenants.values()
            for other in tenant.all_groups()
            if other.pool is pool and level < other.root
            for at in other.physical[level]
        )
        assert sum(cost >= TAKEN for cost in pool.within[level]) == bindings


def _audit_forest(forest: Forest, free: set[int]) -> None:
    assert forest.left == len(free)
    devices = len(forest.free[0])
    for level, size in enumerate(forest.sizes):
        whole: list[int] = []
        partial: dict[int, list[int]] = {}
        for at in range(devices // size):
            count = len(free.intersection(range(at * size, (at + 1) * size)))
            above = forest.sizes[min(level + 1, forest.top)]
            parent = at * size // above
            count_above = len(free.intersection(range(parent * above, (parent + 1) * above)))
            if count == size and (level == forest.top or count_above < above):
                whole.append(at)
            elif 0 < count < size:
                partial.setdefault(count, []).append(at)
        assert forest.whole[level] == whole
        assert forest.partial[level] == partial
        assert forest._masks[level] == sum(1 << count for count in partial)


def _range(pool: PhysicalCells, level: int, at: int) -> range:
    return range(at * pool.sizes[level], (at + 1) * pool.sizes[level])


def state(cluster: CellCluster) -> dict[str, object]:
    """All that decides what a cluster does next."""
    pools = {
        name: (
            (pool.bound, pool.bad, pool.blocked, pool.low, pool.clear, pool.within),
            (pool.lists, pool.free, pool.total, pool.needed, pool.used, pool.lent, sorted(pool.bad_devices)),
            (pool.idle.whole, pool.idle.partial),
        )
        for name, pool in cluster.pools.items()
    }
    groups = [
        (group.vc, group.root, group.pinned, group.physical, group.holders, group.bad_idle, group.bad_in_use)
        for tenant in cluster.tenants.values()
        for group in tenant.all_groups()
    ]
    jobs = [(job, grant.priority, [pod.pieces for pod in grant.pods]) for job, grant in cluster.jobs.items()]
    return deepcopy({"pools": pools, "groups": groups, "jobs": jobs})
