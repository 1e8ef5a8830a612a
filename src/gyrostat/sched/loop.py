"""The one scheduling loop, for every cluster: observe → tick → apply → wait."""

from __future__ import annotations

from collections.abc import Callable

from gyrostat.core.plan import Plan
from gyrostat.sched.port import Cluster, Snapshot
from gyrostat.sched.state import SchedulerState
from gyrostat.sched.tick import tick

Watcher = Callable[[Snapshot, Plan], None]
"""Told of every tick: recorders, progress."""


def run(cluster: Cluster, scheduler_state: SchedulerState, *, watchers: tuple[Watcher, ...] = ()) -> None:
    """Until nothing will happen any more; a real cluster never says so."""
    while True:
        snapshot = cluster.observe()
        plan = tick(scheduler_state, snapshot)
        for watch in watchers:
            watch(snapshot, plan)
        if plan.actions:
            cluster.apply(plan)
        elif snapshot.closed and plan.wake_at is None:
            return
        cluster.wait(plan.wake_at)
