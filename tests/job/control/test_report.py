"""The report is valid JSON, whole or not there."""

from __future__ import annotations

import json
from pathlib import Path

from gyrostat.core.job import ReductionChoice, ReductionOrder
from gyrostat.job.control.outcome import Tally
from gyrostat.job.control.report import write_report
from gyrostat.job.control.worker_tracker import FailureCause, JobFailure
from gyrostat.job.processes.protocol import Logged, Started, StepReport, StepReports, WorkerFinished


def test_it_says_what_the_design_promises(tmp_path: Path) -> None:
    tally = Tally(virtual_workers=4, workers=1, asked_at=10.0)
    chosen = ReductionChoice(order=ReductionOrder.TREE, carrier=None, reason="requested")
    tally.add(0, Started(0, None, [], 11.0, reduction=chosen), 11.0)
    tally.add(
        0, StepReports([StepReport(1, 0, 0.5, 32, 12.0), StepReport(2, 0, float("nan"), 32, 13.0)]), 13.0
    )
    tally.add(0, Logged(2, {"accuracy": 0.75}), 13.0)
    tally.add(0, WorkerFinished(2, "abc", 13.0), 13.0)
    outcome = tally.outcome(now=14.0, exit_codes={0: 0}, failure=None, stopped=False, stopped_by=None)
    path = tmp_path / "report.json"
    path.write_text("old")
    write_report(path, outcome)
    assert json.loads(path.read_text()) == {
        "virtual_workers": 4,
        "workers": 1,
        "servers": None,
        "steps": 2,
        "first_step": 0,
        "reported_from": 0,
        "samples": 64,
        "seconds": 2.0,
        "total_seconds": 4.0,
        "throughput": 32.0,
        "digest": "abc",
        "resumed_from": None,
        "refused_checkpoints": [],
        "reduction": {"order": "tree", "carrier": None, "reason": "requested"},
        "checkpoints": [],
        "events": [],
        "exit_codes": [0],
        "failure": None,
        "stopped_by": None,
        "logs": [{"step": 2, "accuracy": 0.75}],
        "losses": [0.5, None],
    }
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.json"]


def test_a_failed_run_has_one_too(tmp_path: Path) -> None:
    failure = JobFailure(
        worker=0, cause=FailureCause.RAISED, summary="raised E: x", traceback="Traceback", exit_code=1
    )
    tally = Tally(virtual_workers=1, workers=1, asked_at=10.0)
    outcome = tally.outcome(now=14.0, exit_codes={0: 1}, failure=failure, stopped=False, stopped_by=None)
    write_report(tmp_path / "report.json", outcome)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["failure"] == {
        "worker": 0,
        "cause": "raised",
        "summary": "raised E: x",
        "traceback": "Traceback",
        "exit_code": 1,
        "evidence": {"running": None, "lines": [], "out_of_memory": None},
        "role": "worker",
    }
    assert report["events"] == [
        {"kind": "failure", "step": 0, "at": 4.0, "from": 1, "to": 0, "reason": "worker 0 raised E: x"}
    ]
