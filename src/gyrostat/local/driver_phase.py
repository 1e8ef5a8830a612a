"""The phases of a `Driver`, and which phase may follow which."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class DriverPhase(StrEnum):
    """What a driver is doing with its job.

    | phase | meaning | ends when |
    |---|---|---|
    | WAITING | no host has the job | its target devices are free, or its target becomes empty |
    | RELEASED | its target became empty before a host had it; this was reported | there is a new target |
    | STARTING | a host has it or will; its workers do not train: they start, or start again | they train, or it ends |
    | TRAINING | its workers train on the devices of `Driver.actual` | they move, stop, start again or end |
    | MOVING | it was asked to occupy other devices | it answers, or its connection closes |
    | STOPPING | it was asked to checkpoint and stop | its host ends |
    | ENDED | its host has ended; this was reported | the controller restarts it, or closes the driver |
    """

    WAITING = "waiting"
    RELEASED = "released"
    STARTING = "starting"
    TRAINING = "training"
    MOVING = "moving"
    STOPPING = "stopping"
    ENDED = "ended"

    @property
    def hosted(self) -> bool:
        """A host has the job, or will: its devices are taken."""
        return self in _HOSTED


_P = DriverPhase
_HOSTED = frozenset({_P.STARTING, _P.TRAINING, _P.MOVING, _P.STOPPING})
DRIVER_TRANSITIONS: Mapping[DriverPhase, frozenset[DriverPhase]] = {
    _P.WAITING: frozenset({_P.STARTING, _P.RELEASED}),
    _P.RELEASED: frozenset({_P.WAITING}),
    _P.STARTING: frozenset({_P.TRAINING, _P.STOPPING, _P.ENDED}),
    _P.TRAINING: frozenset({_P.STARTING, _P.MOVING, _P.STOPPING, _P.ENDED}),
    _P.MOVING: frozenset({_P.TRAINING, _P.STOPPING, _P.ENDED}),
    _P.STOPPING: frozenset({_P.ENDED}),
    _P.ENDED: frozenset({_P.WAITING}),
}
