"""Tensors of a state side by side in one block of memory: copied there, and found there again.

A block is what is written behind training (checkpoints), and what a newcomer reads while the donor trains on (wire.py).
Every tensor begins at a multiple of 64 bytes, where torch's own allocator would put it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

import torch

from gyrostat.engine.statetree import Flat, Skeleton
from gyrostat.engine.tensorbytes import DTYPES, byte_row

_ALIGNMENT = 64
_PIECE = 4 << 20
_MOST_THREADS = 4
"""One core rarely moves as much as memory can; four do."""


def room_for(skeleton: Skeleton) -> int:
    """Bytes that its tensors take."""
    return sum(_aligned(spec.size) for spec in skeleton.tensors)


def copy_into(block: torch.Tensor, flat: Flat, *, in_a_hurry: bool = False) -> Flat:
    """The same state with tensors in `block`. `in_a_hurry`: training waits, so its cores are free to help."""
    copies = views_of(block, flat.skeleton)
    rows = [
        (byte_row(tensor), byte_row(copy))
        for (_, tensor), copy in zip(flat.tensors, copies, strict=True)
        if tensor.numel()
    ]
    helpers = min(_MOST_THREADS, os.cpu_count() or 1) if in_a_hurry else 1
    if helpers == 1 or sum(source.numel() for source, _ in rows) < helpers * _PIECE:
        _copy_all(rows)
    else:
        pieces = [piece for row in rows for piece in _cut(*row)]
        shares = [pieces[number::helpers] for number in range(helpers)]
        others = [threading.Thread(target=_copy_all, args=(share,)) for share in shares[1:]]
        for other in others:
            other.start()
        _copy_all(shares[0])
        for other in others:
            other.join()
    return Flat(flat.skeleton, [(name, copy) for (name, _), copy in zip(flat.tensors, copies, strict=True)])


def views_of(block: torch.Tensor, skeleton: Skeleton) -> list[torch.Tensor]:
    """The tensors that lie in `block`."""
    views = []
    start = 0
    for spec in skeleton.tensors:
        row = block[start : start + spec.size]
        views.append(row.view(DTYPES[spec.dtype]).view(tuple(spec.shape)))
        start += _aligned(spec.size)
    return views


def _cut(source: torch.Tensor, target: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    if source.device.type != "cpu":
        return [(source, target)]
    starts = range(0, source.numel(), _PIECE)
    return [(source[start : start + _PIECE], target[start : start + _PIECE]) for start in starts]


def _copy_all(rows: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for source, target in rows:
        _copy(source, target)


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    if source.device.type == "cpu":
        # The C library's memmove: unlike torch's copy, it goes around the cache where a tensor is large.
        target.numpy()[:] = source.numpy()
    else:
        target.copy_(source)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
