"""What both orders share: gradients wait in flat buckets, and a complete bucket is reduced before backward has ended.

Virtual workers hand over their gradients one after the other. Those of the last one may be streamed from its backward: when
all gradients of a bucket are complete, the background reducer sums the bucket while backward continues. Buckets are sent in
a fixed order, the last one when backward is over. Everything is out of place: gradients survive until their sum is complete,
and the sum survives until the next one is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from gyrostat.core.placement import Placement
from gyrostat.engine.reduce.base import Reducer
from gyrostat.engine.reduce.buckets import FlatBuckets, Layout
from gyrostat.engine.reduce.buffer_pool import BufferPool
from gyrostat.engine.reduce.host_copies import HostCopies
from gyrostat.engine.transport.group import WorkerGroup
from gyrostat.engine.transport.shared_memory import SharedMemoryTransport

_HOST = torch.device("cpu")  # where gloo adds


class Transfer(Protocol):
    """A reduction under way."""

    def wait(self) -> object: ...


@dataclass
class _StreamedRank:
    """The virtual worker whose gradients are handed over one by one."""

    rank: int
    divide: Sequence[bool]
    scale: float
    buffers: FlatBuckets
    missing: list[int]
    """By bucket: gradients that are not complete yet."""


@dataclass
class _PassState:
    in_flight: list[Transfer] = field(default_factory=list)
    sent: int = 0
    """Buckets whose reduction has begun."""
    streamed: _StreamedRank | None = None


class Bucketed(ABC):
    """The reduction of one module, bucket by bucket."""

    _divides = True
    """Whether gradients that DDP keeps in its buckets are divided by N, as it does without a communication hook."""

    def __init__(self, parameters: Sequence[torch.Tensor], placement: Placement, group: WorkerGroup) -> None:
        self._parameters = list(parameters)
        self._placement, self._group = placement, group
        self._ranks = placement.virtual_workers
        self._copies = HostCopies(self._parameters[0].device)
        on_host = self._parameters[0].device.type == "cpu" and not group.by_collectives
        transport = group.shared_memory
        self._shared = transport is not None and on_host and transport.can_share(self._ranks)
        """Whether peers read the buffers."""
        self._only: list[torch.Tensor] = []  # the mean over one virtual worker is its gradients
        self._last: FlatBuckets | None = None  # the sum before, for a peer that may have missed it

    def _use(self, layout: Layout, *, home: torch.device = _HOST, totals_alone: int = 1) -> None:
        """Use these buckets from now on, in the memory of `home`. `totals_alone`: sets for sums that a lone worker needs."""
        # A lone worker has no peer that could ask for an earlier sum; a lone virtual worker needs no sum.
        totals = 0 if self._ranks == 1 else totals_alone if self._group.size == 1 else 2
        self._buffers = BufferPool(self._parameters, layout, home=home, shared=self._shared, totals=totals)
        self._pass = _PassState()

    @property
    def _shared_memory(self) -> SharedMemoryTransport | None:
        """None unless workers read one another's buffers."""
        return self._group.shared_memory if self._shared else None

    # What the orders do differently.

    @abstractmethod
    def _buffers_for(self, rank: int) -> FlatBuckets:
        """Where the gradients of virtual worker `rank` go."""

    @abstractmethod
    def _add(self, rank: int, bucket: int) -> None:
        """All gradients of virtual worker `rank` for this bucket are complete."""

    @abstractmethod
    def _reduce(self, bucket: int) -> Transfer | None:
        """All virtual workers here are complete for this bucket: sum it over all workers into the total."""

    @abstractmethod
    def _release(self) -> None:
        """The sum is complete: buffers of gradients may be used again."""

    @abstractmethod
    def _sets(self) -> int:
        """How many sets of gradients a pass needs beside the totals."""

    def _result(self) -> FlatBuckets:
        """Where the sum over all virtual workers is."""
        return self._buffers.total

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
        buffers = self._buffers_for(rank)
        scale = 1.0 / self._ranks if weight is None else weight
        for view, gradient, by_division in zip(buffers.views, gradients, divide, strict=True):
            self._put(view, gradient, scale, self._ranks if by_division and self._divides else None)
        self._copies.wait()
        for bucket in range(len(self._buffers.layout)):
            self._add(rank, bucket)

    def stream(self, rank: int, divide: Sequence[bool], weight: float | None) -> None:
        scale = 1.0 / self._ranks if weight is None else weight
        missing = [len(bucket) for bucket in self._buffers.layout]
        self._pass.streamed = _StreamedRank(rank, divide, scale, self._buffers_for(rank), missing)
        self._pass.sent = 0

    def ready(self, number: int, gradient: torch.Tensor) -> None:
        streamed = self._pass.streamed
        assert streamed is not None
        by = self._ranks if streamed.divide[number] and self._divides else None
        self._put(streamed.buffers.views[number], gradient, streamed.scale, by)
        missing = streamed.missing
        missing[self._buffers.bucket_of[number]] -= 1
        while self._pass.sent < len(missing) - 1 and missing[self._pass.sent] == 0:
            self._send_next()

    def send_off(self) -> None:
        while self._ranks > 1 and self._pass.sent < len(self._buffers.layout):
            self._send_next()

    def complete(self) -> None:
        self.send_off()
        with self._group.tracer.span("wait for the reduction"):
            for transfer in self._pass.in_flight:
                transfer.wait()

    def mean(self) -> Sequence[torch.Tensor]:
        if self._ranks == 1:
            return self._only
        self.complete()
        total = self._result()
        self._pass = _PassState()
        self._release()
        self._buffers.alternate()  # a peer that has not completed this sum may still ask for it
        self._last = total
        return total.views

    # A worker is lost.

    def retake(self, placement: Placement, group: WorkerGroup) -> bool:
        self._placement, self._group = placement, group
        if (streamed := self._pass.streamed) is not None:  # some of its buckets have not been sent
            self._copies.wait()
            for bucket in range(self._pass.sent, len(self._buffers.layout)):
                self._add(streamed.rank, bucket)
        self._pass = _PassState()
        self._buffers.replace_total()
        return True

    def last_sum(self) -> Sequence[torch.Tensor]:
        assert self._last is not None
        return self._last.flats

    def receive_sum(self) -> Sequence[torch.Tensor]:
        self._buffers.replace_total()
        self._pass = _PassState(sent=len(self._buffers.layout))
        return self._buffers.total.flats

    def discard(self) -> None:
        self._pass = _PassState()
        self._release()

    # Memory.

    def warm_up(self) -> None:
        if self._ranks > 1:
            self._buffers.warm_up(self._sets())

    def warm_up_beside(self, other: Reducer) -> None:
        if self._ranks > 1 and isinstance(other, Bucketed):
            self._buffers.warm_up_beside(other._buffers, self._sets(), other._sets())

    def inherit(self, other: Reducer) -> None:
        if isinstance(other, Bucketed) and self._buffers.fits(other._buffers):
            other._release()
            other._last = None
            self._buffers.inherit(other._buffers, self._sets())

    def _send_next(self) -> None:
        bucket = self._pass.sent
        self._pass.sent += 1
        self._copies.wait()
        if self._pass.streamed is not None:
            self._add(self._pass.streamed.rank, bucket)
        transfer = self._reduce(bucket)
        if transfer is not None:
            self._pass.in_flight.append(transfer)

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
