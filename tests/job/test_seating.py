"""Who sits where: workers on devices that the job no longer has leave, newcomers take those that are free."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gyrostat.job.seating import Seating, Slot


def slots(*devices: int) -> tuple[Slot, ...]:
    return tuple(Slot(device=device) for device in devices)


def test_a_job_moves_from_devices_to_others() -> None:
    seating = Seating(slots(4, 5))
    seating.begin(2)
    assert seating.devices((0, 1)) == (4, 5)
    assert seating.aim(slots(5, 6, 7), (0, 1)) == (0,)
    assert [seating.sit(member, (0, 1)).device for member in (2, 3)] == [6, 7]
    assert seating.devices((1, 2, 3)) == (5, 6, 7)
    assert seating.aim(slots(4, 7), (1, 2, 3)) == (1, 2)
    assert seating.sit(4, (1, 2, 3)).device == 4


def test_a_newcomer_that_came_in_vain_keeps_no_place() -> None:
    seating = Seating(slots(0))
    seating.begin(1)
    seating.aim(slots(0, 1), (0,))
    assert seating.sit(1, (0,)).device == 1
    assert seating.sit(2, (0,)).device == 1


steps = st.lists(st.sets(st.integers(0, 7), min_size=1), min_size=1, max_size=8)


@given(steps)
def test_after_every_change_each_device_has_one_worker(wishes: list[set[int]]) -> None:
    first, *others = wishes
    seating = Seating(slots(*sorted(first)))
    members = tuple(range(len(first)))
    seating.begin(len(first))
    following = len(first)
    for wanted in others:
        leaving = seating.aim(slots(*sorted(wanted)), members)
        staying = tuple(member for member in members if member not in leaving)
        newcomers = tuple(range(following, following + len(wanted) - len(staying)))
        following += len(newcomers)
        for member in newcomers:
            seating.sit(member, members)
        members = (*staying, *newcomers)
        assert sorted(seating.devices(members)) == sorted(wanted)
