"""What the coordinator is asked for (`Reconfiguration`) and what it answers: instructions that `leader` carries out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from gyrostat.core.plural import plural
from gyrostat.job.control.profiling import ProfileRequest, SizeMeasured
from gyrostat.job.diagnostics.stragglers import Straggler

_SHOWN = 20


@dataclass(frozen=True, kw_only=True)
class Reconfiguration:
    """A requested change of the job's workers."""

    workers: int
    reason: str
    at_step: int | None = None
    """At this boundary, where all workers wait for it; None: as soon as possible."""
    request: str | None = None
    """The id of the request that asked for it; None: the job's own decision, or its schedule's."""
    without: tuple[int, ...] = ()
    """Members that leave. New workers replace them if `workers` requires it."""
    counts: tuple[int, ...] | None = None
    """Virtual workers per worker; None: as even as possible."""
    retries: bool = False
    """A scheduled change that was given up at its step, or a replacement that was given up: tried again later."""

    def impossible(self, members: Sequence[int], virtual_workers: int, devices: int | None) -> str | None:
        """Why a job with these members, and this number of devices if a scheduler assigns them, cannot have it, if so."""
        most = virtual_workers if devices is None else min(virtual_workers, devices)
        if not 1 <= self.workers <= most:
            shared = (
                f"{plural(virtual_workers, 'virtual worker')}"
                if most == virtual_workers
                else f"the job's {most} devices"
            )
            return f"{plural(self.workers, 'worker')} cannot share {shared}; ask for 1 to {most}"
        if unknown := [member for member in self.without if member not in members]:
            return f"no such worker: {_shown(unknown)}; there are {_shown(members)}"
        return None

    @property
    def is_replacement(self) -> bool:
        """The job's own decision to have more workers, in place of lost ones."""
        own = self.request is None and self.at_step is None
        return own and not (self.without or self.retries) and self.counts is None


@dataclass(frozen=True)
class StartNewcomer:
    """Start a worker that joins."""

    member: int


@dataclass(frozen=True)
class TellMember:
    """Send a message to a worker."""

    member: int
    message: msgspec.Struct


@dataclass(frozen=True)
class EndNewcomer:
    """End a new worker that will not join."""

    member: int
    reason: str


@dataclass(frozen=True)
class ReconfigurationDone:
    """The change is in force since boundary `step`."""

    change: Reconfiguration
    step: int
    before: int
    after: int
    paused: float
    """Seconds for which training stood still."""
    prepared: float
    """Seconds from the request to the boundary."""
    joined: tuple[int, ...]
    why_all: str | None = None
    """Why new workers received all state at the fence."""


@dataclass(frozen=True)
class ReconfigurationRefused:
    """The change will not be made; the job is as it was."""

    change: Reconfiguration
    reason: str
    retryable: bool = False
    """Refused for now only: the same request may succeed later."""
    invalid: bool = False
    """The request names what the job does not have: bad input, whenever it is sent."""


@dataclass(frozen=True)
class SurvivorsGoOn:
    """Recovery is complete: the survivors train without these members."""

    lost: tuple[int, ...]
    reason: str
    step: int
    before: int
    after: int
    redone: int
    """Micro-batches of the lost workers that were run again, in the pass that was running."""
    paused: float
    """Seconds for which the survivor that waited longest stood still."""
    waits: bool = False
    """They are fewer than `min_workers`, and wait for others at the next boundary."""


@dataclass(frozen=True)
class ProfileDone:
    """A profile is complete; the job has its original size again."""

    profile: ProfileRequest
    rows: tuple[SizeMeasured, ...]


def refused_profile(
    profile: ProfileRequest, workers: int, reason: str, *, retryable: bool = False, invalid: bool = False
) -> ReconfigurationRefused:
    """The refusal of a profile, by a job that runs on `workers` workers."""
    change = Reconfiguration(workers=workers, reason="profile", request=profile.request)
    return ReconfigurationRefused(change, reason, retryable, invalid)


@dataclass(frozen=True)
class StragglerNoticed:
    """A worker has become slower than the others."""

    straggler: Straggler


@dataclass(frozen=True)
class GiveUp:
    """Workers wait for a change that cannot be made: the job cannot continue."""

    reason: str


Instruction = (
    StartNewcomer
    | TellMember
    | EndNewcomer
    | ReconfigurationDone
    | ReconfigurationRefused
    | SurvivorsGoOn
    | ProfileDone
    | StragglerNoticed
    | GiveUp
)


def _shown(members: Sequence[int]) -> str:
    """A list in a reply, which is kept in the leader's record: not more than some."""
    more = f" and {len(members) - _SHOWN} more" if len(members) > _SHOWN else ""
    return f"{list(members[:_SHOWN])}{more}"
