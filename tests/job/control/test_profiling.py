"""What a profile measures on each size, worked by hand."""

from __future__ import annotations

import pytest

from gyrostat.job.control.profiling import (
    SETTLING,
    WINDOW,
    ProfileRequest,
    Profiling,
    SizeMeasured,
    SpeedBySize,
    measured,
)
from gyrostat.job.processes.protocol import StepReport


def steps(
    first: int, last: int, seconds: float, *, busy: tuple[float, ...] = (), start: float = 0.0
) -> list[StepReport]:
    return [StepReport(n, 0, 0.5, 32, start + n * seconds, busy) for n in range(first, last + 1)]


def test_sizes_go_down() -> None:
    assert Profiling.of(ProfileRequest(smallest=2, largest=5), 3).sizes == [5, 4, 3, 2]
    assert Profiling.of(ProfileRequest(), 3).sizes == [3]
    assert Profiling.of(ProfileRequest(smallest=1), 3).sizes == [3, 2, 1]
    assert Profiling.of(ProfileRequest(largest=2), 3).sizes == []


def test_a_size_is_measured_after_it_has_settled() -> None:
    profiling = Profiling.of(ProfileRequest(smallest=1, largest=2, steps=4), 2)
    profiling.begin(10)
    assert not profiling.add(steps(11, 12, 9.0))
    assert not profiling.add(steps(13, 15, 0.5))
    assert profiling.target == 2
    assert profiling.add([*steps(16, 16, 0.5), *steps(17, 30, 7.0)])
    assert SETTLING == 2
    (row,) = profiling.rows
    assert row.workers == 2
    assert row.steps == 4
    assert profiling.target == 1


def test_the_table() -> None:
    """Two workers make 64 samples/s, one makes 40: per worker 32 and 40."""
    profiling = Profiling.of(ProfileRequest(smallest=1, largest=2, steps=5), 1)
    profiling.begin(0)
    assert profiling.add(steps(1, 7, 0.5, busy=(0.25, 0.375)))
    profiling.begin(7)
    assert profiling.target == 1
    assert profiling.add(steps(8, 14, 0.8, busy=(0.8,)))
    assert profiling.target == 1  # home again
    assert profiling.sizes == []
    table = profiling.table(SpeedBySize())
    assert table == (
        SizeMeasured(
            workers=1,
            steps=5,
            step_seconds=profiling.rows[1].step_seconds,
            throughput=32 / profiling.rows[1].step_seconds,
            busy=profiling.rows[1].busy,
            efficiency=1.0,
        ),
        SizeMeasured(
            workers=2,
            steps=5,
            step_seconds=0.5,
            throughput=64.0,
            busy=0.625,
            efficiency=table[1].efficiency,
        ),
    )
    assert table[1].efficiency == pytest.approx(0.8)


def test_a_profile_of_one_size_is_relative_to_other_sizes_on_which_the_job_has_run() -> None:
    """One worker makes 40 samples/s, then two make 64. A profile on two workers alone has 80 %; before, nothing is known."""
    speeds = SpeedBySize()
    profiling = Profiling.of(ProfileRequest(steps=5), 2)
    profiling.begin(0)
    assert profiling.add(steps(1, 7, 0.5))
    assert [row.efficiency for row in profiling.table(speeds)] == [None]
    speeds.stepped(1, steps(1, SETTLING + WINDOW, 0.8))
    assert [row.efficiency for row in profiling.table(speeds)] == [None]  # not enough steps yet
    speeds.stepped(1, steps(SETTLING + WINDOW + 1, SETTLING + WINDOW + 1, 0.8))
    assert [row.efficiency for row in profiling.table(speeds)] == [pytest.approx(0.8)]


def test_what_happens_between_two_steps_does_not_count() -> None:
    """An evaluation after the third."""
    times = [0.0, 1.0, 2.0, 3.0, 60.0, 61.0]
    row = measured(1, [StepReport(n, 0, None, 8, at) for n, at in enumerate(times)])
    assert (row.step_seconds, row.throughput, row.busy) == (1.0, 8.0, 0.0)
