"""What must hold for any cluster and any sequence of requests."""

from __future__ import annotations

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from gyrostat.sched.cells.allocator import CellCluster
from gyrostat.sched.cells.bindings import BindingChange, Bindings, bindings_of, rebuild, reconfigured
from gyrostat.sched.cells.request import OPPORTUNISTIC, CellRequest, Grant, PodGrant, PodGroup
from gyrostat.sched.cells.shortfall import gaps
from tests.sched.cells.audit import audit, invariant_holds, state
from tests.sched.cells.specs import machines, requests, specs

PRIORITIES = (OPPORTUNISTIC, OPPORTUNISTIC, 0, 0, 1, 7)
STEPS = 24


def some_life(
    data: st.DataObject, cluster: CellCluster, *, failures: bool, priorities: tuple[int, ...] = PRIORITIES
) -> None:
    """Jobs come and go, machines and devices break and come back; after every step all counts are right."""
    spec = cluster.spec
    kinds = ["request"] * 5 + ["release"] * 3 + (["break", "mend"] if failures else [])
    for number, kind in enumerate(data.draw(st.lists(st.sampled_from(kinds), max_size=STEPS), label="steps")):
        if kind == "request":
            cluster.allocate(data.draw(requests(spec, f"j{number}", priorities=priorities)))
        elif kind == "release":
            if cluster.jobs:
                cluster.release(data.draw(st.sampled_from(sorted(cluster.jobs))))
        else:
            name = data.draw(st.sampled_from(machines(spec)))
            hierarchy = spec.hierarchies[0]
            if data.draw(st.booleans()):
                device = data.draw(st.integers(0, hierarchy.sizes[hierarchy.node_level] - 1))
                name = f"{name}/{device}"
            cluster.set_health(name, kind == "mend")
        audit(cluster)


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_every_count_and_list_is_right_after_every_step_whatever_breaks(data: st.DataObject) -> None:
    some_life(data, CellCluster(data.draw(specs())), failures=True)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_every_legal_request_succeeds_and_the_invariant_holds(data: st.DataObject) -> None:
    cluster = CellCluster(data.draw(specs()))
    some_life(data, cluster, failures=False)
    everything_is_still_to_be_had(cluster)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_while_healthy_devices_suffice_bad_ones_change_nothing_else_the_shortfall_is_reported(
    data: st.DataObject,
) -> None:
    cluster = CellCluster(data.draw(specs()))
    some_life(data, cluster, failures=True)
    (pool,) = cluster.pools.values()
    short = [max(0, -gap) for gap in gaps(pool.free, pool.needed, pool.splits)]
    found_short = [0] * len(short)
    for found in cluster.shortfall():
        found_short[found.level - 1] += found.short
        (group,) = (
            g for g in cluster.tenants[found.vc].groups[pool.hierarchy.name] if g.root == found.level - 1
        )
        assert 0 < found.short <= group.count - group.bound
    assert found_short == short
    if not any(short):
        everything_is_still_to_be_had(cluster)


def everything_is_still_to_be_had(cluster: CellCluster) -> None:
    """All cells that tenants have not bound are granted, one after another, the smallest first: the worst order."""
    (pool,) = cluster.pools.values()
    assert invariant_holds(pool)
    wanted = [
        (group.root, tenant.name)
        for tenant in cluster.tenants.values()
        for group in tenant.groups.get(pool.hierarchy.name, ())
        for _ in range(group.count - group.bound)
    ]
    for number, (level, vc) in enumerate(sorted(wanted)):
        request = CellRequest(
            job=f"rest{number}",
            vc=vc,
            pods=(PodGroup(pool.sizes[level]),),
            level=pool.hierarchy.types[level],
        )
        grant = cluster.allocate(request)
        assert isinstance(grant, Grant), grant
        assert not set(grant.devices) & {pool.device_name(device) for device in pool.bad_devices}
        assert invariant_holds(pool)
        audit(cluster)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_release_restores_the_free_lists_exactly(data: st.DataObject) -> None:
    cluster = CellCluster(data.draw(specs()))
    fresh = state(cluster)
    some_life(data, cluster, failures=False)
    before = state(cluster)
    request = data.draw(requests(cluster.spec, "new", priorities=PRIORITIES))
    result = cluster.allocate(request)
    if not isinstance(result, Grant):
        assert state(cluster) == before
    elif not result.preempted:
        cluster.release("new")
        assert state(cluster) == before
    for job in list(cluster.jobs):
        cluster.release(job)
    assert state(cluster) == fresh


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_rebuilding_from_stored_bindings_gives_the_same_state(data: st.DataObject) -> None:
    cluster = CellCluster(data.draw(specs()))
    some_life(data, cluster, failures=True)
    stored = msgspec.json.encode(bindings_of(cluster))
    rebuilt, changes = rebuild(cluster.spec, msgspec.json.decode(stored, type=Bindings))
    assert changes == []
    assert state(rebuilt) == state(cluster)
    audit(rebuilt)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_nobody_is_ended_by_another_specification(data: st.DataObject) -> None:
    cluster = CellCluster(data.draw(specs()))
    some_life(data, cluster, failures=True)
    new = data.draw(specs())
    successor, changes = reconfigured(cluster, new)
    audit(successor)
    outcome = {change.job: change.change for change in changes}
    assert successor.jobs.keys() | successor.outside.keys() == cluster.jobs.keys()
    there = {
        device for pool in successor.pools.values() for device in all_devices(successor, pool.hierarchy.name)
    }
    for job, before in cluster.jobs.items():
        after = successor.jobs.get(job)
        if after is None:
            assert outcome[job] is BindingChange.OUTSIDE
            assert not set(before.devices) <= there
        else:
            assert sorted(after.devices) == sorted(before.devices)
            downgraded = before.priority != OPPORTUNISTIC and after.priority == OPPORTUNISTIC
            assert (outcome.get(job) is BindingChange.DOWNGRADED) == downgraded
    back, _ = reconfigured(successor, cluster.spec)
    audit(back)
    assert {job: sorted(grant.devices) for job, grant in back.jobs.items()} == {
        job: sorted(grant.devices) for job, grant in cluster.jobs.items()
    }


def all_devices(cluster: CellCluster, hierarchy: str) -> list[str]:
    pool = cluster.pools[hierarchy]
    return [
        pool.device_name(device)
        for device in range(pool.roots * pool.sizes[-1])
        if pool.layout.nodes[device // pool.sizes[pool.hierarchy.node_level]] is not None
    ]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_opportunistic_jobs_change_neither_whether_nor_at_which_level_guaranteed_ones_are_served(
    data: st.DataObject,
) -> None:
    spec = data.draw(specs())
    alone, shared = CellCluster(spec), CellCluster(spec)
    for number in range(data.draw(st.integers(0, STEPS))):
        kind = data.draw(st.sampled_from(["guaranteed", "guaranteed", "opportunistic", "release", "give up"]))
        if kind == "opportunistic":
            shared.allocate(data.draw(requests(spec, f"low{number}", priorities=(OPPORTUNISTIC,))))
        elif kind == "guaranteed":
            request = data.draw(requests(spec, f"j{number}", priorities=(0, 0, 3)))
            expected, found = alone.allocate(request), shared.allocate(request)
            assert type(expected) is type(found)
            if isinstance(expected, Grant) and isinstance(found, Grant):
                assert [pod.virtual_cells for pod in found.pods] == [
                    pod.virtual_cells for pod in expected.pods
                ]
                assert [sizes_of(pod.pieces) for pod in found.pods] == [
                    sizes_of(pod.pieces) for pod in expected.pods
                ]
                for mine, other in zip(expected.pods, found.pods, strict=True):
                    if len(cells_of_tenant(mine)) == 1:
                        assert other.level == mine.level
                guaranteed = [job for job in found.preempted if not job.startswith("low")]
                assert tuple(guaranteed) == expected.preempted
            else:
                assert expected == found
        elif kind == "release" and alone.jobs:
            job = data.draw(st.sampled_from(sorted(alone.jobs)))
            alone.release(job)
            shared.release(job)
        elif kind == "give up":
            low = sorted(job for job in shared.jobs if job.startswith("low"))
            if low:
                shared.release(data.draw(st.sampled_from(low)))
        audit(shared)
        assert {job for job in shared.jobs if not job.startswith("low")} == alone.jobs.keys()


def cells_of_tenant(pod: PodGrant) -> set[tuple[int, int]]:
    """Which of the tenant's cells a pod lies in. Where it is soft and lies in several, nobody promises how near they are."""
    sizes = pod.pool.sizes
    return {
        (piece.root, piece.virtual * sizes[piece.level] // sizes[piece.root])
        for piece in pod.pieces
        if piece.root is not None
    }


def sizes_of(pieces: tuple[tuple[int, int, int | None, int], ...]) -> list[int]:
    return [level for level, *_ in pieces]
