"""gloo's addition order, for any placement of the N ranks on P workers.

In gloo's ring of N ranks, chunk c starts at rank c-1, visits c-2, c-3, … and ends at rank c; each visit adds that rank's
gradients. Adjacent ranks are usually on one worker, where a visit is an addition in memory; a message is needed only where
the owner changes. So a chunk goes round the ring of placement segments instead:

1. The chunks that end in the same segment are a group, sent as one message per hop. All but the first of them also start
   in that segment, which adds the ranks below each chunk's start and sends the group to the segment below.
2. Every other segment on the way adds all of its ranks. The first chunk of the group starts at the first of these.
3. When the group is back, its segment adds the remaining ranks, from its highest down to c itself.
4. Each worker sends the chunks it completed to all others.

A worker sends at most its share of every group once (steps 1-2) and its own chunks P-1 times (step 4): less than twice
the gradients, for any N. Only sums are sent, never gradients of one virtual worker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from gyrostat.core.placement import Placement, Segment
from gyrostat.engine.reduce.gloo_order import chunks
from gyrostat.engine.transport.group import WorkerGroup
from gyrostat.engine.transport.pending import Pending


@dataclass(frozen=True)
class Bucket:
    """One bucket during a reduction: this worker's flat gradients by virtual rank, and the tensor for the sum."""

    gradients: Mapping[int, torch.Tensor]
    total: torch.Tensor
    chunks: Sequence[tuple[int, int]]

    @classmethod
    def of(cls, gradients: Mapping[int, torch.Tensor], total: torch.Tensor, ranks: int) -> Bucket:
        return cls(gradients, total, chunks(total.numel(), total.element_size(), ranks))

    def range(self, first: int, stop: int) -> tuple[int, int]:
        """The elements of the chunks first … stop-1."""
        return (self.chunks[first][0], self.chunks[stop - 1][1]) if stop > first else (0, 0)

    def add(self, start: int, stop: int, ranks: Sequence[int], *, fresh: bool) -> None:
        """total[start:stop] += the gradients of `ranks`, one after the other; `fresh`: total begins with the first."""
        if start == stop or not ranks:
            return
        total = self.total[start:stop]
        parts = [self.gradients[rank][start:stop] for rank in ranks]
        if fresh and len(parts) == 1:
            total.copy_(parts[0])
            return
        if fresh:
            torch.add(parts[0], parts[1], out=total)
            parts = parts[2:]
        for part in parts:
            total.add_(part)


def ring_sum(bucket: Bucket, placement: Placement, group: WorkerGroup) -> None:
    """Fill the bucket's `total` with the sum over all virtual ranks, in gloo's order."""
    segments = placement.segments
    mine = [i for i, segment in enumerate(segments) if segment.worker == group.rank]
    if len(segments) == 1:
        _finish(bucket, segments[0], alone=True)
        return
    walk = _Walk(bucket, segments, group)
    for here in mine:
        walk.start(here)
    for hop in range(1, len(segments)):
        for here in mine:
            walk.visit(here, hop)
    for here in mine:
        walk.finish(here)
    walk.share()


def _finish(bucket: Bucket, home: Segment, *, alone: bool = False) -> None:
    """Step 3 for every chunk that ends in `home`. `alone`: there is no other segment, so steps 1 and 3 at once."""
    for chunk in range(home.start, home.stop):
        start, stop = bucket.chunks[chunk]
        below = range(chunk - 1, home.start - 1, -1)
        above = range(home.stop - 1, chunk - 1, -1)
        if alone:
            bucket.add(start, stop, [*below, *above], fresh=True)
        else:
            bucket.add(start, stop, above, fresh=False)


def sum_chunks(bucket: Bucket, home: Segment, ranks: int) -> None:
    """Steps 1 to 3 for the chunks `home.start` … `home.stop`-1, where the bucket has the gradients of all ranks."""
    for chunk in range(home.start + 1, home.stop):
        bucket.add(*bucket.chunks[chunk], range(chunk - 1, home.start - 1, -1), fresh=True)
    elsewhere = [*range(home.start - 1, -1, -1), *range(ranks - 1, home.stop - 1, -1)]
    _pass_by(bucket, home, elsewhere, first=True)
    _finish(bucket, home)


def _pass_by(bucket: Bucket, home: Segment, ranks: Sequence[int], *, first: bool) -> None:
    """Step 2, for the group of chunks that end in `home`. `first`: the group's first chunk starts here."""
    if first:
        bucket.add(*bucket.chunks[home.start], ranks, fresh=True)
        bucket.add(*bucket.range(home.start + 1, home.stop), ranks, fresh=False)
    else:
        bucket.add(*bucket.range(home.start, home.stop), ranks, fresh=False)


class _Walk:
    """The groups that go round the segments. Their sums are kept at their final place in `total`."""

    def __init__(self, bucket: Bucket, segments: Sequence[Segment], group: WorkerGroup) -> None:
        self._bucket, self._segments, self._group = bucket, segments, group
        self._sending: dict[int, list[Pending]] = {index: [] for index in range(len(segments))}

    def start(self, here: int) -> None:
        """Step 1: the ranks below each chunk that starts here."""
        home, bucket = self._segments[here], self._bucket
        for chunk in range(home.start + 1, home.stop):
            bucket.add(*bucket.chunks[chunk], range(chunk - 1, home.start - 1, -1), fresh=True)
        self._send(here, here, hop=0)

    def visit(self, here: int, hop: int) -> None:
        """Step 2: the group that started `hop` segments above."""
        segment = self._segments[here]
        index = (here + hop) % len(self._segments)
        self._receive(here, index, hop)
        ranks = range(segment.stop - 1, segment.start - 1, -1)
        _pass_by(self._bucket, self._segments[index], ranks, first=hop == 1)
        self._send(here, index, hop)

    def finish(self, here: int) -> None:
        """Step 3: the group is back; complete it."""
        self._receive(here, here, len(self._segments))
        _finish(self._bucket, self._segments[here])

    def share(self) -> None:
        """Step 4: send completed chunks to all workers."""
        for index in self._sending:
            self._sent(index)  # its sums lie where completed chunks are received
        others = [worker for worker in range(self._group.size) if worker != self._group.rank]
        receiving = []
        for index, segment in enumerate(self._segments):
            start, stop = self._bucket.range(segment.start, segment.stop)
            if start == stop:
                continue
            part, tag = self._bucket.total[start:stop], self._tag(index, len(self._segments) + 1)
            if segment.worker == self._group.rank:
                self._sending[index] += [self._group.send(part, worker, tag) for worker in others]
            else:
                receiving.append(self._group.receive(part, segment.worker, tag))
        for pending in receiving:
            pending.wait()
        for index in self._sending:
            self._sent(index)

    def _send(self, here: int, index: int, hop: int) -> None:
        """Send group `index` to the segment below."""
        below = self._segments[here - 1].worker
        part = self._part(index, hop + 1)
        if below != self._group.rank and part is not None:
            self._sending[index].append(self._group.send(part, below, self._tag(index, hop + 1)))

    def _receive(self, here: int, index: int, hop: int) -> None:
        """Receive group `index` from the segment above."""
        above = self._segments[(here + 1) % len(self._segments)].worker
        part = self._part(index, hop)
        if above != self._group.rank and part is not None:
            self._sent(index)  # an earlier hop may still be sending the same range
            self._group.receive(part, above, self._tag(index, hop)).wait()

    def _sent(self, index: int) -> None:
        for pending in self._sending[index]:
            pending.wait()
        self._sending[index].clear()

    def _part(self, index: int, hop: int) -> torch.Tensor | None:
        """What is sent on one hop. On the first one the group's first chunk has not begun."""
        home = self._segments[index]
        start, stop = self._bucket.range(home.start + (1 if hop == 1 else 0), home.stop)
        return self._bucket.total[start:stop] if start < stop else None

    def _tag(self, index: int, hop: int) -> int:
        return index * (len(self._segments) + 2) + hop
