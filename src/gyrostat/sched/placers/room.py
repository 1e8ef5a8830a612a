"""Which of a VC's jobs must give way so that another one finds a place: as few as needed, and the lowest ranks.

Devices alone are not enough: eight of them must be of one node. So jobs are considered to go one by one, the last
first, until some node (or enough whole ones) would have the room; then only those of them go that are in the way
there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from gyrostat.core.devices import Devices
from gyrostat.core.request import JobId

Candidate = tuple[JobId, Devices]


def choose_victims(
    candidates: Sequence[Candidate],
    *,
    wanted: int,
    short: int,
    size: int,
    empty: int,
    fits: bool,
    node_of: Sequence[int],
    available: Callable[[int], int],
) -> tuple[JobId, ...] | None:
    """`candidates`, best first, to make room for `wanted` devices; None if not even all of them do.

    `short`: so many devices must be given up in any case (a quota). `size`: of a node. `empty`: nodes that are wholly
    available. `fits`: there is a place already, whoever goes. `available`: of a node, without anybody going.
    """
    chosen = set() if fits else _clear_nodes(candidates, wanted, size, empty, node_of, available)
    if chosen is None:
        return None
    victims: list[JobId] = []
    for job, devices in reversed(candidates):
        in_the_way = any(node_of[device] in chosen for device in devices)
        if in_the_way:
            victims.append(job)
            short -= len(devices)
    for job, devices in reversed(candidates):
        if short <= 0:
            break
        if job not in victims:
            victims.append(job)
            short -= len(devices)
    return tuple(victims) if short <= 0 else None


class _Nodes:
    """What nodes would have, as more and more jobs go."""

    def __init__(self, size: int, empty: int, available: Callable[[int], int]) -> None:
        self.size = size
        self.whole: list[int] = []
        """Nodes that have become wholly available."""
        self.empty = empty
        self.room: dict[int, int] = {}
        self._available = available

    def add(self, nodes: Iterable[int]) -> None:
        for node in nodes:
            room = self.room.get(node)
            room = (self._available(node) if room is None else room) + 1
            self.room[node] = room
            if room == self.size:
                self.whole.append(node)


def _clear_nodes(
    candidates: Sequence[Candidate],
    wanted: int,
    size: int,
    empty: int,
    node_of: Sequence[int],
    available: Callable[[int], int],
) -> set[int] | None:
    """Nodes that would be a place if all candidates on them went; those in the way there are the last possible ones."""
    whole, rest = divmod(wanted, size)
    nodes = _Nodes(size, empty, available)
    for _, devices in reversed(candidates):
        touched = [node_of[device] for device in devices]
        nodes.add(touched)
        if whole == 0:
            fitting = [node for node in touched if nodes.room[node] >= rest]
            if fitting:
                return {min(fitting, key=lambda node: (nodes.room[node], node))}
        elif nodes.empty + len(nodes.whole) >= whole:
            chosen = set(nodes.whole[: max(0, whole - nodes.empty)])
            if not rest or nodes.empty + len(nodes.whole) > whole:
                return chosen | set(nodes.whole[len(chosen) : len(chosen) + 1] if rest else ())
            beside = [node for node, room in nodes.room.items() if room >= rest and node not in chosen]
            if beside:
                return chosen | {min(beside, key=lambda node: (nodes.room[node], node))}
    return None
