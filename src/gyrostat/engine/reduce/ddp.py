"""The order of unmodified DDP over gloo with N processes, for any number of workers.

The gradients of virtual workers wait in flat buckets until they are added in gloo's order: by `shared_sum.py` where all workers
are on one machine, else by `ring.py`, and by gloo's own all-reduce where every worker runs exactly one virtual worker. Which
parameters share a bucket decides bits, so the layout is state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gyrostat.core.errors import CheckpointError
from gyrostat.core.placement import Placement
from gyrostat.engine.reduce.bucketed import Bucketed, Transfer
from gyrostat.engine.reduce.buckets import DdpOptions, FlatBuckets, initial_layout, rebuilt_layout
from gyrostat.engine.reduce.ring import Bucket, ring_sum
from gyrostat.engine.reduce.shared_sum import sum_in_ddp_order
from gyrostat.engine.transport.group import WorkerGroup


class DdpOrder(Bucketed):
    """The reduction of one module in DDP's order."""

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        options: DdpOptions,
        placement: Placement,
        group: WorkerGroup,
    ) -> None:
        super().__init__(parameters, placement, group)
        self._options = options
        self._native = self._is_native()
        self._held: dict[int, FlatBuckets] = {}
        self._reductions = 0
        self._use(initial_layout(self._parameters, options))

    def _is_native(self) -> bool:
        """Whether gloo's own all-reduce adds in the right order: one virtual worker per worker."""
        one_each = self._placement.workers == self._ranks
        return one_each and self._group.size > 1 and self._shared_memory is None

    def _buffers_for(self, rank: int) -> FlatBuckets:
        if self._native:
            return self._buffers.total  # gloo sums it in place
        if rank not in self._held:
            self._held[rank] = self._buffers.take()
        return self._held[rank]

    def _add(self, rank: int, bucket: int) -> None:
        """Nothing can be added yet: the sum of a chunk begins in the middle of the ranks."""

    def _reduce(self, bucket: int) -> Transfer | None:
        total = self._buffers.total.flats[bucket]
        if self._native:
            return self._group.all_reduce(total, f"reduce bucket {bucket}")
        if (transport := self._shared_memory) is not None:
            held, totals = dict(self._held), self._buffers.total
            return self._group.reducer.submit(
                lambda: sum_in_ddp_order(transport, held, totals, bucket, self._ranks),
                f"reduce bucket {bucket}",
            )
        gradients = {rank: held.flats[bucket] for rank, held in self._held.items()}
        piece = Bucket.of(gradients, total, self._ranks)
        if self._group.size == 1:
            ring_sum(piece, self._placement, self._group)
            return None
        return self._group.reducer.submit(
            lambda: ring_sum(piece, self._placement, self._group), f"reduce bucket {bucket}"
        )

    def retake(self, placement: Placement, group: WorkerGroup) -> bool:
        """False where gloo summed in place, which has overwritten the gradients."""
        summed_in_place = self._native
        super().retake(placement, group)
        # Gradients that wait in buffers stay there, even if the new group could sum in place.
        self._native = summed_in_place and self._is_native()
        return not summed_in_place

    def _sets(self) -> int:
        return 0 if self._native else len(self._placement.held_by(self._group.rank))

    def _release(self) -> None:
        self._buffers.give_back(self._held.values())
        self._held.clear()

    def wants_ready_order(self) -> bool:
        after = self._options.rebuilds_after
        return after is not None and self._reductions == after - 1

    def close_pass(self, ready_order: Sequence[int] | None) -> None:
        if self.wants_ready_order() and ready_order is not None:
            self._use(rebuilt_layout(self._parameters, ready_order, self._options))
        self._reductions += 1

    def state_dict(self) -> dict[str, Any]:
        return {"reductions": self._reductions, "layout": [list(bucket) for bucket in self._buffers.layout]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        layout = tuple(tuple(int(i) for i in bucket) for bucket in state["layout"])
        if sorted(i for bucket in layout for i in bucket) != list(range(len(self._parameters))):
            raise CheckpointError(
                f"the saved bucket layout {layout} does not fit {len(self._parameters)} parameters; resume with the model that "
                "wrote the checkpoint"
            )
        self._reductions = int(state["reductions"])
        if layout != self._buffers.layout:
            self._use(layout)
