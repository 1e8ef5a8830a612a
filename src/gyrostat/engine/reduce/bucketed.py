"""What both orders have in common: gradients wait in pooled flat buckets, and a bucket that is complete may leave early.

Virtual workers hand over their gradients one after the other. Those of the last one may be streamed from its backward: as
soon as all gradients of a bucket are there, the bucket is reduced by the courier while backward goes on. Buckets leave in a
fixed order, and the last one when backward is over. Everything is out of place: what went in survives until the sum is
complete, and the sum survives until the next one is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch

from gyrostat.core.placement import Placement
from gyrostat.engine.reduce.base import Reducer
from gyrostat.engine.reduce.buckets import FlatBuckets, Layout, shape_of
from gyrostat.engine.reduce.hostcopy import HostCopies
from gyrostat.engine.transport.group import WorkerGroup
from gyrostat.engine.transport.shared_memory import SharedMemoryTransport


class Transfer(Protocol):
    """Something under way."""

    def wait(self) -> object: ...


class Bucketed(ABC):
    """The reduction of one module, bucket by bucket."""

    _divides = True
    """Whether gradients that DDP keeps in its buckets are divided by N, as it does without a communication hook."""

    def __init__(self, parameters: Sequence[torch.Tensor], placement: Placement, group: WorkerGroup) -> None:
        self._parameters = list(parameters)
        self._placement, self._group = placement, group
        self._ranks = placement.virtual_workers
        self._home = torch.device("cpu")  # where gloo adds
        self._copies = HostCopies(self._parameters[0].device)
        on_host = self._parameters[0].device.type == "cpu" and not group.by_collectives
        near = group.shared_memory
        self._shared = near is not None and on_host and near.can_see(self._ranks)
        """Whether neighbours can look into the buffers."""
        self._only: list[torch.Tensor] = []  # the mean over one virtual worker is its gradients
        self._last: FlatBuckets | None = None  # the sum before, for a peer that may have missed it

    def _use(self, layout: Layout, *, totals_alone: int = 1) -> None:
        """From now on buckets are these. `totals_alone`: buffers for sums that a lone worker needs."""
        self._layout = layout
        # All buffers take the strides of this moment: sums are made on flat memory, where every one must lie alike.
        self._like = [shape_of(parameter) for parameter in self._parameters]
        self._bucket_of = {number: bucket for bucket, numbers in enumerate(layout) for number in numbers}
        self._spare: list[FlatBuckets] = []
        # A lone worker has no peer that could ask for an earlier sum; a lone virtual worker needs no sum.
        sums = 0 if self._ranks == 1 else totals_alone if self._group.size == 1 else 2
        self._totals = [self._new_buffers() for _ in range(sums)]
        self._forget()

    def _new_buffers(self) -> FlatBuckets:
        pinned = self._parameters[0].is_cuda and self._home.type == "cpu"
        return FlatBuckets(self._like, self._layout, home=self._home, pinned=pinned, shared=self._shared)

    @property
    def _shared_memory(self) -> SharedMemoryTransport | None:
        """If sums are made by looking into one another's buffers."""
        return self._group.shared_memory if self._shared else None

    def _forget(self) -> None:
        self._under_way: list[Transfer] = []
        self._missing: list[int] | None = None
        self._left = 0

    # What the orders do differently.

    @abstractmethod
    def _room_for(self, rank: int) -> FlatBuckets:
        """Where the gradients of virtual worker `rank` go."""

    @abstractmethod
    def _add(self, rank: int, bucket: int) -> None:
        """All gradients of virtual worker `rank` for this bucket are there."""

    @abstractmethod
    def _reduce(self, bucket: int) -> Transfer | None:
        """All virtual workers here are complete for this bucket: sum it over all workers into the totals."""

    @abstractmethod
    def _after(self) -> None:
        """The sum is complete; buffers may be used again."""

    def _result(self) -> FlatBuckets:
        """Where the sum over all virtual workers is."""
        return self._totals[0]

    # The interface.

    def take(
        self,
        rank: int,
        gradients: Sequence[torch.Tensor | None],
        divide: Sequence[bool],
        weight: float | None,
    ) -> None:
        if self._ranks == 1:
            self._only = [_zero_if_none(g, p) for g, p in zip(gradients, self._parameters, strict=True)]
            return
        room = self._room_for(rank)
        scale = 1.0 / self._ranks if weight is None else weight
        for view, gradient, by_division in zip(room.views, gradients, divide, strict=True):
            self._put(view, gradient, scale, self._ranks if by_division and self._divides else None)
        self._copies.wait()
        for bucket in range(len(self._layout)):
            self._add(rank, bucket)

    def stream(self, rank: int, divide: Sequence[bool], weight: float | None) -> None:
        self._streamed, self._divide = rank, divide
        self._scale = 1.0 / self._ranks if weight is None else weight
        self._room = self._room_for(rank)
        self._missing = [len(bucket) for bucket in self._layout]
        self._left = 0

    def ready(self, number: int, gradient: torch.Tensor) -> None:
        assert self._missing is not None
        by = self._ranks if self._divide[number] and self._divides else None
        self._put(self._room.views[number], gradient, self._scale, by)
        self._missing[self._bucket_of[number]] -= 1
        while self._left < len(self._layout) - 1 and self._missing[self._left] == 0:
            self._leave()

    def send_off(self) -> None:
        while self._ranks > 1 and self._left < len(self._layout):
            self._leave()

    def complete(self) -> None:
        self.send_off()
        with self._group.tracer.span("wait for the reduction"):
            for transfer in self._under_way:
                transfer.wait()

    def mean(self) -> Sequence[torch.Tensor]:
        if self._ranks == 1:
            return self._only
        self.complete()
        totals = self._result()
        self._forget()
        self._after()
        # The next sum goes elsewhere: a peer that has not completed this one may still ask for it.
        self._totals.reverse()
        self._last = totals
        return totals.views

    # A worker is lost.

    def retake(self, placement: Placement, group: WorkerGroup) -> bool:
        self._placement, self._group = placement, group
        if self._missing is not None:  # of the one that was streamed, some buckets have not left
            self._copies.wait()
            for bucket in range(self._left, len(self._layout)):
                self._add(self._streamed, bucket)
        self._forget()
        # What was under way may still write where it was told to.
        self._totals[:1] = [self._new_buffers()]
        return True

    def kept(self) -> Sequence[torch.Tensor]:
        assert self._last is not None
        return self._last.flats

    def missed(self) -> Sequence[torch.Tensor]:
        self._forget()
        self._totals[:1] = [self._new_buffers()]
        self._left = len(self._layout)
        return self._totals[0].flats

    def discard(self) -> None:
        self._forget()
        self._after()

    # Memory: fresh pages are dear, and a new generation need not pay for them.

    @abstractmethod
    def _sets(self) -> int:
        """How many sets of gradients a pass needs beside the totals."""

    def warm_up(self) -> None:
        if self._ranks > 1:
            self._spare += [self._new_buffers() for _ in range(self._sets() - len(self._spare))]
            for buffers in (*self._totals, *self._spare):
                for flat in buffers.flats:
                    flat.zero_()

    def warm_up_beside(self, other: Reducer) -> None:
        if isinstance(other, Bucketed) and self._shared and not other._shared:
            self.warm_up()  # nothing can be inherited
        elif self._ranks > 1 and isinstance(other, Bucketed):
            missing = len(self._totals) + self._sets() - len(other._totals) - other._sets()
            self._spare = [self._new_buffers() for _ in range(missing)]
            for flat in (flat for buffers in self._spare for flat in buffers.flats):
                flat.zero_()

    def inherit(self, other: Reducer) -> None:
        if not isinstance(other, Bucketed) or (other._layout, other._home) != (self._layout, self._home):
            return
        if self._shared and not other._shared:
            return
        if [like.stride() for like in other._like] != [like.stride() for like in self._like]:
            return
        other._after()
        pool = [*other._totals, *other._spare]
        other._totals, other._spare, other._last = [], [], None
        self._totals = [pool.pop(0) if pool else mine for mine in self._totals]
        self._spare = (pool + self._spare)[: self._sets()]

    def _leave(self) -> None:
        bucket = self._left
        self._left += 1
        self._copies.wait()
        if self._missing is not None:
            self._add(self._streamed, bucket)
        transfer = self._reduce(bucket)
        if transfer is not None:
            self._under_way.append(transfer)

    def _put(
        self, view: torch.Tensor, gradient: torch.Tensor | None, scale: float, divisor: int | None
    ) -> None:
        """Scale a gradient into its place."""
        if gradient is None:
            view.zero_()
        elif gradient.device != view.device:
            self._copies.put(view, gradient, scale, divisor)
        elif divisor is None:
            torch.mul(gradient, scale, out=view)
        else:
            torch.div(gradient, divisor, out=view)


def _zero_if_none(gradient: torch.Tensor | None, parameter: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(parameter) if gradient is None else gradient
