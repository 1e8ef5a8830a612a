"""Ways to share one cluster, as HiveD compares them: private clusters, quotas, cells; or one pool.

All place jobs in the same way, in cells within nodes: with `private` each VC has its own nodes, with `quota` all VCs allocate
from one pool, with `cells` each has cells. Jobs of traces do not request pinned cells, which are only lent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum

from gyrostat.core.devices import Fleet
from gyrostat.sched.cells.spec import CellQuota, CellSpec, Hierarchy, TopCell, VirtualCluster, validated
from gyrostat.sched.placers.base import Placer
from gyrostat.sched.placers.cells import SHARED_POOL, CellPlacer, fleet_of
from gyrostat.sched.placers.nodes import NodePlacer
from gyrostat.sched.placers.private import PrivatePlacer


class Sharing(StrEnum):
    CELLS = "cells"
    """HiveD: a VC has cells, and may borrow idle devices of others."""
    QUOTA = "quota"
    """A VC has a number of devices, wherever they are, and may borrow more."""
    PRIVATE = "private"
    """Every VC has its own nodes."""
    FLAT = "flat"
    """One pool without guarantees; VCs are only names."""


def build(
    spec: CellSpec, sharing: Sharing, *, lends: bool = True, dynamic: bool = True
) -> tuple[Fleet, Placer]:
    """The fleet of a specification, and a placer for it. `lends` and `dynamic` apply to cells and quotas."""
    match sharing:
        case Sharing.CELLS:
            cells = CellPlacer(spec, lends=lends, dynamic=dynamic)
            return cells.fleet, cells
        case Sharing.QUOTA:
            quota = CellPlacer(undivided(spec), lends=lends, quotas=quotas(spec))
            return quota.fleet, quota
        case Sharing.FLAT:
            fleet = fleet_of(spec)
            return fleet, NodePlacer(fleet)
    alone = {vc.name: private(spec, vc) for vc in spec.virtual_clusters}
    fleet = Fleet(
        (node.name, node.type, node.count) for one in alone.values() for node in fleet_of(one).nodes
    )
    placers = {name: CellPlacer(one, fleet=fleet) for name, one in alone.items()}
    nodes = {name: [node.name for node in fleet_of(one).nodes] for name, one in alone.items()}
    return fleet, PrivatePlacer(fleet, placers, nodes)


def quotas(spec: CellSpec) -> dict[str, dict[str, int]]:
    """Devices that each VC has, by type."""
    found: dict[str, dict[str, int]] = {}
    for vc in spec.virtual_clusters:
        counts = found.setdefault(vc.name, {})
        for cells in vc.cells:
            hierarchy = spec.hierarchy(cells.hierarchy)
            type_ = hierarchy.device_type
            counts[type_] = counts.get(type_, 0) + hierarchy.sizes[cells.level] * cells.count
    return found


def undivided(spec: CellSpec) -> CellSpec:
    """The same machines as cells of one tenant."""
    cells = []
    for hierarchy in spec.hierarchies:
        for level in range(hierarchy.node_level, len(hierarchy.types)):
            number = sum(cell.hierarchy == hierarchy.name and cell.level == level for cell in spec.top_cells)
            if number:
                cells.append(CellQuota(hierarchy.name, level, number))
    return replace(spec, virtual_clusters=(VirtualCluster(SHARED_POOL, tuple(cells)),))


def private(spec: CellSpec, vc: VirtualCluster) -> CellSpec:
    """A cluster with the VC's cells only: as many whole machines as they need."""
    vc = replace(vc, pinned=())
    tops: list[TopCell] = []
    for hierarchy in spec.hierarchies:
        size = hierarchy.sizes[hierarchy.node_level]
        mine = [cells for cells in vc.cells if cells.hierarchy == hierarchy.name]
        small = sum(
            hierarchy.sizes[cells.level] * cells.count for cells in mine if cells.level < hierarchy.node_level
        )
        large = [cells for cells in mine if cells.level >= hierarchy.node_level]
        wanted = [(cells.level, cells.count) for cells in large] + [(hierarchy.node_level, -(-small // size))]
        for level, number in wanted:
            for _ in range(number):
                start = sum(len(top.nodes) for top in tops)
                names = (f"{vc.name}-{start + k}" for k in range(hierarchy.nodes_in(level)))
                tops.append(TopCell(hierarchy.name, level, tuple(names)))
    used = {top.hierarchy for top in tops}
    hierarchies = tuple(hierarchy for hierarchy in spec.hierarchies if hierarchy.name in used)
    return validated(replace(spec, hierarchies=hierarchies, top_cells=tuple(tops), virtual_clusters=(vc,)))


NODE = Hierarchy(types=("gpu", "pcie-switch", "socket", "node"), sizes=(1, 2, 4, 8), node_level=3)
"""HiveD's machines (§5.1)."""


def cluster_of_nodes(
    nodes: Mapping[str, int], *, spare: int = 0, weights: Mapping[str, float] | None = None
) -> CellSpec:
    """Machines with 8 devices, by VC, as cells of a whole machine; and `spare` machines without a VC."""
    return cluster_of_cells(
        {vc: {3: number} for vc, number in nodes.items()}, nodes=sum(nodes.values()) + spare, weights=weights
    )


def cluster_of_cells(
    cells: Mapping[str, Mapping[int, int]], *, nodes: int, weights: Mapping[str, float] | None = None
) -> CellSpec:
    """`nodes` machines with 8 devices, and VCs with cells by level; level 0 is a device, 3 a machine."""
    return validated(
        CellSpec(
            hierarchies=(NODE,),
            top_cells=tuple(TopCell(NODE.name, 3, (f"n{k}",)) for k in range(nodes)),
            virtual_clusters=tuple(
                VirtualCluster(
                    vc,
                    tuple(CellQuota(NODE.name, level, number) for level, number in levels.items() if number),
                    weight=(weights or {}).get(vc, 1.0),
                )
                for vc, levels in cells.items()
            ),
        )
    )
