"""The memory in which one module's gradients wait and are summed: sets of flat buckets that every pass uses again.

Fresh pages are expensive, so sets are touched before training needs them, and a new generation takes over those of the
generation before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from gyrostat.engine.reduce.buckets import FlatBuckets, Layout, shape_of


class BufferPool:
    """Sets of flat buckets in one layout. Two totals alternate, so that a sum survives until the next one is complete."""

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        layout: Layout,
        *,
        home: torch.device,
        shared: bool,
        totals: int,
    ) -> None:
        """`home`: where the sets are. `shared`: peers read them. `totals`: how many sets are for sums."""
        self.layout, self.home, self.shared = layout, home, shared
        # All sets take the strides of this moment: sums are made on flat memory, where elements must have the same layout.
        self.shapes = [shape_of(parameter) for parameter in parameters]
        self.bucket_of = {number: bucket for bucket, numbers in enumerate(layout) for number in numbers}
        self._pinned = parameters[0].is_cuda and home.type == "cpu"
        self._spare: list[FlatBuckets] = []
        self._totals = [self._new_set() for _ in range(totals)]

    @property
    def total(self) -> FlatBuckets:
        """Where the next sum goes."""
        return self._totals[0]

    @property
    def spare(self) -> int:
        """How many sets are not in use, besides the totals."""
        return len(self._spare)

    def take(self) -> FlatBuckets:
        """A set for gradients."""
        return self._spare.pop() if self._spare else self._new_set()

    def give_back(self, sets: Iterable[FlatBuckets]) -> None:
        self._spare += sets

    def alternate(self) -> None:
        """A sum is complete: the next one goes elsewhere."""
        self._totals.reverse()

    def replace_total(self) -> None:
        """An abandoned transfer may still write into the total: do not use that memory again."""
        self._totals[:1] = [self._new_set()]

    def warm_up(self, sets: int) -> None:
        """Touch the totals and `sets` sets for gradients."""
        self._spare += [self._new_set() for _ in range(sets - len(self._spare))]
        _touch((*self._totals, *self._spare))

    def warm_up_beside(self, other: BufferPool, sets: int, others_sets: int) -> None:
        """As `warm_up`, except for the sets that `inherit` will take from `other`, which is in use."""
        if self.shared and not other.shared:
            self.warm_up(sets)  # `inherit` will take nothing
            return
        missing = len(self._totals) + sets - len(other._totals) - others_sets
        self._spare = [self._new_set() for _ in range(missing)]
        _touch(self._spare)

    def fits(self, other: BufferPool) -> bool:
        """Whether sets of `other` can serve here."""
        return (
            (other.layout, other.home) == (self.layout, self.home)
            and (other.shared or not self.shared)
            and [shape.stride() for shape in other.shapes] == [shape.stride() for shape in self.shapes]
        )

    def inherit(self, other: BufferPool, sets: int) -> None:
        """Take over the memory of `other`, which is not used any more; keep `sets` sets for gradients."""
        pool = [*other._totals, *other._spare]
        other._totals, other._spare = [], []
        self._totals = [pool.pop(0) if pool else mine for mine in self._totals]
        self._spare = (pool + self._spare)[:sets]

    def _new_set(self) -> FlatBuckets:
        return FlatBuckets(self.shapes, self.layout, home=self.home, pinned=self._pinned, shared=self.shared)


def _touch(sets: Iterable[FlatBuckets]) -> None:
    for flat in (flat for buffers in sets for flat in buffers.flats):
        flat.zero_()
