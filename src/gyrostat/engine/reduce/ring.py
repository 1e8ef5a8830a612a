"""gloo's addition order, for any placement of the N ranks on P workers.

Think of gloo's ring of N ranks. Chunk c starts at rank c-1, visits c-2, c-3, … and ends at rank c, each visit adding
that rank's gradients. Neighbouring ranks usually live in one worker, where a visit is an addition in memory; a message is
needed only where the owner changes. So a chunk goes round the ring of placement segments instead:

1. The chunks that end in the same segment travel together, as one message per bucket and hop. All but the first of them
   also start in that segment, which adds the ranks below each chunk's start and sends them off downwards.
2. Every other segment on the way adds all of its ranks. The first chunk of the group starts at the first of these.
3. Back home, the segment adds its remaining ranks, from its highest down to c itself.
4. Each worker sends the chunks it completed to all others.

A worker sends at most its share of every group once (steps 1-2) and its own chunks P-1 times (step 4): less than twice
the gradients, whatever N is. Nobody ever holds another worker's gradients; only sums travel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from gyrostat.core.placement import Placement, Segment
from gyrostat.engine.group import Group, Pending
from gyrostat.engine.reduce.gloo_order import chunks


@dataclass(frozen=True)
class Bucket:
    """One bucket during a reduction: this worker's flat gradients by virtual rank, and where the sum goes."""

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


def ring_sum(buckets: Sequence[Bucket], placement: Placement, group: Group) -> None:
    """Fill every bucket's `total` with the sum over all virtual ranks, in gloo's order."""
    segments = placement.segments
    mine = [i for i, segment in enumerate(segments) if segment.worker == group.rank]
    if len(segments) == 1:
        for bucket in buckets:
            _finish(bucket, segments[0], alone=True)
        return
    walk = _Walk(buckets, segments, group)
    for here in mine:
        walk.start(here)
    for hop in range(1, len(segments)):
        for here in mine:
            walk.visit(here, hop)
    for here in mine:
        walk.come_home(here)
    walk.share()


def _finish(bucket: Bucket, home: Segment, *, alone: bool = False) -> None:
    """Step 3 for every chunk that ends in `home`; if there is no other segment, steps 1 and 3 in one."""
    for chunk in range(home.start, home.stop):
        start, stop = bucket.chunks[chunk]
        below = range(chunk - 1, home.start - 1, -1)
        above = range(home.stop - 1, chunk - 1, -1)
        if alone:
            bucket.add(start, stop, [*below, *above], fresh=True)
        else:
            bucket.add(start, stop, above, fresh=False)


class _Walk:
    """All groups on their way round the segments. Sums in transit live in their final place in `total`."""

    def __init__(self, buckets: Sequence[Bucket], segments: Sequence[Segment], group: Group) -> None:
        self._buckets, self._segments, self._group = buckets, segments, group
        self._sending: dict[int, list[Pending]] = {index: [] for index in range(len(segments))}

    def start(self, here: int) -> None:
        """Step 1: the ranks below each chunk that starts here."""
        home = self._segments[here]
        for bucket in self._buckets:
            for chunk in range(home.start + 1, home.stop):
                bucket.add(*bucket.chunks[chunk], range(chunk - 1, home.start - 1, -1), fresh=True)
        self._send(here, home, hop=0)

    def visit(self, here: int, hop: int) -> None:
        """Step 2: the group that set out `hop` segments above comes by."""
        segment = self._segments[here]
        home = self._segments[(here + hop) % len(self._segments)]
        self._receive(here, home, hop)
        ranks = range(segment.stop - 1, segment.start - 1, -1)
        for bucket in self._buckets:
            if hop == 1:
                bucket.add(*bucket.chunks[home.start], ranks, fresh=True)
                bucket.add(*bucket.range(home.start + 1, home.stop), ranks, fresh=False)
            else:
                bucket.add(*bucket.range(home.start, home.stop), ranks, fresh=False)
        self._send(here, home, hop)

    def come_home(self, here: int) -> None:
        """Step 3: the group is back, and is completed."""
        home = self._segments[here]
        self._receive(here, home, len(self._segments))
        for bucket in self._buckets:
            _finish(bucket, home)

    def share(self) -> None:
        """Step 4: completed chunks go to everybody."""
        for index in self._sending:
            self._sent(index)  # sums in transit lie where the completed chunks will arrive
        receiving = []
        for index, segment in enumerate(self._segments):
            for number, bucket in enumerate(self._buckets):
                start, stop = bucket.range(segment.start, segment.stop)
                if start == stop:
                    continue
                part, tag = bucket.total[start:stop], self._tag(number, index, len(self._segments) + 1)
                if segment.worker != self._group.rank:
                    receiving.append(self._group.receive(part, segment.worker, tag))
                    continue
                others = [worker for worker in range(self._group.size) if worker != self._group.rank]
                self._sending[index] += [self._group.send(part, worker, tag) for worker in others]
        for pending in receiving:
            pending.wait()
        for index in self._sending:
            self._sent(index)

    def _send(self, here: int, home: Segment, hop: int) -> None:
        """Pass the group of `home` on to the segment below."""
        below = self._segments[here - 1]
        if below.worker != self._group.rank:
            index, parts = self._parts(home, hop + 1)
            self._sending[index] += [self._group.send(part, below.worker, tag) for part, tag in parts]

    def _receive(self, here: int, home: Segment, hop: int) -> None:
        """Take the group of `home` from the segment above."""
        above = self._segments[(here + 1) % len(self._segments)]
        if above.worker != self._group.rank:
            index, parts = self._parts(home, hop)
            self._sent(index)  # the same range may have left here on an earlier hop
            for pending in [self._group.receive(part, above.worker, tag) for part, tag in parts]:
                pending.wait()

    def _sent(self, index: int) -> None:
        for pending in self._sending[index]:
            pending.wait()
        self._sending[index].clear()

    def _parts(self, home: Segment, hop: int) -> tuple[int, list[tuple[torch.Tensor, int]]]:
        """What travels on one hop, bucket by bucket. On the first one the group's first chunk has not begun."""
        first = home.start + (1 if hop == 1 else 0)
        index = self._segments.index(home)
        parts = []
        for number, bucket in enumerate(self._buckets):
            start, stop = bucket.range(first, home.stop)
            if start < stop:
                parts.append((bucket.total[start:stop], self._tag(number, index, hop)))
        return index, parts

    def _tag(self, bucket: int, home: int, hop: int) -> int:
        return (bucket * len(self._segments) + home) * (len(self._segments) + 2) + hop
