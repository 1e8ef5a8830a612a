"""Which worker is on which device: workers on devices that the job no longer has leave, newcomers take those that are free."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gyrostat.job.control.device_assignment import DeviceAssignment, Slot, counts_by_pace


def slots(*devices: int) -> tuple[Slot, ...]:
    return tuple(Slot(device=device) for device in devices)


def test_a_job_moves_from_devices_to_others() -> None:
    device_assignment = DeviceAssignment(slots(4, 5))
    device_assignment.begin(2)
    assert device_assignment.devices((0, 1)) == (4, 5)
    assert device_assignment.retarget(slots(5, 6, 7), (0, 1)) == (0,)
    assert [device_assignment.assign(member, (1, 2, 3)).device for member in (2, 3)] == [6, 7]
    assert device_assignment.devices((1, 2, 3)) == (5, 6, 7)
    assert device_assignment.retarget(slots(4, 7), (1, 2, 3)) == (1, 2)
    assert device_assignment.assign(4, (3, 4)).device == 4


def test_a_newcomer_that_came_in_vain_keeps_no_place() -> None:
    device_assignment = DeviceAssignment(slots(0))
    device_assignment.begin(1)
    device_assignment.retarget(slots(0, 1), (0,))
    assert device_assignment.assign(1, (0, 1)).device == 1
    assert device_assignment.assign(2, (0, 2)).device == 1


def test_new_workers_take_the_devices_of_those_they_replace() -> None:
    """All migrate at once; a profile leaves one worker and brings three back; two die and are replaced together."""
    device_assignment = DeviceAssignment(slots(0, 1, 2, 3))
    device_assignment.begin(4)
    for members in ((4, 5, 6, 7), (4, 8, 9, 10), (4, 9, 11, 12)):
        for member in members:
            device_assignment.assign(member, members)
        assert sorted(device_assignment.devices(members)) == [0, 1, 2, 3]
        assert device_assignment.violation(members) is None


def test_workers_that_share_a_device_are_reported_and_separated() -> None:
    device_assignment = DeviceAssignment(slots(0))
    device_assignment.begin(1)
    assert device_assignment.assign(1, (0, 1)).device == 0, "there is no other"
    assert device_assignment.violation((0, 1)) == "workers 0, 1 are on devices 0, 0, not each on one of 0"
    assert device_assignment.retarget(slots(0, 1), (0, 1)) == (1,)
    assert device_assignment.assign(2, (0, 2)).device == 1
    assert device_assignment.violation((0, 2)) is None


workers = st.sets(st.integers(0, 7), min_size=1)
steps = st.lists(st.tuples(workers, st.sets(st.integers(0, 7))), min_size=1, max_size=8)


@given(steps)
def test_after_every_change_each_device_has_one_worker(requests: list[tuple[set[int], set[int]]]) -> None:
    """Each change has other devices, and replaces some workers on those that stay."""
    (first, _), *others = requests
    device_assignment = DeviceAssignment(slots(*sorted(first)))
    members = tuple(range(len(first)))
    device_assignment.begin(len(first))
    following = len(first)
    for wanted, replaced in others:
        leaving = device_assignment.retarget(slots(*sorted(wanted)), members)
        on = dict(zip(members, device_assignment.devices(members), strict=True))
        staying = tuple(member for member in members if member not in leaving and on[member] not in replaced)
        newcomers = tuple(range(following, following + len(wanted) - len(staying)))
        following += len(newcomers)
        members = (*staying, *newcomers)
        for member in newcomers:
            device_assignment.assign(member, members)
        assert sorted(device_assignment.devices(members)) == sorted(wanted)
        assert device_assignment.violation(members) is None


def test_virtual_workers_by_pace() -> None:
    """Those that stay come first, then those that are started, on the other devices in their order."""
    fast, slow = (Slot(device=device, paced=400.0) for device in (0, 1)), Slot(device=2, paced=100.0)
    first, second = fast
    assert counts_by_pace(9, [first, second, slow]) == (4, 4, 1)
    assert counts_by_pace(9, [first, second]) is None
    assert counts_by_pace(9, [first, Slot(device=3)]) is None
    assert counts_by_pace(2, [first, second, slow]) is None
    assignment = DeviceAssignment([slow])
    assignment.begin(1)
    assert assignment.retarget([first, second, slow], [0]) == ()
    assert assignment.after([0]) == (slow, first, second)
