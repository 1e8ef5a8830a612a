"""What a simulation writes down."""

from __future__ import annotations

import pytest

from gyrostat.core.devices import Fleet
from gyrostat.sched.placers.nodes import NodePlacer
from gyrostat.sched.policies import find_policy
from gyrostat.sched.tenant_state import Vc
from gyrostat.sim.job import TraceJob
from gyrostat.sim.simulate import simulate
from tests.sched.little_cluster import request


def test_of_a_job_that_borrows_besides_its_own_only_that_part_is_lent() -> None:
    """Two devices of x's guarantee on one node, and y's two on the other: four in use, two lent, one node guaranteed."""
    fleet = Fleet.parse("gpu:2x2")
    placer = NodePlacer(fleet, quotas={"x": {"gpu": 2}, "y": {"gpu": 2}}, lends=True)
    vcs = [Vc(name=name, policy=find_policy("easyscale")) for name in "xy"]
    job = TraceJob(request("a", 2, vc="x", smallest=1, largest=4, soft=True), 100.0)
    records = simulate(fleet, vcs, placer, [job]).records
    assert records.finished[0] == 50.0
    assert (records.busy.integral, records.lent.integral) == (4 * 50.0, 2 * 50.0)
    assert records.broken.integral == 50.0


def test_when_devices_were_lost_is_kept() -> None:
    fleet = Fleet.parse("gpu:1x2")
    jobs = [
        TraceJob(request("low", 2, priority=1), 10.0),
        TraceJob(request("high", 1, at=4.0, priority=2), 1.0),
    ]
    vcs = [Vc(name="all", policy=find_policy("priority:preempt=yes"))]
    records = simulate(fleet, vcs, NodePlacer(fleet), jobs).records
    assert list(zip(records.preempted_at, records.preempted, strict=True)) == [(4.0, 2)]
    assert records.preempted_devices == 2
    assert records.finished[-1] == pytest.approx(11.0)
