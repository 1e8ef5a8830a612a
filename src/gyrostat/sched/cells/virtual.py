"""A tenant's virtual cells of one level, and the jobs in them. Nothing here depends on other tenants.

There is one forest per priority, without the jobs that the priority may preempt. The forest of priority 0 counts all jobs;
others are made for the first preemption, and kept while there are jobs of the priority just below. Virtual cells are bound
to physical ones only while a job runs in them: first the tenant's cell as a whole, then the cells within it that the job
uses.
"""

from __future__ import annotations

from collections.abc import Iterator

from gyrostat.sched.cells.forest import Forest
from gyrostat.sched.cells.free_lists import TAKEN
from gyrostat.sched.cells.physical import PhysicalCells

_NOBODY = ""
"""The holder of bad devices within a tenant's bound cells."""
_ALWAYS = 1 << 30
"""The priority that nothing preempts."""


class VirtualCells:
    """The tenant's cells of level `root` in one pool; or one pinned cell, which is bound permanently."""

    def __init__(
        self, vc: str, pool: PhysicalCells, root: int, count: int, pinned: str | None = None
    ) -> None:
        self.vc = vc
        self.pool = pool
        self.root = root
        self.count = count
        self.pinned = pinned
        self.sizes = pool.sizes[: root + 1]
        self.views: dict[int, Forest] = {0: Forest(self.sizes, count)}
        """The forest that each priority sees, ascending."""
        self.priorities: dict[int, int] = {}
        """Number of cells that jobs of each priority hold."""
        devices = count * self.sizes[-1]
        self.physical = [[-1] * (devices // size) for size in self.sizes]
        """By level and virtual cell: the physical cell that it is bound to, or -1."""
        self.bound = 0
        """Number of the tenant's cells that are bound."""
        self.users = [0] * count
        """Number of cells that jobs hold within each of the tenant's cells."""
        self.holders: list[dict[int, tuple[str, int]]] = [{} for _ in self.sizes]
        """By level and virtual cell: the job that holds it, and its priority."""
        self.bad_idle: dict[int, int] = {}
        """Bad devices in bound cells that no guaranteed job has, and the virtual devices that represent them."""
        self.bad_in_use: dict[int, tuple[int, int]] = {}
        """Bad devices that a job still has: virtual device, and the job's priority. Higher priorities must not get them."""

    @property
    def bad(self) -> int:
        """Number of bad devices in bound cells."""
        return len(self.bad_idle) + len(self.bad_in_use)

    def view(self, priority: int) -> Forest:
        forest = self.views.get(priority)
        if forest is None:
            forest = Forest(self.sizes, self.count)
            for level, held in enumerate(self.holders):
                for index, (_, held_by) in held.items():
                    if held_by >= priority:
                        forest.take(level, index)
            for virtual, held_by in self.bad_in_use.values():
                if held_by < priority:
                    forest.take(0, virtual)
            self.views[priority] = forest
            self.views = dict(sorted(self.views.items()))
        return forest

    # Jobs ---------------------------------------------------------------------------------------------------------

    def hold(self, level: int, index: int, job: str, priority: int) -> None:
        self.holders[level][index] = (job, priority)
        self.priorities[priority] = self.priorities.get(priority, 0) + 1
        for seen_by, forest in self.views.items():
            if seen_by <= priority:
                forest.take(level, index)

    def drop(self, level: int, index: int) -> None:
        _, priority = self.holders[level].pop(index)
        for seen_by, forest in self.views.items():
            if seen_by <= priority:
                forest.give(level, index)
        self.priorities[priority] -= 1
        if not self.priorities[priority]:
            del self.priorities[priority]
            self.views.pop(priority + 1, None)

    def holders_in(self, level: int, index: int) -> Iterator[str]:
        """Jobs with a device in a virtual cell."""
        for above in range(level, self.root + 1):
            held = self.holders[above].get(index // (self.sizes[above] // self.sizes[level]))
            if held is not None:
                yield held[0]
                return
        yield from self._holders_below(level, index)

    def _holders_below(self, level: int, index: int) -> Iterator[str]:
        free = self.views[0].free[level - 1] if level else []
        split = self.pool.splits[level]
        for child in range(index * split, (index + 1) * split) if level else ():
            if free[child] == self.sizes[level - 1]:
                continue
            held = self.holders[level - 1].get(child)
            if held is None:
                yield from self._holders_below(level - 1, child)
            elif held[0] != _NOBODY:
                yield held[0]

    # Binding ------------------------------------------------------------------------------------------------------

    def bind_root(self, root: int, physical: int) -> bool:
        """Bind one of the tenant's cells. True if it has bad devices, which the forests then count as taken."""
        self.pool.bind(self.root, physical)
        self.pool.owners[self.root][physical] = (self, root)
        self.physical[self.root][root] = physical
        self.bound += 1
        if self.pinned is None:
            self.pool.needed[self.root] -= 1
        bad = self.pool.bad_within(self.root, physical)
        for device in bad:
            self.reserve_bad(device, root)
        return bool(bad)

    def unbind_root(self, root: int) -> None:
        """Unbind one of the tenant's cells, in which no job runs any more."""
        physical = self.physical[self.root][root]
        for device in self.pool.bad_within(self.root, physical):
            if device in self.bad_idle:
                self.release_bad(device)
        self.physical[self.root][root] = -1
        del self.pool.owners[self.root][physical]
        self.bound -= 1
        if self.pinned is None:
            self.pool.needed[self.root] += 1
        self.pool.unbind(self.root, physical)

    def bind(self, level: int, index: int) -> int:
        """Bind a virtual cell within a bound cell of the tenant. Returns its physical cell."""
        row = self.physical[level]
        if row[index] >= 0:
            return row[index]
        parent = self.bind(level + 1, index // self.pool.splits[level + 1])
        child = self.pool.child_to_bind(level, parent)
        self.pin(level, index, child)
        return child

    def pin(self, level: int, index: int, physical: int) -> None:
        self.physical[level][index] = physical
        self.pool.mark_assigned(level, physical)

    def unpin(self, level: int, index: int) -> None:
        """Unbind this cell and the cells around it, as far up as no job is in them."""
        free, pool = self.views[0].free, self.pool
        while level < self.root and free[level][index] == self.sizes[level]:
            physical = self.physical[level][index]
            if physical >= 0:
                pool.mark_unassigned(level, physical)
                self.physical[level][index] = -1
            level += 1
            index //= pool.splits[level]

    # Bad devices --------------------------------------------------------------------------------------------------

    def reserve_bad(self, device: int, root: int, virtual: int | None = None) -> None:
        """Take a virtual device for a bad one that no job has, so that no job is placed there."""
        if virtual is None or not self._can_represent(virtual, device, root):
            virtual = self.virtual_for(0, device, root)
            assert virtual is not None, "a bad device in a bound cell has a virtual device"
        self.bad_idle[device] = virtual
        self.hold(0, virtual, _NOBODY, _ALWAYS)

    def _can_represent(self, virtual: int, device: int, root: int) -> bool:
        if virtual // self.sizes[-1] != root or not self.views[0].is_free(0, virtual):
            return False
        return self.pin_path(0, virtual, device)

    def release_bad(self, device: int) -> None:
        virtual = self.bad_idle.pop(device)
        self.drop(0, virtual)
        self.unpin(0, virtual)

    def repair(self, device: int) -> None:
        if device in self.bad_idle:
            self.release_bad(device)
        else:
            self.remove_bad_in_use(device)

    def add_bad_in_use(self, device: int, virtual: int, priority: int) -> None:
        """A device of a job of this priority became bad."""
        self.bad_in_use[device] = (virtual, priority)
        for seen_by, forest in self.views.items():
            if seen_by > priority:
                forest.take(0, virtual)

    def remove_bad_in_use(self, device: int) -> int:
        """Returns the virtual device that represented it."""
        virtual, priority = self.bad_in_use.pop(device)
        for seen_by, forest in self.views.items():
            if seen_by > priority:
                forest.give(0, virtual)
        return virtual

    def virtual_for(self, level: int, physical: int, root: int) -> int | None:
        """The virtual cell for a physical one in the tenant's cell `root`; binds the first unbound ones on the way down.

        None if the physical cell, or one around it, cannot be bound there.
        """
        pool, index = self.pool, root
        for below in range(self.root - 1, level - 1, -1):
            wanted = physical // (pool.sizes[below] // pool.sizes[level])
            split = pool.splits[below + 1]
            children = range(index * split, (index + 1) * split)
            row = self.physical[below]
            found = next((child for child in children if row[child] == wanted), None)
            if found is None:
                found = next((child for child in children if row[child] < 0), None)
                if found is None:
                    return None
                self.pin(below, found, wanted)
            index = found
        return index

    def pin_path(self, level: int, virtual: int, physical: int) -> bool:
        """Bind a virtual cell, and those around it, to a given physical one, in a bound cell of the tenant.

        False, and no change, if one of them is bound to another.
        """
        missing = []
        for above in range(level, self.root + 1):
            ratio = self.sizes[above] // self.sizes[level]
            at, wanted = virtual // ratio, physical // ratio
            now = self.physical[above][at]
            if now < 0 and above < self.root and self.pool.within[above][wanted] < TAKEN:
                missing.append((above, at, wanted))
            elif now != wanted:
                return False
        for above, at, wanted in missing:
            self.pin(above, at, wanted)
        return True
