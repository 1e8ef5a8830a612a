"""Who sits where: workers on devices that the job no longer has leave, newcomers take those that are free."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gyrostat.job.control.device_assignment import DeviceAssignment, Slot


def slots(*devices: int) -> tuple[Slot, ...]:
    return tuple(Slot(device=device) for device in devices)


def test_a_job_moves_from_devices_to_others() -> None:
    device_assignment = DeviceAssignment(slots(4, 5))
    device_assignment.begin(2)
    assert device_assignment.devices((0, 1)) == (4, 5)
    assert device_assignment.retarget(slots(5, 6, 7), (0, 1)) == (0,)
    assert [device_assignment.assign(member, (0, 1)).device for member in (2, 3)] == [6, 7]
    assert device_assignment.devices((1, 2, 3)) == (5, 6, 7)
    assert device_assignment.retarget(slots(4, 7), (1, 2, 3)) == (1, 2)
    assert device_assignment.assign(4, (1, 2, 3)).device == 4


def test_a_newcomer_that_came_in_vain_keeps_no_place() -> None:
    device_assignment = DeviceAssignment(slots(0))
    device_assignment.begin(1)
    device_assignment.retarget(slots(0, 1), (0,))
    assert device_assignment.assign(1, (0,)).device == 1
    assert device_assignment.assign(2, (0,)).device == 1


steps = st.lists(st.sets(st.integers(0, 7), min_size=1), min_size=1, max_size=8)


@given(steps)
def test_after_every_change_each_device_has_one_worker(wishes: list[set[int]]) -> None:
    first, *others = wishes
    device_assignment = DeviceAssignment(slots(*sorted(first)))
    members = tuple(range(len(first)))
    device_assignment.begin(len(first))
    following = len(first)
    for wanted in others:
        leaving = device_assignment.retarget(slots(*sorted(wanted)), members)
        staying = tuple(member for member in members if member not in leaving)
        newcomers = tuple(range(following, following + len(wanted) - len(staying)))
        following += len(newcomers)
        for member in newcomers:
            device_assignment.assign(member, members)
        members = (*staying, *newcomers)
        assert sorted(device_assignment.devices(members)) == sorted(wanted)
