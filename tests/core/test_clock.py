"""Clocks never go back."""

from __future__ import annotations

from gyrostat.core.clock import VirtualClock, WallClock


def test_a_virtual_clock_moves_only_when_told_and_never_back() -> None:
    clock = VirtualClock(5.0)
    assert clock.now() == clock.now() == 5.0
    clock.advance(7.5)
    clock.advance(6.0)
    assert clock.now() == 7.5


def test_a_wall_clock_begins_at_nothing_and_goes_on() -> None:
    clock = WallClock()
    first = clock.now()
    assert 0.0 <= first <= clock.now() < 60.0
