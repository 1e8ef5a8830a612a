"""Tensors of a state side by side in one block of memory: copied there, and found there again.

A block is what is written behind training (checkpoints), and what a newcomer reads while the donor trains on (wire.py).
Every tensor begins at a multiple of 64 bytes, where torch's own allocator would put it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from gyrostat.engine.state.statetree import Flat, Skeleton
from gyrostat.engine.state.tensorbytes import DTYPES, aligned, byte_row

_PIECE = 32 << 20
"""What one thread copies at once. From about 20 MB on the C library writes around the cache, almost twice as fast."""
_HANDFUL = 4 << 20
"""What a thread takes at least: to take turns costs more than to copy what is small."""
_MOST_THREADS = 4
"""One core rarely moves as much as memory can; four do."""


@dataclass(frozen=True)
class FlatRow:
    """A tensor, by its name, and the bytes of the block where it goes."""

    name: str
    tensor: torch.Tensor
    room: torch.Tensor

    def pieces(self) -> list[RowSlice]:
        """To be copied one by one, by whoever has time."""
        size, tensor = self.room.numel(), self.tensor
        if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            return [RowSlice(self, 0, size)]  # its bytes have to be put in order first
        return [RowSlice(self, start, min(start + _PIECE, size)) for start in range(0, size, _PIECE)]


@dataclass(frozen=True)
class RowSlice:
    """Bytes `start` to `stop` of a row."""

    row: FlatRow
    start: int
    stop: int

    def copy(self) -> None:
        source, room = byte_row(self.row.tensor), self.row.room
        if source.device.type == "cpu":
            # The C library's memmove; meanwhile other threads have the interpreter.
            room.numpy()[self.start : self.stop] = source.numpy()[self.start : self.stop]
        else:
            room.copy_(source)


class FlatCopy:
    """Rows on their way into the block. As many threads as call `complete` share the work."""

    def __init__(self, rows: Sequence[FlatRow]) -> None:
        self._handfuls = _handfuls(rows)
        self._changed = threading.Condition()
        self._in_hand = 0
        self.failure: BaseException | None = None

    def complete(self) -> None:
        """Copy what is left; return when all is copied, or some of it could not be: then `failure` says why."""
        while True:
            with self._changed:
                handful = next(self._handfuls, None)
                if handful is None:
                    self._changed.wait_for(lambda: not self._in_hand)
                    return
                self._in_hand += 1
            try:
                for piece in handful:
                    piece.copy()
            except BaseException as error:
                self.failure = error
            with self._changed:
                self._in_hand -= 1
                self._changed.notify_all()


def _handfuls(rows: Sequence[FlatRow]) -> Iterator[list[RowSlice]]:
    handful: list[RowSlice] = []
    size = 0
    for row in rows:
        for piece in row.pieces():
            handful.append(piece)
            size += piece.stop - piece.start
            if size >= _HANDFUL:
                yield handful
                handful, size = [], 0
    if handful:
        yield handful


def room_for(skeleton: Skeleton) -> int:
    """Bytes that its tensors take."""
    return sum(aligned(spec.size) for spec in skeleton.tensors)


def copy_into(block: torch.Tensor, flat: Flat, *, in_a_hurry: bool = False) -> Flat:
    """The same state with tensors in `block`. `in_a_hurry`: training waits, so its cores are free to help."""
    copy_rows(rows_of(block, flat), in_a_hurry=in_a_hurry)
    return flat_in(block, flat)


def rows_of(block: torch.Tensor, flat: Flat) -> list[FlatRow]:
    """What has to be copied for that. Tensors without elements have none."""
    return [
        FlatRow(name, tensor, room)
        for (name, tensor), room in zip(flat.tensors, _rooms(block, flat.skeleton), strict=True)
        if room.numel()
    ]


def copy_rows(rows: Sequence[FlatRow], *, in_a_hurry: bool) -> None:
    most = min(_MOST_THREADS, os.cpu_count() or 1) if in_a_hurry else 1
    size = sum(row.room.numel() for row in rows)
    copying = FlatCopy(rows)
    others = [
        threading.Thread(target=copying.complete) for _ in range(1, most if size >= most * _HANDFUL else 1)
    ]
    for other in others:
        other.start()
    copying.complete()
    for other in others:
        other.join()
    if copying.failure is not None:
        raise copying.failure


def flat_in(block: torch.Tensor, flat: Flat) -> Flat:
    """The same state with the tensors that lie in `block`, whether they have been copied there yet or not."""
    names = [name for name, _ in flat.tensors]
    return Flat(flat.skeleton, list(zip(names, views_of(block, flat.skeleton), strict=True)))


def views_of(block: torch.Tensor, skeleton: Skeleton) -> list[torch.Tensor]:
    """The tensors that lie in `block`."""
    rooms = _rooms(block, skeleton)
    return [
        room.view(DTYPES[spec.dtype]).view(tuple(spec.shape))
        for spec, room in zip(skeleton.tensors, rooms, strict=True)
    ]


def _rooms(block: torch.Tensor, skeleton: Skeleton) -> Sequence[torch.Tensor]:
    sizes = [spec.size for spec in skeleton.tensors]
    cuts = [length for size in sizes for length in (size, aligned(size) - size)]
    # One call for all: to make slices one by one takes longer than to copy small tensors.
    return block.split_with_sizes([*cuts, block.numel() - sum(cuts)])[: len(cuts) : 2]
