"""Loss and throughput over time."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from gyrostat.job.processes.protocol import StepReport
from gyrostat.local.curves import EVERY_S, Curves, Point


def test_a_point_for_every_second() -> None:
    curves = Curves()
    steps = [StepReport(number + 1, 0, 10.0 - number, 8, 50.0 + 0.5 * number) for number in range(6)]
    points = curves.add(steps[:4], now=1000.0, monotonic=51.5) + curves.add(steps[4:], 1001.0, 52.5)
    assert points == [
        Point(at=998.5, step=1, epoch=0, loss=10.0, throughput=None),
        Point(at=999.5, step=3, epoch=0, loss=8.5, throughput=16.0),
        Point(at=1000.5, step=5, epoch=0, loss=6.5, throughput=16.0),
    ]
    assert curves.rest(1001.0, 52.5) == [Point(at=1001.0, step=6, epoch=0, loss=5.0, throughput=16.0)]
    assert curves.rest(1001.0, 52.5) == []


def test_a_script_may_have_no_loss() -> None:
    (point,) = Curves().add([StepReport(1, 2, None, 8, 3.0)], now=3.0, monotonic=3.0)
    assert point == Point(at=3.0, step=1, epoch=2, loss=None, throughput=None)


@given(st.lists(st.floats(0.0, 3.0), min_size=1, max_size=60))
def test_no_sample_is_lost_and_no_second_has_two_points(pauses: list[float]) -> None:
    curves, at, points = Curves(), 0.0, []
    for number, pause in enumerate(pauses):
        at += pause
        points += curves.add([StepReport(number + 1, 0, 1.0, 1, at)], now=at, monotonic=at)
    points += curves.rest(at, at)
    assert points[-1].step == len(pauses)
    assert [point.step for point in points] == sorted({point.step for point in points})
    gaps = [after.at - before.at for before, after in pairwise(points[:-1])]
    assert all(gap >= EVERY_S for gap in gaps)
