"""Which jobs of a VC are preempted for another one: as few as needed, and the lowest ranks.

A sufficient number of devices is not enough: a job of eight needs eight of one node. So candidates are considered one by
one, the lowest rank first, until one node (or enough whole ones) would have room; of these only the jobs on the chosen
nodes are preempted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from gyrostat.core.devices import Devices
from gyrostat.core.request import JobId

Candidate = tuple[JobId, Devices]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementDemand:
    """What a job needs, and what is available without preemption."""

    devices: int
    short: int
    """Devices that must be preempted in any case, wherever they are."""
    fits: bool
    """Whether a placement exists; only the quota or the number of devices is exceeded."""
    size: int
    """Devices of a node."""
    empty: int
    """Number of nodes that are available as a whole."""
    available: Callable[[int], int]
    """Available devices of a node."""


def choose_victims(
    candidates: Iterator[Candidate], demand: PlacementDemand, node_of: Sequence[int]
) -> tuple[JobId, ...] | None:
    """The `candidates` (the lowest rank first) to preempt; None if not even all of them make room."""
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
    candidates: Iterator[Candidate],
    considered: list[Candidate],
    demand: PlacementDemand,
    node_of: Sequence[int],
) -> set[int] | None:
    """Nodes that would have room. The candidates whose preemption that assumes are added to `considered`."""
    whole, rest = divmod(demand.devices, demand.size)
    room: dict[int, int] = {}
    cleared: list[int] = []
    """Nodes that would be available as a whole."""
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
