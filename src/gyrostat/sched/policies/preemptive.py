"""What policies that preempt have in common: devices go to jobs by rank, whoever has them now.

Walking down all jobs and giving each what it wants if that much is left is simple, and far too slow for every event
of a long trace. So it is done from what is: jobs that hold devices are in rank order, and so are those that do not.
The first of the latter either fits into what is free, or into that plus what jobs of lower rank hold; of these the
lowest give way, as few as needed for a place where its devices are together. If it does not fit, nobody of its shape
behind it does.
"""

from __future__ import annotations

from collections.abc import Callable, Generator

from gyrostat.sched.policy import PolicyAction, PolicyActions, Promote, ResetService, RunOn
from gyrostat.sched.views import JobView, VcView


def by_rank(
    view: VcView, why: Callable[[JobView], str], *, starving: Callable[[JobView], bool] | None = None
) -> PolicyActions:
    """Wishes that give the guarantee's devices to the best-ranked jobs. Jobs that are `starving` start from anew."""
    blocked: set[object] = set()
    changed = True
    while changed:
        changed = False
        for job in view.heads(without=blocked):
            if job.request.shape in blocked:
                continue
            if not _may_fit(view, job):
                blocked.add(job.request.shape)
                continue
            if starving is not None and starving(job):
                yield ResetService(job)
            if (yield from _run(view, job, why(job))):
                changed = True  # others may be first now
                break
            blocked.add(job.request.shape)


def _may_fit(view: VcView, job: JobView) -> bool:
    """Whether to look for a place at all: there are enough free devices, or some are held by jobs of lower rank."""
    if any(view.free(type_) >= job.request.devices for type_ in view.types_for(job.request)):
        return True
    return view.outranks_a_holder(job) and not view.is_inadmissible(job)


def _run(view: VcView, job: JobView, reason: str) -> Generator[PolicyAction, bool, bool]:
    if job.borrowed:
        return (yield Promote(job, reason, preempts=True))
    for type_ in view.types_for(job.request):
        if (yield RunOn(job, {type_: job.request.devices}, reason, preempts=True)):
            return True
    return False
