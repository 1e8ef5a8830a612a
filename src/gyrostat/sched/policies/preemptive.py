"""What policies that preempt have in common: devices go to jobs by rank, whoever has them now.

Walking down all jobs and giving each what it wants if that much is left is simple, and far too slow for every event
of a long trace. The same result comes cheaper from what is: the jobs that hold devices are in rank order, and so are
those that do not. The first of the latter either fits into what is free, or into that plus what jobs of lower rank
hold; of these the lowest give way, as few as needed. If it does not fit, nobody of its shape behind it does.
"""

from __future__ import annotations

from collections.abc import Callable

from gyrostat.sched.policy import Forgive, Promote, Run, Wishes
from gyrostat.sched.views import JobView, VcView


def by_rank(view: VcView, why: Callable[[JobView], str], *, starving: Callable[[JobView], bool] | None = None) ->
Wishes:
    """Wishes that give the devices of the guarantee to the best-ranked jobs. Jobs that are `starving` start from anew.
    """
    blocked: set[object] = set()
    while (job := view.next(without=blocked)) is not None:
        if starving is not None and starving(job):
            yield Forgive(job)
        for type_ in view.types_for(job.request):
            candidates = may_give_way(view, job, type_)
            if candidates is None:
                continue
            if job.borrowed:
                granted = yield Promote(job, why(job), candidates)
            else:
                granted = yield Run(job, {type_: job.request.devices}, why(job), instead_of=candidates)
            if granted:
                break
        else:
            blocked.add(job.request.shape)


def may_give_way(view: VcView, job: JobView, type_: str) -> tuple[JobView, ...] | None:
    """Jobs of lower rank, of whom some must give way for `job`; None if even all of them have too little."""
    wanted = job.request.devices - view.free(type_)
    if wanted <= 0:
        return ()
    worst = view.holding.worst()
    if worst is None or worst.precedes(job):
        return None
    behind = view.holding.behind(job)
    for other in reversed(behind):
        if other.host is None:
            wanted -= other.counts.get(type_, 0)
            if wanted <= 0:
                return tuple(behind)
    return None
