"""The order of unmodified DDP over gloo with N processes, for any number of workers.

Where every worker runs exactly one virtual worker, gloo's own all-reduce gives these bits at native speed. Otherwise
the virtual workers' gradients wait in pooled flat buffers until `ring.py` adds them as gloo would. Everything is out of
place: inputs survive until the sum is complete, and the sum survives until the next one is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gyrostat.core.errors import CheckpointError
from gyrostat.core.placement import Placement
from gyrostat.engine.group import Group
from gyrostat.engine.reduce.buckets import DdpOptions, FlatBuckets, Layout, initial_layout, rebuilt_layout
from gyrostat.engine.reduce.ring import Bucket, ring_sum


class DdpOrder:
    """The reduction of one module."""

    def __init__(
        self, parameters: Sequence[torch.Tensor], options: DdpOptions, placement: Placement, group: Group
    ) -> None:
        self._parameters, self._options = list(parameters), options
        self._placement, self._group = placement, group
        self._ranks = placement.virtual_workers
        self._native = placement.workers == self._ranks and group.size > 1
        self._reductions = 0
        self._use(initial_layout(self._parameters, options))

    def take(self, rank: int, gradients: Sequence[torch.Tensor | None], divide: Sequence[bool]) -> None:
        if self._native:
            into = self._totals[
                0
            ]  # the only gradients here: scale them straight into the buffer that is summed
        else:
            if rank not in self._held:
                self._held[rank] = (
                    self._spare.pop() if self._spare else FlatBuckets(self._parameters, self._layout)
                )
            into = self._held[rank]
        scale = 1.0 / self._ranks
        for view, gradient, by_division in zip(into.views, gradients, divide, strict=True):
            if gradient is None:
                view.zero_()
            elif by_division:
                torch.div(gradient, self._ranks, out=view)
            else:
                torch.mul(gradient, scale, out=view)

    def mean(self) -> Sequence[torch.Tensor]:
        totals = self._totals[0]
        if self._native:
            self._group.all_reduce(totals.flats)
        else:
            buckets = [
                Bucket.of({rank: held.flats[i] for rank, held in self._held.items()}, total, self._ranks)
                for i, total in enumerate(totals.flats)
            ]
            ring_sum(buckets, self._placement, self._group)
        self._spare += self._held.values()
        self._held.clear()
        # The next sum goes elsewhere: a peer that has not completed this one may still ask for it.
        self._totals.reverse()
        return totals.views

    def wants_ready_order(self) -> bool:
        after = self._options.rebuilds_after
        return after is not None and self._reductions == after - 1

    def close_pass(self, ready_order: Sequence[int] | None) -> None:
        if self.wants_ready_order() and ready_order is not None:
            layout = rebuilt_layout(self._parameters, ready_order, self._options)
            if layout != self._layout:
                self._use(layout)
        self._reductions += 1

    def state_dict(self) -> dict[str, Any]:
        return {"reductions": self._reductions, "layout": [list(bucket) for bucket in self._layout]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        layout = tuple(tuple(int(i) for i in bucket) for bucket in state["layout"])
        if sorted(i for bucket in layout for i in bucket) != list(range(len(self._parameters))):
            raise CheckpointError(
                f"the saved bucket layout {layout} does not fit {len(self._parameters)} parameters"
            )
        self._reductions = int(state["reductions"])
        if layout != self._layout:
            self._use(layout)

    def _use(self, layout: Layout) -> None:
        self._layout = layout
        self._held: dict[int, FlatBuckets] = {}
        self._spare: list[FlatBuckets] = []
        # A lone worker has no peer that could ask for an earlier sum.
        self._totals = [
            FlatBuckets(self._parameters, layout) for _ in range(2 if self._group.size > 1 else 1)
        ]
