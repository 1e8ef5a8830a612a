"""The interface of a reduction: takes the gradients of one module per virtual worker, returns their mean over all N."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from gyrostat.core.placement import Placement
from gyrostat.engine.transport.group import WorkerGroup


class Reducer(Protocol):
    """Adds the gradients of one module over all virtual workers in a fixed order.

    Within a pass: `take` once for each virtual worker of this worker, in rank order, then `mean` once. The gradients of the
    last one may be handed over one by one, by `stream` and `ready`, while its backward still runs. Inputs are not modified,
    and inputs and result stay intact until the next `mean` has returned, so that a reduction can be repeated, or its result
    be sent to a worker that missed it. All methods run in the script's thread, unless they say otherwise.
    """

    def take(
        self,
        rank: int,
        gradients: Sequence[torch.Tensor | None],
        divide: Sequence[bool],
        weight: float | None,
    ) -> None:
        """Take the gradients of virtual worker `rank`; None counts as zero.

        They are multiplied by `weight`, its share of the samples; None: all shares are equal, 1/N. `divide`: by parameter,
        whether to divide by N instead, as DDP does in some cases.
        """

    def stream(self, rank: int, divide: Sequence[bool], weight: float | None) -> None:
        """Announce that the gradients of virtual worker `rank`, the last one here, follow one by one."""

    def ready(self, number: int, gradient: torch.Tensor) -> None:
        """Take gradient `number` of the streamed virtual worker; begin to reduce complete buckets. Autograd's thread."""

    def send_off(self) -> None:
        """All gradients here are complete: begin to reduce all other buckets."""

    def complete(self) -> None:
        """Wait for the sum; all workers call this. After `PeerLost` the gradients are intact."""

    def mean(self) -> Sequence[torch.Tensor]:
        """Wait for the sum, and return the mean gradient of each parameter over all virtual workers."""

    # When a worker is lost in the middle of a pass.

    def retake(self, placement: Placement, group: WorkerGroup) -> bool:
        """Reduce the gradients of this pass among the workers that are left.

        Returns False if those taken so far were overwritten, and have to be taken again.
        """

    def last_sum(self) -> Sequence[torch.Tensor]:
        """The last sum, for a worker that missed it."""

    def receive_sum(self) -> Sequence[torch.Tensor]:
        """Where such a worker writes the sum; then `mean` returns it."""

    def discard(self) -> None:
        """No virtual worker's backward used the module: forget the gradients of this pass."""

    def wants_ready_order(self) -> bool:
        """Whether the order in which virtual worker 0's gradients become ready in this pass has to be recorded."""

    def close_pass(self, ready_order: Sequence[int] | None) -> None:
        """The pass is complete on all workers; `ready_order` as recorded, if it was wanted."""

    def warm_up(self) -> None:
        """Touch the memory that a pass needs, so that the first pass does not have to."""

    def warm_up_beside(self, other: Reducer) -> None:
        """As `warm_up`, except for memory that it will `inherit` from `other`, which is in use. May run in another thread."""

    def inherit(self, other: Reducer) -> None:
        """Take over the memory of the generation before, whose reduction `other` is not used any more."""

    def state_dict(self) -> dict[str, Any]:
        """The state that decides the order of later reductions; part of the job's shared state."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
