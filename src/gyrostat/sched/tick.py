"""One scheduling decision: what has changed in, a plan out. No I/O; time comes with the snapshot.

    1. admit    take in what has happened since the last tick
    2. decide   every VC for which something changed asks its policy about the devices that it is guaranteed;
                each wish is placed at once, so that a policy knows whether it was granted
    3. lend     what nobody uses is lent, to the VC with the least borrowed per weight first
    4. diff     what jobs had before against what they have now: the plan, with what gives devices back first

Guaranteed jobs may drive out borrowers, whose VCs then decide again in the same tick. Borrowers drive out nobody, so
that ends.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from functools import partial

from gyrostat.core.plan import Action, Plan, Preempt, Resize, Start
from gyrostat.sched.policy import (
    Defragment,
    PolicyAction,
    PolicyActions,
    Promote,
    ResetService,
    RunOn,
    ShareDevices,
    StopJob,
    Wake,
)
from gyrostat.sched.port import Snapshot
from gyrostat.sched.state import SchedulerState, TenantState


def tick(state: SchedulerState, snapshot: Snapshot) -> Plan:
    state.apply_changes(snapshot.now, snapshot.changes)
    _decide(state)
    _lend(state)
    actions = tuple(_diff(state))
    state.before_tick.clear()
    state.reasons.clear()
    return Plan(snapshot.now, actions, state.next_wake())


def _decide(state: SchedulerState) -> None:
    while dirty := [tenant for tenant in state.vcs.values() if tenant.dirty]:
        for tenant in dirty:
            tenant.dirty = False
            tenant.view.now = state.now
            actions = tenant.policy.decide(tenant.view, state.now)
            granted: bool | None = None
            while (action := _next(actions, granted)) is not None:
                granted = _grant(state, tenant, action)


def _lend(state: SchedulerState) -> None:
    if not state.placer.lends:
        state.freed = False
        return
    asking = [tenant for tenant in state.vcs.values() if tenant.wants_to_borrow or state.freed]
    state.freed = False
    turns: list[tuple[float, int, TenantState, PolicyActions, bool | None]] = []
    for number, tenant in enumerate(asking):
        tenant.wants_to_borrow = False
        tenant.view.now = state.now
        heapq.heappush(
            turns,
            (tenant.borrowed_share, number, tenant, tenant.policy.borrow(tenant.view, state.now), None),
        )
    while turns:
        _, number, tenant, actions, granted = heapq.heappop(turns)
        if (action := _next(actions, granted)) is not None:
            granted = _grant(state, tenant, action)
            heapq.heappush(turns, (tenant.borrowed_share, number, tenant, actions, granted))


def _next(actions: PolicyActions, granted: bool | None) -> PolicyAction | None:
    try:
        return next(actions) if granted is None else actions.send(granted)
    except StopIteration:
        return None


def _grant(state: SchedulerState, tenant: TenantState, action: PolicyAction) -> bool:
    if type(action) is RunOn:
        if action.preempts:
            place = partial(
                state.place,
                action.job,
                action.devices,
                action.borrowed,
                action.reason,
            )
            return state.preempt_for(action.job, action.devices, place)
        return state.place(action.job, action.devices, action.borrowed, action.reason)
    match action:
        case StopJob(job, reason):
            state.stop(job, reason)
            return True
        case Promote(job, reason, preempts):
            promote = partial(state.promote, job, reason)
            of_one_type = len(job.borrowed_counts) == 1  # nobody gives way to a mixture
            preempts = preempts and of_one_type
            return state.preempt_for(job, job.borrowed_counts, promote) if preempts else promote()
        case ShareDevices(job, host, reason):
            return state.share(job, host, reason)
        case ResetService(job):
            state.reset_service(job)
            return True
        case Defragment(job, reason):
            return state.defragment(job, reason)
        case Wake(at):
            state.wake_at(tenant, at)
            return True
    raise AssertionError(f"no such wish: {action}")


def _diff(state: SchedulerState) -> Iterator[Action]:
    """What gives back before what takes: preemptions, shrinks, then the rest in the order of the decisions."""
    takes: list[Action] = []
    shrinks: list[Action] = []
    for id_, (own, lent) in state.before_tick.items():
        job = state.jobs.get(id_)
        if job is None:
            continue
        before = tuple(sorted((*own, *lent))) if lent else own
        after = tuple(sorted((*job.devices, *job.borrowed))) if job.borrowed else job.devices
        if before == after and lent == job.borrowed:
            continue
        reason = state.reasons.get(id_, "")
        if job.request.elastic:
            job.before = state.fleet.count(before)
        if not before:
            host = None if job.host is None else job.host.id
            takes.append(Start(id_, after, reason, job.borrowed, host))
        elif not after:
            yield Preempt(id_, before, reason)
        else:
            resize = Resize(id_, before, after, reason, job.borrowed)
            (shrinks if resize.shrinks else takes).append(resize)
    yield from shrinks
    yield from takes
