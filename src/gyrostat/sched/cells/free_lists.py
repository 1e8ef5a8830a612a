"""The free lists of buddy allocation: which physical cells can be bound, in order of preference.

Counts per level and index, updated up the tree:

- `bound`: devices of bound virtual cells (and of absent machines).
- `bad`: devices that are marked bad.
- `blocked`: devices that are bound or bad. The free lists contain the cells with none blocked and a parent with some.
- `low`: devices of opportunistic (low-priority) jobs; and `clear`, the level of the largest cell within that has none of
  them, counted from 1; 0 if there is none.

The lists are grouped by `clear` and sorted by `low`, so that a cell without opportunistic jobs, or with few of them, is
found without a search. Which job uses which device is recorded in `physical`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

from gyrostat.sched.cells.forest import Cell
from gyrostat.sched.cells.shortfall import gaps

TAKEN = 1 << 40
"""More opportunistic devices than any cell has: the cost of a cell that is bound to a virtual cell already."""


class FreeLists:
    """Free physical cells of one hierarchy, and the counts by which they are chosen."""

    def __init__(self, sizes: Sequence[int], splits: Sequence[int], roots: int) -> None:
        """`roots` trees; `sizes` are the devices of a cell at each level, `splits` its children."""
        self.sizes = sizes
        self.splits = splits
        self.top = len(sizes) - 1
        self.width = max(1, roots * sizes[-1])
        rows = [roots * sizes[-1] // size for size in sizes]
        self.bound = [[0] * row for row in rows]
        self.bad = [[0] * row for row in rows]
        self.blocked = [[0] * row for row in rows]
        self.low = [[0] * row for row in rows]
        self.clear = [bytearray([level + 1]) * row for level, row in enumerate(rows)]
        self.within = [[0] * row for row in rows]
        """The cost of cells within bound ones: `low`, plus `TAKEN` for cells that are bound to a virtual cell."""
        self.nonzero = [bytearray(row) for row in rows]
        """Whether `within` is not 0: bytes are faster to search than numbers."""
        self.lists: list[list[list[int]]] = [[[] for _ in range(level + 2)] for level in range(len(sizes))]
        """Free cells by level and `clear`, as `low` * width + index, sorted."""
        self.free = [0] * len(sizes)
        """Number of cells in the lists of each level: f_k of healthy cells."""
        self.total = [0] * len(sizes)
        """The same if all devices were healthy."""
        self.needed = [0] * len(sizes)
        """r_k - a_k: cells that tenants have and that are not bound."""
        self.bad_devices: set[int] = set()
        self.low_devices = 0
        for root in range(roots):
            self._list(self.top, root)
            self.total[self.top] += 1

    # Choosing ------------------------------------------------------------------------------------------------

    def choose(self, level: int) -> int | None:
        """The cell to bind: healthy, with the fewest opportunistic devices, from the smallest free block.

        None if that would take cells that other tenants may still request. Larger blocks than necessary are split only if
        there is a surplus of them.
        """
        over = total_over = None
        best: tuple[int, int] | None = None
        for block in range(level, self.top + 1):
            if block > level:
                if over is None:
                    over = gaps(self.free, self.needed, self.splits)
                if over[block] < 1:
                    break
            if not self.free[block]:
                continue
            if self.bad_devices and total_over is None:
                total_over = gaps(self.total, self.needed, self.splits)
            found = self._best_in(block, level, total_over)
            if found is not None:
                if not found[0]:
                    return found[1]
                if best is None or found[0] < best[0]:
                    best = found
        return None if best is None else best[1]

    def _best_in(self, block: int, level: int, total_over: list[int] | None) -> tuple[int, int] | None:
        """Opportunistic devices and index of the best cell of `level` in a free block of level `block`."""
        lists = self.lists[block]
        for clear in range(level + 1, block + 2):
            for key in lists[clear]:
                index = key % self.width
                if total_over is None or self._leaves_enough(block, index, level, total_over):
                    return 0, self._clear_within(block, index, level, last=False)
        best: tuple[int, int] | None = None
        for clear in range(level + 1):
            for key in lists[clear]:
                index = key % self.width
                if total_over is None or self._leaves_enough(block, index, level, total_over):
                    found = self._least_used_within(block, index, level)
                    if best is None or found < best:
                        best = found
                    break
        return best

    def _leaves_enough(self, block: int, index: int, level: int, total_over: list[int]) -> bool:
        """Whether splitting the block around a cell leaves enough cells for all tenants, counting bad ones too."""
        while block < self.top and not self.bound[block + 1][index // self.splits[block + 1]]:
            block += 1
            index //= self.splits[block]
        return all(total_over[between] >= 1 for between in range(level + 1, block + 1))

    def _clear_within(self, block: int, index: int, level: int, *, last: bool) -> int:
        """A cell of `level` without opportunistic devices, in a block that has such cells: the best fit on the way down."""
        while block > level:
            if self.clear[block][index] == block + 1:
                ratio = self.sizes[block] // self.sizes[level]
                return index * ratio + (ratio - 1 if last else 0)
            split = self.splits[block]
            start = index * split
            block -= 1
            row = self.clear[block]
            find = row.rfind if last else row.find
            for wanted in range(level + 1, block + 2):
                index = find(wanted, start, start + split)
                if index >= 0:
                    break
        return index

    def _least_used_within(self, block: int, index: int, level: int) -> tuple[int, int]:
        while block > level:
            split = self.splits[block]
            block -= 1
            row = self.low[block][index * split : (index + 1) * split]
            index = index * split + row.index(min(row))
        return self.low[level][index], index

    def choose_any(self, level: int) -> int:
        """If no healthy cell is free: the cell with the fewest bad, then opportunistic, devices.

        There always is one: if all devices were healthy, every legal request would succeed.
        """
        over = gaps(self.total, self.needed, self.splits)
        size = self.sizes[level]
        candidates = [
            (self.bad[level][index], self.low[level][index], index)
            for index in {device // size for device in self.bad_devices}
            if not self.bound[level][index] and self._leaves_enough(level, index, level, over)
        ]
        if candidates:
            return min(candidates)[2]
        found = [
            best
            for block in range(level, self.top + 1)
            if (best := self._best_in(block, level, over)) is not None
        ]
        return min(found)[1]

    def may_bind(self, level: int, index: int) -> bool:
        """Whether this cell can be bound without taking cells that tenants may still request."""
        if self.bound[level][index]:
            return False
        return self._leaves_enough(level, index, level, gaps(self.total, self.needed, self.splits))

    # Binding -------------------------------------------------------------------------------------------------

    def bind(self, level: int, index: int) -> None:
        for device in self.bad_within(level, index):
            self._unblock(0, device)
        self._block(level, index)
        self._fill(self.bound, level, index, full=True)
        self._raise_bound(level, index, self.sizes[level])

    def unbind(self, level: int, index: int) -> None:
        self._unblock(level, index)
        for device in self.bad_within(level, index):
            self._block(0, device)
        self._fill(self.bound, level, index, full=False)
        self._raise_bound(level, index, -self.sizes[level])

    def _raise_bound(self, level: int, index: int, change: int) -> None:
        """Count bound devices in the cells around a cell, and the free cells if all devices were healthy."""
        bound, total, splits = self.bound, self.total, self.splits
        sign = 1 if change > 0 else -1
        whole = True
        for above in range(level + 1, self.top + 1):
            index //= splits[above]
            before = bound[above][index]
            bound[above][index] = after = before + change
            if whole:
                if before and after:
                    total[above - 1] -= sign
                    whole = False
                else:
                    total[above - 1] += sign * (splits[above] - 1)
        if whole:
            total[self.top] -= sign

    def _block(self, level: int, index: int) -> None:
        """Remove a cell from the free lists, splitting the block around it."""
        blocked, splits, sizes = self.blocked, self.splits, self.sizes
        block, at = level, index
        while block < self.top and not blocked[block + 1][at // splits[block + 1]]:
            block += 1
            at //= splits[block]
        self._unlist(block, at)
        size = sizes[level]
        while block > level:
            split = splits[block]
            first = at * split
            clear = self.clear[block][at] == block + 1
            block -= 1
            at = index // (sizes[block] // size)
            if clear:
                listed = self.lists[block][block + 1]
                place = bisect_left(listed, first)
                listed[place:place] = [*range(first, at), *range(at + 1, first + split)]
                self.free[block] += split - 1
            else:
                for sibling in range(first, first + split):
                    if sibling != at:
                        self._list(block, sibling)
        self._fill(blocked, level, index, full=True)
        self._raise(blocked, level, index, size)

    def _unblock(self, level: int, index: int) -> None:
        """Put a cell back into the free lists, merged with its buddies."""
        blocked, splits = self.blocked, self.splits
        self._fill(blocked, level, index, full=False)
        self._raise(blocked, level, index, -self.sizes[level])
        while level < self.top:
            split = splits[level + 1]
            parent = index // split
            if blocked[level + 1][parent]:
                break
            first = parent * split
            if not self.low[level + 1][parent]:
                listed = self.lists[level][level + 1]
                place = bisect_left(listed, first)
                del listed[place : place + split - 1]
                self.free[level] -= split - 1
            else:
                for sibling in range(first, first + split):
                    if sibling != index:
                        self._unlist(level, sibling)
            level, index = level + 1, parent
        self._list(level, index)

    def _list(self, level: int, index: int) -> None:
        insort(self.lists[level][self.clear[level][index]], self.low[level][index] * self.width + index)
        self.free[level] += 1

    def _unlist(self, level: int, index: int) -> None:
        listed = self.lists[level][self.clear[level][index]]
        del listed[bisect_left(listed, self.low[level][index] * self.width + index)]
        self.free[level] -= 1

    # Cells within bound ones ---------------------------------------------------------------------------------

    def child_to_bind(self, level: int, parent: int) -> int:
        """The cell of `level` in a bound `parent` that is not bound yet, with the fewest opportunistic devices."""
        split = self.splits[level + 1]
        first = parent * split
        untouched = self.nonzero[level].find(0, first, first + split)
        if untouched >= 0:
            return untouched
        children = self.within[level][first : first + split]
        return first + children.index(min(children))

    def mark_assigned(self, level: int, index: int) -> None:
        """This cell, within a bound one, is bound to a virtual cell."""
        self.within[level][index] += TAKEN
        self.nonzero[level][index] = True

    def mark_unassigned(self, level: int, index: int) -> None:
        self.within[level][index] -= TAKEN
        self.nonzero[level][index] = self.within[level][index] > 0

    # Counting ------------------------------------------------------------------------------------------------

    def mark_low(self, level: int, index: int, *, lent: bool) -> None:
        """Count opportunistic devices, and keep the free lists sorted by these counts."""
        listed = self._listed_about(level, index)
        for cell in listed:
            self._unlist(*cell)
        size = self.sizes[level]
        change = size if lent else -size
        self.low_devices += change
        self._fill(self.low, level, index, full=lent)
        for below in range(level, -1, -1):
            each = self.sizes[below] if lent else -self.sizes[below]
            ratio = size // self.sizes[below]
            cells = slice(index * ratio, (index + 1) * ratio)
            costs = [cost + each for cost in self.within[below][cells]]
            self.within[below][cells] = costs
            self.nonzero[below][cells] = bytes(map(bool, costs))
            self.clear[below][cells] = bytes([0 if lent else below + 1]) * ratio
        while level < self.top:
            split = self.splits[level + 1]
            start = index // split * split
            row = self.clear[level]
            level += 1
            index //= split
            cost = self.within[level][index] + change
            self.within[level][index] = cost
            self.nonzero[level][index] = cost > 0
            left = self.low[level][index] + change
            self.low[level][index] = left
            if left:
                clear = level
                while clear and row.find(clear, start, start + split) < 0:
                    clear -= 1
                self.clear[level][index] = clear
            else:
                self.clear[level][index] = level + 1
        for cell in listed:
            self._list(*cell)

    def _listed_about(self, level: int, index: int) -> list[Cell]:
        """The cells of the free lists that contain a cell, or are within it."""
        blocked = self.blocked[level][index]
        if not blocked:
            while level < self.top and not self.blocked[level + 1][index // self.splits[level + 1]]:
                level += 1
                index //= self.splits[level]
            return [Cell(level, index)]
        if blocked == self.sizes[level]:
            return []
        split = self.splits[level]
        children = range(index * split, (index + 1) * split)
        return [cell for child in children for cell in self._listed_about(level - 1, child)]

    def bad_within(self, level: int, index: int) -> list[int]:
        """The bad devices of a cell, ascending."""
        if not self.bad[level][index]:
            return []
        size = self.sizes[level]
        devices = range(index * size, (index + 1) * size)
        if size > len(self.bad_devices):
            return sorted(device for device in self.bad_devices if device in devices)
        return [device for device in devices if self.bad[0][device]]

    def _raise(self, rows: list[list[int]], level: int, index: int, change: int) -> None:
        """Count `change` more devices in all cells around a cell."""
        splits = self.splits
        while level < self.top:
            level += 1
            index //= splits[level]
            rows[level][index] += change

    def _fill(self, rows: list[list[int]], level: int, index: int, *, full: bool) -> None:
        """Count all devices, or none, of a cell and of the cells within it."""
        size = self.sizes[level]
        rows[level][index] = size if full else 0
        for below in range(level - 1, -1, -1):
            each = self.sizes[below]
            ratio = size // each
            rows[below][index * ratio : (index + 1) * ratio] = [each if full else 0] * ratio
