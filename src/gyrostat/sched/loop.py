"""The one scheduling loop, for every cluster: observe → tick → apply → wait."""

from __future__ import annotations

from collections.abc import Callable

from gyrostat.core.plan import Plan
from gyrostat.sched.port import Cluster, Snapshot
from gyrostat.sched.state import SchedulerState
from gyrostat.sched.tick import tick

Watcher = Callable[[Snapshot, Plan], None]
"""Called after every tick: recorders, progress."""


def run(cluster: Cluster, scheduler_state: SchedulerState, *, watchers: tuple[Watcher, ...] = ()) -> None:
    """Run until the cluster is closed and no policy waits for a time. A live cluster is never closed."""
    while True:
        # 1. Observe: the changes since the last cycle.
        snapshot = cluster.observe()
        # 2. Decide: a plan, without I/O.
        plan = tick(scheduler_state, snapshot)
        for watch in watchers:
            watch(snapshot, plan)
        # 3. Apply the plan.
        if plan.actions:
            cluster.apply(plan)
        elif snapshot.closed and plan.wake_at is None:
            return
        # 4. Wait for the next change, or the time at which a policy decides again.
        cluster.wait(plan.wake_at)
