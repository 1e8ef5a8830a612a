"""Which workers are lost to the heartbeat timeout, and when pings are sent."""

from __future__ import annotations

from gyrostat.job.diagnostics.heartbeat import Heartbeats


def test_a_worker_is_lost_after_the_timeout_unless_it_answers() -> None:
    heartbeats = Heartbeats(8.0)
    assert heartbeats.check((0, 1), 100.0) == (True, [])
    for now in (102.0, 104.0, 106.0, 108.0):
        heartbeats.received(0, now)
        assert heartbeats.check((0, 1), now) == (True, [])
    heartbeats.received(0, 108.1)
    assert heartbeats.check((0, 1), 108.1) == (False, [1])


def test_a_newcomer_gets_the_whole_timeout() -> None:
    heartbeats = Heartbeats(8.0)
    for now in range(0, 12, 2):
        heartbeats.received(0, float(now))
        assert heartbeats.check((0,), float(now))[1] == []
    for now in range(12, 20, 2):
        heartbeats.received(0, float(now))
        assert heartbeats.check((0, 1), float(now))[1] == []


def test_a_pause_of_this_process_is_not_a_timeout() -> None:
    heartbeats = Heartbeats(8.0)
    heartbeats.check((0, 1), 0.0)
    assert heartbeats.check((0, 1), 3600.0) == (True, [])


def test_never() -> None:
    heartbeats = Heartbeats(0.0)
    assert heartbeats.check((0, 1), 5.0) == (False, [])
    assert heartbeats.deadline() is None
