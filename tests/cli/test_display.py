"""What a run looks like, on a terminal and elsewhere, at times that the test sets."""

from __future__ import annotations

import io
import logging
from dataclasses import replace
from signal import SIGTERM

import pytest
from rich.console import Console

from gyrostat.cli.display import LiveDisplay, LossCurve, PlainDisplay, ProgressText, sparkline
from gyrostat.core import logs
from gyrostat.core.placement import Placement
from gyrostat.job.control.instructions import Reconfiguration, ReconfigurationDone
from gyrostat.job.control.outcome import Outcome, Tally
from gyrostat.job.control.worker_tracker import FailureCause, JobFailure
from gyrostat.job.diagnostics.stragglers import Straggler
from gyrostat.job.processes.output import OutputStream
from gyrostat.job.processes.protocol import (
    Checkpointed,
    Logged,
    NotCheckpointed,
    Started,
    StepReport,
    StepReports,
    WorkerFinished,
)

PLACEMENT = Placement.even(4, 2)
STEPS = StepReports([StepReport(5, 1, 0.5, 32, 102.0), StepReport(6, 1, 0.25, 32, 104.0)])


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def outcome(
    *, digest: str | None = "abc", failure: JobFailure | None = None, stopped_by: int | None = None
) -> Outcome:
    tally = Tally(virtual_workers=4, workers=2, asked_at=100.0)
    tally.add(0, Started(4, "/c/4", [], 101.0), 101.0)
    tally.add(0, STEPS, 104.0)
    if digest:
        tally.add(0, WorkerFinished(6, digest, 104.0), 104.0)
    return tally.outcome(
        now=104.0, exit_codes={0: 0, 1: 0}, failure=failure, stopped=False, stopped_by=stopped_by
    )


def test_lines_elsewhere_than_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    display = PlainDisplay(PLACEMENT, quiet=False, clock=clock)
    display.heard(0, Started(4, "/c/4", ["/c/5 is damaged"], 101.0))
    display.printed(1, OutputStream.STDOUT, "hello")
    display.printed(0, OutputStream.STDERR, "careful")
    display.heard(0, STEPS)
    display.heard(0, Logged(6, {"accuracy": 0.5}))
    assert display.ticked() == 10.0
    clock.now = 111.0
    assert display.ticked() == 10.0
    display.heard(0, NotCheckpointed("no room for /c/5"))
    display.heard(0, Checkpointed(6, "/c/6", 0.1, 0.01))
    display.over(outcome())
    printed = capsys.readouterr()
    assert printed.out.splitlines() == ["worker 1 │ hello", "job      │ step 6  accuracy 0.5"]
    assert printed.err.splitlines() == [
        "gyrostat: /c/5 is damaged",
        "gyrostat: resumed at step 4 from /c/4",
        "worker 0 │ careful",
        "gyrostat: step 6, epoch 1, loss 0.25, 16 samples/s",
        "gyrostat: no room for /c/5; training continues, and the next checkpoint will be attempted",
        "gyrostat: checkpoint of step 6 in /c/6",
        "gyrostat: steps 5 to 6, 64 samples in 3.0 s (21 samples/s), 4 virtual workers on 2",
        "gyrostat: digest abc",
    ]


def test_quiet_leaves_what_the_script_says(capsys: pytest.CaptureFixture[str]) -> None:
    display = PlainDisplay(PLACEMENT, quiet=True, clock=Clock())
    display.heard(0, Started(4, "/c/4", [], 101.0))
    display.printed(0, OutputStream.STDOUT, "hello")
    display.heard(0, Logged(6, {"accuracy": 0.5}))
    assert display.ticked() is None
    display.over(outcome())
    printed = capsys.readouterr()
    assert printed.out.splitlines() == ["worker 0 │ hello", "job      │ step 6  accuracy 0.5"]
    assert printed.err == ""


def test_a_failure_ends_with_the_traceback_of_the_one_to_blame(capsys: pytest.CaptureFixture[str]) -> None:
    failure = JobFailure(
        worker=1, cause=FailureCause.RAISED, summary="raised E: x", traceback="Traceback\nE: x"
    )
    PlainDisplay(PLACEMENT, quiet=True).over(outcome(digest=None, failure=failure))
    assert capsys.readouterr().err.splitlines() == ["worker 1 │ Traceback", "worker 1 │ E: x"]


def test_a_stop_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    PlainDisplay(PLACEMENT, quiet=False).over(outcome(digest=None, stopped_by=SIGTERM))
    assert capsys.readouterr().err.splitlines()[-1] == "gyrostat: stopped by SIGTERM after step 6"
    PlainDisplay(PLACEMENT, quiet=False).over(
        replace(outcome(digest=None, stopped_by=SIGTERM), stop_requested=True)
    )
    assert capsys.readouterr().err.splitlines()[-1] == "gyrostat: stopped by request after step 6"


def test_names_are_of_one_width() -> None:
    display = PlainDisplay(Placement.even(11, 11), quiet=True)
    assert [display.name(worker) for worker in (3, 10, None)] == ["worker 3 ", "worker 10", "job      "]


def test_the_live_line_on_a_terminal() -> None:
    clock, screen = Clock(), io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100, color_system=None, highlight=False)
    display = LiveDisplay(PLACEMENT, clock=clock, console=console)
    display.printed(1, OutputStream.STDERR, "careful [not markup]")
    display.heard(0, STEPS)
    clock.now = 165.0
    assert display.ticked() == 0.125
    display.over(outcome())
    text = screen.getvalue()
    assert "worker 1 │ careful [not markup]" in text
    assert "step 6 · epoch 1 · loss 0.25 · 16 samples/s · 4 on 2 workers · 1:05  █▁" in text
    assert text.endswith("gyrostat: digest abc\n")


def test_before_the_first_step_it_is_starting() -> None:
    assert ProgressText().parts() == ["starting"]
    progress = ProgressText()
    progress.add([StepReport(1, -1, None, 8, 1.0)])
    assert progress.parts() == ["step 1"]


def test_the_curve_covers_the_whole_run() -> None:
    curve = LossCurve()
    for value in range(1000):
        curve.append(float(value))
    points = curve.points()
    assert 10 <= len(points) < 20
    assert points[0] == 31.5
    assert points == sorted(points)


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ([], ""),
        ([1.0], ""),
        ([1.0, 1.0], "▁▁"),
        ([0.0, 7.0, 3.5], "▁█▄"),
        ([0.0, float("nan"), float("inf"), 7.0], "▁  █"),
    ],
)
def test_sparklines(values: list[float], line: str) -> None:
    assert sparkline(values) == line


def test_changes_and_stragglers_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    display = PlainDisplay(PLACEMENT, quiet=False)
    display.noticed(Straggler(member=1, seconds=0.0533, usual=0.04))
    moved = Reconfiguration(workers=2, reason="speed", counts=(3, 1))
    display.resized(ReconfigurationDone(moved, 13, 2, 2, 0.009, 0.5, ()))
    display.resized(
        ReconfigurationDone(Reconfiguration(workers=1, reason="requested"), 20, 2, 1, 0.02, 0.5, ())
    )
    assert capsys.readouterr().err.splitlines() == [
        "gyrostat: worker 1 is 1.33 times slower than usual: 53.3 ms for a virtual worker's micro-batches, instead of 40.0 ms",
        "gyrostat: from step 13 on other shares among 2 workers, after a pause of 9 ms (speed)",
        "gyrostat: from step 20 on 1 worker instead of 2, after a pause of 20 ms (requested)",
    ]


def test_log_records_are_printed_above_the_live_line() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    display = LiveDisplay(PLACEMENT, clock=Clock(), console=console)
    logs.configure(1)
    logging.getLogger("gyrostat.test").info("fence", extra={"job": "mnist", "step": 4})
    display.close()
    assert isinstance(console.file, io.StringIO)
    assert "INFO gyrostat.test: fence (job mnist, step 4)\n" in console.file.getvalue()


def test_json_records_of_workers_stay_json(capsys: pytest.CaptureFixture[str]) -> None:
    record = '{"time": "2026-11-18T03:00:00.000Z", "level": "INFO", "logger": "gyrostat.worker", "message": "joined"}'
    display = PlainDisplay(PLACEMENT, quiet=False)
    display.printed(1, OutputStream.STDERR, record)
    display.printed(1, OutputStream.STDOUT, '{"time": "of the script"}')
    assert capsys.readouterr() == ('worker 1 │ {"time": "of the script"}\n', f"{record}\n")
