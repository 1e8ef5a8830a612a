"""A recording, made a trace again: the same jobs, the same run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gyrostat.core.errors import UsageError
from gyrostat.core.plan import Plan, Start
from gyrostat.core.request import JobId
from gyrostat.sched.port import Bound, Change, Finished, Snapshot, Submitted, Withdrawn
from gyrostat.sched.recording import TickRecorder
from gyrostat.sim.job import TraceJob
from gyrostat.sim.recorded import read_recorded
from gyrostat.sim.setup import Setup
from gyrostat.sim.simulate import SimulationResult, simulate
from gyrostat.sim.traces import DEFAULT_VC
from tests.sched.little_cluster import request

SETUP = Setup(cluster="gpu:1x4", sharing="flat", policy="wfs")
JOBS = [
    TraceJob(replace(request("a", 4, at=0.0), vc=DEFAULT_VC, min_devices=1), 100.0),
    TraceJob(replace(request("b", 2, at=10.0), vc=DEFAULT_VC, min_devices=1), 50.0),
    TraceJob(replace(request("c", 4, at=20.0), vc=DEFAULT_VC), 30.0),
]


def run(
    setup: Setup, jobs: list[TraceJob], changes: list[tuple[float, Change]], record: Path
) -> SimulationResult:
    fleet, vcs, placer = setup.parts()
    with TickRecorder(record, setup.to_json()) as keep:
        return simulate(fleet, vcs, placer, jobs, changes=[iter(changes)], watchers=(keep,))


def test_recorded_jobs_run_again_as_they_did(tmp_path: Path) -> None:
    serving: list[tuple[float, Change]] = [(30.0, Withdrawn("gpu", 1)), (60.0, Withdrawn("gpu", 0))]
    first = run(SETUP, JOBS, serving, tmp_path / "first.jsonl")
    found = read_recorded(tmp_path / "first.jsonl")
    assert (found.setup, found.changes, found.unfinished) == (SETUP, serving, 0)
    assert [job.request for job in found.jobs] == [job.request for job in JOBS]
    assert [job.duration for job in found.jobs] == pytest.approx([job.duration for job in JOBS])
    again = run(found.setup, found.jobs, found.changes, tmp_path / "again.jsonl")
    assert again.records.ids == first.records.ids
    assert list(again.records.finished) == pytest.approx(list(first.records.finished))


def test_jobs_that_were_not_over_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "ticks.jsonl"
    a, b = (replace(request(name, 2, at=0.0), vc=DEFAULT_VC) for name in "ab")
    with TickRecorder(path, SETUP.to_json()) as keep:
        keep(
            Snapshot(5.0, (Submitted(a), Bound(a.id, (0, 1)), Submitted(b))),
            Plan(5.0, (Start(b.id, (2,), "room"),)),
        )
        keep(Snapshot(25.0, (Finished(b.id),)), Plan(25.0))
    found = read_recorded(path)
    assert [(job.request, job.duration) for job in found.jobs] == [(b, 10.0)]
    assert found.unfinished == 1


def test_a_job_that_was_never_submitted_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "ticks.jsonl"
    with TickRecorder(path, SETUP.to_json()) as keep:
        keep(Snapshot(5.0, (Finished(JobId("a")),)), Plan(5.0))
    with pytest.raises(UsageError, match="has changes of job 'a' before its submission"):
        read_recorded(path)
