"""Keys → row numbers: a vectorised open-addressing hash table, in segments of fixed size (extendible hashing).

A directory maps the high bits of a key to a segment; within it the key's low bits and triangular probing find the
position of its row number. A segment that is full is split in two by the next bit of its keys, so that growing moves a
few hundred entries at a time and never the whole table. The slot is the first of these bits, hence every segment belongs
to one slot: the rows of a slot are found, removed and inserted without looking at any other.

Positions hold row numbers + 1 (4 bytes; 0 is free). Keys are kept once, in the array of the caller, which `bind` passes in.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gyrostat.ps.store.hashing import Keys

Numbers = NDArray[np.int64]

SEGMENT = 1024
_MOST = SEGMENT * 3 // 4
_LOW = np.uint64(SEGMENT - 1)
_ABSENT = 0
"""The segment of slots that are not here. It stays empty."""


class KeyIndex:
    """The row numbers of keys, in the slots that this process owns."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._depth = self._slot_bits = slots.bit_length() - 1
        self._directory = np.zeros(slots, np.int32)
        self._positions = np.zeros(SEGMENT, np.int32)
        self._counts = np.zeros(1, np.int64)
        self._depths = np.zeros(1, np.int64)
        self._prefixes = np.zeros(1, np.int64)
        self._free: list[int] = []
        self._keys: Keys = np.zeros(0, np.uint64)

    @property
    def nbytes(self) -> int:
        return self._positions.nbytes + self._directory.nbytes + 3 * self._counts.nbytes

    def bind(self, keys: Keys) -> None:
        """The keys by row number. Call it again whenever that array is replaced."""
        self._keys = keys

    def owns(self, slot: int) -> bool:
        return bool(self._directory[slot << (self._depth - self._slot_bits)] != _ABSENT)

    def own(self, slot: int) -> None:
        """An empty slot."""
        assert not self.owns(slot)
        (segment,) = self._allocate(1)
        self._depths[segment], self._prefixes[segment] = self._slot_bits, slot
        self._directory[self._range(slot)] = segment

    def rows_of(self, slot: int) -> Numbers:
        """The row numbers of a slot, in ascending order."""
        entries = self._positions.reshape(-1, SEGMENT)[self._segments(slot)]
        return np.sort(entries[entries > 0]).astype(np.int64) - 1

    def remove(self, slot: int) -> Numbers:
        """Forget a slot. Returns its row numbers, which are then free."""
        rows, segments = self.rows_of(slot), self._segments(slot)
        self._clear(segments)
        self._free += segments.tolist()
        self._directory[self._range(slot)] = _ABSENT
        return rows

    def find(self, keys: Keys) -> Numbers:
        """The row number of each key; -1 if there is none."""
        return self._positions[self._locate(keys)].astype(np.int64) - 1

    def insert(self, keys: Keys, rows: Numbers) -> None:
        """Insert distinct keys that are not in the index, of slots that are."""
        segments = self._segment_of(keys)
        while True:
            added = np.bincount(segments, minlength=len(self._counts))
            full = np.flatnonzero(self._counts + added > _MOST)
            if len(full) == 0:
                break
            self._split(full)
            segments = self._segment_of(keys)
        self._counts += added
        self._place(segments, keys, rows)

    def relocate(self, keys: Keys, rows: Numbers) -> None:
        """Keys that are in the index get other row numbers."""
        self._positions[self._locate(keys)] = rows + 1

    def discard(self, slot: int, gone: Numbers) -> None:
        """Remove some rows of a slot: its segments are filled anew without them."""
        kept = np.setdiff1d(self.rows_of(slot), gone, assume_unique=True)
        self._clear(self._segments(slot))
        self.insert(self._keys[kept], kept)

    # Segments.

    def _range(self, slot: int) -> slice:
        shift = self._depth - self._slot_bits
        return slice(slot << shift, (slot + 1) << shift)

    def _segments(self, slot: int) -> Numbers:
        segments: Numbers = np.unique(self._directory[self._range(slot)]).astype(np.int64)
        here: Numbers = segments[segments != _ABSENT]
        return here

    def _segment_of(self, keys: Keys) -> Numbers:
        if self._depth == 0:
            return np.full(len(keys), self._directory[0], np.int64)
        segments: Numbers = self._directory[keys >> np.uint64(64 - self._depth)].astype(np.int64)
        return segments

    def _allocate(self, count: int) -> Numbers:
        taken, self._free = self._free[:count], self._free[count:]
        missing = count - len(taken)
        if missing:
            first = len(self._counts)
            room = first + max(missing, first // 8)
            self._positions.resize(room * SEGMENT, refcheck=False)
            for name in ("_counts", "_depths", "_prefixes"):
                setattr(self, name, np.append(getattr(self, name), np.zeros(room - first, np.int64)))
            taken += range(first, first + missing)
            self._free += range(first + missing, room)
        return np.array(taken, np.int64)

    def _clear(self, segments: Numbers) -> None:
        self._positions.reshape(-1, SEGMENT)[segments] = 0
        self._counts[segments] = 0

    def _split(self, full: Numbers) -> None:
        """Each of these segments becomes two."""
        entries = self._positions.reshape(-1, SEGMENT)[full]
        rows = entries[entries > 0].astype(np.int64) - 1
        self._clear(full)
        others = self._allocate(len(full))
        while self._depth <= self._depths[full].max():
            self._directory = np.repeat(self._directory, 2)
            self._depth += 1
        self._depths[full] += 1
        self._prefixes[full] *= 2
        self._depths[others], self._prefixes[others] = self._depths[full], self._prefixes[full] + 1
        for other in others.tolist():
            shift = self._depth - int(self._depths[other])
            prefix = int(self._prefixes[other])
            self._directory[prefix << shift : (prefix + 1) << shift] = other
        keys = self._keys[rows]
        segments = self._segment_of(keys)
        self._counts += np.bincount(segments, minlength=len(self._counts))
        self._place(segments, keys, rows)

    # Positions.

    def _locate(self, keys: Keys) -> Numbers:
        """The position of each key, or the free one at which its search ended."""
        base = self._segment_of(keys) * SEGMENT
        low = (keys & _LOW).astype(np.int64)
        found = base + low
        entries = self._positions[found]
        # The keys that are still searched for. Entry 0 reads the key of row -1, which does not matter: it is free.
        left = (
            np.flatnonzero((entries > 0) & (self._keys.take(entries - 1, mode="wrap") != keys))
            if len(self._keys)
            else _NONE
        )
        step = 0
        while len(left):
            step += 1
            low[left] = (low[left] + step) & (SEGMENT - 1)
            found[left] = places = base[left] + low[left]
            entries = self._positions[places]
            left = left[(entries > 0) & (self._keys.take(entries - 1, mode="wrap") != keys[left])]
        return found

    def _place(self, segments: Numbers, keys: Keys, rows: Numbers) -> None:
        base, low, entries = segments * SEGMENT, (keys & _LOW).astype(np.int64), (rows + 1).astype(np.int32)
        step = 0
        while len(entries):
            places = base + low
            free = np.flatnonzero(self._positions[places] == 0)
            self._positions[places[free]] = entries[free]
            # Of several keys at one free position, the last one has got it.
            left = self._positions[places] != entries
            base, low, entries = base[left], low[left], entries[left]
            step += 1
            low = (low + step) & (SEGMENT - 1)


_NONE: Numbers = np.zeros(0, np.int64)
