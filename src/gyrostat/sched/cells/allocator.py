"""The cluster's state, and every change to it: deterministic, in memory, without I/O.

A guaranteed request is served in three steps:

1. Plan: find room in the tenant's own cells. Only the tenant's own jobs matter, so the result is that of a private cluster.
2. Bind: cells of the plan without a physical cell get one by buddy allocation, which never fails (HiveD, Theorem 1). If
   only bad hardware is left, the tenant gets it: its cells then have fewer devices, and the plan is made again.
3. Commit: jobs in the planned cells are preempted: opportunistic ones, and lower priorities of the same tenant.

Opportunistic requests are placed on physical cells only, the farthest from bound ones first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gyrostat.core.errors import UsageError
from gyrostat.core.plural import plural
from gyrostat.sched.cells.forest import Cell
from gyrostat.sched.cells.physical import PhysicalCells
from gyrostat.sched.cells.plan import NoRoom, PlannedCell, PlannedPod, bind_roots, plan_pods, unbind_unused
from gyrostat.sched.cells.request import (
    OPPORTUNISTIC,
    CellAffinity,
    CellRefusal,
    CellRequest,
    Grant,
    GrantedCell,
    PodGrant,
)
from gyrostat.sched.cells.shortfall import Shortfall, gaps, missing_by_tenant
from gyrostat.sched.cells.spec import CellSpec
from gyrostat.sched.cells.tenant import HealthChange, Tenant, Usage
from gyrostat.sched.cells.virtual import VirtualCells

if TYPE_CHECKING:
    from gyrostat.sched.cells.bindings import JobBinding


class CellCluster:
    """All cells of a cluster, and the jobs and tenants that have them."""

    def __init__(self, spec: CellSpec) -> None:
        """`spec` must be valid, as those of `load.load` are."""
        self.spec = spec
        self.pools = {h.name: PhysicalCells(h, spec.layouts[h.name]) for h in spec.hierarchies}
        self.tenants: dict[str, Tenant] = {}
        self.jobs: dict[str, Grant] = {}
        self.opportunistic: dict[str, dict[str, int]] = {}
        """Devices of opportunistic jobs, by device type and tenant."""
        self.outside: dict[str, JobBinding] = {}
        """Jobs on devices that a reconfiguration has removed from the cluster; the next one may add them again."""
        for vc in spec.virtual_clusters:
            tenant = self.tenants[vc.name] = Tenant(vc.name, vc.weight)
            for pin in vc.pinned:
                pool = self.pools[pin.hierarchy]
                index = pool.layout.locate(pool.hierarchy, pin.level, pin.at)
                assert index is not None
                group = VirtualCells(vc.name, pool, pin.level, 1, pin.name)
                group.bind_root(0, index)
                tenant.pinned[pin.name] = group
            for cells in sorted(vc.cells, key=lambda cells: cells.level):
                pool = self.pools[cells.hierarchy]
                pool.needed[cells.level] += cells.count
                group = VirtualCells(vc.name, pool, cells.level, cells.count)
                tenant.groups.setdefault(cells.hierarchy, []).append(group)

    # Requests -----------------------------------------------------------------------------------------------------

    def allocate(self, request: CellRequest) -> Grant | CellRefusal:
        """Devices for all pods, or a refusal. Jobs that it preempts have lost their devices when this returns."""
        if request.job in self.jobs or request.job in self.outside:
            raise UsageError(f"job {request.job} has devices already; release it first")
        tenant = self.tenants.get(request.vc)
        if tenant is None:
            raise UsageError(
                f"there is no virtual cluster {request.vc!r}; there are {', '.join(self.tenants)}"
            )
        pools = self._pools(request, tenant)
        refusal: CellRefusal | None = None
        for pool in pools:
            pods = self._pods(request, pool)
            if isinstance(pods, CellRefusal):
                refusal = refusal or pods
                continue
            if request.priority == OPPORTUNISTIC:
                result = self._allocate_opportunistic(request, pool, pods)
            else:
                result = self._allocate_guaranteed(request, tenant, pool, pods)
            if isinstance(result, Grant):
                self.record(result)
                return result
            refusal = refusal or result
        kind = f"{request.device_type} " if request.device_type else ""
        return refusal or CellRefusal(request.job, f"{request.vc} has no {kind}cells")

    def release(self, job: str) -> None:
        """Free the job's devices."""
        if job in self.outside:
            del self.outside[job]
            return
        if job not in self.jobs:
            raise UsageError(f"job {job} has no devices; {len(self.jobs)} other jobs have some")
        self._remove(job)

    def record(self, grant: Grant) -> None:
        """Record that the job has its devices."""
        self.jobs[grant.job] = grant
        if grant.priority == OPPORTUNISTIC:
            self._count_opportunistic(grant, grant.device_count)

    def _count_opportunistic(self, grant: Grant, change: int) -> None:
        use = self.opportunistic.setdefault(grant.device_type, {})
        use[grant.vc] = use.get(grant.vc, 0) + change

    def _pools(self, request: CellRequest, tenant: Tenant) -> Sequence[PhysicalCells]:
        if request.pinned is not None:
            group = tenant.pinned.get(request.pinned)
            if group is None:
                known = ", ".join(tenant.pinned) or "none"
                raise UsageError(f"{tenant.name} has no pinned cell {request.pinned!r}; it has {known}")
            return [group.pool]
        names = self.pools if request.priority == OPPORTUNISTIC else tenant.groups
        pools = [self.pools[name] for name in names]
        if request.device_type is None:
            return pools
        if all(pool.hierarchy.device_type != request.device_type for pool in self.pools.values()):
            known = ", ".join(dict.fromkeys(pool.hierarchy.device_type for pool in self.pools.values()))
            raise UsageError(f"there is no device type {request.device_type!r}; there are {known}")
        return [pool for pool in pools if pool.hierarchy.device_type == request.device_type]

    def _pods(self, request: CellRequest, pool: PhysicalCells) -> list[PlannedPod] | CellRefusal:
        """Single pods, largest first, with the level of the cell for each."""
        types = pool.hierarchy.types
        if request.level is not None and request.level not in types:
            return CellRefusal(
                request.job, f"{types[-1]} has no cells {request.level!r}; it has {', '.join(types)}"
            )
        pods: list[PlannedPod] = []
        for group in request.pods:
            if request.level is None:
                level = min(bisect_left(pool.sizes, group.devices), pool.top)
                limit = max(level, pool.hierarchy.node_level)
            else:
                level = limit = types.index(request.level)
            size = pool.sizes[level]
            if size < group.devices and request.affinity is CellAffinity.HARD:
                reason = f"a pod of {group.devices} devices does not fit into a {types[level]} of {size}"
                return CellRefusal(request.job, reason, types[level], group.count)
            for _ in range(group.count):
                pods.append(PlannedPod(len(pods), group.devices, level, limit))
        if len(pods) > 1:
            pods.sort(key=lambda pod: (-pod.level, -pod.devices, pod.number))
        return pods

    # Guaranteed jobs ----------------------------------------------------------------------------------------------

    def _allocate_guaranteed(
        self, request: CellRequest, tenant: Tenant, pool: PhysicalCells, pods: list[PlannedPod]
    ) -> Grant | CellRefusal:
        pinned = request.pinned
        groups = tenant.groups[pool.hierarchy.name] if pinned is None else [tenant.pinned[pinned]]
        bound: list[tuple[VirtualCells, int]] = []
        while True:
            plan = plan_pods(request, groups, pods)
            if isinstance(plan, NoRoom):
                refusal = self._refusal(request, pool, groups, plan)
                unbind_unused(bound)
                return refusal
            if not bind_roots(plan, bound):
                break
        preempted = self._commit(request, plan)
        unbind_unused(bound)
        return self._grant(request, pool, pods, plan, preempted)

    def _commit(self, request: CellRequest, plan: list[list[PlannedCell]]) -> tuple[str, ...]:
        pieces = [piece for pod in plan for piece in pod]
        lower: dict[str, None] = {}
        for group, level, index in pieces:
            # Counted before any preemption, so that no cell of the plan is unbound in between.
            group.users[index // (group.sizes[-1] // group.sizes[level])] += 1
            if len(group.views) > 1 and not group.views[0].is_free(level, index):
                lower.update(dict.fromkeys(group.holders_in(level, index)))
        for job in lower:
            self._remove(job)
        borrowers: dict[str, None] = {}
        for group, level, index in pieces:
            group.hold(level, index, request.job, request.priority)
            physical = group.bind(level, index)
            if group.pool.low[level][physical]:
                for job in group.pool.borrowers(level, physical):
                    borrowers[job] = None
                    self._remove(job)
            group.pool.use(level, physical, request.job)
        return (*borrowers, *lower)

    def _grant(
        self,
        request: CellRequest,
        pool: PhysicalCells,
        pods: list[PlannedPod],
        plan: list[list[PlannedCell]],
        preempted: tuple[str, ...],
    ) -> Grant:
        grants = []
        for pod, placed in zip(pods, plan, strict=True):
            pieces = [
                GrantedCell(level, group.physical[level][index], group.root, index)
                for group, level, index in placed
            ]
            grant = PodGrant(pool, request.vc, request.pinned, tuple(pieces), pod.level + 1)
            grants.append((pod.number, grant))
        return _granted(request, pool, grants, preempted)

    def _refusal(
        self, request: CellRequest, pool: PhysicalCells, groups: list[VirtualCells], failed: NoRoom
    ) -> CellRefusal:
        kind = pool.hierarchy.types[failed.pod.limit if failed.pod.level else 0]
        whose = f"{request.vc}'s {request.pinned}" if request.pinned else request.vc
        bad = sum(group.bad for group in groups)
        devices = plural(failed.pod.devices, "free device")
        where = f"a {kind} with {devices}" if request.affinity is CellAffinity.HARD else devices
        return CellRefusal(
            request.job,
            f"{whose} is {failed.short} short of {where}"
            + (f"; {bad} of its devices are bad" if bad else ""),
            kind,
            failed.short,
        )

    # Opportunistic jobs -------------------------------------------------------------------------------------------

    def _allocate_opportunistic(
        self, request: CellRequest, pool: PhysicalCells, pods: list[PlannedPod]
    ) -> Grant | CellRefusal:
        if request.pinned is not None:
            raise UsageError(f"job {request.job}: opportunistic jobs cannot ask for a pinned cell")
        grants: list[tuple[int, PodGrant]] = []
        lent: list[Cell] = []
        for place, pod in enumerate(pods):
            pieces = self._idle_cells(request, pool, pod)
            if pieces is None:
                for cell in reversed(lent):
                    pool.reclaim(*cell)
                kind = pool.hierarchy.types[pod.limit if pod.level else 0]
                short = sum(1 for other in pods[place:] if other.devices == pod.devices)
                reason = f"the cluster is {short} short of an idle {kind} with {pod.devices} devices"
                return CellRefusal(request.job, reason, kind, short)
            for cell in pieces:
                pool.lend(*cell, request.job)
                lent.append(cell)
            taken = tuple(GrantedCell(level, index, None, -1) for level, index in pieces)
            grants.append((pod.number, PodGrant(pool, request.vc, None, taken, pod.level + 1)))
        return _granted(request, pool, grants, ())

    def _idle_cells(self, request: CellRequest, pool: PhysicalCells, pod: PlannedPod) -> list[Cell] | None:
        if pod.devices > pool.idle.left:
            return None
        soft = request.affinity is CellAffinity.SOFT
        for level in range(pod.level, pool.top + 1 if soft else pod.limit + 1):
            if pod.devices <= pool.sizes[level]:
                pieces = pool.farthest_idle(level, pod.devices)
                if pieces is not None:
                    return pieces
        return pool.any_idle(pod.devices) if soft else None

    # Releasing ----------------------------------------------------------------------------------------------------

    def _remove(self, job: str) -> None:
        grant = self.jobs.pop(job)
        if grant.priority == OPPORTUNISTIC:
            self._count_opportunistic(grant, -grant.device_count)
        tenant = self.tenants.get(grant.vc)
        for pod in grant.pods:
            pool = pod.pool
            for level, physical, root, index in pod.pieces:
                if root is None:
                    pool.reclaim(level, physical)
                    continue
                group = tenant.group(pool, root, pod.pinned) if tenant else None
                assert group is not None
                release_cell(group, level, index, physical)

    # Health -------------------------------------------------------------------------------------------------------

    def set_health(self, name: str, healthy: bool) -> HealthChange:
        """Mark a machine, or a device (`node/0`), as bad or healthy. Jobs on it are reported, not stopped."""
        pool, devices = self._devices_named(name)
        changed = [device for device in devices if (device in pool.bad_devices) == healthy]
        jobs: dict[str, None] = {}
        owners: dict[str, None] = {}
        for device in changed:
            user = pool.user_of(device)
            if user is not None:
                jobs[user] = None
            owner = locate_owner(pool, device)
            if owner is not None:
                owners[owner[0].vc] = None
            if healthy:
                if owner is not None:
                    owner[0].repair(device)
                pool.mark_healthy(device)
            else:
                self._mark_bad(pool, device)
        return HealthChange(tuple(map(pool.device_name, changed)), tuple(jobs), tuple(owners))

    def restore_bad(self, device: str, virtual: int | None) -> None:
        """Mark a device as bad, with the virtual device that represents it. Devices of other clusters are ignored."""
        for pool in self.pools.values():
            index = pool.layout.locate(pool.hierarchy, 0, device)
            if index is not None and index not in pool.bad_devices:
                self._mark_bad(pool, index, virtual)

    def _mark_bad(self, pool: PhysicalCells, device: int, virtual: int | None = None) -> None:
        pool.mark_bad(device)
        owner = locate_owner(pool, device)
        if owner is None:
            return
        group, root = owner
        user = pool.user_of(device)
        grant = None if user is None else self.jobs[user]
        if grant is None or grant.priority == OPPORTUNISTIC:
            group.reserve_bad(device, root, virtual)
            return
        level, physical, _, index = next(
            piece
            for pod in grant.pods
            for piece in pod.pieces
            if pod.pool is pool and device // pool.sizes[piece.level] == piece.at
        )
        size = pool.sizes[level]
        group.add_bad_in_use(device, index * size + device - physical * size, grant.priority)

    def _devices_named(self, name: str) -> tuple[PhysicalCells, Sequence[int]]:
        for pool in self.pools.values():
            level = 0 if "/" in name else pool.hierarchy.node_level
            index = pool.layout.locate(pool.hierarchy, level, name)
            if index is not None:
                size = pool.sizes[level]
                return pool, range(index * size, (index + 1) * size)
        raise UsageError(
            f"there is no machine or device {name!r} in the cluster; devices are named NODE/NUMBER"
        )

    # Queries ------------------------------------------------------------------------------------------------------

    def usage(self) -> list[Usage]:
        """The cells of every virtual cluster, and their use."""
        return [
            Usage(
                vc=tenant.name,
                cell_type=group.pool.hierarchy.types[group.root],
                level=group.root + 1,
                pinned=group.pinned,
                cells=group.count,
                bound=group.bound,
                devices=group.count * group.sizes[-1],
                free_devices=group.views[0].left,
                bad_devices=group.bad,
            )
            for tenant in self.tenants.values()
            for group in tenant.all_groups()
        ]

    def shortfall(self) -> list[Shortfall]:
        """The tenants whose cells do not all fit on healthy devices now. Empty while every legal request succeeds."""
        found = []
        for pool in self.pools.values():
            for level, gap in enumerate(gaps(pool.free, pool.needed, pool.splits)):
                if gap >= 0:
                    continue
                needs = {
                    tenant.name: group.count - group.bound
                    for tenant in self.tenants.values()
                    for group in tenant.groups.get(pool.hierarchy.name, ())
                    if group.root == level
                }
                for vc, short in missing_by_tenant(-gap, needs).items():
                    found.append(Shortfall(vc, pool.hierarchy.types[level], level + 1, short))
        return found


def release_cell(group: VirtualCells, level: int, index: int, physical: int) -> None:
    """Release a job's cell, and unbind the virtual cells in which no job is left."""
    pool = group.pool
    pool.release(level, physical)
    group.drop(level, index)
    root = index // (group.sizes[-1] // group.sizes[level])
    group.users[root] -= 1
    bad = {device: group.remove_bad_in_use(device) for device in pool.bad_within(level, physical)}
    if group.users[root] or group.pinned is not None:
        for device, virtual in bad.items():
            group.reserve_bad(device, root, virtual)
        group.unpin(level, index)
    else:
        group.unpin(level, index)
        group.unbind_root(root)


def locate_owner(pool: PhysicalCells, device: int) -> tuple[VirtualCells, int] | None:
    """The tenant's cell that contains a device, as its group and index."""
    if pool.bound[0][device]:
        for level, size in enumerate(pool.sizes):
            owner = pool.owners[level].get(device // size)
            if owner is not None:
                return owner
    return None


def _granted(
    request: CellRequest, pool: PhysicalCells, grants: list[tuple[int, PodGrant]], preempted: tuple[str, ...]
) -> Grant:
    if len(grants) > 1:
        grants.sort(key=lambda grant: grant[0])
    return Grant(
        request.job,
        request.vc,
        request.priority,
        pool.hierarchy.device_type,
        tuple([grant for _, grant in grants]),
        preempted,
    )
