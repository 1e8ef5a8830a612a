"""A pool of nodes: every VC may use any device. With quotas this is how most clusters are shared; without, one pool.

A quota is a number of devices per VC and says nothing about where they are, which is why a VC with quota left may still
wait for eight devices of one node (HiveD's sharing anomaly, §2).

Placement is best fit: a job that fits into one node goes to the fullest one with room, a larger one takes whole nodes and
packs its rest. An elastic job may at any size span as many nodes as the size that it requests would need. A job with soft
affinity takes the emptiest nodes if no better placement is free. A guaranteed job without a placement reclaims the nodes
with the fewest borrowed devices in its way.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice

from gyrostat.core.devices import Counts, DeviceId, Devices, Fleet
from gyrostat.core.request import Affinity, JobId, JobRequest
from gyrostat.sched.placers.base import DevicesPlaced, JobPart, PlacementRefused
from gyrostat.sched.placers.preemption import Candidate, PlacementDemand, choose_victims
from gyrostat.sched.placers.quota import Quotas
from gyrostat.sched.placers.withdraw import least_disruptive


class NodePlacer:
    """All nodes of `fleet` in one pool; `quotas` by VC and type, or None: every VC may use all devices."""

    def __init__(
        self, fleet: Fleet, *, quotas: Mapping[str, Counts] | None = None, lends: bool = False
    ) -> None:
        self.fleet = fleet
        self.lends = lends
        self._quotas = Quotas(quotas)
        self._free: list[list[DeviceId]] = [list(node.devices) for node in fleet.nodes]
        self._borrowers: list[dict[JobId, int]] = [{} for _ in fleet.nodes]
        """By node: its borrowers and their devices there, in the order of arrival."""
        self._owner: dict[DeviceId, JobPart] = {}
        self._held: dict[JobPart, Devices] = {}
        self._vc: dict[JobId, str] = {}
        self._gone: set[DeviceId] = set()
        self._totals = dict(fleet.totals)
        self._free_totals = dict(fleet.totals)
        self._lent_totals = dict.fromkeys(fleet.totals, 0)
        self._largest = {
            type_: max(node.count for node in fleet.nodes if node.type == type_) for type_ in fleet.totals
        }
        self._by_free: dict[str, list[list[int]]] = {
            type_: [[] for _ in range(size + 1)] for type_, size in self._largest.items()
        }
        for position, node in enumerate(fleet.nodes):
            self._by_free[node.type][node.count].append(position)

    # The interface of placers.

    def capacity(self, vc: str) -> Counts:
        limits = self._quotas.limits
        if limits is None:
            return self._totals
        return {
            type_: min(number, self._totals.get(type_, 0)) for type_, number in limits.get(vc, {}).items()
        }

    def lendable(self) -> Counts:
        return self._free_totals if self.lends else {}

    def place(self, request: JobRequest, counts: Counts, borrowed: bool) -> DevicesPlaced | PlacementRefused:
        part = JobPart(request.id, borrowed)
        has = self._held.get(part, ())
        now = self.fleet.count(has) if has else {}
        more = {t: n - now.get(t, 0) for t, n in counts.items() if n > now.get(t, 0)}
        fewer = {t: n - counts.get(t, 0) for t, n in now.items() if n > counts.get(t, 0)}
        if (refusal := self._over_limit(request, more, borrowed)) is not None:
            return refusal
        if fewer:
            self._shrink(part, fewer)
        victims: list[JobId] = []
        for type_, number in more.items():
            if not self._grow(part, request, type_, number, victims):
                assert not victims
                self._set_held(part, request, has)
                return PlacementRefused(f"no {number} {type_} close enough together")
        return DevicesPlaced(self._held.get(part, ()), tuple(victims))

    def victims_for(
        self, request: JobRequest, counts: Counts, candidates: Iterator[Candidate]
    ) -> tuple[JobId, ...] | None:
        ((type_, wanted),) = counts.items()
        available = self._free_totals.get(type_, 0) + self._lent_totals.get(type_, 0)
        demand = PlacementDemand(
            devices=wanted,
            short=wanted - int(min(available, self._quotas.left(request.vc, type_))),
            fits=request.affinity is Affinity.SOFT or self._find(type_, wanted, request.affinity) is not None,
            size=self._largest[type_],
            empty=len(self._by_free[type_][-1]),
            available=self._available,
        )
        return choose_victims(candidates, demand, self.fleet.node_of)

    def _available(self, position: int) -> int:
        borrowers = self._borrowers[position]
        return len(self._free[position]) + (sum(borrowers.values()) if borrowers else 0)

    def restore(self, request: JobRequest, devices: Devices, borrowed: bool) -> bool:
        part = JobPart(request.id, borrowed)
        if any(device in self._gone or self._owner.get(device, part) != part for device in devices):
            return False
        self._set_held(part, request, devices)
        return True

    def release(self, job: JobId, borrowed: bool) -> None:
        part = JobPart(job, borrowed)
        self._release(part, self._held.get(part, ()))

    def promote(self, request: JobRequest) -> DevicesPlaced | PlacementRefused:
        borrowed = JobPart(request.id, True)
        devices = self._held[borrowed]
        if (refusal := self._quotas.refusal(request.vc, self.fleet.count(devices))) is not None:
            return refusal
        self._release(borrowed, devices)
        self._take(JobPart(request.id, False), request, list(devices))
        return DevicesPlaced(devices)

    def defragment(
        self, request: JobRequest, devices: Devices, borrowed: bool
    ) -> DevicesPlaced | PlacementRefused:
        part = JobPart(request.id, borrowed)
        if self.fleet.spread(devices) != 1 or request.devices != len(devices):
            return PlacementRefused("only a job within one node is migrated to defragment nodes")
        here = self.fleet.node_of[devices[0]]
        type_ = self.fleet.nodes[here].type
        room = len(self._free[here])
        for free in range(len(devices), room + 1):
            for position in self._by_free[type_][free]:
                if position != here and free < room + len(devices):
                    self._release(part, devices)
                    self._take(part, request, self._free[position][: len(devices)])
                    return DevicesPlaced(self._held[part])
        return PlacementRefused("no placement leaves larger free blocks")

    def remove_devices(self, devices: Iterable[DeviceId]) -> list[tuple[JobPart, Devices]]:
        lost: dict[JobPart, list[DeviceId]] = {}
        for device in devices:
            if device in self._gone:
                continue
            if (part := self._owner.get(device)) is not None:
                lost.setdefault(part, []).append(device)
                self._release(part, (device,))
            self._set_free(device, False)
            self._gone.add(device)
            self._totals[self.fleet.type_of(device)] -= 1
        return [(part, self._held.get(part, ())) for part in lost]

    def add_devices(self, devices: Iterable[DeviceId]) -> None:
        for device in devices:
            if device in self._gone:
                self._gone.remove(device)
                self._set_free(device, True)
                self._totals[self.fleet.type_of(device)] += 1

    def choose_to_withdraw(self, type_: str, number: int) -> Devices:
        return least_disruptive(self.fleet, type_, number, self._owner, self._gone)

    # Finding a placement.

    def _over_limit(self, request: JobRequest, more: Counts, borrowed: bool) -> PlacementRefused | None:
        for type_, number in more.items():
            room = self._free_totals.get(type_, 0) + (0 if borrowed else self._lent_totals.get(type_, 0))
            if number > room:
                return PlacementRefused(f"{number} {type_} requested, {room} free")
        if borrowed:
            return None if self.lends else PlacementRefused("this cluster lends no devices")
        return self._quotas.refusal(request.vc, more)

    def _grow(
        self, part: JobPart, request: JobRequest, type_: str, number: int, victims: list[JobId]
    ) -> bool:
        """Take `number` more devices, if they are close enough together."""
        has = self._held.get(part, ())
        beside = self._beside(has, type_, number)
        if beside is not None:
            self._take(part, request, beside)
            return True
        same_type = [device for device in has if self.fleet.type_of(device) == type_]
        whole = number + len(same_type)
        if same_type and request.affinity is Affinity.HARD and whole <= self._largest[type_]:
            return self._move(part, request, type_, same_type, whole)
        found = self._find(type_, number, request.affinity)
        if found is None and request.elastic and not same_type:
            found = self._within(type_, number, -(-request.devices // self._largest[type_]))
        if found is None and not part.borrowed:
            found = self._reclaim(type_, number, request.affinity, victims)
        if found is None:
            return False
        self._take(part, request, found)
        return True

    def _beside(self, has: Devices, type_: str, number: int) -> list[DeviceId] | None:
        """Free devices of a node on which the part already has some."""
        for position in sorted({self.fleet.node_of[device] for device in has}):
            if self.fleet.nodes[position].type == type_ and len(self._free[position]) >= number:
                return self._free[position][:number]
        return None

    def _move(self, part: JobPart, request: JobRequest, type_: str, old: list[DeviceId], whole: int) -> bool:
        """Migrate from a node that is too small to another one that holds the whole part."""
        found = self._find(type_, whole, Affinity.HARD)
        if found is None:
            return False
        self._release(part, tuple(old))
        self._take(part, request, found)
        return True

    def _find(self, type_: str, number: int, affinity: Affinity) -> list[DeviceId] | None:
        by_free, largest = self._by_free[type_], self._largest[type_]
        whole, rest = divmod(number, largest)
        found: list[DeviceId] = []
        if len(by_free[largest]) >= whole:
            for position in by_free[largest][:whole]:
                found += self._free[position]
            if not rest:
                return found
            for free in range(rest, largest + 1):
                for position in by_free[free][whole if free == largest else 0 :][:1]:
                    return found + self._free[position][:rest]
        if affinity is Affinity.HARD:
            return None
        found = []
        for free in range(largest, 0, -1):
            for position in by_free[free]:
                found += self._free[position][: number - len(found)]
                if len(found) == number:
                    return found
        return None

    def _within(self, type_: str, number: int, nodes: int) -> list[DeviceId] | None:
        """Free devices of at most `nodes` nodes, the emptiest."""
        by_free = self._by_free[type_]
        emptiest = (position for free in range(len(by_free) - 1, 0, -1) for position in by_free[free])
        found: list[DeviceId] = []
        for position in islice(emptiest, nodes):
            found += self._free[position][: number - len(found)]
        return found if len(found) == number else None

    def _reclaim(
        self, type_: str, number: int, affinity: Affinity, victims: list[JobId]
    ) -> list[DeviceId] | None:
        """Evict borrowers from the nodes where that costs the fewest borrowed devices."""
        if not self._lent_totals.get(type_):
            return None
        largest = self._largest[type_]
        needs = [largest] * (number // largest) + ([number % largest] if number % largest else [])
        if affinity is Affinity.SOFT:
            needs = [1] * number
        lent = {
            position: sum(self._borrowers[position].values())
            for position, node in enumerate(self.fleet.nodes)
            if node.type == type_
        }
        left = {position: len(self._free[position]) + lent[position] for position in lent}
        chosen: dict[int, int] = {}
        for need in needs:
            position = min(
                (p for p in left if left[p] >= need),
                key=lambda p: (max(0, chosen.get(p, 0) + need - len(self._free[p])), left[p], p),
                default=None,
            )
            if position is None:
                return None
            left[position] -= need
            chosen[position] = chosen.get(position, 0) + need
        found: list[DeviceId] = []
        for position, need in chosen.items():
            while len(self._free[position]) < need:
                borrower = next(reversed(self._borrowers[position]))
                victims.append(borrower)
                self.release(borrower, True)
            found += self._free[position][:need]
        return found

    def _shrink(self, part: JobPart, fewer: Counts) -> None:
        """Release devices on the nodes where the part has the fewest."""
        for type_, number in fewer.items():
            per_node: dict[int, list[DeviceId]] = {}
            for device in self._held[part]:
                if self.fleet.type_of(device) == type_:
                    per_node.setdefault(self.fleet.node_of[device], []).append(device)
            order = [
                d
                for p in sorted(per_node, key=lambda p: (len(per_node[p]), -p))
                for d in reversed(per_node[p])
            ]
            self._release(part, tuple(order[:number]))

    # Records of who has which device.

    def _set_held(self, part: JobPart, request: JobRequest, devices: Devices) -> None:
        has = self._held.get(part, ())
        self._release(part, tuple(device for device in has if device not in devices))
        self._take(part, request, [device for device in devices if device not in has])

    def _take(self, part: JobPart, request: JobRequest, devices: list[DeviceId]) -> None:
        if not devices:
            return
        self._vc[part.job] = request.vc
        self._held[part] = tuple(sorted((*self._held.get(part, ()), *devices)))
        owner = self._owner
        for position, of_node in self._per_node(devices).items():
            node = self.fleet.nodes[position]
            free = self._free[position]
            self._reindex(position, len(free), len(free) - len(of_node))
            for device in of_node:
                owner[device] = part
                free.remove(device)
            number = len(of_node)
            self._free_totals[node.type] -= number
            if part.borrowed:
                self._lent_totals[node.type] += number
                at = self._borrowers[position]
                at[part.job] = at.get(part.job, 0) + number
            else:
                self._quotas.count(request.vc, node.type, number)

    def _release(self, part: JobPart, devices: Devices) -> None:
        if not devices:
            return
        gone = set(devices)
        left = tuple(device for device in self._held[part] if device not in gone)
        if left:
            self._held[part] = left
        else:
            del self._held[part]
        for position, of_node in self._per_node(devices).items():
            node = self.fleet.nodes[position]
            free = self._free[position]
            self._reindex(position, len(free), len(free) + len(of_node))
            for device in of_node:
                del self._owner[device]
                insort(free, device)
            number = len(of_node)
            self._free_totals[node.type] += number
            if part.borrowed:
                self._lent_totals[node.type] -= number
                at = self._borrowers[position]
                at[part.job] -= number
                if not at[part.job]:
                    del at[part.job]
            else:
                self._quotas.count(self._vc[part.job], node.type, -number)
        if not left and JobPart(part.job, not part.borrowed) not in self._held:
            del self._vc[part.job]

    def _set_free(self, device: DeviceId, free: bool) -> None:
        position = self.fleet.node_of[device]
        devices = self._free[position]
        before = len(devices)
        if free:
            insort(devices, device)
        else:
            devices.remove(device)
        self._free_totals[self.fleet.nodes[position].type] += len(devices) - before
        self._reindex(position, before, len(devices))

    def _reindex(self, position: int, before: int, after: int) -> None:
        by_free = self._by_free[self.fleet.nodes[position].type]
        del by_free[before][bisect_left(by_free[before], position)]
        insort(by_free[after], position)

    def _per_node(self, devices: Iterable[DeviceId]) -> dict[int, list[DeviceId]]:
        per_node: dict[int, list[DeviceId]] = {}
        node_of = self.fleet.node_of
        for device in devices:
            per_node.setdefault(node_of[device], []).append(device)
        return per_node
