"""Whole simulations, small enough to be worked out by hand."""

from __future__ import annotations

from gyrostat.core.devices import Fleet
from gyrostat.sched.placers.nodes import NodePlacer
from gyrostat.sched.policies import find_policy
from gyrostat.sched.tenant_state import Vc
from gyrostat.sim.job import TraceJob
from gyrostat.sim.simulate import SimulationResult, simulate
from tests.sched.little_cluster import request


def run(fleet: str, policy: str, *jobs: TraceJob) -> SimulationResult:
    nodes = Fleet.parse(fleet)
    return simulate(nodes, [Vc(name="all", policy=find_policy(policy))], NodePlacer(nodes), jobs)


def test_fifo_by_hand() -> None:
    """Four devices: a and b share them, c waits for both, d waits behind c."""
    result = run(
        "gpu:1x4",
        "fifo",
        TraceJob(request("a", 2, at=0.0), 10.0),
        TraceJob(request("b", 2, at=1.0), 20.0),
        TraceJob(request("c", 4, at=2.0), 5.0),
        TraceJob(request("d", 1, at=3.0), 1.0),
    )
    records = result.records
    assert records.ids == ["a", "b", "c", "d"]
    assert list(records.started) == [0.0, 1.0, 21.0, 26.0]
    assert list(records.finished) == [10.0, 21.0, 26.0, 27.0]
    assert list(records.waited) == [0.0, 0.0, 19.0, 23.0]
    assert records.busy.integral == 2 * 10 + 2 * 20 + 4 * 5 + 1
    assert (result.events, result.unfinished) == (8, ())


def test_a_job_that_is_too_large_is_left_over() -> None:
    result = run("gpu:1x4", "fifo", TraceJob(request("a", 5), 10.0))
    assert (len(result.records), result.unfinished) == (0, ("a",))


def test_what_happens_at_one_instant_shares_a_tick() -> None:
    """Three arrivals at 0; two completions and an arrival at 10; two completions at 20: eight events, three ticks."""
    result = run(
        "gpu:1x3",
        "fifo",
        TraceJob(request("a", 1), 10.0),
        TraceJob(request("b", 1), 10.0),
        TraceJob(request("c", 1), 20.0),
        TraceJob(request("d", 2, at=10.0), 10.0),
    )
    assert (result.events, result.ticks) == (8, 3)
    assert list(result.records.started) == [0.0, 0.0, 0.0, 10.0]
