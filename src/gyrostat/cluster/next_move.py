"""The next move that leads from the devices a job's workers are on to those it should have. Pure."""

from __future__ import annotations

from enum import Enum, auto

from gyrostat.core.devices import Devices


class DriverMove(Enum):
    """What to do next."""

    NOTHING = auto()
    START = auto()
    STOP = auto()
    LEAVE = auto()
    """Some devices, to go on with the rest until it can have all it should."""
    OCCUPY = auto()
    """All that it should have, in one switch."""


def next_move(*, wanted: Devices, actual: Devices, hosted: bool, can_join: bool) -> DriverMove:
    """What leads from the devices that a job's workers are on to those that it should have.

    `can_join`: nobody has to leave those that it does not have yet. A job never waits while it is where it should not be:
    it leaves first, if need be all of it.
    """
    if not hosted:
        return DriverMove.START if wanted and can_join else DriverMove.NOTHING
    if not wanted:
        return DriverMove.STOP
    if wanted == actual:
        return DriverMove.NOTHING
    if can_join:
        return DriverMove.OCCUPY
    staying = set(wanted) & set(actual)
    if not staying:
        return DriverMove.STOP
    return DriverMove.LEAVE if staying != set(actual) else DriverMove.NOTHING
