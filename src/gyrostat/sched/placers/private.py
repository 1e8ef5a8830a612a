"""A private cluster for each VC: the baseline for every way of sharing. Nothing is lent, and VCs cannot affect each other.

Each VC has its own nodes and its own placer; device numbers are those of one fleet.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from gyrostat.core.devices import Counts, DeviceId, Devices, Fleet
from gyrostat.core.request import JobId, JobRequest
from gyrostat.sched.placers.base import DevicesPlaced, JobPart, PlacementRefused, Placer
from gyrostat.sched.placers.preemption import Candidate


class PrivatePlacer:
    """One placer per VC behind the interface of one."""

    lends = False

    def __init__(
        self, fleet: Fleet, placers: Mapping[str, Placer], nodes: Mapping[str, Iterable[str]]
    ) -> None:
        """`placers` by VC, with the device numbers of `fleet`; `nodes`: names of each VC's nodes."""
        self.fleet = fleet
        self._placers = placers
        self._vc: dict[JobId, str] = {}
        self._vc_of = {
            device: vc
            for vc, names in nodes.items()
            for name in names
            for device in fleet.nodes[fleet.position[name]].devices
        }

    def capacity(self, vc: str) -> Counts:
        return self._placers[vc].capacity(vc)

    def lendable(self) -> Counts:
        return {}

    def place(self, request: JobRequest, counts: Counts, borrowed: bool) -> DevicesPlaced | PlacementRefused:
        if borrowed:
            return PlacementRefused("this cluster lends no devices")
        self._vc[request.id] = request.vc
        return self._placers[request.vc].place(request, counts, borrowed)

    def victims_for(
        self, request: JobRequest, counts: Counts, candidates: Iterator[Candidate]
    ) -> tuple[JobId, ...] | None:
        return self._placers[request.vc].victims_for(request, counts, candidates)

    def restore(self, request: JobRequest, devices: Devices, borrowed: bool) -> bool:
        self._vc[request.id] = request.vc
        return self._placers[request.vc].restore(request, devices, borrowed)

    def release(self, job: JobId, borrowed: bool) -> None:
        self._placers[self._vc.pop(job)].release(job, borrowed)

    def promote(self, request: JobRequest) -> DevicesPlaced | PlacementRefused:
        return PlacementRefused("this cluster lends no devices")

    def defragment(
        self, request: JobRequest, devices: Devices, borrowed: bool
    ) -> DevicesPlaced | PlacementRefused:
        return self._placers[request.vc].defragment(request, devices, borrowed)

    def remove_devices(self, devices: Iterable[DeviceId]) -> list[tuple[JobPart, Devices]]:
        return [
            loss
            for vc, mine in self._split(devices).items()
            for loss in self._placers[vc].remove_devices(mine)
        ]

    def add_devices(self, devices: Iterable[DeviceId]) -> None:
        for vc, mine in self._split(devices).items():
            self._placers[vc].add_devices(mine)

    def choose_to_withdraw(self, type_: str, number: int) -> Devices:
        chosen: list[DeviceId] = []
        for placer in self._placers.values():
            chosen += placer.choose_to_withdraw(type_, number - len(chosen))
        return tuple(sorted(chosen))

    def _split(self, devices: Iterable[DeviceId]) -> dict[str, list[DeviceId]]:
        per_vc: dict[str, list[DeviceId]] = {}
        for device in devices:
            if device in self._vc_of:
                per_vc.setdefault(self._vc_of[device], []).append(device)
        return per_vc
