"""Which of a VC's jobs must give way so that another one finds a place: as few as needed, and the lowest ranks.

Devices alone are not enough: eight of them must be of one node. So jobs are considered to go one by one, the last
first, until some node (or enough whole ones) would have the room; then only those of them go that are in the way
there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gyrostat.core.devices import Devices
from gyrostat.core.request import JobId

Candidate = tuple[JobId, Devices]


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
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
    candidates: Sequence[Candidate], want: Want, node_of: Sequence[int]
) -> tuple[JobId, ...] | None:
    """Those of the `candidates` (best first) that must go; None if not even all of them make room."""
    short, victims = want.short, []
    spared = reversed(candidates)
    if not want.fits:
        found = _clear(candidates, want, node_of)
        if found is None:
            return None
        nodes, considered = found
        tail = candidates[len(candidates) - considered :]
        rest = []
        for candidate in reversed(tail):
            if any(node_of[device] in nodes for device in candidate[1]):
                victims.append(candidate[0])
                short -= len(candidate[1])
            else:
                rest.append(candidate)
        spared = iter([*rest, *reversed(candidates[: len(candidates) - considered])])
    while short > 0:
        further = next(spared, None)
        if further is None:
            return None
        victims.append(further[0])
        short -= len(further[1])
    return tuple(victims)


def _clear(
    candidates: Sequence[Candidate], want: Want, node_of: Sequence[int]
) -> tuple[set[int], int] | None:
    """Nodes that would have the room, and how many candidates had to be considered for that."""
    whole, rest = divmod(want.devices, want.size)
    room: dict[int, int] = {}
    cleared: list[int] = []
    """Nodes that have become wholly available."""
    for considered, (_, devices) in enumerate(reversed(candidates), 1):
        for device in devices:
            node = node_of[device]
            left = room.get(node)
            left = room[node] = (want.available(node) if left is None else left) + 1
            if left == want.size:
                cleared.append(node)
        if not whole:
            fitting = [node for device in devices if room[node := node_of[device]] >= rest]
            if fitting:
                return {min(fitting, key=lambda node: (room[node], node))}, considered
        elif want.empty + len(cleared) >= whole:
            nodes = set(cleared[: max(0, whole - want.empty)])
            if not rest:
                return nodes, considered
            beside = [node for node, left in room.items() if left >= rest and node not in nodes]
            if want.empty + len(cleared) > whole and not beside:
                return nodes, considered
            if beside:
                return nodes | {min(beside, key=lambda node: (room[node], node))}, considered
    return None
