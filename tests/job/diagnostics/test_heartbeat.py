"""Who is silent, and for how long one waits."""

from __future__ import annotations

from gyrostat.job.diagnostics.heartbeat import Heartbeats


def test_who_does_not_answer_is_given_up_and_who_does_is_not() -> None:
    heartbeats = Heartbeats(8.0)
    assert heartbeats.look((0, 1), 100.0) == (True, [])
    for now in (102.0, 104.0, 106.0, 108.0):
        heartbeats.heard(0, now)
        assert heartbeats.look((0, 1), now) == (True, [])
    heartbeats.heard(0, 108.1)
    assert heartbeats.look((0, 1), 108.1) == (False, [1])


def test_a_newcomer_has_its_own_time() -> None:
    heartbeats = Heartbeats(8.0)
    for now in range(0, 12, 2):
        heartbeats.heard(0, float(now))
        assert heartbeats.look((0,), float(now))[1] == []
    for now in range(12, 20, 2):
        heartbeats.heard(0, float(now))
        assert heartbeats.look((0, 1), float(now))[1] == []


def test_it_may_have_been_us_who_slept() -> None:
    heartbeats = Heartbeats(8.0)
    heartbeats.look((0, 1), 0.0)
    assert heartbeats.look((0, 1), 3600.0) == (True, [])


def test_never() -> None:
    heartbeats = Heartbeats(0.0)
    assert heartbeats.look((0, 1), 5.0) == (False, [])
    assert heartbeats.deadline() is None
