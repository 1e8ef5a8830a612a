"""Which of a VC's jobs must give way so that another one finds a place: as few as needed, and the lowest ranks.

Devices alone are not enough: eight of them must be of one node. So jobs are considered to go one by one, the last
first, until some node (or enough whole ones) would have the room; then only those of them go that are in the way
there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from gyrostat.core.devices import Devices
from gyrostat.core.request import JobId

Candidate = tuple[JobId, Devices]


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a job needs, and what there is without anybody going."""

    devices: int
    short: int
    """So many devices must be given up in any case, wherever they are."""
    fits: bool
    """There is a place for it; only the number of devices stands against it."""
    size: int
    """Of a node."""
    empty: int
    """Nodes that are wholly available."""
    available: Callable[[int], int]
    """How many devices of a node are."""


def choose_victims(
    candidates: Iterator[Candidate], demand: Demand, node_of: Sequence[int]
) -> tuple[JobId, ...] | None:
    """Those of the `candidates` (the last first) that must go; None if not even all of them make room."""
    considered: list[Candidate] = []
    nodes: set[int] = set()
    if not demand.fits:
        found = _clear(candidates, considered, demand, node_of)
        if found is None:
            return None
        nodes = found
    short, victims, spared = demand.short, [], []
    for candidate in considered:
        if any(node_of[device] in nodes for device in candidate[1]):
            victims.append(candidate[0])
            short -= len(candidate[1])
        else:
            spared.append(candidate)
    further = iter(spared)
    while short > 0:
        job, devices = next(further, None) or next(candidates, (None, ()))
        if job is None:
            return None
        victims.append(job)
        short -= len(devices)
    return tuple(victims)


def _clear(
    candidates: Iterator[Candidate], considered: list[Candidate], demand: Demand, node_of: Sequence[int]
) -> set[int] | None:
    """Nodes that would have the room. Candidates that had to be thought of as gone for that are `considered`."""
    whole, rest = divmod(demand.devices, demand.size)
    room: dict[int, int] = {}
    cleared: list[int] = []
    """Nodes that have become wholly available."""
    for candidate in candidates:
        considered.append(candidate)
        devices = candidate[1]
        for device in devices:
            node = node_of[device]
            left = room.get(node)
            left = room[node] = (demand.available(node) if left is None else left) + 1
            if left == demand.size:
                cleared.append(node)
        if not whole:
            fitting = [node for device in devices if room[node := node_of[device]] >= rest]
            if fitting:
                return {min(fitting, key=lambda node: (room[node], node))}
        elif demand.empty + len(cleared) >= whole:
            nodes = set(cleared[: max(0, whole - demand.empty)])
            if not rest:
                return nodes
            beside = [node for node, left in room.items() if left >= rest and node not in nodes]
            if demand.empty + len(cleared) > whole and not beside:
                return nodes
            if beside:
                return nodes | {min(beside, key=lambda node: (room[node], node))}
    return None
