"""Ids, keys and slots, and the values that a row begins with.

The key of a row is a bijective hash of its id, salted by the name of its table. Its high bits are its slot: keys in
ascending order are in the order of slots, so that a sorted batch is cut into slots by a few comparisons. Its low bits
are its place in the index. Nothing but the id decides any of this: not order, placement or history.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.uint64]
Rows = NDArray[np.float32]

MAX_SLOTS = 4096

_M1, _M2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_INVERSE_M1, _INVERSE_M2 = np.uint64(pow(int(_M1), -1, 1 << 64)), np.uint64(pow(int(_M2), -1, 1 << 64))
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_U = np.uint64


def salt(*parts: object) -> np.uint64:
    """64 bits that are the same on every machine."""
    return _U(int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "little"))


def mix(values: Keys) -> Keys:
    """The finalizer of splitmix64: a bijection of 64-bit numbers."""
    mixed: Keys = values ^ (values >> _U(30))
    mixed *= _M1
    mixed ^= mixed >> _U(27)
    mixed *= _M2
    mixed ^= mixed >> _U(31)
    return mixed


def unmix(mixed: Keys) -> Keys:
    """The inverse of `mix`."""
    values: Keys = mixed ^ (mixed >> _U(31)) ^ (mixed >> _U(62))
    values *= _INVERSE_M2
    values ^= (values >> _U(27)) ^ (values >> _U(54))
    values *= _INVERSE_M1
    values ^= (values >> _U(30)) ^ (values >> _U(60))
    return values


def keys_of(ids: NDArray[np.integer], table: str) -> Keys:
    """The keys of ids of any integer type; negative ones count as their 64 bits."""
    bits: Keys = ids.astype(np.int64, copy=False).view(np.uint64)
    return mix(bits ^ salt("table", table))


def ids_of(keys: Keys, table: str) -> NDArray[np.int64]:
    """The inverse of `keys_of`."""
    return (unmix(keys) ^ salt("table", table)).view(np.int64)


def slots_of(keys: Keys, slots: int) -> NDArray[np.int64]:
    """The slot of each key."""
    bits = slots.bit_length() - 1
    if bits == 0:
        return np.zeros(len(keys), np.int64)
    return (keys >> _U(64 - bits)).astype(np.int64)


def slot_bounds(keys: Keys, slots: int) -> NDArray[np.int64]:
    """Of ascending keys: where each slot's begin, and the end; V + 1 numbers."""
    bits = slots.bit_length() - 1
    starts = np.arange(slots, dtype=np.uint64)
    if bits:
        starts <<= _U(64 - bits)
    return np.append(np.searchsorted(keys, starts), len(keys))


def uniform_rows(keys: Keys, width: int, seed: int, scale: float) -> Rows:
    """Rows that are uniform in [-scale, scale): a pure function of seed, key and column, exact on every machine."""
    pairs = (width + 1) // 2
    counters = (np.arange(1, pairs + 1, dtype=np.uint64) * _GOLDEN) ^ salt("initial", seed)
    bits = mix(keys[:, None] ^ counters[None, :]).view(np.uint32)[:, :width]
    # 24 bits are exact as a float32, and so are the two operations that follow if scale is a power of two.
    return ((bits >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1.0)) * np.float32(
        scale
    )
