"""A shuffled order that is computed instead of stored: a keyed bijection of 0 … length-1 onto itself.

A Feistel network permutes the smallest power of two that is not less than the length; a result outside of the range is permuted
again until it is inside (cycle walking). So position j of the order costs a few multiplications at any length, and a
billion samples need no memory. The round keys are a hash of everything the order is keyed by, such as seed and epoch.

`order.py` uses it for `shuffle="bijection"`, `shards/` for the order of shards.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from gyrostat.core.errors import UsageError

_ROUNDS = 8
_MIN_BITS = 4  # with halves of a single bit a few elements would be shuffled unevenly
_BLOCK = 4096
_BLOCKS_KEPT = 64
_MAX_LENGTH = 2**62
_MULTIPLIERS = np.array([0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9], dtype=np.uint64)


class Bijection:
    """Position → element. Two with equal length and key are equal, on every machine."""

    def __init__(self, length: int, *key: int) -> None:
        if not 0 <= length <= _MAX_LENGTH:
            raise UsageError(f"an order of {length} elements cannot be made; give 0 to 2**62")
        self.length = length
        bits = max(_MIN_BITS, (length - 1).bit_length())
        self._low_bits = bits // 2
        self._high_bits = bits - self._low_bits
        self._keys = _round_keys(length, key)
        self._blocks: dict[int, NDArray[np.int64]] = {}

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, position: int) -> int:
        if not 0 <= position < self.length:
            raise IndexError(f"position {position} is outside of an order of {self.length}")
        block, place = divmod(position, _BLOCK)
        return int(self._block(block)[place])

    def take(self, positions: range) -> list[int]:
        """The elements at ascending positions; fast for sequential access."""
        taken: list[int] = []
        while len(positions):
            block = positions[0] // _BLOCK
            here = positions[: -(-((block + 1) * _BLOCK - positions.start) // positions.step)]
            first = block * _BLOCK
            taken += self._block(block)[here.start - first : here.stop - first : here.step].tolist()
            positions = positions[len(here) :]
        return taken

    def at(self, positions: NDArray[np.integer]) -> NDArray[np.int64]:
        """The elements at any positions, all of them 0 … length-1."""
        elements = self._permute(positions.astype(np.uint64))
        outside = np.flatnonzero(elements >= self.length)
        while len(outside):
            walked = self._permute(elements[outside])
            elements[outside] = walked
            outside = outside[walked >= self.length]
        return elements.astype(np.int64)

    def _block(self, number: int) -> NDArray[np.int64]:
        block = self._blocks.get(number)
        if block is None:
            if len(self._blocks) == _BLOCKS_KEPT:
                del self._blocks[next(iter(self._blocks))]
            first = number * _BLOCK
            block = self.at(np.arange(first, min(first + _BLOCK, self.length)))
            self._blocks[number] = block
        return block

    def _permute(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """One pass through the network: a permutation of the power of two, since each round changes one half by the other."""
        low_bits = np.uint64(self._low_bits)
        high = values >> low_bits
        low = values & np.uint64((1 << self._low_bits) - 1)
        for number in range(0, _ROUNDS, 2):
            high ^= _mixed(low, self._keys[number], self._high_bits)
            low ^= _mixed(high, self._keys[number + 1], self._low_bits)
        return (high << low_bits) | low


def _mixed(values: NDArray[np.uint64], key: np.uint64, bits: int) -> NDArray[np.uint64]:
    """`bits` bits that depend on all of the value and the key."""
    mixed = values ^ key
    mixed *= _MULTIPLIERS[0]
    mixed ^= mixed >> np.uint64(29)
    mixed *= _MULTIPLIERS[1]
    mixed >>= np.uint64(64 - bits)
    return mixed


def _round_keys(length: int, key: tuple[int, ...]) -> NDArray[np.uint64]:
    text = " ".join(str(part) for part in ("gyrostat bijection 1", length, *key))
    return np.frombuffer(blake2b(text.encode(), digest_size=8 * _ROUNDS).digest(), dtype="<u8").astype(
        np.uint64
    )
