"""One move leads from the devices a job is on to those it should have, and every job gets there."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyrostat.cluster.next_move import DriverMove, next_move
from gyrostat.cluster.occupancy import Occupancy

Devices = tuple[int, ...]


@pytest.mark.parametrize(
    ("wanted", "actual", "hosted", "can_join", "move"),
    [
        ((), (), False, True, DriverMove.NOTHING),
        ((0, 1), (), False, True, DriverMove.START),
        ((0, 1), (), False, False, DriverMove.NOTHING),
        ((), (0, 1), True, True, DriverMove.STOP),
        ((0, 1), (0, 1), True, True, DriverMove.NOTHING),
        ((0,), (0, 1), True, True, DriverMove.OCCUPY),
        ((0, 2), (0, 1), True, True, DriverMove.OCCUPY),
        ((0, 2), (0, 1), True, False, DriverMove.LEAVE),
        ((0, 1, 2), (0, 1), True, False, DriverMove.NOTHING),
        ((2, 3), (0, 1), True, False, DriverMove.STOP),
    ],
)
def test_moves(wanted: Devices, actual: Devices, hosted: bool, can_join: bool, move: DriverMove) -> None:
    assert next_move(wanted=wanted, actual=actual, hosted=hosted, can_join=can_join) is move


sets = st.sets(st.integers(0, 5)).map(lambda devices: tuple(sorted(devices)))


@given(st.lists(st.tuples(sets, sets), min_size=1, max_size=5))
def test_every_job_gets_there_whatever_it_had(had_and_wanted: list[tuple[Devices, Devices]]) -> None:
    """Entitlements never overlap, as a scheduler sees to; what jobs had did not either. Swaps are no deadlock."""
    actual: dict[str, Devices] = {}
    wanted: dict[str, Devices] = {}
    for number, (had, wants) in enumerate(had_and_wanted):
        taken = {device for devices in actual.values() for device in devices}
        promised = {device for devices in wanted.values() for device in devices}
        actual[f"j{number}"] = tuple(device for device in had if device not in taken)
        wanted[f"j{number}"] = tuple(device for device in wants if device not in promised)
    occupancy = Occupancy()
    for job, devices in actual.items():
        occupancy.mark(job, devices)
    for job, devices in wanted.items():
        occupancy.entitle(job, devices)
    for _ in range(3 * len(actual)):
        for job in actual:
            _step(job, actual, wanted, occupancy)
            for device in range(6):
                assert len(occupancy.on(device)) <= 1, f"two jobs on {device}"
    assert actual == wanted


def _step(job: str, actual: dict[str, Devices], wanted: dict[str, Devices], occupancy: Occupancy) -> None:
    joining = [device for device in wanted[job] if device not in actual[job]]
    move = next_move(
        wanted=wanted[job],
        actual=actual[job],
        hosted=bool(actual[job]),
        can_join=occupancy.acquire(job, joining),
    )
    match move:
        case DriverMove.START | DriverMove.OCCUPY:
            actual[job] = wanted[job]
        case DriverMove.STOP:
            actual[job] = ()
        case DriverMove.LEAVE:
            actual[job] = tuple(device for device in actual[job] if device in wanted[job])
        case DriverMove.NOTHING:
            return
    occupancy.release(job, keep=actual[job])


def test_jobs_that_share_a_device_do_not_wait_for_each_other() -> None:
    occupancy = Occupancy()
    occupancy.entitle("host", (0, 1))
    assert occupancy.acquire("host", (0, 1))
    occupancy.entitle("guest", (0, 1))
    assert occupancy.acquire("guest", (0, 1))
    occupancy.entitle("host", ())
    assert not occupancy.acquire("third", (1,))
    assert not occupancy.await_free((1,), 0.0)
    occupancy.release("host")
    occupancy.release("guest")
    assert occupancy.await_free((0, 1), 0.0)
