"""What happens besides training, each worked out by hand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gyrostat.core.devices import Fleet
from gyrostat.core.errors import UsageError
from gyrostat.sched.placers.nodes import NodePlacer
from gyrostat.sched.policies import find_policy
from gyrostat.sched.port import Change, NodeBack, NodeLost, Withdrawn
from gyrostat.sched.tenant_state import Vc
from gyrostat.sched.throughput import AnalyticScaling
from gyrostat.sim.cluster import Costs
from gyrostat.sim.failures import failures
from gyrostat.sim.job import TraceJob
from gyrostat.sim.records import POINTS, Curve
from gyrostat.sim.setup import by_load
from gyrostat.sim.simulate import SimulationResult, simulate
from gyrostat.sim.summary import percentile, summarise
from tests.sched.little_cluster import request


def run(
    fleet: str,
    *jobs: TraceJob,
    policy: str = "fifo",
    costs: Costs | None = None,
    changes: list[tuple[float, Change]] | None = None,
) -> SimulationResult:
    nodes = Fleet.parse(fleet)
    return simulate(
        nodes,
        [Vc(name="all", policy=find_policy(policy))],
        NodePlacer(nodes),
        jobs,
        costs=costs,
        changes=[iter(changes or [])],
    )


def ends(result: SimulationResult) -> dict[str, float]:
    return dict(zip(result.records.ids, result.records.finished, strict=True))


def test_a_job_starts_to_train_after_its_start_time() -> None:
    assert ends(run("gpu:1x1", TraceJob(request("a", 1), 10.0), costs=Costs(start=3.0))) == {"a": 13.0}


def test_scattered_devices_are_slower() -> None:
    """b gets one device of each node: one node more than it needs, so it runs at 0.8."""
    jobs = (
        TraceJob(request("x", 3), 100.0),
        TraceJob(request("y", 3), 100.0),
        TraceJob(request("b", 2, soft=True), 8.0),
    )
    assert ends(run("gpu:2x4", *jobs, costs=Costs(spread=0.2)))["b"] == pytest.approx(10.0)


def test_a_preempted_job_starts_anew_without_losing_work() -> None:
    """low has done 4 of 10 when high comes for 5 s; it goes on at 9, starts for 2, and needs 6 more."""
    jobs = (TraceJob(request("low", 1), 10.0), TraceJob(request("high", 1, at=6.0, priority=1), 3.0))
    result = run("gpu:1x1", *jobs, policy="priority:preempt=yes", costs=Costs(start=2.0))
    assert ends(result) == {"high": 11.0, "low": 19.0}
    assert list(result.records.waited) == [0.0, 5.0]
    assert result.records.preempted_devices == 1


def test_a_failed_node_costs_what_was_not_checkpointed() -> None:
    """a has done 30 of 50 when its node fails; the last checkpoint is at most 20 old. It goes on 5 s later."""
    lost: list[tuple[float, Change]] = [(30.0, NodeLost("gpu-0")), (35.0, NodeBack("gpu-0"))]
    job = TraceJob(request("a", 1), 50.0)
    assert ends(run("gpu:1x1", job, changes=lost)) == {"a": 55.0}
    assert ends(run("gpu:1x1", job, costs=Costs(checkpoint_every=20.0), changes=lost)) == {"a": 75.0}
    assert ends(run("gpu:1x1", job, costs=Costs(checkpoint_every=60.0), changes=lost)) == {"a": 85.0}


def test_serving_takes_devices_and_gives_them_back() -> None:
    load: list[tuple[float, Change]] = [(5.0, Withdrawn("gpu", 1)), (20.0, Withdrawn("gpu", 0))]
    result = run("gpu:1x2", TraceJob(request("a", 2), 10.0), changes=load)
    assert ends(result) == {"a": 25.0}
    assert list(result.records.preemptions) == [1]


def test_failures_are_the_same_for_the_same_seed_and_alternate_by_node() -> None:
    def first(number: int, seed: int) -> list[tuple[float, Change]]:
        stream = failures(Fleet.uniform("gpu", 3, 8), between=100.0, repair=10.0, seed=seed)
        return [next(stream) for _ in range(number)]

    assert first(50, 1) == first(50, 1) != first(50, 2)
    times = [at for at, _ in first(50, 1)]
    assert times == sorted(times)
    of_one = [type(change) for _, change in first(200, 1) if getattr(change, "node", "") == "gpu-1"]
    assert of_one[::2] == [NodeLost] * len(of_one[::2])
    assert of_one[1::2] == [NodeBack] * len(of_one[1::2])
    with pytest.raises(UsageError, match="must be positive"):
        next(failures(Fleet.uniform("gpu", 1, 1), between=0.0, repair=1.0))


def test_a_job_that_is_too_large_does_not_wait_for_endless_failures() -> None:
    nodes = Fleet.uniform("gpu", 1, 4)
    result = simulate(
        nodes,
        [Vc(name="all", policy=find_policy("fifo"))],
        NodePlacer(nodes),
        [TraceJob(request("a", 5), 10.0)],
        changes=[failures(nodes, between=100.0, repair=10.0)],
    )
    assert result.unfinished == ("a",)


def test_analytic_scaling() -> None:
    scaling = AnalyticScaling(overhead=0.1, speeds={"v100": 2.0})
    job = request("a", 2, smallest=1, largest=4)
    assert scaling.rate(job, {"p100": 2}) == 1.0
    assert scaling.rate(job, {"v100": 2}) == 2.0
    assert scaling.rate(job, {"p100": 4}) == pytest.approx((4 / 1.3) / (2 / 1.1))
    assert scaling.rate(job, {"p100": 1, "v100": 1}) == pytest.approx(1.5)
    assert scaling.rate(job, {}) == 0.0


def test_a_curve_keeps_its_integral_however_long_it_gets() -> None:
    curve = Curve(0.0)
    for k in range(10_000):
        curve.set(100.0 * k, float(k % 7))
    curve.advance(1_000_000.0)
    points = curve.points()
    assert len(points) <= POINTS
    width = points[1][0] - points[0][0]
    whole, last = points[:-1], points[-1]
    rest = 2 * (1_000_000.0 - last[0])
    assert sum(value * width for _, value in whole) + last[1] * rest == pytest.approx(curve.integral)
    assert curve.integral == pytest.approx(100.0 * sum(k % 7 for k in range(10_000)))


def test_percentiles() -> None:
    values = [float(value) for value in range(1, 101)]
    assert [percentile(values, share) for share in (0, 1, 50, 95, 99, 100)] == [
        1.0,
        1.0,
        50.0,
        95.0,
        99.0,
        100.0,
    ]
    assert percentile([], 50) == 0.0


def test_a_tenant_that_waits_longer_than_alone_is_an_anomaly() -> None:
    late = (TraceJob(request("a", 1), 10.0), TraceJob(request("b", 1), 10.0))
    shared, alone = run("gpu:1x1", *late), run("gpu:1x2", *late)
    summary = summarise(shared, policy="fifo", sharing="one pool", private=alone)
    assert summary.all.queueing_mean == 5.0
    assert summary.all.jct_p99 == 20.0
    anomaly = summary.anomalies["all"]
    assert (anomaly.private_mean, anomaly.shared_mean, anomaly.worst_half_day) == (0.0, 5.0, 5.0)
    assert anomaly.suffered
    assert not summarise(alone, policy="fifo", sharing="x", private=shared).anomalies["all"].suffered
    assert (summary.utilisation, summary.fragmentation, summary.makespan) == (1.0, 1.0, 20.0)


def test_machines_by_load() -> None:
    def jobs() -> Iterator[TraceJob]:
        yield TraceJob(request("a", 1, vc="busy"), 900.0)
        yield TraceJob(request("b", 20, vc="large"), 5.0)

    assert by_load(jobs(), 10) == {"busy": 7, "large": 3}
    assert by_load(jobs(), 4) == {"busy": 1, "large": 3}
    with pytest.raises(UsageError, match="3 nodes are too few: the largest jobs of the 2 tenants need 4"):
        by_load(jobs(), 3)
