"""Which jobs make a policy or placer raise. Pure: it tries on scheduler states of its own.

After a tick has raised, the scheduler's state may be half updated and is of no use. A new one gets all jobs again, without
those that it raises on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from gyrostat.core.request import JobId
from gyrostat.sched.port import Change, Snapshot
from gyrostat.sched.state import SchedulerState
from gyrostat.sched.tick import tick


def jobs_at_fault(
    build: Callable[[], SchedulerState], jobs: Mapping[JobId, tuple[Change, ...]], now: float
) -> dict[JobId, Exception]:
    """The jobs without which the first tick of a new scheduler succeeds, and what it raises with them.

    `jobs`: how each is reported to a new scheduler. Raises what a tick without any job raises: then none is at fault.
    """
    if (error := _first_tick(build, (), now)) is not None:
        raise error
    found: dict[JobId, Exception] = {}
    kept = dict(jobs)
    while (error := _first_tick(build, list(kept.values()), now)) is not None:
        names = list(kept)
        works, fails = 0, len(names)  # the first `works` jobs do, the first `fails` do not
        while fails - works > 1:
            middle = (works + fails) // 2
            raised = _first_tick(build, [kept[name] for name in names[:middle]], now)
            if raised is None:
                works = middle
            else:
                fails, error = middle, raised
        found[names[fails - 1]] = error
        del kept[names[fails - 1]]
    return found


def _first_tick(
    build: Callable[[], SchedulerState], jobs: Sequence[tuple[Change, ...]], now: float
) -> Exception | None:
    try:
        tick(build(), Snapshot(now, tuple(change for changes in jobs for change in changes)))
    except Exception as error:
        return error
    return None
