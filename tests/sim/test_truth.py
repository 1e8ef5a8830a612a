"""Jobs that are not as fast as the scheduler expects, and a scheduler that finds out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gyrostat.core.devices import Fleet
from gyrostat.core.profile import Profile, Speed
from gyrostat.core.request import Affinity, JobId, JobRequest
from gyrostat.sched.placers.nodes import NodePlacer
from gyrostat.sched.planner.throughput import PlannedThroughput
from gyrostat.sched.policies import find_policy
from gyrostat.sched.recording import TickRecorder, replay
from gyrostat.sched.state import SchedulerState
from gyrostat.sched.tenant_state import Vc
from gyrostat.sim.cluster import Costs
from gyrostat.sim.job import TraceJob
from gyrostat.sim.simulate import SimulationResult, simulate

FLEET = Fleet.parse("v100:1x4,p100:1x4")
EXPECTED = PlannedThroughput({"w": Profile("w", {"v100": Speed(((1, 4.0),)), "p100": Speed(((1, 3.0),))})})
REAL = PlannedThroughput({"w": Profile("w", {"v100": Speed(((1, 4.0),)), "p100": Speed(((1, 0.3),))})})
"""P100s are a tenth as fast as expected."""


def job(name: str, virtual_workers: int, duration: float, **options: Any) -> TraceJob:
    request = JobRequest(
        id=JobId(name),
        vc="all",
        submitted=0.0,
        devices=virtual_workers,
        virtual_workers=virtual_workers,
        affinity=Affinity.SOFT,
        workload="w (batch size 1)",
        **options,
    )
    return TraceJob(request, duration)


def jobs() -> list[TraceJob]:
    """800 steps of eight micro-batches on whatever there is; and for 100 s a job that keeps all P100s."""
    return [job("b", 4, 100.0, types=("p100",)), job("a", 8, 200.0, min_devices=0, mixes_types=True)]


def vcs() -> list[Vc]:
    return [Vc(name="all", policy=find_policy("easyscale"))]


def run(
    truth: PlannedThroughput,
    *,
    measure: float,
    more: Sequence[TraceJob] = (),
    recorder: TickRecorder | None = None,
) -> SimulationResult:
    return simulate(
        FLEET,
        vcs(),
        NodePlacer(FLEET),
        [*jobs(), *more],
        throughput=EXPECTED,
        truth=truth,
        costs=Costs(measure=measure),
        watchers=() if recorder is None else (recorder,),
    )


def finished(result: SimulationResult) -> dict[str, float]:
    return dict(zip(result.records.ids, result.records.finished, strict=True))


def service(result: SimulationResult) -> dict[str, float]:
    """Device-seconds."""
    return dict(zip(result.records.ids, result.records.service, strict=True))


def test_devices_that_do_not_help_are_given_back() -> None:
    """a takes 0.5 s a step on four V100s. At 100 s it gets the P100s, to take a third of a second; but its best split leaves
    them idle. After 10 s it has found that out and gives them back. Who never measures keeps them until it ends.
    """
    learning, believing = run(REAL, measure=10.0), run(REAL, measure=1e9)
    assert finished(learning) == finished(believing) == {"b": 100.0, "a": 400.0}
    assert service(learning) == {"b": 400.0, "a": 4 * 400.0 + 4 * 10.0}
    assert service(believing) == {"b": 400.0, "a": 4 * 400.0 + 4 * 300.0}


def test_what_is_given_back_helps_others() -> None:
    """c comes at 120 s and may only use P100s. It gets all four; of a job that believes its profile it gets one at first."""
    late = job("c", 4, 30.0, types=("p100",), min_devices=0)
    late = replace(late, request=replace(late.request, submitted=120.0))
    learning = run(REAL, measure=10.0, more=[late])
    believing = run(REAL, measure=1e9, more=[late])
    assert finished(learning)["c"] == 150.0
    assert finished(believing)["c"] > 200.0


def test_where_profiles_are_right_measuring_changes_nothing() -> None:
    measured, reported = run(EXPECTED, measure=10.0), run(EXPECTED, measure=0.0)
    assert finished(measured) == finished(reported) == {"b": 100.0, "a": pytest.approx(100.0 + 600 / 3)}


def test_what_was_measured_is_recorded_and_replays_exactly(tmp_path: Path) -> None:
    path = tmp_path / "ticks.jsonl"
    with TickRecorder(path, {}) as recorder:
        run(REAL, measure=10.0, recorder=recorder)
    assert b'"Progressed"' in path.read_bytes()
    found = replay(path, lambda setup: SchedulerState(FLEET, vcs(), NodePlacer(FLEET), EXPECTED))
    assert found.difference is None
    assert found.actions == 4
