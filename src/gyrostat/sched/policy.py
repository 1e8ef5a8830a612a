"""The interface of policies: the order of a VC's jobs, and the number of devices of each. Pure: no I/O, time is an argument.

A policy sees one VC (`VcView`) and decides whenever something there has changed. `decide` is a generator of actions: each
`yield` requests one action and returns whether it was granted (a placer may refuse, for instance because the free
devices are scattered over nodes). FIFO in full:

    class Fifo(Policy):
        def rank(self, job, now):
            return (job.request.submitted,), inf

        def decide(self, view, now):
            while (job := view.next()) is not None:
                if not (yield from run(view, job, "next in line")):
                    return                                  # the head of the queue blocks the rest

Rules:

- Jobs without an action keep their devices. An action that asks for the present devices of a job is granted and changes
  nothing. Policies that compute a complete assignment (all jobs → devices) extend `policies.steady.SteadyPolicy`.
- `rank` orders the queues of the view. It returns a key (smallest first) and the time until which the key is valid; then
  `rank` and the policy are called again. Equal keys are ordered by submission.
- `decide` allocates the guaranteed devices of the VC. After all VCs have decided, `borrow` allocates idle devices of
  others, which can be reclaimed at any time. VCs take turns, the one with the fewest borrowed devices per weight first.
- Elastic jobs may have any size from `request.smallest` to `request.largest`, by type (`{"v100": 2, "p100": 4}`;
  several types at once only if `request.mixes_types`). A job's devices have two parts, the guaranteed allocation
  (`RunOn`) and the borrowed one (`RunOn(…, borrowed=True)`); each action sets one part. `view.rate(job, counts)` is the
  expected throughput.
- Every action has a reason, which reaches the plan, the log and the user.
- A policy object holds its settings only. State belongs to the views (`job.service(now)`, `job.starts`, `job.since`
  …): decisions of a policy with its own state could not be replayed.

Policies are found by name: those of `sched.policies`, and others by the entry point group `gyrostat.policies`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from dataclasses import dataclass
from typing import TypeAlias

from gyrostat.core.devices import Counts
from gyrostat.sched.views import JobView, Key, SchedulingRound, VcView


@dataclass(frozen=True, slots=True)
class RunOn:
    """Set the number of devices of one part of the job: start, grow or shrink it."""

    job: JobView
    devices: Counts
    reason: str
    borrowed: bool = False
    preempts: bool = False
    """Whether jobs that hold devices and rank behind it may be preempted for it: as few as needed, the lowest ranks first,
    and none if that does not help."""


@dataclass(frozen=True, slots=True)
class StopJob:
    """Take all devices from the job, also borrowed ones. It waits."""

    job: JobView
    reason: str


@dataclass(frozen=True, slots=True)
class Promote:
    """Turn the borrowed allocation of a job into a guaranteed one, which cannot be reclaimed."""

    job: JobView
    reason: str
    preempts: bool = False
    """As in `RunOn`."""


@dataclass(frozen=True, slots=True)
class ShareDevices:
    """Start a waiting job on the devices of another job of its VC; both run slower. One guest per host, with the host's
    number of devices. When the host ends, the guest keeps the devices."""

    job: JobView
    host: JobView
    reason: str


@dataclass(frozen=True, slots=True)
class ResetService:
    """Count the job's `recent_service` and `recent_seconds_on` from 0 again."""

    job: JobView


@dataclass(frozen=True, slots=True)
class BeginRound:
    """Make this the `round` of the view."""

    round: SchedulingRound


@dataclass(frozen=True, slots=True)
class Defragment:
    """Migrate the job, with its number of devices, if that leaves larger blocks of free devices."""

    job: JobView
    reason: str


@dataclass(frozen=True, slots=True)
class Wake:
    """Decide again at this time, even if nothing changes until then."""

    at: float


PolicyAction: TypeAlias = (
    RunOn | StopJob | Promote | ShareDevices | ResetService | BeginRound | Defragment | Wake
)
PolicyActions: TypeAlias = Generator[PolicyAction, bool, None]


BORROWS = "no room in the guarantee; borrows"
"""The reason of a job that starts on borrowed devices."""


class Policy(ABC):
    """The module's docstring has the rules."""

    @abstractmethod
    def rank(self, job: JobView, now: float) -> tuple[Key, float]:
        """The job's key in the queues (smallest first), and until when it is valid (`math.inf`: until its devices change)."""

    @abstractmethod
    def decide(self, view: VcView, now: float) -> PolicyActions:
        """Actions on the guaranteed devices of the VC."""

    def borrow(self, view: VcView, now: float) -> PolicyActions:
        """Actions on idle devices of other VCs. The default: waiting jobs by rank, until one does not fit."""
        return run_by_rank(view, BORROWS, borrowed=True)


def run_by_rank(
    view: VcView, reason: str, *, borrowed: bool = False, backfill: bool = False
) -> PolicyActions:
    """Run jobs by rank until one does not fit; with `backfill` that blocks only the jobs of its shape."""
    blocked: set[object] = set()
    while (job := view.waiting.best(blocked) if borrowed else view.next(blocked)) is not None:
        if not (yield from run(view, job, reason, borrowed=borrowed)):
            if not backfill:
                return
            blocked.add(job.request.shape)


def run(
    view: VcView, job: JobView, reason: str, *, borrowed: bool = False
) -> Generator[PolicyAction, bool, bool]:
    """Run the job on the number of devices that it requests, of the first of its types with room. Returns whether granted.

    A job that runs on borrowed devices is promoted instead.
    """
    if job.borrowed and not borrowed:
        return (yield Promote(job, f"{reason}; keeps its borrowed devices"))
    types = view.types_for(job.request) if not borrowed else job.request.types or tuple(view.lendable)
    for type_ in types:
        if (yield RunOn(job, {type_: job.request.devices}, reason, borrowed=borrowed)):
            return True
    return False
