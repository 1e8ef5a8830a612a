"""`gyrostat cells`: check and show a cell file, and print its schema for editors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gyrostat.core.devices import format_counts
from gyrostat.core.errors import UsageError
from gyrostat.core.files import read_text
from gyrostat.core.plural import plural

if TYPE_CHECKING:
    from rich.table import Table
    from rich.tree import Tree

    from gyrostat.sched.cells.spec import CellSpec, Hierarchy, TopCell, VirtualCluster

_ABOUT = "\n\n".join(
    [
        "Share a cluster among tenants with guarantees (HiveD's cells).",
        "A cell file defines cell types, the machines of the cluster, and the number of cells that each tenant owns. A tenant "
        "can get its cells at any time; other tenants may borrow them while they are idle.",
        "docs/reference/cells.md explains the format; examples/clusters/cells.yaml is an example.",
    ]
)
_CHECK = "\n\n".join(
    [
        "Check a cell file, and print every error with its line.",
        "If tenants own more cells than the machines have: the tenant, the level and the number of missing cells.",
        "Exit code: 0, or 2 on errors.",
    ]
)
_SHOW = "Show a cell file: hierarchies, machines, pinned cells, and the cells of each tenant."
_SCHEMA = "\n\n".join(
    [
        "Print the JSON schema of cell files, for editors.",
        "For the YAML extension of most editors, write it to a file and begin a cell file with:",
        "  # yaml-language-server: $schema=cells.schema.json",
    ]
)

_MANY = 12
"""The maximum number of top cells that are shown; of the others, only those with pinned cells."""

app = typer.Typer(no_args_is_help=True, help=_ABOUT)


def register(parent: typer.Typer) -> None:
    parent.add_typer(app, name="cells")


File = Annotated[Path, typer.Argument(metavar="FILE", show_default=False, help="Cell file (YAML).")]


@app.command(help=_CHECK, short_help="Check a cell file.")
def check(file: File) -> None:
    from gyrostat.sched.cells.load import parse

    spec, problems = parse(read_text(file))
    if spec is None:
        for problem in problems:
            print(f"{file}:{problem.line}: {problem.reason}")
        raise UsageError(f"{file} has {plural(len(problems), 'error')}")
    print(f"{file} is valid: {', '.join(_summary(spec))}")


@app.command(help=_SHOW)
def show(file: File) -> None:
    from rich.console import Console
    from rich.markup import escape

    from gyrostat.sched.cells.load import load

    spec = load(file)
    console = Console(highlight=False)
    for hierarchy in spec.hierarchies:
        console.print(_drawn(spec, hierarchy))
    console.print(_tenants(spec))
    if spec.priorities:
        named = sorted(spec.priorities.items(), key=lambda item: item[1])
        console.print(
            "priorities: opportunistic < " + " < ".join(f"{escape(name)} ({value})" for name, value in named)
        )


@app.command(help=_SCHEMA, short_help="Print the JSON schema of cell files.")
def schema() -> None:
    from gyrostat.sched.cells.file import schema as schema_of_files

    print(json.dumps(schema_of_files(), indent=2))


def _summary(spec: CellSpec) -> Iterator[str]:
    for hierarchy in spec.hierarchies:
        nodes = sum(node is not None for node in spec.layouts[hierarchy.name].nodes)
        devices = nodes * hierarchy.sizes[hierarchy.node_level]
        yield f"{plural(devices, f'{hierarchy.device_type} device')} on {plural(nodes, 'machine')}"
    yield plural(len(spec.virtual_clusters), "virtual cluster")


def _drawn(spec: CellSpec, hierarchy: Hierarchy) -> Tree:
    """One hierarchy: its cell types, and the machines of each top cell."""
    from rich.markup import escape
    from rich.tree import Tree

    layout = spec.layouts[hierarchy.name]
    nodes = sum(node is not None for node in layout.nodes)
    devices = plural(nodes * hierarchy.sizes[hierarchy.node_level], f"{hierarchy.device_type} device")
    tree = Tree(f"[bold]{hierarchy.name}[/bold]: {plural(nodes, 'machine')}, {devices}")
    levels = tree.add("cells")
    for level in range(len(hierarchy.types) - 1, -1, -1):
        kind, size = hierarchy.types[level], hierarchy.sizes[level]
        made_of = (
            f"{hierarchy.splits[level]} x {hierarchy.types[level - 1]}, {plural(size, 'device')}"
            if level
            else "a device"
        )
        machine = ", a machine" if level == hierarchy.node_level else ""
        levels = levels.add(f"level {level + 1}: {kind} = {made_of}{machine}")
    machines = tree.add("machines")
    pins = _pins(spec, hierarchy)
    mine = [cell for cell in spec.top_cells if cell.hierarchy == hierarchy.name]
    for place, cell in enumerate(mine):
        pinned = [words for at, words in pins.items() if at.partition("/")[0] in cell.nodes]
        if place < _MANY or pinned:
            branch = machines.add(f"{hierarchy.types[cell.level]}: {escape(_ranges(cell))}")
            for words in pinned:
                branch.add(escape(words))
    if len(mine) > _MANY:
        machines.add(f"… {plural(len(mine), 'top cell')} in all")
    return tree


def _pins(spec: CellSpec, hierarchy: Hierarchy) -> dict[str, str]:
    return {
        pin.at: f"{hierarchy.types[pin.level]} at {pin.at} is pinned: {vc.name}/{pin.name}"
        for vc in spec.virtual_clusters
        for pin in vc.pinned
        if pin.hierarchy == hierarchy.name
    }


def _tenants(spec: CellSpec) -> Table:
    from rich.markup import escape
    from rich.table import Table

    with_servers = any(vc.servers.cores for vc in spec.virtual_clusters)
    columns = ("devices", "servers") if with_servers else ("devices",)
    table = Table("virtual cluster", "weight", "cells", *columns, box=None)
    owned: dict[str, int] = {}
    for vc in spec.virtual_clusters:
        devices = _devices(spec, vc)
        for kind, number in devices.items():
            owned[kind] = owned.get(kind, 0) + number
        cells = [
            f"{cells.count} x {spec.hierarchy(cells.hierarchy).types[cells.level]}"
            for cells in sorted(vc.cells, key=lambda cells: -cells.level)
        ]
        cells += [
            f"{pin.name} ({spec.hierarchy(pin.hierarchy).types[pin.level]} at {pin.at})" for pin in vc.pinned
        ]
        servers = (str(vc.servers) if vc.servers.cores else "none",) if with_servers else ()
        table.add_row(vc.name, f"{vc.weight:g}", escape(", ".join(cells)), format_counts(devices), *servers)
    spare: dict[str, int] = {}
    for hierarchy in spec.hierarchies:
        nodes = sum(node is not None for node in spec.layouts[hierarchy.name].nodes)
        kind = hierarchy.device_type
        spare[kind] = spare.get(kind, 0) + nodes * hierarchy.sizes[hierarchy.node_level]
    rest = {kind: number - owned.get(kind, 0) for kind, number in spare.items()}
    table.add_row("(unassigned)", "", "spare for bad hardware and opportunistic jobs", format_counts(rest))
    return table


def _devices(spec: CellSpec, vc: VirtualCluster) -> dict[str, int]:
    devices: dict[str, int] = {}
    for owned, count in [(cells, cells.count) for cells in vc.cells] + [(pin, 1) for pin in vc.pinned]:
        hierarchy = spec.hierarchy(owned.hierarchy)
        kind = hierarchy.device_type
        devices[kind] = devices.get(kind, 0) + count * hierarchy.sizes[owned.level]
    return devices


def _ranges(cell: TopCell) -> str:
    """The machines of a cell; of more than 8, the first two and the last."""
    nodes = cell.nodes
    return ", ".join(nodes) if len(nodes) <= 8 else f"{nodes[0]}, {nodes[1]} … {nodes[-1]} ({len(nodes)})"
