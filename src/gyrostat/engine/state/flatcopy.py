"""Copies the tensors of a state into one block of memory, and makes views of them there.

Checkpoints are written from such a block (`checkpoint/hostcopy.py`), and a newcomer reads one while the donor trains
(`reconfigure/state_wire.py`). Every tensor begins at a multiple of 64 bytes, as in torch's own allocator.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from gyrostat.engine.state.statetree import Flat, Skeleton
from gyrostat.engine.state.tensorbytes import DTYPES, aligned, byte_row

_SLICE_BYTES = 32 << 20
"""The largest copy of one call. From about 20 MB on the C library bypasses the cache, almost twice as fast."""
_BATCH_BYTES = 4 << 20
"""What a thread takes from the queue at once, at least: synchronizing costs more than copying small tensors."""
_MAX_THREADS = 4
"""One core rarely uses the whole memory bandwidth; four do."""


@dataclass(frozen=True)
class FlatRow:
    """A named tensor, and the bytes of the block for its copy."""

    name: str
    tensor: torch.Tensor
    room: torch.Tensor

    def slices(self) -> list[RowSlice]:
        """Parts that threads can copy independently."""
        size, tensor = self.room.numel(), self.tensor
        if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            return [RowSlice(self, 0, size)]  # its bytes have to be reordered first
        return [
            RowSlice(self, start, min(start + _SLICE_BYTES, size)) for start in range(0, size, _SLICE_BYTES)
        ]


@dataclass(frozen=True)
class RowSlice:
    """Bytes `start` to `stop` of a row."""

    row: FlatRow
    start: int
    stop: int

    def copy(self) -> None:
        source, room = byte_row(self.row.tensor), self.row.room
        if source.device.type == "cpu":
            # The C library's memmove, which releases Python's lock.
            room.numpy()[self.start : self.stop] = source.numpy()[self.start : self.stop]
        else:
            room.copy_(source)


class FlatCopy:
    """A copy of rows under way. All threads that call `complete` share the work."""

    def __init__(self, rows: Sequence[FlatRow]) -> None:
        self._batches = _batches(rows)
        self._changed = threading.Condition()
        self._copying = 0
        self.failure: BaseException | None = None

    def complete(self) -> None:
        """Help to copy; return when everything is copied, or a copy has failed: then `failure` is its error."""
        while True:
            with self._changed:
                batch = next(self._batches, None)
                if batch is None:
                    self._changed.wait_for(lambda: not self._copying)
                    return
                self._copying += 1
            try:
                for piece in batch:
                    piece.copy()
            except BaseException as error:
                self.failure = error
            with self._changed:
                self._copying -= 1
                self._changed.notify_all()


def _batches(rows: Sequence[FlatRow]) -> Iterator[list[RowSlice]]:
    batch: list[RowSlice] = []
    size = 0
    for row in rows:
        for piece in row.slices():
            batch.append(piece)
            size += piece.stop - piece.start
            if size >= _BATCH_BYTES:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def size_of(skeleton: Skeleton) -> int:
    """Bytes that the tensors of a state take in a block."""
    return sum(aligned(spec.size) for spec in skeleton.tensors)


def copy_into(block: torch.Tensor, flat: Flat, *, parallel: bool = False) -> Flat:
    """Copy the tensors of a state into `block`; returns the state with the copies. `parallel`: use several cores."""
    copy_rows(rows_of(block, flat), parallel=parallel)
    return flat_in(block, flat)


def rows_of(block: torch.Tensor, flat: Flat) -> list[FlatRow]:
    """The rows to copy into `block`. Tensors without elements have none."""
    return [
        FlatRow(name, tensor, room)
        for (name, tensor), room in zip(flat.tensors, _spaces(block, flat.skeleton), strict=True)
        if room.numel()
    ]


def copy_rows(rows: Sequence[FlatRow], *, parallel: bool) -> None:
    most = min(_MAX_THREADS, os.cpu_count() or 1) if parallel else 1
    size = sum(row.room.numel() for row in rows)
    copying = FlatCopy(rows)
    others = [
        threading.Thread(target=copying.complete)
        for _ in range(1, most if size >= most * _BATCH_BYTES else 1)
    ]
    for other in others:
        other.start()
    copying.complete()
    for other in others:
        other.join()
    if copying.failure is not None:
        raise copying.failure


def flat_in(block: torch.Tensor, flat: Flat) -> Flat:
    """The state with the tensors of `block`, which may not have been copied yet."""
    names = [name for name, _ in flat.tensors]
    return Flat(flat.skeleton, list(zip(names, views_of(block, flat.skeleton), strict=True)))


def views_of(block: torch.Tensor, skeleton: Skeleton) -> list[torch.Tensor]:
    """The tensors of a state in `block`."""
    spaces = _spaces(block, skeleton)
    return [
        room.view(DTYPES[spec.dtype]).view(tuple(spec.shape))
        for spec, room in zip(skeleton.tensors, spaces, strict=True)
    ]


def _spaces(block: torch.Tensor, skeleton: Skeleton) -> Sequence[torch.Tensor]:
    sizes = [spec.size for spec in skeleton.tensors]
    cuts = [length for size in sizes for length in (size, aligned(size) - size)]
    # One call for all: making slices one by one takes longer than copying small tensors.
    return block.split_with_sizes([*cuts, block.numel() - sum(cuts)])[: len(cuts) : 2]
