"""Gandiva-style (Xiao et al., OSDI 2018): small jobs migrate to defragment nodes, and jobs share devices.

Jobs start in order of submission, and later ones may pass those that do not fit. When enough devices are free for a job but
scattered, running jobs migrate: each to the fullest node with room, the smallest jobs first, at most `moves` of them per
decision. When no device is free, a waiting job shares the devices of a running one of its size, if two jobs on a device have
a higher total throughput than one (`packed` is the speed that each keeps; at 0.5 there is no gain, and nothing is shared).
Gandiva finds that by profiling pairs of jobs; here it is one setting.
"""

from __future__ import annotations

import math
from collections.abc import Generator

from gyrostat.core.errors import UsageError
from gyrostat.sched.policy import (
    BORROWS,
    Defragment,
    Policy,
    PolicyAction,
    PolicyActions,
    ShareDevices,
    run,
    run_by_rank,
)
from gyrostat.sched.views import JobView, Key, VcView


class Gandiva(Policy):
    def __init__(self, *, moves: int = 8, packed: float = 0.5) -> None:
        if moves < 0 or not 0 < packed <= 1:
            raise UsageError(f"moves is 0 or more and packed in 0 … 1; got {moves} and {packed}")
        self.moves = moves
        self.packed = packed

    def rank(self, job: JobView, now: float) -> tuple[Key, float]:
        return (job.request.submitted,), math.inf

    def decide(self, view: VcView, now: float) -> PolicyActions:
        blocked: set[object] = set()
        moves = self.moves
        while (job := view.next(without=blocked)) is not None:
            granted = yield from run(view, job, "next that fits")
            while not granted and moves and self._scattered(view, job):
                moves -= 1
                if not (yield from _migrate(view, job)):
                    break
                granted = yield from run(view, job, "next that fits, after a migration")
            if not granted:
                blocked.add(job.request.shape)
        if self.packed > 0.5:
            yield from _share(view)

    def borrow(self, view: VcView, now: float) -> PolicyActions:
        return run_by_rank(view, BORROWS, borrowed=True, backfill=True)

    def _scattered(self, view: VcView, job: JobView) -> bool:
        """Whether enough devices are free for the job, though scattered."""
        return any(view.free(type_) >= job.request.devices for type_ in view.types_for(job.request))


def _migrate(view: VcView, blocked: JobView) -> Generator[PolicyAction, bool, bool]:
    """Migrate one job that is smaller than the blocked one. Returns whether one migrated."""
    for job in sorted(view.holding, key=lambda job: (job.held, job.number)):
        if job.held >= blocked.request.devices:
            break
        if (yield Defragment(job, f"makes room for {blocked.id}")):
            return True
    return False


def _share(view: VcView) -> PolicyActions:
    """Let waiting jobs share the devices of running ones of their size, the best-ranked hosts first."""
    hosts: dict[int, list[JobView]] = {}
    for job in view.holding:
        if job.host is None and job.guest is None and not job.borrowed:
            hosts.setdefault(job.held, []).append(job)
    for job in view.waiting:
        fitting = hosts.get(job.request.devices)
        if fitting:
            host = fitting.pop(0)
            yield ShareDevices(job, host, f"shares the devices of {host.id}")
