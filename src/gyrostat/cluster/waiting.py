"""Why a job waits, and what would let it run: read from the scheduler's state between two rounds."""

from __future__ import annotations

from collections.abc import Sequence

from gyrostat.cluster.occupancy import Holder
from gyrostat.cluster.records import JobRecord, JobState, Waiting
from gyrostat.core.devices import format_counts
from gyrostat.core.plural import plural
from gyrostat.core.request import JobId
from gyrostat.sched.state import SchedulerState
from gyrostat.sched.views import JobView


def explain_waiting(scheduler_state: SchedulerState, record: JobRecord, now: float) -> Waiting | None:
    """None: the job does not wait."""
    if record.state.over or record.holds_devices or record.devices:
        return None
    view = scheduler_state.jobs.get(JobId(record.id))
    if view is None:
        return _outside_scheduler(record, now)
    ahead = [job for job in view.vc.waiting if job.precedes(view)]
    position = len(ahead) + 1
    least = max(1, view.request.smallest)
    types = view.request.types or tuple(scheduler_state.fleet.totals)
    free = {type_: view.vc.free(type_) for type_ in types if view.vc.capacity.get(type_, 0)}
    lendable = {type_: number for type_ in types if (number := view.vc.lendable.get(type_, 0))}
    wants = f"it needs {least} of {' or '.join(types)}"
    if not any(view.vc.capacity.values()):
        why = f"{wants} that no other job uses, and there are {format_counts(lendable)}"
        helps = f"{plural(least, 'unused device')}"
        return Waiting(job=record.id, position=position, why=why, what_helps=helps)
    missing, quota = view.request.servers, scheduler_state.vcs[view.vc.name].servers
    if missing is not None and not quota.fits(view.request):
        why = f"its servers need {missing}, and {view.vc.name} has {quota.free} left for them"
        helps = "jobs with servers end or get fewer, or this one: gyrostat scale JOB servers=…"
        return Waiting(job=record.id, position=position, why=why, what_helps=helps)
    if ahead:
        first = ahead[0]
        why = f"{len(ahead)} before it in {view.vc.name}, {first.id} first; free: {format_counts(free)}"
        helps = (
            f"{first.id} and {plural(len(ahead) - 1, 'other')} start"
            if len(ahead) > 1
            else f"{first.id} starts"
        )
    else:
        why = f"{wants}, and {view.vc.name} has {format_counts(free)} free"
        helps = _what_helps(view, least)
    return Waiting(job=record.id, position=position, why=why, what_helps=helps)


def waits_for(record: JobRecord, holders: Sequence[Holder], grace: float) -> Waiting:
    """Devices are assigned to it that other jobs have yet to leave."""
    since = ", ".join(f"{holder.job} {holder.seconds:.0f} s ago" for holder in holders)
    why = f"{explain_holders(holders, grace)}; asked to leave: {since}"
    return Waiting(job=record.id, position=0, why=why, what_helps="the next boundary of these jobs, or time")


def explain_holders(holders: Sequence[Holder], grace: float) -> str:
    """Which jobs have yet to leave devices."""
    named = ", ".join(f"{holder.job} (on {', '.join(map(str, holder.devices))})" for holder in holders)
    return f"its devices are still held by {named}, which must leave within {grace:g} s"


def _outside_scheduler(record: JobRecord, now: float) -> Waiting:
    """The scheduler does not know it at present."""
    if record.state is JobState.PAUSED:
        why, helps = "its owner has paused it", f"gyrostat resume {record.id}"
    elif record.not_before is not None and record.not_before > now:
        why = f"it failed, and is tried again in {record.not_before - now:.0f} s ({record.failure})"
        helps = "time"
    else:
        why, helps = record.reason, "the next scheduling round"
    return Waiting(job=record.id, position=0, why=why, what_helps=helps)


def _what_helps(view: JobView, least: int) -> str:
    holders = sorted(view.vc.holding, key=lambda job: job.since)
    if not holders:
        return "the return of failed or reserved devices"
    named = ", ".join(f"{job.id} ({job.held})" for job in holders[:3])
    more = f" and {len(holders) - 3} more" if len(holders) > 3 else ""
    return f"{plural(least, 'free device')} of {named}{more}"
