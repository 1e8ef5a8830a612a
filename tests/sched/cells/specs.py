"""Small clusters at random, and requests to them."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from gyrostat.sched.cells.request import CellAffinity, CellRequest, PodGroup
from gyrostat.sched.cells.spec import (
    CellQuota,
    CellSpec,
    Hierarchy,
    PinnedCell,
    TopCell,
    VirtualCluster,
    check,
)

TENANTS = ("a", "b", "c")


@st.composite
def specs(draw: st.DrawFn, *, most_devices: int = 48, most_tops: int = 4) -> CellSpec:
    """A sound spec of one hierarchy: top cells of several levels, tenants with whatever fits, sometimes a pinned cell."""
    splits = draw(st.lists(st.sampled_from([2, 2, 3, 4, 1]), min_size=1, max_size=4))
    sizes = [1]
    for split in splits:
        if sizes[-1] * split <= most_devices // 2:
            sizes.append(sizes[-1] * split)
    if len(sizes) == 1:
        sizes.append(2)
    node_level = draw(st.integers(1, len(sizes) - 1))
    hierarchy = Hierarchy(
        tuple(f"level{number}" for number in range(1, len(sizes) + 1)), tuple(sizes), node_level
    )
    tops: list[TopCell] = []
    devices = 0
    for level in draw(st.lists(st.integers(node_level, len(sizes) - 1), min_size=1, max_size=most_tops)):
        if not tops or devices + sizes[level] <= most_devices:
            first = devices // sizes[node_level]
            nodes = tuple(f"n{first + number}" for number in range(hierarchy.nodes_in(level)))
            tops.append(TopCell(hierarchy.name, level, nodes))
            devices += sizes[level]
    tenants = {name: VirtualCluster(name) for name in TENANTS}
    spec = CellSpec((hierarchy,), tuple(tops), tuple(tenants.values()))
    if draw(st.booleans()):
        level = draw(st.integers(0, len(sizes) - 1))
        device = draw(st.integers(0, devices - 1))
        node, number = divmod(device, sizes[node_level])
        pin = PinnedCell("pinned", hierarchy.name, level, f"n{node}/{number}")
        spec = _if_sound(spec, replace(tenants["a"], pinned=(pin,)))
    wanted_cells = st.tuples(st.sampled_from(TENANTS), st.integers(0, len(sizes) - 1))
    for name, level in draw(st.lists(wanted_cells, min_size=1, max_size=14)):
        tenant = next(vc for vc in spec.virtual_clusters if vc.name == name)
        counts = {cells.level: cells.count for cells in tenant.cells}
        counts[level] = counts.get(level, 0) + 1
        cells = tuple(CellQuota(hierarchy.name, at, count) for at, count in sorted(counts.items()))
        spec = _if_sound(spec, replace(tenant, cells=cells))
    return spec


def _if_sound(spec: CellSpec, tenant: VirtualCluster) -> CellSpec:
    tenants = tuple(tenant if vc.name == tenant.name else vc for vc in spec.virtual_clusters)
    changed = replace(spec, virtual_clusters=tenants)
    return spec if list(check(changed)) else changed


def cell_sizes(spec: CellSpec) -> st.SearchStrategy[int]:
    return st.sampled_from(spec.hierarchies[0].sizes)


@st.composite
def requests(draw: st.DrawFn, spec: CellSpec, job: str, *, priorities: tuple[int, ...]) -> CellRequest:
    """Any request that makes sense: gangs, odd sizes, both affinities."""
    hierarchy = spec.hierarchies[0]
    sizes = st.one_of(cell_sizes(spec), st.integers(1, hierarchy.sizes[-1] + 1))
    groups = st.builds(PodGroup, sizes, st.integers(1, 2))
    priority = draw(st.sampled_from(priorities))
    vc = draw(st.sampled_from(spec.virtual_clusters))
    pinned = vc.pinned and priority >= 0 and draw(st.booleans())
    return CellRequest(
        job=job,
        vc=vc.name,
        pods=tuple(draw(st.lists(groups, min_size=1, max_size=2))),
        priority=priority,
        affinity=draw(st.sampled_from(CellAffinity)),
        pinned="pinned" if pinned else None,
    )


def machines(spec: CellSpec) -> list[str]:
    return [node for cell in spec.top_cells for node in cell.nodes]
