"""Which workers are slower than the others, and how to distribute virtual workers among them. Pure.

Every step reports the time each worker took for its micro-batches (EDL §5.2 takes it from gradient requests; here the reduction
carries it). It is divided by the worker's number of virtual workers. A worker straggles when the median of its last ten steps
is more than 1.2 times the job's usual time: the median over all workers of their own medians in the last hundred steps. A
median over the current step alone would rise with the stragglers where several become slow at once, as in one of the
production jobs that the tests replay. If all workers become slower together, none straggles: a straggler must also be slower
than the current median of its peers, by half that factor.

A job can react in two ways: `shares` re-places virtual workers by measured speed, through `core`'s apportioning, if that makes
steps shorter by a margin; or the worker is removed, and its place is tried again later, since the cause may have gone. Both
happen at most once per `pause_s`.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from gyrostat.core.errors import UsageError
from gyrostat.core.placement import apportion_by_speed


class Reaction(StrEnum):
    """The reaction to a straggler."""

    REPORT = "report"
    REPLACE = "re-place"
    """It gets fewer virtual workers."""
    REMOVE = "remove"
    """The job continues without it."""


@dataclass(frozen=True, kw_only=True)
class StragglerPolicy:
    """When a worker straggles, and the reaction."""

    factor: float = 1.2
    """A straggler is at least this many times slower than usual."""
    steps: int = 10
    """The number of recent steps whose median counts."""
    usual: int = 100
    """The number of steps that define the usual time."""
    reaction: Reaction = Reaction.REPORT
    pause_s: float = 60.0
    """At most one change in this time."""
    least_s: float = 0.002
    """A worker that is slower by less than this is no straggler."""
    gain: float = 0.05
    """Virtual workers are re-placed if steps become shorter by at least this fraction."""
    back_s: float = 600.0
    """Seconds until the place of a removed worker is tried again; doubled every further time; 0: never."""

    def __post_init__(self) -> None:
        if not self.factor > 1 or not 1 <= self.steps <= self.usual:
            raise UsageError(
                f"a straggler needs a factor above 1 and a median of 1 to {self.usual} steps; got {self.factor} and "
                f"{self.steps}"
            )
        if self.pause_s < 0 or self.back_s < 0:
            raise UsageError(
                "the seconds between two reactions, and until a removed worker's place is tried again, must be 0 or more; got "
                f"{self.pause_s} and {self.back_s}"
            )

    def comes_back_at(self, now: float, before: int) -> float:
        """When the place of a worker that is removed now is tried again; `before`: the number of removals before it."""
        return now + self.back_s * 2.0**before if self.back_s else float("inf")


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """A worker that is slower than the others."""

    member: int
    seconds: float
    """Its median time for the micro-batches of one virtual worker."""
    usual: float
    """The usual time for that in this job."""

    def __str__(self) -> str:
        return (
            f"worker {self.member} is {self.seconds / self.usual:.2f} times slower than usual: {1e3 * self.seconds:.1f} ms for "
            f"a virtual worker's micro-batches, instead of {1e3 * self.usual:.1f} ms"
        )


@dataclass
class Pace:
    """The measured times of each worker, step by step."""

    policy: StragglerPolicy = field(default_factory=StragglerPolicy)
    _seconds: dict[int, deque[float]] = field(default_factory=dict)
    _known: set[int] = field(default_factory=set)

    def add(self, steps: Sequence[Mapping[int, float]]) -> list[Straggler]:
        """Add steps, each with the members' times per virtual worker. Returns the new stragglers."""
        for seconds in steps:
            for gone in self._seconds.keys() - seconds.keys():
                del self._seconds[gone]
            for member, time in seconds.items():
                self._seconds.setdefault(member, deque(maxlen=self.policy.usual)).append(time)
        now = self.stragglers()
        new = [straggler for straggler in now if straggler.member not in self._known]
        self._known = {straggler.member for straggler in now}
        return new

    def stragglers(self) -> list[Straggler]:
        """The current stragglers."""
        recent = self.recent()
        if len(recent) < max(2, len(self._seconds)):
            return []
        usual = statistics.median(statistics.median(times) for times in self._seconds.values())
        peers = statistics.median(recent.values())
        factor = self.policy.factor
        return [
            Straggler(member=member, seconds=time, usual=usual)
            for member, time in recent.items()
            if time > max(factor * usual, usual + self.policy.least_s, (1 + factor) / 2 * peers)
        ]

    def recent(self) -> dict[int, float]:
        """The median over the last steps, for all members that have made enough of them."""
        steps = self.policy.steps
        return {
            member: statistics.median(list(times)[-steps:])
            for member, times in self._seconds.items()
            if len(times) >= steps
        }


def shares(
    virtual_workers: int, now: Sequence[int], seconds: Sequence[float], gain: float
) -> list[int] | None:
    """The number of virtual workers for each worker, given the time one takes on it; None if that gains too little.

    `now`: the current numbers.
    """
    wanted = apportion_by_speed(virtual_workers, seconds)
    before, after = (
        max(count * time for count, time in zip(counts, seconds, strict=True)) for counts in (now, wanted)
    )
    return wanted if after <= (1 - gain) * before else None
