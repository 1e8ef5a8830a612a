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
    Promote,
    ResetService,
    RunOn,
    ShareDevices,
    StopJob,
    Wake,
    Wish,
    Wishes,
)
from gyrostat.sched.port import Snapshot
from gyrostat.sched.state import SchedulerState, TenantState


def tick(scheduler_state: SchedulerState, snapshot: Snapshot) -> Plan:
    scheduler_state.admit(snapshot.now, snapshot.changes)
    _decide(scheduler_state)
    _lend(scheduler_state)
    actions = tuple(_diff(scheduler_state))
    scheduler_state.touched.clear()
    scheduler_state.reasons.clear()
    return Plan(snapshot.now, actions, scheduler_state.next_wake())


def _decide(scheduler_state: SchedulerState) -> None:
    while dirty := [book for book in scheduler_state.vcs.values() if book.dirty]:
        for book in dirty:
            book.dirty = False
            book.view.now = scheduler_state.now
            policy_actions = book.policy.decide(book.view, scheduler_state.now)
            granted: bool | None = None
            while (policy_action := _next(policy_actions, granted)) is not None:
                granted = _grant(scheduler_state, book, policy_action)


def _lend(scheduler_state: SchedulerState) -> None:
    if not scheduler_state.placer.lends:
        scheduler_state.freed = False
        return
    asking = [book for book in scheduler_state.vcs.values() if book.wants_to_borrow or scheduler_state.freed]
    scheduler_state.freed = False
    turns: list[tuple[float, int, TenantState, Wishes, bool | None]] = []
    for number, book in enumerate(asking):
        book.wants_to_borrow = False
        book.view.now = scheduler_state.now
        heapq.heappush(
            turns,
            (book.borrowed_share, number, book, book.policy.borrow(book.view, scheduler_state.now), None),
        )
    while turns:
        _, number, book, policy_actions, granted = heapq.heappop(turns)
        if (policy_action := _next(policy_actions, granted)) is not None:
            granted = _grant(scheduler_state, book, policy_action)
            heapq.heappush(turns, (book.borrowed_share, number, book, policy_actions, granted))


def _next(policy_actions: Wishes, granted: bool | None) -> Wish | None:
    try:
        return next(policy_actions) if granted is None else policy_actions.send(granted)
    except StopIteration:
        return None


def _grant(scheduler_state: SchedulerState, book: TenantState, policy_action: Wish) -> bool:
    if type(policy_action) is RunOn:
        if policy_action.preempts:
            place = partial(
                scheduler_state.place,
                policy_action.job,
                policy_action.devices,
                policy_action.borrowed,
                policy_action.reason,
            )
            return scheduler_state.preempt_for(policy_action.job, policy_action.devices, place)
        return scheduler_state.place(
            policy_action.job, policy_action.devices, policy_action.borrowed, policy_action.reason
        )
    match policy_action:
        case StopJob(job, reason):
            scheduler_state.stop(job, reason)
            return True
        case Promote(job, reason, preempts):
            promote = partial(scheduler_state.promote, job, reason)
            of_one_type = len(job.borrowed_counts) == 1  # nobody gives way to a mixture
            preempts = preempts and of_one_type
            return scheduler_state.preempt_for(job, job.borrowed_counts, promote) if preempts else promote()
        case ShareDevices(job, host, reason):
            return scheduler_state.share(job, host, reason)
        case ResetService(job):
            scheduler_state.forgive(job)
            return True
        case Defragment(job, reason):
            return scheduler_state.pack(job, reason)
        case Wake(at):
            scheduler_state.wake(book, at)
            return True
    raise AssertionError(f"no such wish: {policy_action}")


def _diff(scheduler_state: SchedulerState) -> Iterator[Action]:
    """What gives back before what takes: preemptions, shrinks, then the rest in the order of the decisions."""
    takes: list[Action] = []
    shrinks: list[Action] = []
    for id_, (own, lent) in scheduler_state.touched.items():
        job = scheduler_state.jobs.get(id_)
        if job is None:
            continue
        before = tuple(sorted((*own, *lent))) if lent else own
        after = tuple(sorted((*job.devices, *job.borrowed))) if job.borrowed else job.devices
        if before == after and lent == job.borrowed:
            continue
        reason = scheduler_state.reasons.get(id_, "")
        if job.request.elastic:
            job.before = scheduler_state.fleet.count(before)
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
