"""Equal trees of cells, and which of their devices are free: the data structure behind every view of a cluster.

A forest has `roots` equal trees. A cell is a level and an index: level 0 is a device, and the cell `index` at `level` has the
cells `index * split …` one level below. Cells are indices only, so no search and no objects are needed.

Two sorted listings find a cell with room for d devices without iterating over cells:

- `whole`, per level: cells that are entirely free and whose parent is not. These are the free lists of buddy allocation.
- `partial`, per level and number of free devices: cells that are partly taken.

Cells are taken and given back as a whole; below a taken cell nothing is recorded. The listings are sorted, so a choice
depends on which cells are taken, and never on the order in which they were.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple


class Cell(NamedTuple):
    """A cell of a forest: level 0 is a device."""

    level: int
    at: int


class Room(NamedTuple):
    """A cell with enough room. A smaller value fits better: the level of the free block around it, then its free devices."""

    block: int
    free: int
    at: int


class Forest:
    """Free devices of equal trees."""

    __slots__ = ("_masks", "free", "left", "partial", "sizes", "splits", "top", "whole")

    def __init__(self, sizes: Sequence[int], roots: int) -> None:
        """`sizes` are the devices of a cell at each level, beginning with 1."""
        self.sizes = tuple(sizes)
        self.top = len(sizes) - 1
        self.splits = (1, *(upper // lower for lower, upper in pairwise(sizes)))
        self.left = devices = roots * sizes[-1]
        self.free = [[size] * (devices // size) for size in sizes]
        self.whole: list[list[int]] = [[] for _ in sizes]
        self.whole[-1].extend(range(roots))
        self.partial: list[dict[int, list[int]]] = [{} for _ in sizes]
        self._masks = [0] * len(sizes)
        """Per level: bit f is set while a partly taken cell has f free devices."""

    def find(self, level: int, devices: int) -> Room | None:
        """The best fitting cell at `level` with `devices` free devices; of equal ones that with the fullest cells around it."""
        mask = self._masks[level] >> devices
        if mask:
            free = devices + (mask & -mask).bit_length() - 1
            return Room(level, free, self._in_fullest(level, self.partial[level][free]))
        size = self.sizes[level]
        for block in range(level, self.top + 1):
            if self.whole[block]:
                at = self.whole[block][0] if block == self.top else self._whole_in_fullest(block)
                return Room(block, self.sizes[block], at * (self.sizes[block] // size))
        return None

    def _in_fullest(self, level: int, cells: list[int]) -> int:
        """The cell whose parent has the fewest free devices; then that parent's parent, and so on; then the first."""
        return (
            cells[0] if len(cells) == 1 or level == self.top else min(cells, key=partial(self._around, level))
        )

    def _around(self, level: int, index: int) -> list[int]:
        """Free devices of the cells around a cell."""
        found = []
        for above in range(level + 1, self.top + 1):
            index //= self.splits[above]
            found.append(self.free[above][index])
        return found

    def _whole_in_fullest(self, level: int) -> int:
        """The free cell of `level` with the fullest cells around it; there is one, and its parent is partly taken."""
        size, split, row = self.sizes[level], self.splits[level + 1], self.free[level]
        mask = self._masks[level + 1] >> size << size
        while True:
            free = (mask & -mask).bit_length() - 1
            fitting = [
                parent
                for parent in self.partial[level + 1][free]
                if any(row[child] == size for child in range(parent * split, (parent + 1) * split))
            ]
            if fitting:
                parent = self._in_fullest(level + 1, fitting)
                return next(
                    child for child in range(parent * split, (parent + 1) * split) if row[child] == size
                )
            mask &= mask - 1

    def is_free(self, level: int, index: int) -> bool:
        """Whether a cell is entirely free."""
        size = self.sizes[level]
        if self.free[level][index] != size:
            return False
        while level < self.top:
            level += 1
            index //= self.splits[level]
            if self.free[level][index] < size:
                return False
        return True

    def fullest(self) -> Room | None:
        """The tree with the most free devices."""
        if self.whole[self.top]:
            return Room(self.top, self.sizes[self.top], self.whole[self.top][0])
        if not self._masks[self.top]:
            return None
        free = self._masks[self.top].bit_length() - 1
        return Room(self.top, free, self.partial[self.top][free][0])

    def closest(self, level: int, index: int, devices: int) -> Cell:
        """The smallest cell within a cell that has `devices` free devices; of equal ones, the one with the fewest."""
        for below in range(bisect_left(self.sizes, devices), level):
            ratio = self.sizes[level] // self.sizes[below]
            row = self.free[below]
            fitting = [
                (row[cell], around, cell)
                for cell in range(index * ratio, (index + 1) * ratio)
                if row[cell] >= devices and all(around := self._around(below, cell))  # 0: taken as a whole
            ]
            if fitting:
                return Cell(below, min(fitting)[2])
        return Cell(level, index)

    def carve(self, level: int, index: int, devices: int) -> list[Cell]:
        """The cells as which to take `devices` of a cell's free devices: few, and from its fullest parts."""
        if devices == self.sizes[level]:
            return [Cell(level, index)]
        split, row = self.splits[level], self.free[level - 1]
        children = range(index * split, (index + 1) * split)
        fitting = [child for child in children if row[child] >= devices]
        if fitting:
            return self.carve(level - 1, min(fitting, key=row.__getitem__), devices)
        pieces: list[Cell] = []
        for child in sorted(children, key=row.__getitem__, reverse=True):
            share = min(row[child], devices)
            pieces += self.carve(level - 1, child, share)
            devices -= share
            if not devices:
                break
        return pieces

    def take(self, level: int, index: int) -> None:
        """Take a cell that is entirely free."""
        free, sizes, splits, top = self.free, self.sizes, self.splits, self.top
        size = sizes[level]
        self.left -= size
        block, at = level, index
        while block < top and free[block + 1][at // splits[block + 1]] == sizes[block + 1]:
            block += 1
            at //= splits[block]
        listed = self.whole[block]
        del listed[bisect_left(listed, at)]
        self._change_above(block, at, -size)
        while block > level:
            rest = sizes[block] - size
            free[block][at] = rest
            self._list(block, at, rest)
            split = splits[block]
            first = at * split
            block -= 1
            at = index // (sizes[block] // size)
            listed = self.whole[block]
            place = bisect_left(listed, first)
            listed[place:place] = [*range(first, at), *range(at + 1, first + split)]
        free[level][index] = 0

    def give(self, level: int, index: int) -> None:
        """Give back a cell that was taken as such."""
        free, sizes, splits, top = self.free, self.sizes, self.splits, self.top
        size = sizes[level]
        self.left += size
        free[level][index] = size
        while level < top:
            split = splits[level + 1]
            parent = index // split
            rest = free[level + 1][parent]
            if rest + size != sizes[level + 1]:
                break
            if rest:
                self._unlist(level + 1, parent, rest)
                listed = self.whole[level]
                place = bisect_left(listed, parent * split)
                del listed[place : place + split - 1]
            level, index = level + 1, parent
            free[level][index] = sizes[level]
        insort(self.whole[level], index)
        self._change_above(level, index, size)

    def _change_above(self, level: int, index: int, change: int) -> None:
        """Count `change` more free devices in all cells around a cell; each is partly taken before or after."""
        free, splits, masks = self.free, self.splits, self._masks
        for above in range(level + 1, self.top + 1):
            index //= splits[above]
            row, lists = free[above], self.partial[above]
            before = row[index]
            row[index] = after = before + change
            if before:
                listed = lists[before]
                if len(listed) == 1:
                    del lists[before]
                    masks[above] ^= 1 << before
                else:
                    del listed[bisect_left(listed, index)]
            if after:
                if after in lists:
                    insort(lists[after], index)
                else:
                    lists[after] = [index]
                    masks[above] ^= 1 << after

    def _list(self, level: int, index: int, rest: int) -> None:
        if rest:
            listed = self.partial[level].get(rest)
            if listed:
                insort(listed, index)
            else:
                self.partial[level][rest] = [index]
                self._masks[level] |= 1 << rest

    def _unlist(self, level: int, index: int, rest: int) -> None:
        if rest:
            listed = self.partial[level][rest]
            if len(listed) == 1:
                del self.partial[level][rest]
                self._masks[level] &= ~(1 << rest)
            else:
                del listed[bisect_left(listed, index)]
