"""Placement by cells: a VC can at any time place what it could place in a private cluster (HiveD).

`sched.cells` decides; this module translates. A part of a job is one or more gangs there: the first one of its initial
size, further ones for what it grew by. A gang larger than a node is one pod per node.

Two baselines of the HiveD paper are variants of it. With `dynamic=False` every cell of a VC is bound permanently (§5.3).
With `quotas` the whole cluster belongs to one tenant, `SHARED_POOL`, and VCs are limited in their number of devices only:
placement is the same, but no VC is guaranteed any place (§2).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import count

from gyrostat.core.devices import Counts, DeviceId, Devices, Fleet
from gyrostat.core.request import JobId, JobRequest
from gyrostat.sched.cells.allocator import CellCluster
from gyrostat.sched.cells.bindings import BindingChange, JobBinding, PodBinding, restore
from gyrostat.sched.cells.physical import PhysicalCells
from gyrostat.sched.cells.request import (
    OPPORTUNISTIC,
    CellAffinity,
    CellRefusal,
    CellRequest,
    Grant,
    PodGroup,
)
from gyrostat.sched.cells.spec import CellSpec
from gyrostat.sched.cells.virtual import VirtualCells
from gyrostat.sched.placers.base import DevicesPlaced, JobPart, PlacementRefused
from gyrostat.sched.placers.preemption import Candidate, PlacementDemand, choose_victims
from gyrostat.sched.placers.quota import Quotas
from gyrostat.sched.placers.withdraw import least_disruptive


def fleet_of(spec: CellSpec) -> Fleet:
    """All machines of a specification, in its order."""
    return Fleet(
        (node, hierarchy.device_type, hierarchy.sizes[hierarchy.node_level])
        for hierarchy in spec.hierarchies
        for node in spec.layouts[hierarchy.name].nodes
        if node is not None
    )


SHARED_POOL = "the pool"
"""The one tenant of a cluster with quotas; refusals name it."""


class CellPlacer:
    """HiveD's cells behind the interface of placers."""

    def __init__(
        self,
        spec: CellSpec,
        *,
        fleet: Fleet | None = None,
        lends: bool = False,
        dynamic: bool = True,
        quotas: Mapping[str, Counts] | None = None,
    ) -> None:
        """`fleet` contains the machines of the specification; by default nothing else."""
        self.fleet = fleet_of(spec) if fleet is None else fleet
        self.lends = lends
        self._cells = CellCluster(spec)
        self._gangs: dict[JobPart, list[Grant]] = {}
        self._parts: dict[str, JobPart] = {}
        """By the name of a gang."""
        self._held: dict[JobPart, Devices] = {}
        self._owner: dict[DeviceId, JobPart] = {}
        self._quotas = Quotas(quotas)
        self._vcs: dict[JobPart, str] = {}
        self._numbers = count()
        self._gone: set[DeviceId] = set()
        self._on_node: dict[tuple[str, int], int] = {}
        """By tenant and node: devices of its guaranteed jobs."""
        self._pools: dict[str, list[PhysicalCells]] = {}
        """By device type."""
        self._ids: dict[PhysicalCells, list[DeviceId]] = {}
        """Maps a pool's device numbers to the fleet's."""
        for pool in self._cells.pools.values():
            self._pools.setdefault(pool.hierarchy.device_type, []).append(pool)
            per_node = pool.sizes[pool.hierarchy.node_level]
            firsts = [
                -per_node if node is None else self.fleet.nodes[self.fleet.position[node]].first
                for node in pool.layout.nodes
            ]
            self._ids[pool] = [first + k for first in firsts for k in range(per_node)]
        self._lendable = _Idle(self._pools)
        if not dynamic:
            self._bind_all()

    # The interface of placers.

    def capacity(self, vc: str) -> Counts:
        if self._quotas.limits is not None:
            return self._quotas.limits.get(vc, {})
        counts: dict[str, int] = {}
        for groups in self._cells.tenants[vc].groups.values():  # requests cannot ask for pinned cells
            for group in groups:
                type_ = group.pool.hierarchy.device_type
                counts[type_] = counts.get(type_, 0) + group.count * group.sizes[-1] - group.bad
        return counts

    def lendable(self) -> Counts:
        return self._lendable if self.lends else {}

    def place(self, request: JobRequest, counts: Counts, borrowed: bool) -> DevicesPlaced | PlacementRefused:
        part = JobPart(request.id, borrowed)
        now = self.fleet.count(self._held[part]) if part in self._held else {}
        if any(counts.get(type_, 0) < number for type_, number in now.items()):
            return self._shrink(part, request, counts, now)
        victims: list[JobId] = []
        added: list[Grant] = []
        for type_, number in counts.items():
            more = number - now.get(type_, 0)
            if more <= 0:
                continue
            answer = self._allocate(part, request, type_, more, victims)
            if isinstance(answer, PlacementRefused):
                for grant in added:
                    self._drop(part, grant)
                return PlacementRefused(answer.reason, tuple(dict.fromkeys(victims)))
            added.append(answer)
        return DevicesPlaced(self._held.get(part, ()), tuple(dict.fromkeys(victims)))

    def victims_for(
        self, request: JobRequest, counts: Counts, candidates: Iterator[Candidate]
    ) -> tuple[JobId, ...] | None:
        ((type_, wanted),) = counts.items()
        tenant = self._tenant(request.vc)
        groups = self._groups(request.vc, type_)
        hierarchy = self._pools[type_][0].hierarchy
        size = hierarchy.sizes[hierarchy.node_level]
        empty = sum(
            len(whole) * (group.sizes[level] // size)
            for group in groups
            for level, whole in enumerate(group.views[0].whole)
            if level >= hierarchy.node_level
        )
        demand = PlacementDemand(
            devices=wanted,
            short=wanted - self._room(request.vc, type_),
            fits=str(request.affinity) == "soft",
            size=size,
            empty=empty,
            available=lambda node: size - self._on_node.get((tenant, node), 0),
        )
        return choose_victims(candidates, demand, self.fleet.node_of)

    def restore(self, request: JobRequest, devices: Devices, borrowed: bool) -> bool:
        part = JobPart(request.id, borrowed)
        for grant in list(self._gangs.get(part, ())):
            self._drop(part, grant)
        per_type: dict[str, list[DeviceId]] = {}
        for device in devices:
            per_type.setdefault(self.fleet.type_of(device), []).append(device)
        restored = [self._restore(part, request.vc, type_, mine) for type_, mine in per_type.items()]
        return all(restored)

    def release(self, job: JobId, borrowed: bool) -> None:
        part = JobPart(job, borrowed)
        for grant in list(self._gangs.get(part, ())):
            self._drop(part, grant)

    def promote(self, request: JobRequest) -> DevicesPlaced | PlacementRefused:
        """Usually a migration into the VC's own cells; under a quota the job keeps its devices."""
        devices = self._held[JobPart(request.id, True)]
        counts = self.fleet.count(devices)
        if self._quotas.limits is not None:
            for type_, number in counts.items():
                if number > (room := self._room(request.vc, type_)):
                    return PlacementRefused(f"{number} {type_} requested, {room} left of the quota")
            self.release(request.id, True)
            kept = self.restore(request, devices, False)
            assert kept, f"{request.id} cannot keep its borrowed devices"
            return DevicesPlaced(devices)
        placed = self.place(request, counts, False)
        if isinstance(placed, DevicesPlaced):
            self.release(request.id, True)
            placed = DevicesPlaced(placed.devices, tuple(job for job in placed.victims if job != request.id))
        return placed

    def defragment(
        self, request: JobRequest, devices: Devices, borrowed: bool
    ) -> DevicesPlaced | PlacementRefused:
        part = JobPart(request.id, borrowed)
        if borrowed or self.fleet.spread(devices) != 1 or len(self._gangs[part]) != 1:
            return PlacementRefused("only a guaranteed job within one node is migrated to defragment nodes")
        (old,) = self._gangs[part]
        here = self.fleet.node_of[devices[0]]
        victims: list[JobId] = []
        found = self._allocate(part, request, self.fleet.nodes[here].type, len(devices), victims)
        if isinstance(found, PlacementRefused):
            return found
        there = self.fleet.node_of[self._devices(found)[0]]
        tenant = self._tenant(request.vc)
        beside = {node: self._on_node[tenant, node] - len(devices) for node in {here, there}}
        better = beside[there] > beside[here]
        self._drop(part, old if better or victims else found)
        return (
            DevicesPlaced(self._held[part], tuple(victims))
            if better or victims
            else PlacementRefused("no placement leaves larger free blocks")
        )

    def remove_devices(self, devices: Iterable[DeviceId]) -> list[tuple[JobPart, Devices]]:
        gone = [device for device in devices if device not in self._gone]
        lost: dict[JobPart, Devices] = {}
        for device in gone:
            part = self._owner.get(device)
            if part is not None and part not in lost:
                lost[part] = self._held[part]
        vcs = {part: self._vcs[part] for part in lost}
        for part in lost:
            self.release(part.job, part.borrowed)
        self._gone.update(gone)
        for device in gone:
            self._cells.set_health(self._name(device), False)
        left = []
        for part, had in lost.items():
            rest = [device for device in had if device not in self._gone]
            for type_ in self.fleet.count(rest):
                of_type = [device for device in rest if self.fleet.type_of(device) == type_]
                self._restore(part, vcs[part], type_, of_type)
            left.append((part, self._held.get(part, ())))
        return left

    def add_devices(self, devices: Iterable[DeviceId]) -> None:
        for device in devices:
            if device in self._gone:
                self._gone.remove(device)
                self._cells.set_health(self._name(device), True)

    def choose_to_withdraw(self, type_: str, number: int) -> Devices:
        return least_disruptive(self.fleet, type_, number, self._owner, self._gone)

    # Requests for cells.

    def _tenant(self, vc: str) -> str:
        return vc if self._quotas.limits is None else SHARED_POOL

    def _room(self, vc: str, type_: str) -> int:
        """Devices that the VC may still allocate to guaranteed jobs."""
        left = sum(group.views[0].left for group in self._groups(vc, type_))
        return int(min(left, self._quotas.left(vc, type_)))

    def _groups(self, vc: str, type_: str) -> list[VirtualCells]:
        tenant = self._cells.tenants[self._tenant(vc)]
        return [group for pool in self._pools[type_] for group in tenant.groups.get(pool.hierarchy.name, ())]

    def _allocate(
        self, part: JobPart, request: JobRequest, type_: str, number: int, victims: list[JobId]
    ) -> Grant | PlacementRefused:
        if type_ not in self._pools:
            return PlacementRefused(f"this cluster has no {type_}")
        if part.borrowed:
            if not self.lends:
                return PlacementRefused("this cluster lends no devices")
            room = self._lendable[type_]
        else:
            room = self._room(request.vc, type_)
        if number > room:
            return PlacementRefused(f"{number} {type_} requested, {room} free")
        hierarchy = self._pools[type_][0].hierarchy
        whole, rest = divmod(number, hierarchy.sizes[hierarchy.node_level])
        pods = [PodGroup(hierarchy.sizes[hierarchy.node_level], whole)] if whole else []
        pods += [PodGroup(rest)] if rest else []
        answer = self._cells.allocate(
            CellRequest(
                job=self._new_name(part),
                vc=self._tenant(request.vc),
                pods=tuple(pods),
                priority=OPPORTUNISTIC if part.borrowed else 0,
                device_type=type_,
                affinity=CellAffinity(str(request.affinity)),
            )
        )
        if isinstance(answer, CellRefusal):
            return PlacementRefused(answer.reason)
        for victim in dict.fromkeys(self._parts[gang] for gang in answer.preempted):
            victims.append(victim.job)
            for grant in list(self._gangs[victim]):
                self._drop(victim, grant, lost=grant.job in answer.preempted)
        self._take(part, request.vc, answer)
        return answer

    def _shrink(
        self, part: JobPart, request: JobRequest, counts: Counts, now: Counts
    ) -> DevicesPlaced | PlacementRefused:
        """Keep the devices on the nodes where the part has most; then add what is missing of other types."""
        had = self._held[part]
        per_node: dict[int, int] = {}
        for device in had:
            node = self.fleet.node_of[device]
            per_node[node] = per_node.get(node, 0) + 1
        keep: list[DeviceId] = []
        for type_, number in now.items():
            of_type = [device for device in had if self.fleet.type_of(device) == type_]
            of_type.sort(key=lambda device: (-per_node[self.fleet.node_of[device]], device))
            keep += of_type[: min(number, counts.get(type_, 0))]
        restored = self.restore(request, tuple(sorted(keep)), part.borrowed)
        assert restored, f"{part} cannot keep a subset of its devices"
        grown = self.place(request, counts, part.borrowed) if len(keep) < sum(counts.values()) else None
        if isinstance(grown, PlacementRefused):
            self.restore(request, had, part.borrowed)
            return grown
        return grown or DevicesPlaced(self._held.get(part, ()))

    def _restore(self, part: JobPart, vc: str, type_: str, devices: list[DeviceId]) -> bool:
        """Give the part exactly these devices of one type, if they are free."""
        per_node: dict[int, list[str]] = {}
        for device in devices:
            per_node.setdefault(self.fleet.node_of[device], []).append(self._name(device))
        binding = JobBinding(
            job=self._new_name(part),
            vc=self._tenant(vc),
            priority=OPPORTUNISTIC if part.borrowed else 0,
            hierarchy=self._pools[type_][0].hierarchy.name,
            pods=tuple(PodBinding((), tuple(names), 1) for names in per_node.values()),
        )
        change = restore(self._cells, binding)
        if change is not None and change.change is not BindingChange.REBOUND:
            self._cells.release(binding.job)
            return False
        self._take(part, vc, self._cells.jobs[binding.job])
        return True

    def _bind_all(self) -> None:
        """Bind every cell of every VC permanently: it always counts as used."""
        groups = [group for tenant in self._cells.tenants.values() for group in tenant.all_groups()]
        for group in sorted(groups, key=lambda group: -group.root):
            for root in range(group.count):
                if group.pinned is None:
                    physical = group.pool.choose(group.root)
                    assert physical is not None
                    group.bind_root(root, physical)
                    group.users[root] += 1

    # Records of who has which device.

    def _new_name(self, part: JobPart) -> str:
        return f"{part.job}{'~' if part.borrowed else '.'}{next(self._numbers)}"

    def _name(self, device: DeviceId) -> str:
        node = self.fleet.nodes[self.fleet.node_of[device]]
        return f"{node.name}/{device - node.first}"

    def _devices(self, grant: Grant) -> list[DeviceId]:
        devices: list[DeviceId] = []
        for pod in grant.pods:
            ids, sizes = self._ids[pod.pool], pod.pool.sizes
            for piece in pod.pieces:
                start = piece.at * sizes[piece.level]
                devices += ids[start : start + sizes[piece.level]]
        return devices

    def _take(self, part: JobPart, vc: str, grant: Grant) -> None:
        self._parts[grant.job] = part
        self._vcs[part] = vc
        self._gangs.setdefault(part, []).append(grant)
        devices = self._devices(grant)
        self._held[part] = tuple(sorted((*self._held.get(part, ()), *devices)))
        for device in devices:
            self._owner[device] = part
        if not part.borrowed:
            self._count(grant, vc, devices, 1)

    def _drop(self, part: JobPart, grant: Grant, *, lost: bool = False) -> None:
        """`lost`: its cells have been released already."""
        if not lost:
            self._cells.release(grant.job)
        del self._parts[grant.job]
        gangs = self._gangs[part]
        gangs.remove(grant)
        devices = self._devices(grant)
        if not part.borrowed:
            self._count(grant, self._vcs[part], devices, -1)
        for device in devices:
            del self._owner[device]
        if gangs:
            gone = set(devices)
            self._held[part] = tuple(device for device in self._held[part] if device not in gone)
        else:
            del self._gangs[part], self._held[part], self._vcs[part]

    def _count(self, grant: Grant, vc: str, devices: list[DeviceId], sign: int) -> None:
        on_node, node_of, tenant = self._on_node, self.fleet.node_of, grant.vc
        for device in devices:
            key = (tenant, node_of[device])
            on_node[key] = on_node.get(key, 0) + sign
        self._quotas.count(vc, grant.device_type, sign * len(devices))


class _Idle(Mapping[str, int]):
    """A live view of the number of idle devices, by type."""

    def __init__(self, pools: Mapping[str, list[PhysicalCells]]) -> None:
        self._pools = pools

    def __getitem__(self, type_: str) -> int:
        return sum(pool.idle.left for pool in self._pools[type_])

    def __iter__(self) -> Iterator[str]:
        return iter(self._pools)

    def __len__(self) -> int:
        return len(self._pools)
