"""Of ordered jobs: which steps are committed, and which batch has to wait for them. Pure.

A step is committed when all its batches are reported: then every slot has them, and may apply the step.
"""

from __future__ import annotations

from gyrostat.core.errors import UsageError
from gyrostat.data.shards.messages import WaitForShard
from gyrostat.data.shards.queues import Queues
from gyrostat.ps.store.spec import StepOrder


def committed_steps(order: StepOrder, queues: Queues) -> int:
    """How many steps, over all epochs. The queues hand out one batch after the other."""
    if queues.over:
        return (queues.epoch + 1) * order.steps
    return order.place(queues.epoch, queues.first_left // queues.layout.shard_size)[0]


def wait_for_steps(order: StepOrder, queues: Queues, epoch: int, committed: int) -> WaitForShard | None:
    """Why a request for this epoch has to wait; None: the next batch can be computed with what is committed."""
    if epoch < queues.epoch or (epoch == queues.epoch and not queues.todo):
        return None
    start = queues.next_start if epoch == queues.epoch else 0
    step, _ = order.place(epoch, start // queues.layout.shard_size)
    if step <= committed + order.staleness:
        return None
    return WaitForShard(
        f"a batch of step {step} waits: {committed} steps are complete (staleness={order.staleness})"
    )


def check_recovery(*, partial: bool, order: StepOrder | None) -> None:
    """Raise if slots would go back alone, which breaks the order of steps."""
    if order is not None and partial:
        raise UsageError(
            f"the recovery of servers is 'partial', but the script says staleness={order.staleness}: slots that go back alone "
            "would miss steps that others have; use 'exact' or 'replica', or staleness=None"
        )
