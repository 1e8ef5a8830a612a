"""Which change of a schedule comes next."""

from __future__ import annotations

from gyrostat.job.control.instructions import Reconfiguration
from gyrostat.job.control.schedule import Schedule, scheduled


def test_entries_that_change_nothing_are_left_out() -> None:
    changes = scheduled(1, [(10, 2), (20, 2), (30, 1)])
    assert [(change.at_step, change.workers) for change in changes] == [(10, 2), (30, 1)]


def test_of_the_entries_before_a_checkpoint_the_last_is_due_at_once() -> None:
    schedule = Schedule(scheduled(1, [(10, 2), (20, 4), (40, 1)]))
    schedule.skip_to(30)
    assert [(change.at_step, change.workers) for change in schedule.changes] == [(None, 4), (40, 1)]


def test_members_that_have_gone_need_not_leave() -> None:
    schedule = Schedule([Reconfiguration(workers=1, reason="r", without=(0, 2))])
    change = schedule.pop((1, 2))
    assert change is not None
    assert change.without == (2,)
    assert schedule.pop((1, 2)) is None


def test_a_change_is_awaited_by_its_client_or_at_its_step() -> None:
    assert not Schedule().next_is_awaited(5)
    assert Schedule([Reconfiguration(workers=1, reason="r", request="id")]).next_is_awaited(5)
    assert not Schedule([Reconfiguration(workers=1, reason="r")]).next_is_awaited(5)
    at_seven = Schedule(scheduled(2, [(7, 1)]))
    assert not at_seven.next_is_awaited(5)
    assert at_seven.next_is_awaited(6)
