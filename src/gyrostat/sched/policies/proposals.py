"""Proposals of jobs for further devices, and which of them to accept: the highest speedup per device, then the larger one.

A `TentativeAllocation` has the devices of jobs while a policy computes targets: EasyScale's, and Gavel's with `mixed`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from gyrostat.core.devices import Counts, format_counts
from gyrostat.sched.estimates import unhelpful
from gyrostat.sched.policies.steady import DeviceTargets, limit
from gyrostat.sched.policy import PolicyActions, RunOn
from gyrostat.sched.views import JobView, VcView

_ROUNDING = 1e-9


@dataclass(frozen=True)
class JobProposal:
    """Devices that a job proposes to have, `added` of them new."""

    target: dict[str, int]
    added: int
    speedup: float

    @property
    def per_device(self) -> float:
        return (self.speedup - 1) / self.added

    def better(self, other: JobProposal) -> bool:
        """Whether the speedup per device is higher, or equal with more devices."""
        if self.added > other.added:
            return self.per_device >= other.per_device * (1 - _ROUNDING)
        return self.per_device > other.per_device * (1 + _ROUNDING)


class TentativeAllocation:
    """Devices of jobs while targets are computed; at first their guaranteed devices, and the free ones."""

    def __init__(self, view: VcView, *, mixed: bool = True) -> None:
        self.view = view
        self.mixed = mixed
        self.moving = True
        self.free = view.free_by_type()
        self.assignment = DeviceTargets({job.id: dict(job.counts) for job in view.holding})

    def held(self, job: JobView) -> dict[str, int]:
        return self.assignment.devices.get(job.id, {})

    def assign(self, job: JobView, counts: Counts, reason: str) -> None:
        for type_, number in self.held(job).items():
            self.free[type_] += number
        for type_, number in counts.items():
            self.free[type_] -= number
        self.assignment.devices[job.id] = {type_: number for type_, number in counts.items() if number}
        self.assignment.reasons[job.id] = reason

    def types(self, job: JobView) -> tuple[str, ...]:
        return self.view.types_for(job.request)

    def fastest(self, job: JobView, number: int) -> str | None:
        """The type on which the job is fastest, of those with `number` free devices."""
        fitting = [type_ for type_ in self.types(job) if self.free.get(type_, 0) >= number]
        rated = [(self.view.rate(job, {type_: number}), -place, type_) for place, type_ in enumerate(fitting)]
        rate, _, type_ = max(rated, default=(0.0, 0, None))
        return type_ if rate > 0 else None

    def loss(self, job: JobView, type_: str) -> float | None:
        """The share of its speed that a job loses with one device of a type; None if it cannot lose one."""
        held = self.held(job)
        if (
            not job.request.elastic
            or sum(held.values()) <= max(job.request.smallest, 1)
            or not held.get(type_)
        ):
            return None
        fewer = {name: number - (name == type_) for name, number in held.items() if number > (name == type_)}
        return 1 - self.view.rate(job, fewer) / self.view.rate(job, held)

    def best_proposal(self, job: JobView) -> JobProposal | None:
        """The best proposal for devices that are free now."""
        held = self.held(job)
        before = self.view.rate(job, held)
        best: JobProposal | None = None
        for target, added in self._targets(job, held):
            after = self.view.rate(job, target)
            if after <= before * (1 + _ROUNDING):
                continue
            proposal = JobProposal(target, added, after / before)
            if best is None or proposal.better(best):
                best = proposal
        return best

    def _targets(self, job: JobView, held: Mapping[str, int]) -> Iterator[tuple[dict[str, int], int]]:
        room = limit(job)
        may_mix = self.mixed and job.request.mixes_types
        for type_ in self.types(job):
            free = self.free.get(type_, 0)
            if not free:
                continue
            if may_mix or set(held) <= {type_}:
                for more in range(1, min(free, room - sum(held.values())) + 1):
                    yield {**held, type_: held.get(type_, 0) + more}, more
            if self.moving and set(held) != {type_}:
                least = max(job.request.smallest, held.get(type_, 0) + 1)
                for number in range(least, min(free + held.get(type_, 0), room) + 1):
                    yield {type_: number}, number - held.get(type_, 0)


_Entry = tuple[float, int, int, JobProposal, JobView]


def grow(table: TentativeAllocation, jobs: Iterable[JobView], *, moving: bool = True) -> None:
    """Accept proposals of these jobs until none helps any more. `moving`: they may migrate from one type to another."""
    table.moving = moving
    heap = [entry for job in jobs if (entry := _proposed(job, table)) is not None]
    heapq.heapify(heap)
    while heap and any(table.free.values()):
        *_, proposal, job = heapq.heappop(heap)
        current = table.best_proposal(job)
        if current is None:
            continue
        if current == proposal:
            reason = f"{current.speedup:.2f} times as fast with {current.added} more: the highest speedup per device"
            table.assign(job, current.target, reason)
        if (entry := _proposed(job, table)) is not None:
            heapq.heappush(heap, entry)


def grow_borrowed(view: VcView) -> PolicyActions:
    """Opportunistic growth: jobs with guaranteed devices borrow more, those first that gain most. Jobs that borrowed devices
    have not made faster release these. In a VC without guaranteed devices, borrowing jobs grow.
    """
    running = view.holding if any(view.capacity.values()) else view.borrowing
    jobs = [job for job in running if job.request.elastic]
    for job in jobs:
        added = unhelpful(job) if job.borrowed else {}
        kept = {type_: max(0, n - added.get(type_, 0)) for type_, n in job.borrowed_counts.items()}
        if kept != job.borrowed_counts:
            kept = {type_: number for type_, number in kept.items() if number}
            yield RunOn(job, kept, f"no faster with {format_counts(added)} more", borrowed=True)
    if not any(view.lendable.values()):
        return
    table = TentativeAllocation(view)
    table.free = dict(view.lendable)
    table.assignment = DeviceTargets({job.id: job.all_counts() for job in jobs})
    grow(table, jobs, moving=False)
    for job in jobs:
        more = table.held(job)
        borrowed = {
            type_: n - job.counts.get(type_, 0) for type_, n in more.items() if n > job.counts.get(type_, 0)
        }
        if borrowed != job.borrowed_counts:
            reason = table.assignment.reasons.get(job.id, "grows")
            yield RunOn(job, borrowed, f"{reason}; idle devices", borrowed=True)


def _proposed(job: JobView, table: TentativeAllocation) -> _Entry | None:
    proposal = table.best_proposal(job)
    return None if proposal is None else (-proposal.per_device, -proposal.added, job.number, proposal, job)
