"""One move leads from where a job is to where it should be, and moves end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyrostat.local.driver import Move, next_move
from gyrostat.local.occupancy import Occupancy

Devices = tuple[int, ...]


@pytest.mark.parametrize(
    ("wanted", "actual", "hosted", "can_join", "move"),
    [
        ((), (), False, True, Move.NOTHING),
        ((0, 1), (), False, True, Move.START),
        ((0, 1), (), False, False, Move.NOTHING),
        ((), (0, 1), True, True, Move.STOP),
        ((0, 1), (0, 1), True, True, Move.NOTHING),
        ((0,), (0, 1), True, True, Move.OCCUPY),
        ((0, 2), (0, 1), True, True, Move.OCCUPY),
        ((0, 2), (0, 1), True, False, Move.LEAVE),
        ((0, 1, 2), (0, 1), True, False, Move.NOTHING),
        ((2, 3), (0, 1), True, False, Move.STOP),
    ],
)
def test_moves(wanted: Devices, actual: Devices, hosted: bool, can_join: bool, move: Move) -> None:
    assert next_move(wanted=wanted, actual=actual, hosted=hosted, can_join=can_join) is move


sets = st.sets(st.integers(0, 5)).map(lambda devices: tuple(sorted(devices)))


@given(st.lists(st.tuples(sets, sets), min_size=1, max_size=5))
def test_everybody_gets_there_whatever_they_had(had_and_wanted: list[tuple[Devices, Devices]]) -> None:
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
        occupancy.found(job, devices)
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
        can_join=occupancy.sit(job, joining),
    )
    match move:
        case Move.START | Move.OCCUPY:
            actual[job] = wanted[job]
        case Move.STOP:
            actual[job] = ()
        case Move.LEAVE:
            actual[job] = tuple(device for device in actual[job] if device in wanted[job])
        case Move.NOTHING:
            return
    occupancy.leave(job, keep=actual[job])


def test_who_shares_a_device_waits_for_nobody() -> None:
    occupancy = Occupancy()
    occupancy.entitle("host", (0, 1))
    assert occupancy.sit("host", (0, 1))
    occupancy.entitle("guest", (0, 1))
    assert occupancy.sit("guest", (0, 1))
    occupancy.entitle("host", ())
    assert not occupancy.sit("third", (1,))
    assert not occupancy.await_free((1,), 0.0)
    occupancy.leave("host")
    occupancy.leave("guest")
    assert occupancy.await_free((0, 1), 0.0)
