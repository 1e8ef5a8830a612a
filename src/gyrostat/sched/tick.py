"""One scheduling cycle: a snapshot in, a plan out. No I/O; time comes with the snapshot.

    1. update   apply the changes since the last tick to the scheduler's state
    2. decide   every VC with changes asks its policy about its guaranteed devices; each action is placed at once, so
                that the policy knows whether it was granted
    3. lend     idle devices are lent, first to the VC with the fewest borrowed devices per weight
    4. diff     devices of each job before and after: the plan, in which releases precede allocations

Guaranteed jobs may evict borrowers, whose VCs then decide again in the same tick. Borrowers evict no job, so the
repetition ends.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections.abc import Iterator
from functools import partial

from gyrostat.core.plan import Action, Plan, Preempt, Resize, Start
from gyrostat.sched.policy import (
    BeginRound,
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
from gyrostat.sched.state import SchedulerState
from gyrostat.sched.tenant_state import TenantState

logger = logging.getLogger(__name__)


def tick(state: SchedulerState, snapshot: Snapshot) -> Plan:
    """One cycle. A cycle with actions logs its duration at DEBUG."""
    began = time.perf_counter() if logger.isEnabledFor(logging.DEBUG) else None
    # 1. Update.
    state.apply_changes(snapshot.now, snapshot.changes)
    # 2. Decide.
    _decide(state)
    # 3. Lend.
    _lend(state)
    # 4. Diff.
    actions = tuple(_diff(state))
    state.before_tick.clear()
    state.reasons.clear()
    if began is not None and actions:
        elapsed_ms = 1e3 * (time.perf_counter() - began)
        logger.debug(
            "tick at %.3f s: %d changes, %d actions, %.2f ms",
            snapshot.now,
            len(snapshot.changes),
            len(actions),
            elapsed_ms,
            extra={"actions": len(actions), "duration_ms": elapsed_ms},
        )
    return Plan(snapshot.now, actions, state.next_wake())


def _decide(state: SchedulerState) -> None:
    """Let policies decide until no VC has changes: an evicted borrower is a change of its VC."""
    while dirty := [tenant for tenant in state.vcs.values() if tenant.dirty]:
        for tenant in dirty:
            tenant.dirty = False
            actions = tenant.policy.decide(tenant.view, state.now)
            granted: bool | None = None
            while (action := _next(actions, granted)) is not None:
                granted = _grant(state, tenant, action)


def _lend(state: SchedulerState) -> None:
    """VCs take turns, one action each; the VC with the fewest borrowed devices per weight is next."""
    if not state.placer.lends:
        state.freed = False
        return
    asking = [tenant for tenant in state.vcs.values() if tenant.wants_to_borrow or state.freed]
    state.freed = False
    turns: list[tuple[float, int, TenantState, PolicyActions, bool | None]] = []
    for number, tenant in enumerate(asking):
        tenant.wants_to_borrow = False
        actions = tenant.policy.borrow(tenant.view, state.now)
        heapq.heappush(turns, (tenant.borrowed_share, number, tenant, actions, None))
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
    """Carry out one action of a policy on the state. Returns whether it was granted."""
    if type(action) is RunOn:  # by far the most frequent
        if action.preempts:
            place = partial(state.place, action.job, action.devices, action.borrowed, action.reason)
            return state.preempt_for(action.job, action.devices, place)
        return state.place(action.job, action.devices, action.borrowed, action.reason)
    match action:
        case StopJob(job, reason):
            state.stop(job, reason)
            return True
        case Promote(job, reason, preempts):
            promote = partial(state.promote, job, reason)
            preempts = preempts and len(job.borrowed_counts) == 1  # victims are chosen for one device type
            return state.preempt_for(job, job.borrowed_counts, promote) if preempts else promote()
        case ShareDevices(job, host, reason):
            return state.share(job, host, reason)
        case ResetService(job):
            state.reset_service(job)
            return True
        case BeginRound(round_):
            tenant.view.round = round_
            return True
        case Defragment(job, reason):
            return state.defragment(job, reason)
        case Wake(at):
            state.wake_at(tenant, at)
            return True
    raise AssertionError(f"unknown policy action: {action}")


def _diff(state: SchedulerState) -> Iterator[Action]:
    """Preemptions, then shrinks, then all that takes devices, in the order of the decisions."""
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
