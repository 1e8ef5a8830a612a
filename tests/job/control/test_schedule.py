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
    change = schedule.pop((1, 2), step=0, now=0.0)
    assert change is not None
    assert change.without == (2,)
    assert schedule.pop((1, 2), step=0, now=0.0) is None


def test_lost_workers_are_not_replaced_on_devices_that_the_job_no_longer_has() -> None:
    schedule = Schedule(
        [Reconfiguration(workers=workers, reason="in place of worker 3") for workers in (4, 4)]
    )
    change = schedule.pop((0, 1), step=0, now=0.0, devices=3)
    assert change is not None
    assert change.workers == 3
    change = schedule.pop((0, 1, 2), step=0, now=0.0, devices=2)
    assert change is not None
    assert change.workers == 3, "a job does not shrink because it has lost workers"


def test_a_change_is_awaited_by_its_client_or_at_its_step() -> None:
    assert not Schedule().next_is_awaited(5)
    assert Schedule([Reconfiguration(workers=1, reason="r", request="id")]).next_is_awaited(5)
    assert not Schedule([Reconfiguration(workers=1, reason="r")]).next_is_awaited(5)
    at_seven = Schedule(scheduled(2, [(7, 1)]))
    assert not at_seven.next_is_awaited(5)
    assert at_seven.next_is_awaited(6)


def test_a_job_has_at_most_one_worker_per_virtual_worker_and_device() -> None:
    change = Reconfiguration(workers=4, reason="r", without=(1,))
    assert change.impossible((0, 1), 4, None) is None
    assert change.impossible((0, 1), 3, 5) == "4 workers cannot share 3 virtual workers; ask for 1 to 3"
    assert change.impossible((0, 1), 8, 2) == "4 workers cannot share the job's 2 devices; ask for 1 to 2"
    assert change.impossible((0, 2), 4, 4) == "no such worker: [1]; there are [0, 2]"


def test_a_postponed_change_is_tried_again_ever_later_until_the_step_of_the_next() -> None:
    schedule = Schedule(scheduled(2, [(7, 4), (20, 1)]))
    first = schedule.pop((0, 1), step=6, now=0.0)
    assert first is not None
    schedule.postpone(first, now=10.0)
    assert schedule.pop((0, 1), step=8, now=10.9) is None
    again = schedule.pop((0, 1), step=8, now=11.0)
    assert again is not None
    assert (again.workers, again.at_step, again.retries) == (4, None, True)
    schedule.postpone(again, now=12.0)
    assert schedule.retry_at == 14.0
    last = schedule.pop((0, 1), step=19, now=12.5)
    assert last is not None
    assert (last.workers, last.at_step, schedule.postponed) == (1, 20, None)
