"""Placements: which worker runs which range of virtual workers; and the apportionment of N pieces.

A placement is a sequence of segments that together cover the virtual ranks 0 … N-1 in order. A worker usually has one
segment; after the loss of another worker it may have several.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heapreplace

from gyrostat.core.errors import UsageError
from gyrostat.core.plural import plural


@dataclass(frozen=True)
class Segment:
    """The virtual ranks `start` … `stop`-1, run by `worker`."""

    worker: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Placement:
    """Segments in rank order, covering every virtual rank exactly once."""

    segments: tuple[Segment, ...]

    def __post_init__(self) -> None:
        expected = 0
        for segment in self.segments:
            if segment.start != expected or len(segment) < 1:
                raise UsageError(
                    f"a placement must cover the virtual ranks in order without gaps; got {self.segments}"
                )
            expected = segment.stop
        if {segment.worker for segment in self.segments} != set(range(self.workers)):
            raise UsageError(f"workers of a placement must be numbered 0, 1, 2 …; got {self.segments}")

    @classmethod
    def from_counts(cls, counts: Sequence[int]) -> Placement:
        """Worker i runs `counts[i]` virtual workers, in order."""
        if not counts or min(counts) < 1:
            raise UsageError(
                f"every worker needs at least one virtual worker, but the counts are {list(counts)}; "
                "use fewer workers or more virtual workers"
            )
        segments, start = [], 0
        for worker, count in enumerate(counts):
            segments.append(Segment(worker, start, start + count))
            start += count
        return cls(tuple(segments))

    @classmethod
    def even(cls, virtual_workers: int, workers: int) -> Placement:
        """As even as integers allow; the first workers get one more."""
        if workers < 1 or virtual_workers < 1:
            raise UsageError(
                f"a job needs at least one worker and one virtual worker, got {workers} and {virtual_workers}"
            )
        if virtual_workers < workers:
            raise UsageError(
                f"{workers} workers cannot share {plural(virtual_workers, 'virtual worker')}: each needs at least one; "
                f"use --workers {virtual_workers} or fewer, or raise --virtual-workers"
            )
        return cls.from_counts(apportion(virtual_workers, [1.0] * workers))

    @cached_property
    def virtual_workers(self) -> int:
        return self.segments[-1].stop

    @cached_property
    def workers(self) -> int:
        return max(segment.worker for segment in self.segments) + 1

    def held_by(self, worker: int) -> tuple[int, ...]:
        """The virtual ranks that `worker` runs, ascending."""
        return tuple(
            rank
            for segment in self.segments
            if segment.worker == worker
            for rank in range(segment.start, segment.stop)
        )

    def owner(self, rank: int) -> int:
        """The worker that runs virtual rank `rank`."""
        return next(segment.worker for segment in self.segments if segment.start <= rank < segment.stop)


def apportion(total: int, weights: Sequence[float]) -> list[int]:
    """Split `total` in proportion to `weights` by largest remainder, at least one each; ties go to the first."""
    if total < len(weights):
        raise UsageError(f"cannot give {len(weights)} shares at least one of {total}")
    spare, whole = total - len(weights), sum(weights)
    exact = [spare * weight / whole for weight in weights]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: (shares[i] - exact[i], i))
    for i in by_remainder[: spare - sum(shares)]:
        shares[i] += 1
    return [share + 1 for share in shares]


def apportion_by_speed(total: int, seconds: Sequence[float]) -> list[int]:
    """Split `total` equal pieces, each of which takes worker i `seconds[i]`, so that the last worker finishes soonest.

    At least one each; ties go to the first. Optimal: each piece goes to the worker that would finish it soonest.
    """
    if total < len(seconds):
        raise UsageError(f"cannot give {len(seconds)} shares at least one of {total}")
    shares = [1] * len(seconds)
    finish = [(2 * time, i) for i, time in enumerate(seconds)]
    heapify(finish)
    for _ in range(total - len(seconds)):
        _, i = finish[0]
        shares[i] += 1
        heapreplace(finish, ((shares[i] + 1) * seconds[i], i))
    return shares
