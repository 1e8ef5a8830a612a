"""The specification of a cluster of cells: hierarchies, machines and tenants; and whether all tenants' cells fit.

`load` reads it from a YAML file; `validated` checks one that was made in Python.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from gyrostat.core.errors import UsageError
from gyrostat.core.roles import ServerCapacity
from gyrostat.sched.cells.file import CellFileProblem, LineIndex
from gyrostat.sched.cells.shortfall import gaps, missing_by_tenant

OPPORTUNISTIC = -1
"""The priority of jobs that run on idle devices and are preempted by guaranteed jobs, whose priorities are 0 and above."""
MAX_PRIORITY = 1000


@dataclass(frozen=True)
class Hierarchy:
    """Cell types from the device up, each a number of cells of the type below. All cells of a level are equal."""

    types: tuple[str, ...]
    sizes: tuple[int, ...]
    """Devices in a cell of each type, beginning with 1."""
    node_level: int
    """The level of a machine."""

    @property
    def name(self) -> str:
        return self.types[-1]

    @property
    def device_type(self) -> str:
        return self.types[0]

    @cached_property
    def splits(self) -> tuple[int, ...]:
        return (1, *(upper // lower for lower, upper in pairwise(self.sizes)))

    def nodes_in(self, level: int) -> int:
        return self.sizes[level] // self.sizes[self.node_level]


@dataclass(frozen=True)
class TopCell:
    """A physical cell that is not part of a larger one, and its machines in order."""

    hierarchy: str
    level: int
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class PinnedCell:
    """A virtual cell that is always bound to the same physical cell: the one around `at`."""

    name: str
    hierarchy: str
    level: int
    at: str


@dataclass(frozen=True)
class CellQuota:
    """The number of cells of one level that belong to a virtual cluster."""

    hierarchy: str
    level: int
    count: int


@dataclass(frozen=True)
class VirtualCluster:
    """A tenant: its cells, its pinned cells, and its weight for opportunistic devices."""

    name: str
    cells: tuple[CellQuota, ...] = ()
    pinned: tuple[PinnedCell, ...] = ()
    weight: float = 1.0
    servers: ServerCapacity = field(default_factory=ServerCapacity)
    """For parameter servers, beside its cells."""


@dataclass(frozen=True)
class CellSpec:
    """A whole cluster."""

    hierarchies: tuple[Hierarchy, ...]
    top_cells: tuple[TopCell, ...]
    virtual_clusters: tuple[VirtualCluster, ...]
    priorities: Mapping[str, int] = field(default_factory=dict)

    def hierarchy(self, name: str) -> Hierarchy:
        return self._by_name[name]

    @property
    def servers(self) -> dict[str, ServerCapacity]:
        """For parameter servers, by tenant."""
        return {vc.name: vc.servers for vc in self.virtual_clusters}

    def priority(self, name: str) -> int:
        """The priority that a job names: a name of the file, a number, or `opportunistic`."""
        if name in self.priorities:
            return self.priorities[name]
        if name == "opportunistic":
            return OPPORTUNISTIC
        if name.isdecimal():
            return int(name)
        known = ", ".join(["opportunistic", *self.priorities])
        raise UsageError(f"there is no priority {name!r}; there are {known}, and numbers from 0")

    @cached_property
    def _by_name(self) -> dict[str, Hierarchy]:
        return {hierarchy.name: hierarchy for hierarchy in self.hierarchies}

    @cached_property
    def layouts(self) -> dict[str, CellLayout]:
        """By hierarchy: the positions of its machines."""
        return {hierarchy.name: CellLayout.of(self, hierarchy) for hierarchy in self.hierarchies}


@dataclass(frozen=True)
class CellLayout:
    """The machines of one hierarchy in equal top cells. Smaller top cells of the file are padded with absent machines."""

    nodes: tuple[str | None, ...]
    roots: int
    places: Mapping[str, int]

    @classmethod
    def of(cls, spec: CellSpec, hierarchy: Hierarchy) -> CellLayout:
        nodes: list[str | None] = []
        mine = [cell for cell in spec.top_cells if cell.hierarchy == hierarchy.name]
        for cell in sorted(mine, key=lambda cell: -cell.level):  # the largest first, so that all are aligned
            nodes += cell.nodes
        per_root = hierarchy.nodes_in(len(hierarchy.sizes) - 1)
        nodes += [None] * (-len(nodes) % per_root)
        places = {node: place for place, node in enumerate(nodes) if node is not None}
        return cls(tuple(nodes), len(nodes) // per_root, places)

    def locate(self, hierarchy: Hierarchy, level: int, at: str) -> int | None:
        """The index of the cell of that level around a machine, or a device given as `machine/number`."""
        node, _, number = at.partition("/")
        place = self.places.get(node)
        per_node = hierarchy.sizes[hierarchy.node_level]
        if place is None:
            return None
        if number:
            if not number.isdecimal() or int(number) >= per_node:
                return None
            return (place * per_node + int(number)) // hierarchy.sizes[level]
        if level < hierarchy.node_level:
            return None
        return place * per_node // hierarchy.sizes[level]


def validated(spec: CellSpec) -> CellSpec:
    """The spec itself; raises if not all tenants' cells fit."""
    problems = list(check(spec))
    if problems:
        raise UsageError("; ".join(problem.reason for problem in problems))
    return spec


def check(spec: CellSpec, lines: LineIndex | None = None) -> Iterator[CellFileProblem]:
    """Errors if not all tenants' cells fit at once: by tenant and level, the number of missing cells."""
    where = lines or LineIndex({(): 0})
    for hierarchy in spec.hierarchies:
        layout = spec.layouts[hierarchy.name]
        pinned: dict[tuple[int, int], tuple[str, PinnedCell]] = {}
        for vc in spec.virtual_clusters:
            for pin in vc.pinned:
                if pin.hierarchy == hierarchy.name:
                    yield from _check_pin(hierarchy, layout, vc, pin, pinned, where)
        free = _free_beside(hierarchy, layout, pinned)
        needs = {
            (vc.name, cells.level): cells.count
            for vc in spec.virtual_clusters
            for cells in vc.cells
            if cells.hierarchy == hierarchy.name
        }
        needed = [sum(n for (_, at), n in needs.items() if at == level) for level in range(len(free))]
        for level, gap in enumerate(gaps(free, needed, hierarchy.splits)):
            if gap >= 0:
                continue
            lacking = missing_by_tenant(-gap, {vc: n for (vc, at), n in needs.items() if at == level})
            kind = hierarchy.types[level]
            for vc_name, short in lacking.items():
                yield CellFileProblem(
                    where("virtual_clusters", vc_name, "cells", kind),
                    f"virtual cluster {vc_name} is {short} short of its {needs[vc_name, level]} {kind} cells "
                    f"(level {level + 1}): all tenants together have {needed[level]}, and beside their larger cells "
                    f"{'and pinned ones ' if pinned else ''}the physical cluster has room for {needed[level] + gap}",
                )


def _check_pin(
    hierarchy: Hierarchy,
    layout: CellLayout,
    vc: VirtualCluster,
    pin: PinnedCell,
    pinned: dict[tuple[int, int], tuple[str, PinnedCell]],
    where: LineIndex,
) -> Iterator[CellFileProblem]:
    line = where("virtual_clusters", vc.name, "pinned", pin.name)
    index = layout.locate(hierarchy, pin.level, pin.at)
    kind = hierarchy.types[pin.level]
    if index is None:
        smaller = (
            "" if pin.level >= hierarchy.node_level else "; for a cell within a machine name a device: NODE/0"
        )
        yield CellFileProblem(
            line, f"pinned cell {pin.name}: no {kind} at {pin.at!r} in the physical cluster{smaller}"
        )
        return
    size = hierarchy.sizes[pin.level]
    per_node = hierarchy.sizes[hierarchy.node_level]
    nodes = layout.nodes[index * size // per_node : -(-(index + 1) * size // per_node)]
    if None in nodes:
        yield CellFileProblem(line, f"pinned cell {pin.name}: {pin.at!r} is not part of a whole {kind}")
        return
    for (level, other), (owner, name) in pinned.items():
        low, high = sorted([(level, other), (pin.level, index)])
        if low[1] // (hierarchy.sizes[high[0]] // hierarchy.sizes[low[0]]) == high[1]:
            yield CellFileProblem(
                line, f"pinned cell {pin.name} of {vc.name} overlaps {name.name} of {owner}"
            )
            return
    pinned[pin.level, index] = (vc.name, pin)


def _free_beside(
    hierarchy: Hierarchy, layout: CellLayout, pinned: Mapping[tuple[int, int], object]
) -> list[int]:
    """Free cells per level, as large as possible, without pinned cells and absent machines."""
    sizes = hierarchy.sizes
    taken = [0] * (layout.roots * sizes[-1])
    for level, index in pinned:
        taken[index * sizes[level] : (index + 1) * sizes[level]] = [1] * sizes[level]
    per_node = sizes[hierarchy.node_level]
    for place, node in enumerate(layout.nodes):
        if node is None:
            taken[place * per_node : (place + 1) * per_node] = [1] * per_node
    free, whole_above = [0] * len(sizes), [False] * layout.roots
    for level in range(len(sizes) - 1, -1, -1):
        size = sizes[level]
        whole = [not any(taken[start : start + size]) for start in range(0, len(taken), size)]
        if level == len(sizes) - 1:
            free[level] = sum(whole)
        else:
            ratio = sizes[level + 1] // size
            free[level] = sum(
                1 for i, is_whole in enumerate(whole) if is_whole and not whole_above[i // ratio]
            )
        whole_above = whole
    return free
