"""Delays double up to a limit, however often something fails."""

from __future__ import annotations

from gyrostat.core.backoff import Backoff


def test_delays_double_up_to_the_limit() -> None:
    delays = Backoff(0.5, 30.0)
    assert [delays.after(failures) for failures in range(9)] == [0, 0.5, 1, 2, 4, 8, 16, 30, 30]


def test_any_number_of_failures_has_a_delay() -> None:
    """A power of two would overflow after 1,024: half an hour of retries every two seconds."""
    assert Backoff(0.1, 2.0).after(10**9) == 2.0
