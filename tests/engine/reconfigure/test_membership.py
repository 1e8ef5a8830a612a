"""What a worker makes of what it is told about generations to come."""

from __future__ import annotations

import queue

from gyrostat.core.job import NextGeneration
from gyrostat.core.placement import Placement
from gyrostat.engine.reconfigure.membership import Membership, PreparedGeneration

PATIENCE_S = 120.0


def plan(generation: int) -> NextGeneration:
    return NextGeneration(
        generation=generation,
        placement=Placement.even(2, 1),
        members=(0,),
        newcomers=(),
        donor=0,
        store="",
    )


def test_who_is_told_twice_connects_once() -> None:
    """Whoever tells does not always know whether it was heard: a leader that took over, an agent that was away."""
    connected: queue.SimpleQueue[int] = queue.SimpleQueue()
    told: queue.SimpleQueue[int] = queue.SimpleQueue()

    def connect(plan: NextGeneration) -> PreparedGeneration:
        connected.put(plan.generation)
        return PreparedGeneration(plan, None, None)

    membership = Membership(0, (0, 1), connect=connect, report_prepared=told.put)
    membership.prepare(plan(2))
    assert told.get(timeout=PATIENCE_S) == 2
    membership.prepare(plan(2))
    membership.set_fence(2, 5)
    membership.set_fence(2, 5)
    membership.cancel(2)
    membership.prepare(plan(3))
    assert told.get(timeout=PATIENCE_S) == 3
    assert [connected.get(timeout=PATIENCE_S) for _ in range(2)] == [2, 3]
    assert connected.empty()
