"""Private clusters, quotas and cells on the same jobs: what HiveD promises, exactly."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyrostat.sched.cells.spec import CellSpec
from gyrostat.sched.policies import find_policy
from gyrostat.sched.tenant_state import Vc
from gyrostat.sim.job import TraceJob
from gyrostat.sim.sharing import Sharing, build, cluster_of_cells, cluster_of_nodes
from gyrostat.sim.simulate import SimulationResult, simulate
from gyrostat.sim.traces import between, read_trace
from tests.sched.little_cluster import request
from tests.sim.data import data


def run(
    spec: CellSpec, sharing: str, jobs: Sequence[TraceJob], policy: str = "fifo", *, lends: bool = True
) -> SimulationResult:
    fleet, placer = build(spec, Sharing(sharing), lends=lends)
    vcs = [Vc(name=vc.name, policy=find_policy(policy)) for vc in spec.virtual_clusters]
    return simulate(fleet, vcs, placer, jobs)


def starts(result: SimulationResult) -> dict[str, float]:
    return dict(zip(result.records.ids, result.records.started, strict=True))


def mean_waits(result: SimulationResult) -> dict[str, float]:
    records = result.records
    return {vc: statistics.fmean(records.waited[row] for row in records.of_vc(vc)) for vc in records.vcs}


@pytest.fixture(scope="module")
def philly() -> list[TraceJob]:
    """Four days of the Philly trace, without the few jobs that no small cluster could run."""
    jobs = between(read_trace(data("philly.csv")), 30, 34)
    return [job for job in jobs if job.request.devices <= 16]


def sized(jobs: Sequence[TraceJob]) -> CellSpec:
    """A cluster that is busy: a node per tenant and 32 by load."""
    load: dict[str, float] = {}
    for job in jobs:
        load[job.request.vc] = load.get(job.request.vc, 0.0) + job.duration * job.request.devices
    whole = sum(load.values())
    return cluster_of_nodes({vc: 2 + round(32 * mine / whole) for vc, mine in load.items()})


def test_a_real_trace_without_borrowing_starts_every_job_as_a_private_cluster_does(
    philly: list[TraceJob],
) -> None:
    spec = sized(philly)
    private = run(spec, "private", philly)
    cells = run(spec, "cells", philly, lends=False)
    assert len(private.records) == len(philly)
    assert max(private.records.waited) > 600
    assert starts(cells) == starts(private)


def test_a_real_trace_with_borrowing_makes_no_tenant_wait_longer(philly: list[TraceJob]) -> None:
    spec = sized(philly)
    private, cells = mean_waits(run(spec, "private", philly)), mean_waits(run(spec, "cells", philly))
    assert all(cells[vc] <= private[vc] + 1e-6 for vc in private), (cells, private)
    assert sum(cells.values()) < 0.5 * sum(private.values())


def test_a_quota_is_no_promise_of_a_place_but_cells_are() -> None:
    """HiveD §2. Under a quota, small jobs of one tenant come to lie on both nodes, the last one on the fuller node, beside
    three devices of the other tenant; and that one's job of eight waits.
    """
    spec = cluster_of_nodes({"small": 1, "large": 1})
    jobs = [
        *(TraceJob(request(f"s{k}", 1, vc="small"), 1000.0 if k >= 6 else 10.0) for k in range(8)),
        TraceJob(request("three", 3, at=1.0, vc="large"), 15.0),
        TraceJob(request("late", 1, at=12.0, vc="small"), 2000.0),
        TraceJob(request("eight", 8, at=20.0, vc="large"), 100.0),
    ]
    waits = {
        sharing: starts(run(spec, sharing, jobs))["eight"] - 20.0 for sharing in ("private", "quota", "cells")
    }
    assert waits == {"private": 0.0, "quota": 980.0, "cells": 0.0}


jobs_of_tenants = st.lists(
    st.tuples(
        st.sampled_from(["a", "b"]), st.sampled_from([1, 2, 4, 8, 16]), st.integers(0, 60), st.integers(1, 50)
    ),
    min_size=1,
    max_size=40,
)


@settings(max_examples=40, deadline=None)
@given(
    jobs_of_tenants,
    st.sampled_from(["fifo", "fifo:backfill=yes", "tiresias:queues=20/200", "gandiva", "priority"]),
)
def test_any_policy_in_cells_decides_as_in_a_private_cluster(
    drawn: list[tuple[str, int, int, int]], policy: str
) -> None:
    spec = cluster_of_cells({"a": {3: 2, 1: 2}, "b": {3: 3}}, nodes=6)
    jobs = [
        TraceJob(request(f"j{k}", devices, at=float(at), vc=vc), float(duration))
        for k, (vc, devices, at, duration) in enumerate(sorted(drawn, key=lambda row: row[2]))
    ]
    private, cells = run(spec, "private", jobs, policy), run(spec, "cells", jobs, policy, lends=False)
    assert starts(cells) == starts(private)
    assert cells.unfinished == private.unfinished == ()
