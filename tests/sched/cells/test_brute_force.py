"""On small clusters everything is tried, and the allocator agrees with what is found."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from gyrostat.sched.cells.allocator import CellCluster
from gyrostat.sched.cells.request import OPPORTUNISTIC, CellRequest, Grant, PodGroup
from gyrostat.sched.cells.shortfall import gaps
from gyrostat.sched.cells.spec import CellQuota, check
from gyrostat.sched.cells.virtual import VirtualCells
from tests.sched.cells.specs import machines, requests, specs


def fits(free: frozenset[int], sizes: Sequence[int]) -> bool:
    """Whether disjoint aligned cells of these sizes can be cut out of the free devices: all ways are tried."""
    if not sizes:
        return True
    size, rest = sizes[0], sizes[1:]
    if sum(sizes) > len(free):
        return False
    for start in sorted({device - device % size for device in free}):
        cell = frozenset(range(start, start + size))
        if cell <= free and fits(free - cell, rest):
            return True
    return False


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_spec_is_feasible_if_and_only_if_a_mapping_exists(data: st.DataObject) -> None:
    spec = data.draw(specs(most_devices=12, most_tops=3))
    (hierarchy,) = spec.hierarchies
    more = data.draw(st.lists(st.integers(0, len(hierarchy.sizes) - 1), max_size=3))
    first, *others = (replace(vc, pinned=()) for vc in spec.virtual_clusters)
    counts = {cells.level: cells.count for cells in first.cells}
    for level in more:
        counts[level] = counts.get(level, 0) + 1
    first = replace(first, cells=tuple(CellQuota(hierarchy.name, level, n) for level, n in counts.items()))
    spec = replace(spec, virtual_clusters=(first, *others))
    layout, per_node = spec.layouts[hierarchy.name], hierarchy.sizes[hierarchy.node_level]
    there = frozenset(
        device
        for device in range(len(layout.nodes) * per_node)
        if layout.nodes[device // per_node] is not None
    )
    cells = [
        hierarchy.sizes[cells.level]
        for vc in spec.virtual_clusters
        for cells in vc.cells
        for _ in range(cells.count)
    ]
    assert (not list(check(spec))) == fits(there, sorted(cells, reverse=True))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_grants_and_gaps_agree_with_trying_everything(data: st.DataObject) -> None:
    spec = data.draw(specs(most_devices=16, most_tops=3))
    cluster = CellCluster(spec)
    (pool,) = cluster.pools.values()
    for number in range(data.draw(st.integers(1, 10))):
        kind = data.draw(st.sampled_from(["cells", "cells", "any", "release", "break"]))
        if kind == "release" and cluster.jobs:
            cluster.release(data.draw(st.sampled_from(sorted(cluster.jobs))))
        elif kind == "break" and data.draw(st.booleans()):
            cluster.set_health(data.draw(st.sampled_from(machines(spec))), False)
        elif kind == "any":
            cluster.allocate(data.draw(requests(spec, f"j{number}", priorities=(OPPORTUNISTIC, 0))))
        elif kind == "cells":
            sizes = data.draw(st.lists(st.sampled_from(pool.sizes), min_size=1, max_size=3))
            tenant = data.draw(st.sampled_from([vc.name for vc in spec.virtual_clusters if vc.cells] or [""]))
            if tenant:
                groups = cluster.tenants[tenant].groups[pool.hierarchy.name]
                possible = None if pool.bad_devices else room_for(groups, sizes)
                pods = tuple(PodGroup(size) for size in sizes)
                result = cluster.allocate(CellRequest(job=f"j{number}", vc=tenant, pods=pods))
                assert possible in (None, isinstance(result, Grant))
        free = frozenset(device for device, blocked in enumerate(pool.blocked[0]) if not blocked)
        needed = [size for size, count in zip(pool.sizes, pool.needed, strict=True) for _ in range(count)]
        suffices = min(gaps(pool.free, pool.needed, pool.splits)) >= 0
        assert suffices == fits(free, sorted(needed, reverse=True))
        assert suffices == (not cluster.shortfall())


def room_for(groups: Iterable[VirtualCells], sizes: Sequence[int]) -> bool:
    """Whether the tenant's own cells have room, each as a cluster of its own; nobody else is looked at."""
    free: set[int] = set()
    start = 0
    for group in groups:
        size = group.sizes[-1]
        whole = max(group.pool.sizes)
        for root in range(group.count):
            held = {
                device
                for level, jobs in enumerate(group.holders)
                for index in jobs
                for device in range(index * group.sizes[level], (index + 1) * group.sizes[level])
            }
            free |= {
                start + device - root * size
                for device in range(root * size, (root + 1) * size)
                if device not in held
            }
            start += whole  # cells of different roots never form a larger one
    return fits(frozenset(free), sorted(sizes, reverse=True))
