"""The physical cluster of one hierarchy: which devices are used, idle, lent to opportunistic jobs or bad; and their names.

A pool consists of the free lists of its cells and a forest of idle devices: healthy devices that no job uses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from gyrostat.sched.cells.forest import Cell, Forest
from gyrostat.sched.cells.free_lists import FreeLists
from gyrostat.sched.cells.request import GrantedCell
from gyrostat.sched.cells.spec import CellLayout, Hierarchy

if TYPE_CHECKING:
    from gyrostat.sched.cells.virtual import VirtualCells


class PhysicalCells(FreeLists):
    """A pool: the physical cells of one hierarchy."""

    def __init__(self, hierarchy: Hierarchy, layout: CellLayout) -> None:
        sizes = hierarchy.sizes
        super().__init__(sizes, hierarchy.splits, layout.roots)
        self.hierarchy = hierarchy
        self.layout = layout
        self.roots = layout.roots
        self.idle = Forest(sizes, layout.roots)
        self.used: list[dict[int, str]] = [{} for _ in sizes]
        """By level and cell: the guaranteed job that has it."""
        self.lent: list[dict[int, str]] = [{} for _ in sizes]
        """By level and cell: the opportunistic job that has it."""
        self.owners: list[dict[int, tuple[VirtualCells, int]]] = [{} for _ in sizes]
        """By level and bound cell: the tenant's group of cells, and the index in it."""
        for place, node in enumerate(layout.nodes):
            if node is None:
                self.bind(hierarchy.node_level, place)
                self.idle.take(hierarchy.node_level, place)

    # Devices in use -----------------------------------------------------------------------------------------------

    def use(self, level: int, index: int, job: str) -> None:
        """Give an idle cell to a guaranteed job."""
        self.idle.take(level, index)
        self.used[level][index] = job

    def release(self, level: int, index: int) -> None:
        del self.used[level][index]
        self._idle_again(level, index)

    def lend(self, level: int, index: int, job: str) -> None:
        """Give an idle cell to an opportunistic job."""
        self.idle.take(level, index)
        self.lent[level][index] = job
        self.mark_low(level, index, lent=True)

    def reclaim(self, level: int, index: int) -> None:
        del self.lent[level][index]
        self.mark_low(level, index, lent=False)
        self._idle_again(level, index)

    def _idle_again(self, level: int, index: int) -> None:
        self.idle.give(level, index)
        if self.bad[level][index]:
            for device in self.bad_within(level, index):
                self.idle.take(0, device)

    def borrowers(self, level: int, index: int) -> list[str]:
        """Opportunistic jobs with a device in a cell."""
        if not self.low[level][index]:
            return []
        for above in range(level, self.top + 1):
            job = self.lent[above].get(index // (self.sizes[above] // self.sizes[level]))
            if job is not None:
                return [job]
        return list(dict.fromkeys(self._borrowers_below(level, index)))

    def _borrowers_below(self, level: int, index: int) -> Iterator[str]:
        split = self.splits[level]
        for child in range(index * split, (index + 1) * split):
            if self.low[level - 1][child]:
                job = self.lent[level - 1].get(child)
                if job is not None:
                    yield job
                else:
                    yield from self._borrowers_below(level - 1, child)

    # Opportunistic jobs -------------------------------------------------------------------------------------------

    def farthest_idle(self, level: int, devices: int) -> list[Cell] | None:
        """Idle devices within one cell of `level`, farthest from cells that are bound."""
        for block in range(self.top, level - 1, -1):
            for clear in range(level + 1, block + 2):
                listed = self.lists[block][clear]
                if listed:
                    cell = self._clear_within(block, listed[-1] % self.width, level, last=True)
                    return self.split_at_bounds(self.idle.carve(level, cell, devices))
        room = self.idle.find(level, devices)
        if room is None:
            return None
        return self.split_at_bounds(self.idle.carve(level, room.at, devices))

    def any_idle(self, devices: int) -> list[Cell] | None:
        """Any idle devices, wherever they are."""
        if devices > self.idle.left:
            return None
        pieces: list[Cell] = []
        taken: list[Cell] = []
        while devices:
            room = self.idle.fullest()
            assert room is not None
            share = min(devices, room.free)
            for piece in self.split_at_bounds(self.idle.carve(self.top, room.at, share)):
                self.idle.take(*piece)
                taken.append(piece)
            devices -= share
        for piece in reversed(taken):
            self.idle.give(*piece)
            pieces.append(piece)
        return pieces[::-1]

    def split_at_bounds(self, pieces: Sequence[tuple[int, int]]) -> list[Cell]:
        """Split cells until each is entirely within or entirely outside bound ones (pinned cells are bound while idle)."""
        result: list[Cell] = []
        for level, index in pieces:
            bound = self.bound[level][index]
            if bound and bound != self.sizes[level]:
                split = self.splits[level]
                children = [Cell(level - 1, child) for child in range(index * split, (index + 1) * split)]
                result += self.split_at_bounds(children)
            else:
                result.append(Cell(level, index))
        return result

    # Health -------------------------------------------------------------------------------------------------------

    def mark_bad(self, device: int) -> None:
        self.bad_devices.add(device)
        self.bad[0][device] = 1
        self._raise(self.bad, 0, device, 1)
        if not self.blocked[0][device]:
            self._block(0, device)
        if self.user_of(device) is None:
            self.idle.take(0, device)

    def mark_healthy(self, device: int) -> None:
        self.bad_devices.discard(device)
        self.bad[0][device] = 0
        self._raise(self.bad, 0, device, -1)
        if not self.bound[0][device]:
            self._unblock(0, device)
        if self.user_of(device) is None:
            self.idle.give(0, device)

    def user_of(self, device: int) -> str | None:
        """The job that has a device."""
        for level, size in enumerate(self.sizes):
            job = self.used[level].get(device // size) or self.lent[level].get(device // size)
            if job is not None:
                return job
        return None

    # Names --------------------------------------------------------------------------------------------------------

    def device_name(self, device: int) -> str:
        node, number = divmod(device, self.sizes[self.hierarchy.node_level])
        return f"{self.layout.nodes[node]}/{number}"

    def devices_of(self, level: int, index: int) -> list[str]:
        size = self.sizes[level]
        return [self.device_name(device) for device in range(index * size, (index + 1) * size)]

    def name_of(self, level: int, index: int) -> str:
        """`TYPE@NODE`, or `TYPE@NODE/NUMBER` for cells within a machine: its first machine or device."""
        at = self.device_name(index * self.sizes[level])
        if level >= self.hierarchy.node_level:
            at = at.partition("/")[0]
        return f"{self.hierarchy.types[level]}@{at}"

    def virtual_name(self, vc: str, pinned: str | None, piece: GrantedCell) -> str:
        """`VC/TYPE[i]`, or `VC/PINNED`, and the position within it, if the piece is a part of it."""
        assert piece.root is not None
        ratio = self.sizes[piece.root] // self.sizes[piece.level]
        number, place = divmod(piece.virtual, ratio)
        name = f"{vc}/{pinned}" if pinned else f"{vc}/{self.hierarchy.types[piece.root]}[{number}]"
        return name if ratio == 1 else f"{name}/{self.hierarchy.types[piece.level]}[{place}]"

    def common_level(self, pieces: Sequence[GrantedCell]) -> int:
        """The level of the smallest cell around all pieces, counted as in the paper; 0 if there is none."""
        for level in range(max(piece.level for piece in pieces), self.top + 1):
            around = {piece.at // (self.sizes[level] // self.sizes[piece.level]) for piece in pieces}
            if len(around) == 1:
                return level + 1
        return 0
