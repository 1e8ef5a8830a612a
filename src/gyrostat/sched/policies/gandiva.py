"""Gandiva-style (Xiao et al., OSDI 2018): nobody waits for a tidy place. Small jobs move, and full devices are shared.

Jobs start in the order in which they came, later ones passing those that do not fit. For a job that finds enough
devices, but scattered ones, running jobs migrate: each to the fullest node that takes it, those on the emptiest nodes
first, at most `moves` of them per decision. When devices run out, jobs are packed: a waiting job shares the devices
of a running one of its size, if two on a device get more done than one (`packed` is the speed that each keeps; 0.5 is
no gain, and nothing is packed). What Gandiva finds by introspection, profiling pairs of jobs on the fly, is here the
one setting.
"""

from __future__ import annotations

import math
from collections.abc import Generator

from gyrostat.core.errors import UsageError
from gyrostat.sched.policy import Defragment, Policy, PolicyAction, PolicyActions, ShareDevices, run
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
        blocked: set[object] = set()
        while (job := view.waiting.best(blocked)) is not None:
            if not (yield from run(view, job, "no room in the guarantee; borrows", borrowed=True)):
                blocked.add(job.request.shape)

    def _scattered(self, view: VcView, job: JobView) -> bool:
        """There are enough devices for it, only not together."""
        return any(view.free(type_) >= job.request.devices for type_ in view.types_for(job.request))


def _migrate(view: VcView, blocked: JobView) -> Generator[PolicyAction, bool, bool]:
    """Let one small job move, so that nodes are fuller and fewer. Returns whether one did."""
    for job in sorted(view.holding, key=lambda job: (job.held, job.number)):
        if job.held >= blocked.request.devices:
            break
        if (yield Defragment(job, f"makes room for {blocked.id}")):
            return True
    return False


def _share(view: VcView) -> PolicyActions:
    """Two jobs of a size share devices: the oldest hosts first."""
    hosts: dict[int, list[JobView]] = {}
    for job in view.holding:
        if job.host is None and job.guest is None and not job.borrowed:
            hosts.setdefault(job.held, []).append(job)
    for job in view.waiting:
        fitting = hosts.get(job.request.devices)
        if fitting:
            host = fitting.pop(0)
            yield ShareDevices(job, host, f"shares the devices of {host.id}")
