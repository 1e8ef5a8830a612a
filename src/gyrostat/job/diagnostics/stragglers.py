"""Which workers are slower than the others, and how virtual workers are best shared out among them: decided purely.

Every worker's time for its micro-batches comes with each step (EDL §5.2 takes it from gradient requests; here it is in the
envelope of the reduction), and is divided by the number of its virtual workers, so that who has more to do is not blamed for
it. A worker straggles when the median of its last ten steps is more than 1.2 times the job's usual time: the median over
all workers of their own medians in the last hundred. A median over the present step alone would rise with the stragglers
themselves where several become slow at once, as in one of the production jobs that the tests replay. If all workers become
slower together nobody straggles: it must also be slower than the median of its peers now, by half as much.

Two changes by which a job reacts: `shares` re-places virtual workers by measured speed, through `core`'s apportioning, if
that makes steps shorter by a margin; or a worker is removed, and its place is tried again some time later, for what slowed it
down may have passed. Neither comes more often than `pause_s` allows.
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
    """What is done about a straggler."""

    REPORT = "report"
    REPLACE = "re-place"
    """It gets fewer virtual workers."""
    REMOVE = "remove"
    """The job goes on without it."""


@dataclass(frozen=True, kw_only=True)
class StragglerPolicy:
    """When a worker straggles, and what is done then."""

    factor: float = 1.2
    """So many times slower than usual."""
    steps: int = 10
    """In the median of so many steps."""
    usual: int = 100
    """Steps that say what is usual."""
    reaction: Reaction = Reaction.REPORT
    pause_s: float = 60.0
    """At most one change in this time."""
    least_s: float = 0.002
    """Who takes longer by less than this is not worth a word."""
    gain: float = 0.05
    """Virtual workers are re-placed if steps become shorter by at least this share."""
    back_s: float = 600.0
    """The place of a worker that was removed is tried again after so long; after twice as long every further time; 0: never."""

    def __post_init__(self) -> None:
        if not self.factor > 1 or not 1 <= self.steps <= self.usual:
            raise UsageError(
                f"a straggler is more than 1 times slower, in the median of 1 to {self.usual} steps; got {self.factor} and "
                f"{self.steps}"
            )
        if self.pause_s < 0 or self.back_s < 0:
            raise UsageError(
                f"seconds between changes, and until a straggler may come back, are 0 or more; got {self.pause_s} and "
                f"{self.back_s}"
            )

    def comes_back_at(self, now: float, before: int) -> float:
        """When the place of one that is removed now is tried again, after `before` others were."""
        return now + self.back_s * 2.0**before if self.back_s else float("inf")


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """A worker that is slower than the others, and how much."""

    member: int
    seconds: float
    """Its median time for the micro-batches of one virtual worker."""
    usual: float
    """What that takes in this job."""

    def __str__(self) -> str:
        return (
            f"worker {self.member} is {self.seconds / self.usual:.2f} times slower than usual: {1e3 * self.seconds:.1f} ms for "
            f"a virtual worker's micro-batches, instead of {1e3 * self.usual:.1f} ms"
        )


@dataclass
class Pace:
    """How fast each worker is, step by step."""

    policy: StragglerPolicy = field(default_factory=StragglerPolicy)
    _seconds: dict[int, deque[float]] = field(default_factory=dict)
    _known: set[int] = field(default_factory=set)

    def add(self, steps: Sequence[Mapping[int, float]]) -> list[Straggler]:
        """Some steps: each member's time per virtual worker. Those that have become stragglers with them."""
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
        """Those that are too slow now."""
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
        """The median of the last steps, of all members that have made so many."""
        steps = self.policy.steps
        return {
            member: statistics.median(list(times)[-steps:])
            for member, times in self._seconds.items()
            if len(times) >= steps
        }


def shares(
    virtual_workers: int, now: Sequence[int], seconds: Sequence[float], gain: float
) -> list[int] | None:
    """How many virtual workers each worker should have, given what one takes on it; None if that gains too little.

    `now`: how many they have.
    """
    wanted = apportion_by_speed(virtual_workers, seconds)
    before, after = (
        max(count * time for count, time in zip(counts, seconds, strict=True)) for counts in (now, wanted)
    )
    return wanted if after <= (1 - gain) * before else None
