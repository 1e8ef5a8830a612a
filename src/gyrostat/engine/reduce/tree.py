"""The order of a fixed binary tree over virtual ranks: equal bits for every placement, at the cost of a plain all-reduce.

1. A worker folds the gradients of its V virtual workers as they are taken, like a binary counter: two complete halves of a
   node of the tree become that node. So it holds at most log2 V + 1 sums.
2. The largest subtrees that lie entirely on this worker remain: one, where the placement is aligned.
3. Every worker is responsible for a share of the elements. It receives that share of all subtrees' sums, adds them along the
   tree, and sends the result to all others (`tree_exchange.py`). On one machine nothing is sent (`shared_sum.py`).

Sums are folded where the gradients are. Those of a GPU are folded in pinned host memory if the device has no room, or if they
are sent through host memory anyway. That decides no bits: an addition rounds in the same way in both.

A worker with K subtrees sends (K + 1)(1 - 1/P) times the gradients; an all-reduce sends 2(1 - 1/P) times them. The layout
decides no bits: buckets only serve to overlap the reduction with backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gyrostat.core.placement import Placement
from gyrostat.engine.reduce.bucketed import Bucketed, Transfer
from gyrostat.engine.reduce.buckets import FlatBuckets, Layout, view_like
from gyrostat.engine.reduce.shared_sum import sum_along_tree
from gyrostat.engine.reduce.tree_exchange import exchange_sum
from gyrostat.engine.reduce.tree_order import Node, maximal_nodes, siblings
from gyrostat.engine.torch_internals import assign_buckets
from gyrostat.engine.transport.backend import has_room_to_fold
from gyrostat.engine.transport.group import WorkerGroup

_FIRST_BUCKET = 1 << 20
_OTHER_BUCKETS = 8 << 20


class TreeOrder(Bucketed):
    """The reduction of one module along the tree."""

    _divides = False

    def __init__(self, parameters: Sequence[torch.Tensor], placement: Placement, group: WorkerGroup) -> None:
        super().__init__(parameters, placement, group)
        home = folding_home(self._parameters, placement, group)
        self._staged = group.size > 1 and home != group.gradients_on
        self._siblings = siblings(self._ranks)
        self._nodes = [maximal_nodes(self._ranks, placement.held_by(w)) for w in range(placement.workers)]
        self._sums: list[tuple[Node, FlatBuckets]] = []
        self._merges: list[tuple[FlatBuckets, FlatBuckets]] = []
        self._use(_reversed_layout(self._parameters), home=home, totals_alone=0)
        self._scratch = _scratch_views(self._buffers.shapes, home)

    def take(
        self,
        rank: int,
        gradients: Sequence[torch.Tensor | None],
        divide: Sequence[bool],
        weight: float | None,
    ) -> None:
        completes = bool(self._sums) and (self._sums[-1][0], (rank, rank + 1)) in self._siblings
        if not completes or self._buffers.home != self._parameters[0].device:
            super().take(rank, gradients, divide, weight)
            return
        # The other half of this leaf's node is complete: add to it at once, parameter by parameter, while it is in the cache.
        self._release_merged()
        scale = 1.0 / self._ranks if weight is None else weight
        node, left = self._sums.pop()
        for view, gradient, scratch in zip(left.views, gradients, self._scratch, strict=True):
            view.add_(0.0 if gradient is None else torch.mul(gradient, scale, out=scratch))
        self._sums.append(((node[0], rank + 1), left))
        self._find_merges()
        for bucket in range(len(self._buffers.layout)):
            self._add(rank, bucket)

    def _buffers_for(self, rank: int) -> FlatBuckets:
        """A new leaf. The nodes that it completes are known at once; the additions follow bucket by bucket."""
        self._release_merged()
        buffers = self._buffers.take()
        self._sums.append(((rank, rank + 1), buffers))
        self._find_merges()
        return buffers

    def _find_merges(self) -> None:
        """Two complete halves of a node become that node; `_add` makes the additions that are recorded here."""
        while len(self._sums) > 1 and (self._sums[-2][0], self._sums[-1][0]) in self._siblings:
            (right_node, right), (left_node, left) = self._sums.pop(), self._sums.pop()
            self._merges.append((left, right))
            self._sums.append(((left_node[0], right_node[1]), left))

    @property
    def allocated_sets(self) -> int:
        """How many sets of gradients are allocated for folding, in use or spare. For benchmarks."""
        return len(self._sums) + len(self._merges) + self._buffers.spare

    def _add(self, rank: int, bucket: int) -> None:
        for left, right in self._merges:
            left.flats[bucket].add_(right.flats[bucket])

    def retake(self, placement: Placement, group: WorkerGroup) -> bool:
        super().retake(placement, group)
        self._nodes = [maximal_nodes(self._ranks, placement.held_by(w)) for w in range(placement.workers)]
        return True

    def send_off(self) -> None:
        self._fold_out_of_order()
        super().send_off()

    def _fold_out_of_order(self) -> None:
        """After a recovery virtual workers have not run in order of rank: sort the sums, so that halves of a node meet."""
        nodes = [node for node, _ in self._sums]
        if nodes != sorted(nodes):
            self._release_merged()
            unfolded, self._sums = sorted(self._sums, key=lambda held: held[0]), []
            for node_and_sum in unfolded:
                self._sums.append(node_and_sum)
                self._find_merges()
            for bucket in range(len(self._buffers.layout)):
                self._add(-1, bucket)
            self._release_merged()

    def _reduce(self, bucket: int) -> Transfer | None:
        if self._group.size == 1:
            return None  # folding has reached the root
        total = self._buffers.total.flats[bucket]
        if (transport := self._shared_memory) is not None:
            held, totals = dict(self._sums), self._buffers.total
            return self._group.reducer.submit(
                lambda: sum_along_tree(transport, held, totals, bucket, self._ranks),
                f"reduce bucket {bucket}",
            )
        sums = {node: flats.flats[bucket] for node, flats in self._sums}
        return self._group.reducer.submit(
            lambda: exchange_sum(sums, self._nodes, total, self._group), f"reduce bucket {bucket}"
        )

    def _result(self) -> FlatBuckets:
        return self._sums[0][1] if self._group.size == 1 else self._buffers.total

    def mean(self) -> Sequence[torch.Tensor]:
        totals = super().mean()
        if self._staged:  # the copies must be over before this thread writes into host memory again
            torch.cuda.current_stream(self._group.gradients_on).synchronize()
        return totals

    def _sets(self) -> int:
        return most_sets(len(self._placement.held_by(self._group.rank)), 1)

    def _release(self) -> None:
        self._release_merged()
        self._buffers.give_back(flats for _, flats in self._sums)
        self._sums.clear()

    def _release_merged(self) -> None:
        self._buffers.give_back(right for _, right in self._merges)
        self._merges.clear()

    def wants_ready_order(self) -> bool:
        return False

    def close_pass(self, ready_order: Sequence[int] | None) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def folding_home(
    parameters: Sequence[torch.Tensor], placement: Placement, group: WorkerGroup
) -> torch.device:
    """The device on which sums are folded."""
    own, host = parameters[0].device, torch.device("cpu")
    if own.type == "cpu" or (group.size > 1 and group.gradients_on != own):
        return host
    sets = most_sets(len(placement.held_by(group.rank)), group.size)
    needed = sets * sum(parameter.nbytes for parameter in parameters)
    return own if has_room_to_fold(needed, torch.cuda.mem_get_info(own)[0]) else host


def most_sets(held: int, workers: int) -> int:
    """The largest number of sets of gradients that a worker with `held` virtual workers keeps."""
    return (held - 1).bit_length() + 1 + (2 if workers > 1 else 0)


def _reversed_layout(parameters: Sequence[torch.Tensor]) -> Layout:
    """About the order in which backward completes gradients: last defined first."""
    numbers = list(reversed(range(len(parameters))))
    caps = [_FIRST_BUCKET, _OTHER_BUCKETS]
    return tuple(tuple(bucket) for bucket in assign_buckets([parameters[i] for i in numbers], caps, numbers))


def _scratch_views(parameters: Sequence[torch.Tensor], home: torch.device) -> list[torch.Tensor]:
    """Room for one scaled gradient at a time, in the shape of each parameter."""
    largest: dict[torch.dtype, int] = {}
    for parameter in parameters:
        largest[parameter.dtype] = max(largest.get(parameter.dtype, 0), parameter.numel())
    room = {dtype: torch.empty(elements, dtype=dtype, device=home) for dtype, elements in largest.items()}
    return [view_like(room[parameter.dtype], parameter, 0) for parameter in parameters]
