"""What every elastic policy keeps, whatever happens: limits of jobs and of the cluster, and no change without a cause."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gyrostat.core.profile import Profile, Speed
from gyrostat.core.request import Affinity, JobId, JobRequest
from gyrostat.sched.cells.load import parse
from gyrostat.sched.placers.cells import CellPlacer
from gyrostat.sched.planner.throughput import PlannedThroughput
from gyrostat.sched.port import Change, Finished, Progressed, Submitted, Withdrawn
from tests.sched.little_cluster import LittleCluster

POLICIES = (
    "easyscale:hold=0",
    "easyscale:mixed=no,hold=0",
    "easyscale:hold=60,price=5",
    "wfs",
    "wfs:by=sjf,hold=60,price=5",
    "optimus",
    "gavel",
    "gavel:mixed=yes",
    "elastic-tiresias:crowd=0,queues=10/1000",
    "elastic-tiresias:crowd=2,queues=10/1000,hold=60,price=5",
)
PLANNED = PlannedThroughput(
    {
        "scales": Profile("scales", {"v100": Speed(((1, 4.0),)), "p100": Speed(((1, 1.0),))}),
        "hardly": Profile(
            "hardly",
            {"v100": Speed(((1, 4.0),), ((2, 0.2),)), "p100": Speed(((1, 2.0),), ((2, 0.1), (8, 0.5)))},
        ),
    }
)
jobs = st.fixed_dictionaries(
    {
        "devices": st.integers(1, 4),
        "smaller": st.integers(0, 4),
        "larger": st.integers(0, 4),
        "mixes": st.booleans(),
        "soft": st.booleans(),
        "priority": st.sampled_from([1, 5, 10]),
        "workload": st.sampled_from(["scales", "hardly"]),
        "vc": st.sampled_from(["x", "y"]),
    }
)
events = st.lists(
    st.one_of(
        jobs,
        st.integers(0, 9),
        st.tuples(st.just("serve"), st.integers(0, 5)),
        st.tuples(st.just("measured"), st.integers(0, 9), st.floats(0.05, 3.0)),
    ),
    max_size=14,
)


def job(number: int, at: float, drawn: dict[str, object]) -> JobRequest:
    devices, smaller, larger = (int(str(drawn[name])) for name in ("devices", "smaller", "larger"))
    return JobRequest(
        id=JobId(f"job{number}"),
        vc=str(drawn["vc"]),
        submitted=at,
        devices=devices,
        min_devices=max(0, devices - smaller),
        max_devices=devices + larger,
        virtual_workers=devices + larger,
        mixes_types=bool(drawn["mixes"]),
        affinity=Affinity.SOFT if drawn["soft"] else Affinity.HARD,
        priority=int(str(drawn["priority"])),
        workload=f"{drawn['workload']} (batch size 1)",
        work=10.0 * devices,
    )


def check(cluster: LittleCluster) -> None:
    used: list[int] = []
    for each in cluster.scheduler_state.jobs.values():
        used += [*each.devices, *each.borrowed]
        if each.running:
            assert max(each.request.smallest, 1) <= each.held <= each.request.largest, each
            assert each.request.mixes_types or len(each.all_counts()) == 1, each
            assert each.request.elastic or each.held == each.request.devices, each
    assert len(used) == len(set(used))


FLEET = "v100:2x2,p100:1x4"
QUOTAS: dict[str, dict[str, int]] = {"x": {"v100": 2, "p100": 2}, "y": {"v100": 2, "p100": 2}}
CELLS = """
cell_types:
  v100-node: {of: v100, count: 2, node: true}
  p100-node: {of: p100-half, count: 2, node: true}
  p100-half: {of: p100, count: 2}
physical_cluster:
  - {cell: v100-node, nodes: [v100-0, v100-1]}
  - {cell: p100-node, nodes: [p100-0]}
virtual_clusters:
  x: {cells: {v100-node: 1, p100-half: 1}}
  y: {cells: {v100-node: 1, p100-half: 1}}
"""


def wanting(devices: int, *, smaller: int = 0, larger: int = 0, mixes: bool = False) -> dict[str, object]:
    """A job of tenant x that was once in the way."""
    least = {"soft": False, "priority": 1, "workload": "hardly" if mixes else "scales", "vc": "x"}
    return {"devices": devices, "smaller": smaller, "larger": larger, "mixes": mixes, **least}


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=25, deadline=None)
@given(history=events)
def test_limits_hold_and_nothing_changes_without_a_cause(policy: str, history: list[object]) -> None:
    live(LittleCluster(FLEET, policy, quotas=QUOTAS, lends=True, throughput=PLANNED), history)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=10, deadline=None)
@example(
    history=[wanting(3, smaller=1, larger=4, mixes=True), wanting(1), ("serve", 1), wanting(2), wanting(1)]
)
@example(history=[wanting(2, larger=1), wanting(1), wanting(2)])
@given(history=events)
def test_so_it_is_in_cells(policy: str, history: list[object]) -> None:
    spec, problems = parse(CELLS)
    assert spec is not None, problems
    placer = CellPlacer(spec, lends=True)
    live(LittleCluster(FLEET, policy, quotas=QUOTAS, placer=placer, throughput=PLANNED), history)


def live(cluster: LittleCluster, history: list[object]) -> None:
    now = 0.0
    for number, event in enumerate(history):
        now += 100.0
        changes: list[Change] = []
        if isinstance(event, dict):
            changes = [Submitted(job(number, now, event))]
        elif isinstance(event, tuple) and event[0] == "serve":
            changes = [Withdrawn("v100", min(event[1], 4))]
        elif isinstance(event, tuple):
            running = [each for each in cluster.scheduler_state.jobs.values() if each.running]
            for each in running[event[1] : event[1] + 1]:
                rate = event[2] * PLANNED.rate(each.request, each.all_counts())
                changes = [Progressed(each.id, 1.0, rate)]
        elif cluster.scheduler_state.jobs:
            chosen = list(cluster.scheduler_state.jobs)[int(str(event)) % len(cluster.scheduler_state.jobs)]
            changes = [Finished(chosen)]
        cluster.tick(now, *changes)
        check(cluster)
        assert cluster.tick(now).actions == ()
