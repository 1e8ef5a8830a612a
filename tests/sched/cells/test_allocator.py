"""The allocator on cases worked out by hand."""

from __future__ import annotations

import pytest

from gyrostat.core.errors import UsageError
from gyrostat.sched.cells.allocator import CellCluster
from gyrostat.sched.cells.bindings import BindingChange, bindings_of, rebuild, reconfigured
from gyrostat.sched.cells.lending import lend_fairly, opportunistic_shares, over_share
from gyrostat.sched.cells.load import parse
from gyrostat.sched.cells.request import (
    OPPORTUNISTIC,
    CellAffinity,
    CellRefusal,
    CellRequest,
    Grant,
    PodGroup,
)
from gyrostat.sched.cells.shortfall import Shortfall
from gyrostat.sched.cells.spec import CellSpec
from tests.sched.cells.audit import audit

RACK = """\
cell_types:
  rack: {of: node, count: 4}
  node: {of: socket, count: 2, node: true}
  socket: {of: gpu, count: 2}
physical_cluster:
  - {cell: rack, nodes: ["n[0-7]"]}
virtual_clusters:
"""


def spec(tenants: str, *, text: str = RACK) -> CellSpec:
    """Two racks of four machines of two sockets of two devices, divided as `tenants` says."""
    found, problems = parse(text + tenants)
    assert problems == []
    assert found is not None
    return found


def cluster(tenants: str) -> CellCluster:
    return CellCluster(spec(tenants))


def ask(
    cells: CellCluster,
    job: str,
    vc: str,
    *devices: int,
    priority: int = 0,
    soft: bool = False,
    level: str | None = None,
    pinned: str | None = None,
) -> Grant | CellRefusal:
    result = cells.allocate(
        CellRequest(
            job=job,
            vc=vc,
            pods=tuple(map(PodGroup, devices)),
            priority=priority,
            affinity=CellAffinity.SOFT if soft else CellAffinity.HARD,
            level=level,
            pinned=pinned,
        )
    )
    audit(cells)
    return result


def places(result: Grant | CellRefusal) -> list[tuple[str, ...]]:
    assert isinstance(result, Grant), result
    return [pod.physical_cells for pod in result.pods]


def test_the_smallest_block_is_split_and_merged_again() -> None:
    cells = cluster("  a: {cells: {gpu: 3, socket: 1, node: 1}}\n")
    (pool,) = cells.pools.values()
    assert pool.free == [0, 0, 0, 2]
    assert places(ask(cells, "j1", "a", 1)) == [("gpu@n0/0",)]
    assert pool.free == [1, 1, 3, 1]
    assert places(ask(cells, "j2", "a", 4)) == [("node@n1",)]
    assert places(ask(cells, "j3", "a", 2)) == [("socket@n0/2",)]
    assert places(ask(cells, "j4", "a", 1)) == [("gpu@n0/1",)]
    assert pool.free == [0, 0, 2, 1]
    for job in ("j2", "j3", "j4", "j1"):
        cells.release(job)
    assert pool.free == [0, 0, 0, 2]


def test_a_grant_says_what_was_bound_to_what() -> None:
    cells = cluster("  a: {cells: {rack: 1}}\n")
    grant = ask(cells, "j", "a", 3, 4)
    assert isinstance(grant, Grant)
    small, large = grant.pods
    assert large.devices == ("n0/0", "n0/1", "n0/2", "n0/3")
    assert (large.virtual_cells, large.physical_cells) == (("a/rack[0]/node[0]",), ("node@n0",))
    assert small.devices == ("n1/0", "n1/1", "n1/2")
    assert small.virtual_cells == ("a/rack[0]/socket[2]", "a/rack[0]/gpu[6]")
    assert (small.level, small.cell_type, large.level, large.cell_type) == (3, "node", 3, "node")
    assert grant.devices == small.devices + large.devices
    assert (grant.device_type, grant.device_count, grant.preempted) == ("gpu", 7, ())


def test_a_tenant_gets_no_more_than_its_cells_and_learns_how_many_are_missing() -> None:
    cells = cluster("  a: {cells: {node: 2}}\n  b: {cells: {node: 1}}\n")
    ask(cells, "j1", "a", 1)
    assert ask(cells, "j2", "a", 4, 4, 4) == CellRefusal(
        "j2", "a is 2 short of a node with 4 free devices", "node", 2
    )
    assert ask(cells, "j2", "a", 5) == CellRefusal(
        "j2", "a is 1 short of a rack with 5 free devices", "rack", 1
    )
    assert ask(cells, "j2", "a", 17) == CellRefusal(
        "j2", "a pod of 17 devices does not fit into a rack of 16", "rack", 1
    )
    assert isinstance(ask(cells, "j2", "a", 2, 4, 1), Grant)


def test_soft_affinity_takes_a_larger_cell_and_then_anything() -> None:
    cells = cluster("  a: {cells: {node: 2}}\n")
    for job in ("j1", "j2"):
        ask(cells, job, "a", 1)
        ask(cells, f"{job}b", "a", 1)
        ask(cells, f"{job}s", "a", 2)
    cells.release("j1b")
    cells.release("j2b")
    assert isinstance(ask(cells, "hard", "a", 2), CellRefusal)
    grant = ask(cells, "soft", "a", 2, soft=True)
    assert isinstance(grant, Grant)
    assert (grant.pods[0].devices, grant.pods[0].level, grant.pods[0].wanted_level) == (
        ("n0/1", "n1/1"),
        4,
        2,
    )
    cells.release("j1s")
    grant = ask(cells, "wide", "a", 2, soft=True, level="node")
    assert places(grant) == [("socket@n0/2",)]
    refusal = ask(cells, "more", "a", 1, soft=True)
    assert refusal == CellRefusal("more", "a is 1 short of 1 free device", "gpu", 1)


def test_within_a_machine_of_its_own_a_pod_need_not_have_a_socket_of_its_own() -> None:
    cells = cluster("  a: {cells: {node: 1}}\n")
    ask(cells, "j1", "a", 1)
    ask(cells, "j2", "a", 2)
    cells.release("j1")
    ask(cells, "j3", "a", 1)
    assert isinstance(ask(cells, "j4", "a", 1, level="node"), Grant)


def test_binding_avoids_bad_then_opportunistic_devices_then_packs() -> None:
    cells = cluster("  a: {cells: {node: 3}}\n  b: {cells: {rack: 1}}\n")
    cells.set_health("n0/3", False)
    ask(cells, "low", "b", 1, priority=OPPORTUNISTIC)
    (low,) = cells.jobs["low"].devices
    assert low == "n7/3"
    # The first rack is split already by the bad device; in the second, which is b's by now, only the low job is.
    assert places(ask(cells, "j1", "a", 4)) == [("node@n1",)]
    assert places(ask(cells, "j2", "b", 4)) == [("node@n4",)]
    assert places(ask(cells, "j3", "b", 4)) == [("node@n5",)]
    assert places(ask(cells, "j4", "b", 4)) == [("node@n6",)]
    last = ask(cells, "j5", "b", 4)
    assert isinstance(last, Grant)
    assert (places(last), last.preempted) == ([("node@n7",)], ("low",))
    assert "low" not in cells.jobs


def test_a_larger_block_is_split_for_a_quiet_cell_only_where_cells_are_over() -> None:
    for spare, expected in (("", "node@n4"), ("  c: {cells: {rack: 1}}\n", "node@n1")):
        cells = cluster("  a: {cells: {node: 4}}\n" + spare)
        ask(cells, "j0", "a", 4)
        for number in range(4):
            ask(cells, f"far{number}", "a", 4, priority=OPPORTUNISTIC)
        for number in range(3):
            ask(cells, f"near{number}", "a", 4, priority=OPPORTUNISTIC)
        for number in range(4):
            cells.release(f"far{number}")
        grant = ask(cells, "j1", "a", 4)
        assert places(grant) == [(expected,)]


def test_opportunistic_jobs_go_farthest_from_bound_cells_and_keep_together() -> None:
    cells = cluster("  a: {cells: {node: 2, gpu: 1}}\n")
    ask(cells, "j", "a", 1)
    assert places(ask(cells, "low1", "a", 1, priority=OPPORTUNISTIC)) == [("gpu@n7/3",)]
    assert places(ask(cells, "low2", "a", 1, priority=OPPORTUNISTIC)) == [("gpu@n7/2",)]
    assert places(ask(cells, "low3", "a", 4, 4, 4, priority=OPPORTUNISTIC)) == [
        ("node@n6",),
        ("node@n5",),
        ("node@n4",),
    ]
    # Then the bound rack: whole free machines before the sockets beside the guaranteed job.
    assert places(ask(cells, "low4", "a", 2, priority=OPPORTUNISTIC)) == [("socket@n7/0",)]
    assert places(ask(cells, "low5", "a", 2, priority=OPPORTUNISTIC)) == [("socket@n3/2",)]
    assert places(ask(cells, "low6", "a", 4, 4, priority=OPPORTUNISTIC)) == [("node@n2",), ("node@n1",)]
    assert places(ask(cells, "low7", "a", 2, 2, 1, priority=OPPORTUNISTIC)) == [
        ("socket@n3/0",),
        ("socket@n0/2",),
        ("gpu@n0/1",),
    ]
    assert isinstance(ask(cells, "low8", "a", 1, priority=OPPORTUNISTIC), CellRefusal)


def test_priorities_of_a_tenant_preempt_lower_ones_and_no_others() -> None:
    cells = cluster("  a: {cells: {node: 2}}\n  b: {cells: {node: 1}}\n")
    ask(cells, "zero", "a", 4, priority=0)
    ask(cells, "two", "a", 2, priority=2)
    ask(cells, "other", "b", 4, priority=0)
    ask(cells, "low", "a", 4, priority=OPPORTUNISTIC)
    assert isinstance(ask(cells, "same", "a", 4, priority=0), CellRefusal)
    grant = ask(cells, "one", "a", 4, priority=1)
    assert isinstance(grant, Grant)
    assert grant.preempted == ("zero",)
    assert isinstance(ask(cells, "three", "a", 2, priority=3), Grant)
    grant = ask(cells, "five", "a", 4, priority=5)
    assert isinstance(grant, Grant)
    assert grant.preempted == ("one",)
    assert list(cells.jobs) == ["two", "other", "low", "three", "five"]


def test_the_lowest_priorities_go_first() -> None:
    cells = cluster("  a: {cells: {node: 3}}\n")
    for priority in (2, 0, 1):
        ask(cells, f"p{priority}", "a", 4, priority=priority)
    for job, preempted in (("x", "p0"), ("y", "p1"), ("z", "p2")):
        grant = ask(cells, job, "a", 4, priority=9)
        assert isinstance(grant, Grant)
        assert grant.preempted == (preempted,)
    assert isinstance(ask(cells, "w", "a", 1, priority=9), CellRefusal)
    assert isinstance(ask(cells, "w", "a", 1, priority=10), Grant)


def test_pinned_cells_stay_in_place_and_go_to_jobs_that_request_them() -> None:
    cells = cluster("  a:\n    cells: {gpu: 1}\n    pinned: {fast: {cell: socket, at: n2/2}}\n")
    assert places(ask(cells, "j1", "a", 1, pinned="fast")) == [("gpu@n2/2",)]
    assert places(ask(cells, "j2", "a", 1)) == [("gpu@n2/0",)]
    assert isinstance(ask(cells, "j3", "a", 1), CellRefusal)
    grant = ask(cells, "j3", "a", 1, pinned="fast")
    assert isinstance(grant, Grant)
    assert grant.pods[0].virtual_cells == ("a/fast/gpu[1]",)
    refusal = ask(cells, "j4", "a", 1, pinned="fast")
    assert refusal == CellRefusal("j4", "a's fast is 1 short of a gpu with 1 free device", "gpu", 1)
    with pytest.raises(UsageError, match="a has no pinned cell 'slow'; it has fast"):
        ask(cells, "j5", "a", 1, pinned="slow")


def test_bad_hardware_is_avoided_while_possible_and_then_shown_to_the_tenant() -> None:
    cells = cluster("  a: {cells: {node: 4}}\n  b: {cells: {rack: 1}}\n")
    change = cells.set_health("n0", False)
    assert (change.devices, change.jobs) == (("n0/0", "n0/1", "n0/2", "n0/3"), ())
    assert cells.shortfall() == [Shortfall("a", "node", 3, 1)]
    assert places(ask(cells, "j1", "a", 4, 4, 4)) == [("node@n1",), ("node@n2",), ("node@n3",)]
    refusal = ask(cells, "j2", "a", 4)
    assert refusal == CellRefusal(
        "j2", "a is 1 short of a node with 4 free devices; 4 of its devices are bad", "node", 1
    )
    assert places(ask(cells, "j3", "b", 16)) == [("rack@n4",)]
    cells.set_health("n0/1", True)
    cells.set_health("n0/2", True)
    assert cells.shortfall() == [Shortfall("a", "node", 3, 1)]
    # The tenant has no other machine: it is shown this one, and uses what works of it.
    assert places(ask(cells, "j4", "a", 1)) == [("gpu@n0/1",)]
    assert [use.bad_devices for use in cells.usage()] == [2, 0]
    assert ask(cells, "j5", "a", 2) == CellRefusal(
        "j5", "a is 1 short of a node with 2 free devices; 2 of its devices are bad", "node", 1
    )
    cells.set_health("n0", True)
    assert cells.shortfall() == []
    assert isinstance(ask(cells, "j5", "a", 2), Grant)


def test_a_job_on_broken_hardware_is_named_and_nobody_takes_its_place() -> None:
    cells = cluster("  a: {cells: {node: 1}}\n")
    ask(cells, "j", "a", 4)
    change = cells.set_health("n0/2", False)
    assert (change.devices, change.jobs, change.virtual_clusters) == (("n0/2",), ("j",), ("a",))
    assert isinstance(ask(cells, "urgent", "a", 4, priority=1), CellRefusal)
    assert cells.set_health("n0/2", False).devices == ()
    cells.release("j")
    assert places(ask(cells, "next", "a", 4)) == [("node@n1",)]


def test_a_reconfiguration_keeps_devices_and_downgrades_what_no_longer_fits() -> None:
    cells = cluster("  a: {cells: {node: 3}}\n  b: {cells: {rack: 1}}\n")
    ask(cells, "first", "a", 4)
    ask(cells, "second", "a", 4, priority=1)
    ask(cells, "third", "a", 4)
    cells.release("first")
    ask(cells, "low", "b", 4, priority=OPPORTUNISTIC)
    successor, changes = reconfigured(cells, spec("  a: {cells: {node: 1}}\n  b: {cells: {rack: 1}}\n"))
    audit(successor)
    assert [(change.job, change.change) for change in changes] == [
        ("second", BindingChange.REBOUND),
        ("third", BindingChange.DOWNGRADED),
    ]
    assert {job: grant.devices for job, grant in successor.jobs.items()} == {
        job: grant.devices for job, grant in cells.jobs.items()
    }
    assert successor.jobs["third"].priority == OPPORTUNISTIC
    smaller = spec("  a: {cells: {node: 1}}\n", text=RACK.replace("n[0-7]", "n[0-3]"))
    _, changes = reconfigured(cells, smaller)
    assert ("low", BindingChange.OUTSIDE) in [(change.job, change.change) for change in changes]


def test_a_rebuilt_cluster_goes_on_as_the_first_would_have() -> None:
    cells = cluster("  a: {cells: {node: 2, socket: 1}}\n  b: {cells: {rack: 1}}\n")
    ask(cells, "j1", "a", 1, 2)
    ask(cells, "j2", "b", 3)
    ask(cells, "low", "a", 2, 1, priority=OPPORTUNISTIC)
    replica, changes = rebuild(cells.spec, bindings_of(cells))
    assert changes == []
    for number, (vc, devices) in enumerate([("a", 4), ("b", 2), ("b", 4), ("a", 2)]):
        assert places(ask(cells, f"n{number}", vc, devices)) == places(
            ask(replica, f"n{number}", vc, devices)
        )


def test_opportunistic_devices_are_shared_by_weight() -> None:
    cells = cluster("  a: {cells: {node: 1}, weight: 3}\n  b: {cells: {node: 1}}\n")
    requests = [
        CellRequest(job=f"{vc}{number}", vc=vc, pods=(PodGroup(4),), priority=OPPORTUNISTIC)
        for vc in ("b", "a")
        for number in range(8)
    ]
    results = lend_fairly(cells, requests)
    granted = [result.job for result in results if isinstance(result, Grant)]
    assert granted == ["b0", "b1", "a0", "a1", "a2", "a3", "a4", "a5"]
    assert cells.opportunistic == {"gpu": {"a": 24, "b": 8}}
    assert opportunistic_shares(cells, "gpu", {"a": 40, "b": 40}) == {"a": 24, "b": 8}
    assert opportunistic_shares(cells, "gpu", {"a": 8, "b": 40}) == {"a": 8, "b": 24}
    assert over_share(cells, "gpu", {"a": 12, "b": 40}) == ["a5", "a4", "a3"]


def test_misuse_is_refused() -> None:
    cells = cluster("  a: {cells: {node: 1}}\n")
    ask(cells, "j", "a", 1)
    with pytest.raises(UsageError, match="job j has devices already"):
        ask(cells, "j", "a", 1)
    with pytest.raises(UsageError, match="job k has no devices"):
        cells.release("k")
    with pytest.raises(UsageError, match="there is no virtual cluster 'x'; there are a"):
        ask(cells, "k", "x", 1)
    with pytest.raises(UsageError, match="there is no device type 'tpu'; there are gpu"):
        cells.allocate(CellRequest(job="k", vc="a", pods=(PodGroup(1),), device_type="tpu"))
    with pytest.raises(UsageError, match="every group needs at least one pod and one device"):
        CellRequest(job="k", vc="a", pods=(PodGroup(0),))
    with pytest.raises(UsageError, match="priority -2; it is 0 to 1000, or -1 for opportunistic"):
        CellRequest(job="k", vc="a", pods=(PodGroup(1),), priority=-2)
    with pytest.raises(UsageError, match="priority 1001; it is 0 to 1000, or -1 for opportunistic"):
        CellRequest(job="k", vc="a", pods=(PodGroup(1),), priority=1001)
    with pytest.raises(UsageError, match="no machine or device 'n9'"):
        cells.set_health("n9", False)
    refusal = ask(cells, "k", "a", 1, level="room")
    assert refusal == CellRefusal("k", "rack has no cells 'room'; it has gpu, socket, node, rack")


def test_two_device_types_are_two_pools() -> None:
    text = """\
cell_types:
  big: {of: v100, count: 4, node: true}
  small: {of: k80, count: 2, node: true}
physical_cluster:
  - {cell: big, nodes: [b0]}
  - {cell: small, nodes: [s0, s1]}
virtual_clusters:
"""
    cells = CellCluster(spec("  a: {cells: {big: 1, small: 1}}\n  b: {cells: {small: 1}}\n", text=text))
    grant = ask(cells, "j1", "a", 2)
    assert isinstance(grant, Grant)
    assert grant.device_type == "v100"
    only_small = CellRequest(job="j2", vc="a", pods=(PodGroup(2),), device_type="k80")
    assert places(cells.allocate(only_small)) == [("small@s0",)]
    none = cells.allocate(CellRequest(job="j3", vc="b", pods=(PodGroup(1),), device_type="v100"))
    assert none == CellRefusal("j3", "b has no v100 cells")


def test_a_single_device_goes_to_the_fullest_machine() -> None:
    """Machines of eight: 4 on one, 5 on the other, 1 beside the 5; so another 4 still fit beside the first."""
    text = """\
cell_types:
  node: {of: gpu, count: 8, node: true}
physical_cluster:
  - {cell: node, nodes: ["n[0-1]"]}
virtual_clusters:
"""
    cells = CellCluster(spec("  a: {cells: {node: 2}}\n", text=text))
    for job, devices in (("four", 4), ("five", 5), ("one", 1)):
        ask(cells, job, "a", devices)
    again = ask(cells, "again", "a", 4)
    assert isinstance(again, Grant)
    assert {device.partition("/")[0] for device in again.devices} == {"n0"}


def test_hard_affinity_is_to_one_machine_and_to_a_smaller_cell_only_if_it_is_named() -> None:
    """One device of each socket of the only machine is free."""
    cells = cluster("  a: {cells: {node: 1}}\n")
    for number in range(4):
        ask(cells, f"j{number}", "a", 1)
    (left, _), (right, _) = (
        sorted(cells.jobs[job].devices[0] for job in pair) for pair in (("j0", "j1"), ("j2", "j3"))
    )
    for job in [job for job, held in cells.jobs.items() if held.devices[0] in (left, right)]:
        cells.release(job)
    assert ask(cells, "named", "a", 2, level="socket") == CellRefusal(
        "named", "a is 1 short of a socket with 2 free devices", "socket", 1
    )
    grant = ask(cells, "pair", "a", 2)
    assert isinstance(grant, Grant)
    assert (set(grant.devices), grant.pods[0].level, grant.pods[0].wanted_level) == ({left, right}, 3, 2)


def test_a_gang_goes_into_one_unused_cell_that_holds_all_of_it() -> None:
    cells = cluster("  a: {cells: {node: 1, socket: 1}}\n")
    grant = ask(cells, "gang", "a", 2, 2)
    assert isinstance(grant, Grant)
    assert [pod.virtual_cells for pod in grant.pods] == [("a/node[0]/socket[0]",), ("a/node[0]/socket[1]",)]


def test_a_refusal_counts_bad_devices_of_cells_that_were_bound_for_the_attempt() -> None:
    cells = cluster("  a: {cells: {node: 8}}\n")
    for node in range(8):
        cells.set_health(f"n{node}/0", False)
    assert ask(cells, "j", "a", 4) == CellRefusal(
        "j", "a is 1 short of a node with 4 free devices; 8 of its devices are bad", "node", 1
    )
    assert [use.bad_devices for use in cells.usage()] == [0]
