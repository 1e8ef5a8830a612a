"""Which updates every slot of a process has applied, or keeps for its step: a bit per slot and batch; and a count per slot.

An update is named (epoch, first sample // batch size), so that a batch that is trained again has the name it had before,
and a slot that has it refuses it. Epochs before `forgotten` are complete: all of their updates count as applied, and
their bits are dropped.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Slots = NDArray[np.int64]
Flags = NDArray[np.bool_]
Versions = NDArray[np.int64]


class UpdateLedger:
    """The applied updates of V slots, whichever of them are here."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self.versions = np.zeros(slots, np.int64)
        """Updates that each slot has applied; of ordered jobs, steps."""
        self.forgotten = np.zeros(slots, np.int64)
        """All updates of epochs before this one have been applied."""
        self._bits: dict[int, NDArray[np.uint8]] = {}

    def applied(self, slots: Slots, epoch: int, batch: int) -> Flags:
        """Of each slot, whether it has this update."""
        old: Flags = self.forgotten[slots] > epoch
        bits = self._bits.get(epoch)
        if bits is None or batch >> 3 >= bits.shape[1]:
            return old
        held: Flags = (bits[slots, batch >> 3] >> (batch & 7)) & 1 != 0
        return old | held

    def all_applied(self, slots: Slots, epoch: int, first: int, count: int) -> Flags:
        """Of each of `count` batches, whether all these slots have it."""
        old = self.forgotten[slots] > epoch
        held = np.zeros((len(slots), count), bool)
        bits = self._bits.get(epoch)
        if bits is not None:
            flags = np.unpackbits(bits[slots], axis=1, bitorder="little")[:, first : first + count]
            held[:, : flags.shape[1]] = flags
        everywhere: Flags = np.all(held | old[:, None], axis=0)
        return everywhere

    def record(self, slots: Slots, epoch: int, batch: int) -> None:
        """These slots have an update that they did not have."""
        bits = self._bits.get(epoch)
        if bits is None:
            bits = self._bits[epoch] = np.zeros((self._slots, 64), np.uint8)
        if batch >> 3 >= bits.shape[1]:
            wider = np.zeros((self._slots, max((batch >> 3) + 1, 2 * bits.shape[1])), np.uint8)
            wider[:, : bits.shape[1]] = bits
            bits = self._bits[epoch] = wider
        bits[slots, batch >> 3] |= np.uint8(1 << (batch & 7))

    def advance(self, slots: Slots) -> None:
        """These slots have applied an update; of ordered jobs, a step."""
        self.versions[slots] += 1

    def forget(self, slots: Slots, epoch: int) -> None:
        """All updates of epochs before this one have been applied, and no roll-back will ask for them again."""
        self.forgotten[slots] = np.maximum(self.forgotten[slots], epoch)
        for old in [each for each in self._bits if each < epoch]:
            self._bits[old][slots] = 0
            if not self._bits[old].any():
                del self._bits[old]

    def clear(self, slot: int) -> None:
        """A slot that is not here any more."""
        self.versions[slot] = self.forgotten[slot] = 0
        for bits in self._bits.values():
            bits[slot] = 0

    def bits_of(self, slot: int) -> dict[int, NDArray[np.uint8]]:
        """By epoch, without trailing zeros: equal content gives equal bytes."""
        found = {}
        for epoch, bits in sorted(self._bits.items()):
            (set_bytes,) = np.nonzero(bits[slot])
            if len(set_bytes):
                found[epoch] = bits[slot, : set_bytes[-1] + 1].copy()
        return found

    def restore(
        self, slot: int, *, version: int, forgotten: int, bits: Iterable[tuple[int, NDArray[np.uint8]]]
    ) -> None:
        self.clear(slot)
        self.versions[slot], self.forgotten[slot] = version, forgotten
        for epoch, values in bits:
            mine = self._bits.get(epoch)
            if mine is None or mine.shape[1] < len(values):
                wider = np.zeros((self._slots, max(64, len(values))), np.uint8)
                if mine is not None:
                    wider[:, : mine.shape[1]] = mine
                mine = self._bits[epoch] = wider
            mine[slot, : len(values)] = values
