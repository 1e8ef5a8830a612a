"""The next move that leads from the devices a job's workers are on to those it should have. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

from gyrostat.core.devices import Devices


class DriverMove(Enum):
    """What the driver of a job does next."""

    NOTHING = auto()
    START = auto()
    STOP = auto()
    LEAVE = auto()
    """Leave some devices, and train on the others until all wanted ones are free."""
    OCCUPY = auto()
    """Occupy all wanted devices, in one reconfiguration."""


def next_move(*, wanted: Devices, actual: Devices, hosted: bool, can_join: bool) -> DriverMove:
    """The move from the devices a job's workers are on (`actual`) to those it should have (`wanted`).

    `can_join`: no other job has yet to leave the devices it lacks. A job never waits on a device that it should not have: it
    leaves first, if necessary by stopping.
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


def misplaced(*, reported: Devices, occupied: Sequence[int]) -> str | None:
    """The devices that a job has reported to be on are those that its workers are on, one worker on each. Otherwise: what is
    wrong."""
    if sorted(occupied) == sorted(reported):
        return None
    return f"its workers are on devices {_join(occupied)}, and it reported that they are on {_join(reported)}"


def _join(devices: Sequence[int]) -> str:
    return ", ".join(map(str, devices)) or "none"
