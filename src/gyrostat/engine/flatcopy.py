"""Tensors of a state side by side in one block of memory: copied there, and found there again.

A block is what is written behind training (checkpoints), and what a newcomer reads while the donor trains on (wire.py).
Every tensor begins at a multiple of 64 bytes, where torch's own allocator would put it.
"""

from __future__ import annotations

import torch

from gyrostat.engine.statetree import Flat, Skeleton
from gyrostat.engine.tensorbytes import DTYPES, byte_row

_ALIGNMENT = 64


def room_for(skeleton: Skeleton) -> int:
    """Bytes that its tensors take."""
    return sum(_aligned(spec.size) for spec in skeleton.tensors)


def copy_into(block: torch.Tensor, flat: Flat) -> Flat:
    """The same state with tensors in `block`."""
    copies = views_of(block, flat.skeleton)
    for (_, tensor), copy in zip(flat.tensors, copies, strict=True):
        if tensor.numel():
            _copy(byte_row(tensor), byte_row(copy))
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


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    if source.device.type == "cpu":
        # The C library's memmove: unlike torch's copy, it goes around the cache where a tensor is large.
        target.numpy()[:] = source.numpy()
    else:
        target.copy_(source)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
