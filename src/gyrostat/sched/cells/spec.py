"""What a cluster of cells is: hierarchies, machines, tenants. From a YAML file, with every error told by line.

`load` is the way in. A spec that came out of it is sound: hierarchies are uniform, every machine is there once, and all
tenants' cells fit at the same time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path

from gyrostat.core.errors import UsageError
from gyrostat.sched.cells.file import CellFile, CellFileProblem, LineIndex, TopCellEntry, read
from gyrostat.sched.cells.shortfall import gaps, missing_by_tenant

OPPORTUNISTIC = -1
"""The priority of jobs that run on what others leave, and go when these come. Guaranteed priorities are 0 and more."""


@dataclass(frozen=True)
class Hierarchy:
    """Cell types from the device up, each so many of the one below: a pool in which cells of a level are alike."""

    types: tuple[str, ...]
    sizes: tuple[int, ...]
    """Devices in a cell of each type, beginning with 1."""
    node_level: int
    """Which of the types is a machine."""

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
    """A virtual cell that is always the same physical one: the one around `at`."""

    name: str
    hierarchy: str
    level: int
    at: str


@dataclass(frozen=True)
class CellQuota:
    """So many cells of a level belong to a virtual cluster."""

    hierarchy: str
    level: int
    count: int


@dataclass(frozen=True)
class VirtualCluster:
    """A tenant: its cells, its pinned cells, and its weight among those who want opportunistic devices."""

    name: str
    cells: tuple[CellQuota, ...] = ()
    pinned: tuple[PinnedCell, ...] = ()
    weight: float = 1.0


@dataclass(frozen=True)
class CellSpec:
    """A whole cluster. Use `load`, or `sound` for one made in Python."""

    hierarchies: tuple[Hierarchy, ...]
    top_cells: tuple[TopCell, ...]
    virtual_clusters: tuple[VirtualCluster, ...]
    priorities: Mapping[str, int] = field(default_factory=dict)

    def hierarchy(self, name: str) -> Hierarchy:
        return self._by_name[name]

    def priority(self, name: str) -> int:
        """What a job's priority is: a name of the file's, a number, or `opportunistic`."""
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
        """Where each hierarchy's machines stand."""
        return {hierarchy.name: CellLayout.of(self, hierarchy) for hierarchy in self.hierarchies}


@dataclass(frozen=True)
class CellLayout:
    """The machines of one hierarchy in equal top cells. Where the file has smaller ones, the rest of a top cell is absent."""

    nodes: tuple[str | None, ...]
    roots: int
    places: Mapping[str, int]

    @classmethod
    def of(cls, spec: CellSpec, hierarchy: Hierarchy) -> CellLayout:
        nodes: list[str | None] = []
        mine = [cell for cell in spec.top_cells if cell.hierarchy == hierarchy.name]
        for cell in sorted(mine, key=lambda cell: -cell.level):  # larger ones first, so that all are aligned
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


def load(path: Path) -> CellSpec:
    """The spec in a file; all that is wrong with it is told by line."""
    try:
        text = path.read_text()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not text: {error}") from error
    spec, problems = parse(text)
    if spec is None:
        told = "\n".join(f"  {path}:{problem.line}: {problem.reason}" for problem in problems)
        raise UsageError(f"{path} is no sound cell file:\n{told}")
    return spec


def parse(text: str) -> tuple[CellSpec | None, list[CellFileProblem]]:
    """The spec, or everything that is wrong with it."""
    content, lines, problems = read(text)
    if content is None:
        return None, sorted(problems)
    reader = _Reader(content, lines)
    spec = reader.spec()
    problems += reader.problems
    if not problems:
        problems += check(spec, lines)
    return (None if problems else spec), sorted(problems)


def validated(spec: CellSpec) -> CellSpec:
    """A spec that was made in Python, if all tenants' cells fit."""
    problems = list(check(spec))
    if problems:
        raise UsageError("; ".join(problem.reason for problem in problems))
    return spec


def check(spec: CellSpec, lines: LineIndex | None = None) -> Iterator[CellFileProblem]:
    """Whether all tenants' cells fit at once: which lacks how many cells of which level."""
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
    """Free cells per level, at the highest levels, once pinned cells and absent machines are taken out."""
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


_MOST_DEVICES = 10_000_000
"""More than any cluster has: beyond it somebody has mistyped."""
_RANGE = re.compile(r"^(.*)\[(\d+)-(\d+)\](.*)$|^(.*?)(\d+)~(\d+)()$")


def expand(pattern: str) -> list[str]:
    """`n[0-3]` is n0, n1, n2, n3; `10.0.1.4~7` is 10.0.1.4 … 10.0.1.7. Leading zeros are kept."""
    match = _RANGE.match(pattern)
    if match is None:
        return [pattern]
    before, first, last, after = (
        match.group(i) if match.group(2) else match.group(i + 4) for i in (1, 2, 3, 4)
    )
    if int(last) - int(first) >= _MOST_DEVICES:
        return []
    width = len(first) if first.startswith("0") else 0
    return [
        f"{head}{number:0{width}d}{after}"
        for head in expand(before)
        for number in range(int(first), int(last) + 1)
    ]


class _Reader:
    """From what a file says to what it means."""

    def __init__(self, content: CellFile, lines: LineIndex) -> None:
        self.content = content
        self.lines = lines
        self.problems: list[CellFileProblem] = []

    def spec(self) -> CellSpec:
        hierarchies = self._hierarchies()
        if self.problems:
            return CellSpec((), (), ())  # without all hierarchies the rest would only seem wrong
        return CellSpec(
            hierarchies=hierarchies,
            top_cells=tuple(self._top_cells(hierarchies)),
            virtual_clusters=tuple(self._virtual_clusters(hierarchies)),
            priorities=dict(self.content.priorities),
        )

    def _problem(self, reason: str, *path: str | int) -> None:
        self.problems.append(CellFileProblem(self.lines(*path), reason))

    def _hierarchies(self) -> tuple[Hierarchy, ...]:
        entries = self.content.cell_types
        inside: dict[str, str] = {}
        for name, entry in entries.items():
            if entry.of in entries and entry.of in inside:
                self._problem(
                    f"{entry.of} is part of both {inside[entry.of]} and {name}: cells of a level must be alike; "
                    "give one of them types of its own",
                    "cell_types",
                    name,
                    "of",
                )
            inside.setdefault(entry.of, name)
        found = []
        for name in entries:
            if name in inside:
                continue
            chain = [name]
            while chain[-1] in entries and chain.count(chain[-1]) == 1:
                chain.append(entries[chain[-1]].of)
            found.append(self._hierarchy(chain[::-1]))
        reached = {kind for hierarchy in found for kind in hierarchy.types}
        for name in entries:
            if name not in reached and not self.problems:
                self._problem(f"{name} is part of itself", "cell_types", name)
        if not entries:
            self._problem("there are no cell types", "cell_types")
        return tuple(found)

    def _hierarchy(self, types: list[str]) -> Hierarchy:
        entries = self.content.cell_types
        sizes = [1]
        for kind in types[1:]:
            sizes.append(sizes[-1] * entries[kind].count)
        nodes = [level for level, kind in enumerate(types) if level and entries[kind].node]
        if len(nodes) != 1:
            marked = ", ".join(types[level] for level in nodes) or "none"
            self._problem(
                f"exactly one type of the hierarchy {types[-1]} must be a machine (`node: true`), found: {marked}",
                "cell_types",
                types[nodes[1]] if nodes else types[-1],
            )
        return Hierarchy(tuple(types), tuple(sizes), nodes[0] if nodes else 1)

    def _top_cells(self, hierarchies: tuple[Hierarchy, ...]) -> Iterator[TopCell]:
        seen: dict[str, int] = {}
        for place, entry in enumerate(self.content.physical_cluster):
            kind = self._find(hierarchies, entry.cell, "physical_cluster", place, "cell")
            nodes = list(self._nodes(place, entry, seen))
            if kind is None:
                continue
            hierarchy, level = kind
            if level < hierarchy.node_level:
                self._problem(
                    f"{entry.cell} is smaller than a machine ({hierarchy.types[hierarchy.node_level]}); name whole machines",
                    "physical_cluster",
                    place,
                    "cell",
                )
                continue
            each = hierarchy.nodes_in(level)
            if not nodes or len(nodes) % each:
                self._problem(
                    f"a {entry.cell} has {each} machines, so their number must be a multiple of that; there are {len(nodes)}",
                    "physical_cluster",
                    place,
                    "nodes",
                )
                continue
            if len(nodes) * hierarchy.sizes[hierarchy.node_level] > _MOST_DEVICES:
                self._problem(
                    f"these would be more than {_MOST_DEVICES:,} devices", "physical_cluster", place, "nodes"
                )
                continue
            for start in range(0, len(nodes), each):
                yield TopCell(hierarchy.name, level, tuple(nodes[start : start + each]))

    def _nodes(self, place: int, entry: TopCellEntry, seen: dict[str, int]) -> Iterator[str]:
        for number, pattern in enumerate(entry.nodes):
            path = ("physical_cluster", place, "nodes", number)
            names = expand(pattern)
            if not names or not all(re.fullmatch(r"[^\s/@]+", name) for name in names):
                self._problem(f"{pattern!r} names no machines; write node7, node[0-7] or 10.0.1.0~7", *path)
                continue
            for name in names:
                if name in seen:
                    self._problem(f"machine {name} is here twice; the first is in line {seen[name]}", *path)
                else:
                    seen[name] = self.lines(*path)
                    yield name

    def _virtual_clusters(self, hierarchies: tuple[Hierarchy, ...]) -> Iterator[VirtualCluster]:
        for name, entry in self.content.virtual_clusters.items():
            path = ("virtual_clusters", name)
            cells, pinned = [], []
            for kind_name, count in entry.cells.items():
                kind = self._find(hierarchies, kind_name, *path, "cells", kind_name)
                if kind is not None:
                    cells.append(CellQuota(kind[0].name, kind[1], count))
            for pin_name, pin in entry.pinned.items():
                kind = self._find(hierarchies, pin.cell, *path, "pinned", pin_name, "cell")
                if kind is not None:
                    pinned.append(PinnedCell(pin_name, kind[0].name, kind[1], pin.at))
            if len({(cell.hierarchy, cell.level) for cell in cells}) < len(cells):
                self._problem(f"{name} has the same cell type under two names", *path, "cells")
            yield VirtualCluster(name, tuple(cells), tuple(pinned), entry.weight)
        if not self.content.virtual_clusters:
            self._problem("there are no virtual clusters", "virtual_clusters")

    def _find(
        self, hierarchies: tuple[Hierarchy, ...], name: str, *path: str | int
    ) -> tuple[Hierarchy, int] | None:
        wanted, _, kind = name.rpartition("/")
        found = [
            (hierarchy, hierarchy.types.index(kind))
            for hierarchy in hierarchies
            if kind in hierarchy.types and wanted in ("", hierarchy.name)
        ]
        if len(found) == 1:
            return found[0]
        if found:
            ways = " or ".join(f"{hierarchy.name}/{kind}" for hierarchy, _ in found)
            self._problem(f"{name} is in several hierarchies; write {ways}", *path)
        else:
            known = ", ".join(kind for hierarchy in hierarchies for kind in hierarchy.types)
            self._problem(f"there is no cell type {name!r}; there are {known}", *path)
        return None
