"""Reading a cell file: from YAML to a valid `CellSpec`, with every error reported by line.

`load` is the entry point. A spec that it returns is valid: hierarchies are uniform, every machine occurs once, and the cells
of all tenants fit at the same time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from gyrostat.core.errors import UsageError
from gyrostat.core.files import read_text
from gyrostat.core.roles import ServerCapacity
from gyrostat.sched.cells.file import (
    CellFile,
    CellFileProblem,
    LineIndex,
    ServersEntry,
    TopCellEntry,
    read,
)
from gyrostat.sched.cells.spec import (
    CellQuota,
    CellSpec,
    Hierarchy,
    PinnedCell,
    TopCell,
    VirtualCluster,
    check,
)

_MOST_DEVICES = 10_000_000
"""More than any cluster has; a larger number is a typing error."""
_RANGE = re.compile(r"^(.*)\[(\d+)-(\d+)\](.*)$|^(.*?)(\d+)~(\d+)()$")


def load(path: Path) -> CellSpec:
    """The spec in a file; raises with all errors by line."""
    return loads(read_text(path), str(path))


def loads(text: str, source: str) -> CellSpec:
    """The spec in a text; raises with all errors by line. `source` names the text in messages."""
    spec, problems = parse(text)
    if spec is None:
        errors = "\n".join(f"  {source}:{problem.line}: {problem.reason}" for problem in problems)
        raise UsageError(f"{source} is not a valid cell file:\n{errors}")
    return spec


def parse(text: str) -> tuple[CellSpec | None, list[CellFileProblem]]:
    """The spec, or None and all errors."""
    content, lines, problems = read(text)
    if content is None:
        return None, sorted(problems)
    reader = _Reader(content, lines)
    spec = reader.spec()
    problems += reader.problems
    if not problems:
        problems += check(spec, lines)
    return (None if problems else spec), sorted(problems)


def expand(pattern: str) -> list[str]:
    """`n[0-3]` expands to n0, n1, n2, n3; `10.0.1.4~7` to 10.0.1.4 … 10.0.1.7. Leading zeros are kept."""
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
    """Makes a spec of the contents of a file."""

    def __init__(self, content: CellFile, lines: LineIndex) -> None:
        self.content = content
        self.lines = lines
        self.problems: list[CellFileProblem] = []

    def spec(self) -> CellSpec:
        hierarchies = self._hierarchies()
        if self.problems:
            return CellSpec((), (), ())  # errors in the rest would follow from the missing hierarchies
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
                    f"{entry.of} is part of both {inside[entry.of]} and {name}: cells of a level must be equal; "
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
            servers = entry.servers or ServersEntry(cores=0)
            capacity = ServerCapacity(cores=servers.cores, memory=servers.memory)
            yield VirtualCluster(name, tuple(cells), tuple(pinned), entry.weight, capacity)
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
