"""Cores and memory for parameter servers: no virtual cluster's jobs ever have more, whatever the policy."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyrostat.cluster.layout import read_layout
from gyrostat.core.plan import Plan
from gyrostat.core.request import JobId, JobRequest
from gyrostat.core.roles import ServerCapacity
from gyrostat.sched.cells.load import loads, parse
from gyrostat.sched.planner.throughput import workload_name
from gyrostat.sched.port import Bound, Change, Finished, Snapshot, Stopped, Submitted
from gyrostat.sched.state import SchedulerState
from gyrostat.sched.tick import tick

CELLS = """
cell_types:
  machine: {of: cpu, count: 4, node: true}
physical_cluster:
- {cell: machine, nodes: [a, b]}
virtual_clusters:
  red: {cells: {machine: 1}, servers: {cores: 4, memory: 1000}}
  blue: {cells: {machine: 1}}
"""


def state(policy: str = "fifo") -> SchedulerState:
    return read_layout(CELLS).scheduler_state(policy)


def job(
    name: str, servers: int, *, memory: int | None = None, devices: int = 1, vc: str = "red"
) -> Submitted:
    needs = ServerCapacity(cores=servers, memory=memory) if servers else None
    workload = workload_name("clicks", 1)
    return Submitted(
        JobRequest(id=JobId(name), vc=vc, submitted=0.0, devices=devices, servers=needs, workload=workload)
    )


def run(found: SchedulerState, now: float, *changes: Change) -> Plan:
    return tick(found, Snapshot(now, changes))


def running(found: SchedulerState) -> set[str]:
    return {name for name, view in found.jobs.items() if view.running}


def test_the_cell_file_states_them() -> None:
    spec = loads(CELLS, "cells")
    assert spec.servers == {"red": ServerCapacity(cores=4, memory=1000), "blue": ServerCapacity()}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("servers: {cores: 0}", "virtual_clusters.red.servers {'cores': 0}: Expected `int` >= 1"),
        ("servers: {memory: 5}", "Object missing required field `cores`"),
        ("servers: {cores: 1, gpus: 2}", "Object contains unknown field `gpus`"),
        ("servers: 3", "virtual_clusters.red.servers 3"),
    ],
)
def test_bad_entries_are_named_with_their_line(text: str, reason: str) -> None:
    spec, problems = parse(CELLS.replace("servers: {cores: 4, memory: 1000}", text))
    assert spec is None
    assert [problem.line for problem in problems] == [7]
    assert reason in problems[0].reason


def test_a_job_waits_for_server_cores_and_starts_when_they_are_free() -> None:
    found = state()
    run(found, 0.0, job("a", 3), job("b", 2), job("c", 1))
    assert running(found) == {"a", "c"} or running(found) == {"a"}
    run(found, 1.0, Finished(JobId("a")))
    assert running(found) == {"b", "c"}


def test_jobs_without_servers_are_not_held_up_by_one_that_does_not_fit() -> None:
    found = state("priority")
    run(found, 0.0, job("big", 4), job("next", 4), job("plain", 0))
    assert running(found) >= {"big"}
    assert "next" not in running(found)


def test_memory_counts_too() -> None:
    found = state()
    run(found, 0.0, job("a", 1, memory=700), job("b", 1, memory=700))
    assert running(found) == {"a"}


def test_servers_are_given_back_with_the_last_device() -> None:
    found = state()
    run(found, 0.0, job("a", 4))
    assert found.vcs["red"].servers.free == ServerCapacity(cores=0, memory=1000)
    run(found, 1.0, Stopped(JobId("a"), "it failed to start"), Finished(JobId("a")))
    assert found.vcs["red"].servers.free == ServerCapacity(cores=4, memory=1000)


def test_a_job_that_ran_before_keeps_its_devices_only_if_its_servers_fit() -> None:
    found = state()
    run(found, 0.0, job("a", 3), job("b", 3), Bound(JobId("a"), (0,)), Bound(JobId("b"), (1,)))
    assert running(found) == {"a"}
    assert found.vcs["red"].servers.free == ServerCapacity(cores=1, memory=1000)


@settings(max_examples=60, deadline=None)
@given(
    policy=st.sampled_from(["fifo", "priority", "tiresias", "elastic-tiresias", "gandiva", "wfs"]),
    sizes=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 3), st.integers(0, 400)), max_size=12),
    ends=st.lists(st.integers(0, 11), max_size=20),
)
def test_never_more_than_the_tenant_has(
    policy: str, sizes: list[tuple[int, int, int]], ends: list[int]
) -> None:
    found, now, alive = state(policy), 0.0, dict[str, tuple[int, int]]()
    events = [*range(len(sizes)), *(-1 - end for end in ends)]
    for event in events:
        now += 100.0
        if event >= 0:
            cores, devices, memory = sizes[event]
            alive[f"j{event}"] = cores, memory if cores else 0
            run(found, now, job(f"j{event}", cores, memory=memory, devices=devices))
        elif f"j{-1 - event}" in alive:
            del alive[f"j{-1 - event}"]
            run(found, now, Finished(JobId(f"j{-1 - event}")))
        held = [alive[name] for name in running(found)]
        assert sum(cores for cores, _ in held) <= 4
        assert sum(memory for _, memory in held) <= 1000
        free = found.vcs["red"].servers.free
        assert free == ServerCapacity(
            cores=4 - sum(cores for cores, _ in held), memory=1000 - sum(memory for _, memory in held)
        )
