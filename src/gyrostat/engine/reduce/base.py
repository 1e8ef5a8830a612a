"""The interface of a reduction: gradients of one module go in per virtual worker, their mean over all N comes out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from gyrostat.core.placement import Placement
from gyrostat.engine.transport.group import WorkerGroup


class Reducer(Protocol):
    """Adds the gradients of one module over all virtual workers in a fixed order.

    Within a pass: `take` once for each virtual worker of this worker, in rank order, then `mean` once. The last one may be
    given gradient by gradient, by `stream` and `ready`, while its backward still runs. Inputs are not modified, and what
    went in and came out stays intact until the next `mean` has returned, so that a reduction can be repeated or handed to
    a worker that missed it.
    """

    def take(
        self,
        rank: int,
        gradients: Sequence[torch.Tensor | None],
        divide: Sequence[bool],
        weight: float | None,
    ) -> None:
        """The gradients of virtual worker `rank`; None counts as zero.

        They are multiplied by `weight`, its share of the samples; None means that all shares are equal, 1/N. `divide`:
        divided by N instead, for parameters where DDP does so.
        """

    def stream(self, rank: int, divide: Sequence[bool], weight: float | None) -> None:
        """The gradients of virtual worker `rank`, the last one here, will come one by one."""

    def ready(self, number: int, gradient: torch.Tensor) -> None:
        """Gradient `number` of the streamed virtual worker. Buckets that are complete are on their way from now on."""

    def send_off(self) -> None:
        """All gradients here are complete: let every bucket be on its way."""

    def complete(self) -> None:
        """Wait until the sum is here; all workers call this together. Raises `PeerLost`, and then nothing is lost."""

    def mean(self) -> Sequence[torch.Tensor]:
        """The mean gradient of each parameter over all virtual workers, as soon as it is complete."""

    # When a worker is lost in the middle of a pass.

    def retake(self, placement: Placement, group: WorkerGroup) -> bool:
        """Reduce what was taken, and what is still to come, among those that are left.

        False: what was taken is lost, and has to be given again.
        """

    def kept(self) -> Sequence[torch.Tensor]:
        """The last sum, for a worker that missed it."""

    def missed(self) -> Sequence[torch.Tensor]:
        """Where such a worker puts it; then `mean` returns it."""

    def discard(self) -> None:
        """Nobody's backward came through the module: forget what was taken."""

    def wants_ready_order(self) -> bool:
        """Whether the order in which virtual worker 0's gradients become ready in this pass has to be recorded."""

    def close_pass(self, ready_order: Sequence[int] | None) -> None:
        """The pass is complete on all workers; `ready_order` as recorded, if it was wanted."""

    def warm_up(self) -> None:
        """Touch the memory that a pass will need, before training waits for it."""

    def warm_up_beside(self, other: Reducer) -> None:
        """The same, but for what it will inherit from `other`, which is in use: this may be called by another thread."""

    def inherit(self, other: Reducer) -> None:
        """Use the memory of the reduction of the generation before, which is not needed any more."""

    def state_dict(self) -> dict[str, Any]:
        """What decides the order of later reductions; part of the job's shared state."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on as the job did that saved `state`."""
