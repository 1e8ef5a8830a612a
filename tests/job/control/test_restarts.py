"""How often and how soon."""

from __future__ import annotations

from gyrostat.job.control.restarts import DELAY, Restarts


def test_the_number_is_limited_whatever_the_progress() -> None:
    restarts = Restarts(3)
    assert [restarts.died(step) for step in (10, 20, 30, 40)] == [0.0, 0.0, 0.0, None]


def test_it_waits_twice_as_long_every_time_without_progress() -> None:
    restarts = Restarts(20)
    waits = [restarts.died(5) for _ in range(9)]
    assert waits == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, DELAY.longest_s, DELAY.longest_s]
    assert restarts.died(4) == DELAY.longest_s  # it did not even come as far as before
    assert restarts.died(6) == 0.0
    assert restarts.died(6) == 1.0


def test_never() -> None:
    assert Restarts(0).died(1) is None
