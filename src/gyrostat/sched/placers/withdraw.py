"""Which devices to withdraw for a serving load: those whose loss disrupts training least."""

from __future__ import annotations

from collections.abc import Container, Mapping

from gyrostat.core.devices import DeviceId, Devices, Fleet
from gyrostat.sched.placers.base import JobPart


def least_disruptive(
    fleet: Fleet, type_: str, number: int, owner: Mapping[DeviceId, JobPart], gone: Container[DeviceId]
) -> Devices:
    """Free devices, then borrowed ones, then the rest; of each kind those on the least used nodes. Fewer than `number` if
    the fleet has fewer."""

    def kind(device: DeviceId) -> int:
        part = owner.get(device)
        return 0 if part is None else 1 if part.borrowed else 2

    ranked: list[tuple[int, int, int]] = []
    for node in fleet.nodes:
        if node.type != type_:
            continue
        kinds = [(kind(device), device) for device in node.devices if device not in gone]
        in_use = sum(of_kind == 2 for of_kind, _ in kinds)
        ranked += [(of_kind, in_use, -device) for of_kind, device in kinds]
    return tuple(sorted(-device for _, _, device in sorted(ranked)[:number]))
