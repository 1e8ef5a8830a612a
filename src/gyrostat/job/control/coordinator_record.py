"""The coordinator's options, and its record for the next leader."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from gyrostat.core.job import NextGeneration
from gyrostat.core.phase import ReconfigurationPhase
from gyrostat.core.placement import Placement
from gyrostat.job.control.instructions import Reconfiguration
from gyrostat.job.control.profiling import ProfileRequest
from gyrostat.job.diagnostics.stragglers import Pace


class CoordinatorRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a coordinator's state that the next leader cannot learn from the workers."""

    virtual_workers: int
    members: tuple[int, ...]
    schedule: list[Reconfiguration]
    generation: int
    phase: ReconfigurationPhase
    training: bool
    step: int
    compatibility: dict[str, str]
    change: Reconfiguration | None
    next_member: int
    newcomers: tuple[int, ...]
    plan: NextGeneration | None
    placement: Placement | None
    leaving: tuple[int, ...]
    profile: ProfileRequest | None
    original_size: int | None
    """The size to which the job returns after a profile."""
    lost: tuple[int, ...] = ()
    loss_reason: str = ""
    missed: int = 0


@dataclass(frozen=True, kw_only=True)
class CoordinatorOptions:
    """How a job reacts to slow and to lost workers."""

    pace: Pace = field(default_factory=Pace)
    recovers: bool = False
    """Survivors can train on without a worker that dies."""
    min_workers: int = 1
    """With fewer workers they wait for others."""
    devices: Callable[[], int] | None = None
    """The number of devices that the job has now, if a scheduler assigns them: the most workers that it may have."""
