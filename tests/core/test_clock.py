"""A virtual clock never goes back."""

from __future__ import annotations

from gyrostat.core.clock import VirtualClock


def test_a_virtual_clock_moves_only_when_advanced_and_never_back() -> None:
    clock = VirtualClock(5.0)
    assert clock.now() == clock.now() == 5.0
    clock.advance(7.5)
    clock.advance(6.0)
    assert clock.now() == 7.5
