"""Gradients of the same key, summed in a fixed order: that of their occurrence in the batch.

The result is a function of the batch alone. Keys come back in ascending order, which is the order of slots.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gyrostat.ps.store.hashing import Keys, Rows


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
    order = _stable_order(keys)
    ascending = keys[order]
    starts = np.empty(len(keys), bool)
    starts[:1] = True
    np.not_equal(ascending[1:], ascending[:-1], out=starts[1:])
    firsts = np.flatnonzero(starts)
    inverse = np.empty(len(keys), np.int64)
    inverse[order] = np.cumsum(starts, dtype=np.int64) - 1
    return Grouping(ascending[firsts], order, firsts, inverse)


def _stable_order(keys: Keys) -> NDArray[np.int64]:
    """The positions by key, those of one key in the order of the batch.

    Sorting numbers is several times as fast as sorting positions: positions take the place of the lowest bits of the keys,
    which are hashes. Should two keys differ in those bits alone, it is noticed, and positions are sorted.
    """
    mask = np.uint64((1 << max(1, (len(keys) - 1).bit_length())) - 1)
    combined = (keys & ~mask) | np.arange(len(keys), dtype=np.uint64)
    combined.sort()
    order = (combined & mask).astype(np.int64)
    ascending = keys[order]
    if np.any(ascending[1:] < ascending[:-1]):
        return np.argsort(keys, kind="stable")
    return order


def coalesce(keys: Keys, gradients: Rows) -> tuple[Keys, Rows]:
    """Distinct ascending keys with the sums of their gradients; nothing is copied if they are that already."""
    if len(keys) < 2 or bool(np.all(keys[1:] > keys[:-1])):
        return keys, gradients
    grouped = group(keys)
    return grouped.keys, grouped.sum(gradients)
