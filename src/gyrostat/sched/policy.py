"""What a policy is: the order of a VC's jobs, and which of them should have how many devices. Pure: no I/O, time is
given.

A policy sees one VC (`VcView`) and is asked whenever something there has changed. It answers with a generator of
wishes: each `yield` hands over one wish and returns whether it was granted (a placer may refuse, for instance because
the free devices are scattered over nodes). So FIFO is, in full:

    class Fifo(Policy):
        def rank(self, job, now):
            return (job.request.submitted,), inf

        def decide(self, view, now):
            while (job := view.next()) is not None:
                if not (yield from run(view, job, "next in line")):
                    return                                  # the head of the line blocks the rest

Rules of the game:

- Jobs that are not mentioned stay as they are. A wish for what a job already has is granted and changes nothing.
  `wishes` turns a complete assignment (all jobs → devices) into the wishes that lead there, shrinks first, for
  policies that compute one.
- `rank` orders the queues of the view; it returns a key (smallest first) and until when that key is good: then it is
  asked again, and so is the policy. Where two keys are equal, submission decides.
- `decide` is about the devices that the VC is guaranteed. After all VCs have decided, `borrow` is asked about what
  nobody uses; what it is granted can be taken back at any time. VCs take turns, the one with the least borrowed per
  weight first.
- Elastic jobs are given any size from `request.smallest` to `request.largest`, by type (`{"v100": 2, "p100": 4}`;
  several types at once only if `request.mixes_types`). A job's devices have two parts, its share of the guarantee
  (`RunOn`) and what it borrows (`RunOn(…, borrowed=True)`); each wish sets one part. `view.rate(job, counts)` is the
  expected throughput.
- Every wish carries its reason, which reaches the plan, the log and the user.
- A policy object holds its settings only. State belongs to the views (`job.service(now)`, `job.starts`, `job.since`
  …): a policy that remembers could not be replayed.

Policies are found by name: those of this package, and others by the entry point group `gyrostat.policies`
(`sched.policies`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from gyrostat.core.devices import Counts
from gyrostat.core.request import JobId
from gyrostat.sched.views import JobView, Key, VcView


@dataclass(frozen=True, slots=True)
class RunOn:
    """Let this part of the job hold exactly so many devices: start, grow or shrink it."""

    job: JobView
    devices: Counts
    reason: str
    borrowed: bool = False
    preempts: bool = False
    """Jobs that hold devices and rank behind it may be stopped for it: as few as needed, the last first, and none if
    that
    does not help."""


@dataclass(frozen=True, slots=True)
class StopJob:
    """Take all devices from the job, borrowed ones too. It waits."""

    job: JobView
    reason: str


@dataclass(frozen=True, slots=True)
class Promote:
    """Turn what a borrowing job has into its share of the guarantee, so that nobody can take it back."""

    job: JobView
    reason: str
    preempts: bool = False
    """As in `RunOn`."""


@dataclass(frozen=True, slots=True)
class ShareDevices:
    """Let a waiting job use the devices of another one of its VC, together with it; both run slower. One guest per
    host, and as
    many devices as the host has. When the host ends, the guest has them for itself."""

    job: JobView
    host: JobView
    reason: str


@dataclass(frozen=True, slots=True)
class ResetService:
    """Count the job's `recent_service` from anew."""

    job: JobView


@dataclass(frozen=True, slots=True)
class Defragment:
    """Move the job to where it leaves the larger holes, if there is such a place; as many devices as now."""

    job: JobView
    reason: str


@dataclass(frozen=True, slots=True)
class Wake:
    """Ask again at this time, even if nothing happens until then."""

    at: float


PolicyAction: TypeAlias = RunOn | StopJob | Promote | ShareDevices | ResetService | Defragment | Wake
PolicyActions: TypeAlias = Generator[PolicyAction, bool, None]


class Policy(ABC):
    """See the module's docstring."""

    @abstractmethod
    def rank(self, job: JobView, now: float) -> tuple[Key, float]:
        """Its place in the queues (smallest first), and until when that holds (`math.inf`: until its devices change)."""

    @abstractmethod
    def decide(self, view: VcView, now: float) -> PolicyActions:
        """What should change within the VC's guarantee."""

    def borrow(self, view: VcView, now: float) -> PolicyActions:
        """What should change beyond it. Unless a policy knows better: waiting jobs by rank, until one does not fit."""
        while (job := view.waiting.best()) is not None:
            if not (
                yield from run(view, job, "no room in the guarantee, and nobody uses these", borrowed=True)
            ):
                return


def run(
    view: VcView, job: JobView, reason: str, *, borrowed: bool = False
) -> Generator[PolicyAction, bool, bool]:
    """Wish for what the job's owner asked for, on the first of its types that has it. Returns whether it was granted.

    A job that runs on borrowed devices is promoted.
    """
    if job.borrowed and not borrowed:
        return (yield Promote(job, f"{reason}; keeps what it borrowed"))
    types = view.types_for(job.request) if not borrowed else job.request.types or tuple(view.lendable)
    for type_ in types:
        if (yield RunOn(job, {type_: job.request.devices}, reason, borrowed=borrowed)):
            return True
    return False


def policy_actions(
    view: VcView, wanted: Mapping[JobId, Counts], reason: str | Mapping[JobId, str], *, borrowed: bool = False
) -> PolicyActions:
    """What leads from what jobs have to what they should have: stops, then shrinks, then the rest in the order of
    `wanted`.

    Jobs of the VC that are not in `wanted` should have nothing.
    """

    def why(job: JobId) -> str:
        return reason if isinstance(reason, str) else reason.get(job, "not in the new assignment")

    held = {id_: job.borrowed_counts if borrowed else job.counts for id_, job in view.jobs.items()}
    for id_, counts in held.items():
        if counts and not any(wanted.get(id_, {}).values()):
            yield RunOn(view.jobs[id_], {}, why(id_), borrowed=borrowed)
    later = []
    for id_, counts in wanted.items():
        counts = {type_: number for type_, number in counts.items() if number}
        if counts == held[id_]:
            continue
        if all(number <= held[id_].get(type_, 0) for type_, number in counts.items()):
            yield RunOn(view.jobs[id_], counts, why(id_), borrowed=borrowed)
        else:
            later.append((id_, counts))
    for id_, counts in later:
        yield RunOn(view.jobs[id_], counts, why(id_), borrowed=borrowed)
