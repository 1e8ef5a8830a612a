"""The common part of preemptive policies: devices go to jobs by rank, also devices that other jobs hold.

A pass over all jobs by rank, allocating while devices last, is simple but too slow for every event of a long trace. So this
is incremental: jobs with and without devices are both in rank order. The first job without devices fits either into the free
devices, or into these plus devices of jobs of lower rank; of these the lowest are preempted, as few as a placement needs. If
it does not fit, no job of its shape behind it does.
"""

from __future__ import annotations

from collections.abc import Callable, Generator

from gyrostat.sched.policy import PolicyAction, PolicyActions, Promote, ResetService, RunOn
from gyrostat.sched.views import JobView, VcView


def by_rank(
    view: VcView, why: Callable[[JobView], str], *, starving: Callable[[JobView], bool] | None = None
) -> PolicyActions:
    """Actions that give the guaranteed devices to the best-ranked jobs. The service of `starving` jobs is reset."""
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
                changed = True  # the order may have changed
                break
            blocked.add(job.request.shape)


def _may_fit(view: VcView, job: JobView) -> bool:
    """Whether a placement is possible: enough devices are free, or jobs of lower rank hold some."""
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
