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
        self._only: list[torch.Tensor] = []  # the mean over one virtual worker is its gradients
        self._use(initial_layout(self._parameters, options))

    def take(self, rank: int, gradients: Sequence[torch.Tensor | None], divide: Sequence[bool]) -> None:
        if self._ranks == 1:
            self._only = [_zero_if_none(g, p) for g, p in zip(gradients, self._parameters, strict=True)]
            return
        into = self._room_for(rank)
        scale = 1.0 / self._ranks
        for view, gradient, by_division in zip(into.views, gradients, divide, strict=True):
            if gradient is None:
                view.zero_()
            elif gradient.device != view.device:
                view.copy_(gradient / self._ranks if by_division else gradient * scale)
            elif by_division:
                torch.div(gradient, self._ranks, out=view)
            else:
                torch.mul(gradient, scale, out=view)

    def mean(self) -> Sequence[torch.Tensor]:
        if self._ranks == 1:
            return self._only
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

    def _room_for(self, rank: int) -> FlatBuckets:
        """Where the gradients of virtual worker `rank` wait."""
        if self._native:
            return self._totals[0]  # they are alone here: straight into the buffer that is summed
        if rank not in self._held:
            fresh = not self._spare
            self._held[rank] = FlatBuckets(self._parameters, self._layout) if fresh else self._spare.pop()
        return self._held[rank]

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
        # A lone worker has no peer that could ask for an earlier sum; a lone virtual worker needs no sum.
        sums = 0 if self._ranks == 1 else 1 if self._group.size == 1 else 2
        self._totals = [FlatBuckets(self._parameters, layout) for _ in range(sums)]


def _zero_if_none(gradient: torch.Tensor | None, parameter: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(parameter) if gradient is None else gradient
