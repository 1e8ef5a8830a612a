"""What reports add up to."""

from __future__ import annotations

from signal import SIGTERM

import pytest

from gyrostat.cli.display import summary
from gyrostat.core.errors import Diverged, ScriptFailed
from gyrostat.core.events import EventKind
from gyrostat.job.control.outcome import Outcome, Tally
from gyrostat.job.control.worker_tracker import FailureCause, JobFailure
from gyrostat.job.processes.protocol import (
    Checkpointed,
    Logged,
    NotCheckpointed,
    Probed,
    Started,
    StepReport,
    StepReports,
    WorkerFinished,
)


def tally() -> Tally:
    """Two workers, asked for at 100; training begins at 101 with step 4 and makes two steps."""
    tally = Tally(virtual_workers=4, workers=2, asked_at=100.0)
    tally.add(0, Started(4, "/c/4", ["/c/5 is damaged"], 101.0), 101.0)
    tally.add(0, StepReports([StepReport(5, 0, 0.5, 32, 102.0), StepReport(6, 1, None, 32, 103.0)]), 103.0)
    return tally


def end(
    tally: Tally,
    failure: JobFailure | None = None,
    stopped: bool = False,
    stopped_by: int | None = None,
    cut: bool = False,
) -> Outcome:
    return tally.outcome(
        now=104.0, exit_codes={0: 0, 1: 0}, failure=failure, stopped=stopped, stopped_by=stopped_by, cut=cut
    )


def test_a_good_run_adds_up() -> None:
    counted = tally()
    counted.add(0, Logged(6, {"accuracy": 0.5}), 103.0)
    counted.add(0, Probed(6, "d6", {"model.weight": "w"}), 103.0)
    counted.add(0, NotCheckpointed("no room"), 103.25)
    counted.add(0, Checkpointed(6, "/c/6", 0.25, 0.01), 103.5)
    counted.add(0, WorkerFinished(6, "abc", 103.5), 103.5)
    counted.add(1, WorkerFinished(6, "abc", 103.5), 103.5)
    outcome = end(counted).check()
    assert (outcome.first_step, outcome.steps, outcome.samples) == (4, 6, 64)
    assert (outcome.seconds, outcome.total_seconds, outcome.throughput) == (2.0, 4.0, 32.0)
    assert outcome.losses == (0.5, None)
    assert outcome.step_times == (2.0, 3.0)
    assert outcome.digest == "abc"
    assert (outcome.resumed_from, outcome.refused) == ("/c/4", ("/c/5 is damaged",))
    assert [(log.step, log.metrics) for log in outcome.logs] == [(6, {"accuracy": 0.5})]
    assert [(probe.step, probe.digest) for probe in outcome.probes] == [(6, "d6")]
    assert [event.as_json() for event in outcome.events] == [
        {"kind": "resume", "step": 4, "at": 1.0, "reason": "resumed from /c/4"},
        {"kind": "checkpoint_failed", "step": 6, "at": 3.25, "reason": "no room"},
        {"kind": "checkpoint", "step": 6, "at": 3.5, "reason": "wrote /c/6"},
    ]
    assert outcome.exit_code == 0


def test_different_digests_are_an_error() -> None:
    counted = tally()
    counted.add(0, WorkerFinished(6, "a" * 64, 103.5), 103.5)
    counted.add(1, WorkerFinished(6, "b" * 64, 103.5), 103.5)
    outcome = end(counted)
    assert outcome.exit_code == 1
    with pytest.raises(Diverged, match=r"worker 0 aaaaaaaaaaaaaaaa…, worker 1 bbbbbbbbbbbbbbbb…"):
        outcome.check()


def test_a_failure_is_an_event_and_raises() -> None:
    failure = JobFailure(
        worker=1, cause=FailureCause.RAISED, summary="raised E: x", traceback="Traceback", exit_code=1
    )
    outcome = end(tally(), failure=failure)
    assert outcome.events[-1].as_json() == {
        "kind": "failure",
        "step": 6,
        "at": 4.0,
        "from": 2,
        "to": 0,
        "reason": "worker 1 raised E: x",
    }
    with pytest.raises(ScriptFailed, match=r"^worker 1 raised E: x\nTraceback$"):
        outcome.check()


def test_a_run_that_was_stopped_returns_what_a_shell_would() -> None:
    outcome = end(tally(), stopped=True, stopped_by=SIGTERM)
    assert outcome.exit_code == 128 + SIGTERM
    assert outcome.events[-1].kind is EventKind.STOP
    with pytest.raises(ScriptFailed, match="stopped by signal 15 after step 6"):
        outcome.check()


def test_a_stop_that_came_too_late_changes_nothing() -> None:
    counted = tally()
    counted.add(0, WorkerFinished(6, "abc", 103.5), 103.5)
    assert end(counted, stopped_by=SIGTERM).exit_code == 0


def test_a_run_that_was_cut_at_a_step_is_a_good_run() -> None:
    assert end(tally(), stopped=True, cut=True).check().steps == 6


def test_a_run_that_was_stopped_by_nobody_has_no_result() -> None:
    outcome = end(tally(), stopped=True)
    assert outcome.exit_code == 1
    with pytest.raises(ScriptFailed, match="stopped without a request after step 6"):
        outcome.check()


@pytest.mark.parametrize(
    "failure", [None, JobFailure(worker=0, cause=FailureCause.EXITED, summary="", exit_code=0)]
)
@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize("stopped_by", [None, SIGTERM])
@pytest.mark.parametrize("digests", [(), ("a", "a"), ("a", "b")])
def test_an_exit_code_of_0_means_a_result(
    failure: JobFailure | None, stopped: bool, stopped_by: int | None, digests: tuple[str, ...]
) -> None:
    counted = tally()
    for worker, digest in enumerate(digests):
        counted.add(worker, WorkerFinished(6, digest, 103.5), 103.5)
    outcome = end(counted, failure=failure, stopped=stopped, stopped_by=stopped_by)
    result = digests == ("a", "a")  # it has trained
    assert (outcome.exit_code == 0) == outcome.ok == (failure is None and result)


def test_a_script_without_gyrostat_is_a_good_run_without_a_digest() -> None:
    outcome = end(Tally(virtual_workers=1, workers=2, asked_at=100.0)).check()
    assert (outcome.steps, outcome.digest, outcome.throughput) == (0, None, 0.0)
    (line,) = summary(outcome)
    assert "without gyrostat.init" in line
    assert "2 times, once on each worker" in line


def test_samples_of_a_job_that_was_taken_over() -> None:
    """Workers tell the next leader their last reports again: no step counts twice, and samples are those of the same steps as
    losses."""
    counted = Tally(virtual_workers=4, workers=2, asked_at=100.0, taken_over=True)
    counted.add(1, StepReports([StepReport(5, 0, 0.5, 32, 99.0), StepReport(6, 0, 0.4, 32, 99.5)]), 100.0)
    counted.add(0, Started(0, None, [], 90.0), 100.0)
    counted.add(0, StepReports([StepReport(6, 0, 0.4, 32, 99.5), StepReport(7, 0, 0.3, 32, 101.0)]), 101.0)
    outcome = end(counted)
    assert (outcome.first_step, outcome.reported_from, outcome.steps) == (0, 4, 7)
    assert (outcome.samples, outcome.losses) == (96, (0.5, 0.4, 0.3))
    assert summary(outcome)[0].startswith("steps 5 to 7, 96 samples in ")
