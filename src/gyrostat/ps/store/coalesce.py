"""Gradients of the same key, summed in a fixed order: that of their occurrence in the batch.

The result is a function of the batch alone. Keys come back in ascending order, which is the order of slots.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gyrostat.ps.store.hashing import Keys, Rows

_INDEX = np.uint64(0xFFFFFFFF)


class Grouping(NamedTuple):
    """The occurrences of each distinct key of a batch."""

    keys: Keys
    """Distinct and ascending."""
    order: NDArray[np.int64]
    """The batch's positions by key, those of one key in the order of the batch."""
    firsts: NDArray[np.int64]
    """Where each key's begin in `order`."""
    inverse: NDArray[np.int64]
    """Of each position of the batch, the number of its key."""

    def sum(self, gradients: Rows) -> Rows:
        """The sums by key, of one gradient per position of the batch."""
        if len(self.keys) == 0:
            return np.zeros((0, gradients.shape[1]), np.float32)
        return np.add.reduceat(np.take(gradients, self.order, axis=0), self.firsts, axis=0)


def group(keys: Keys) -> Grouping:
    """Group a batch by key."""
    sort = np.argsort(keys)  # the fastest sort is not stable: the positions of each key are sorted below
    ascending = keys[sort]
    starts = np.empty(len(keys), bool)
    starts[:1] = True
    np.not_equal(ascending[1:], ascending[:-1], out=starts[1:])
    firsts = np.flatnonzero(starts)
    numbers = np.cumsum(starts, dtype=np.int64) - 1
    combined = (numbers.astype(np.uint64) << np.uint64(32)) | sort.astype(np.uint64)
    combined.sort()
    order = (combined & _INDEX).astype(np.int64)
    inverse = np.empty(len(keys), np.int64)
    inverse[order] = numbers
    return Grouping(ascending[firsts], order, firsts, inverse)


def coalesce(keys: Keys, gradients: Rows) -> tuple[Keys, Rows]:
    """Distinct ascending keys with the sums of their gradients; nothing is copied if they are that already."""
    if len(keys) < 2 or bool(np.all(keys[1:] > keys[:-1])):
        return keys, gradients
    grouped = group(keys)
    return grouped.keys, grouped.sum(gradients)
