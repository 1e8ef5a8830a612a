"""A copy of a snapshot in host memory: what is written while training goes on and changes the original.

The memory is one block, allocated when the first copy is made and used again for the next, so that only the first one
pays for fresh pages. It is as large as the state. Beside an accelerator it is page-locked, which transfers need to be
fast.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from gyrostat.engine.checkpoint.snapshot import FlatSnapshot
from gyrostat.engine.statetree import Flat
from gyrostat.engine.tensorbytes import DTYPES, byte_row

_ALIGNMENT = 64


class HostCopy:
    """Room for one copy at a time."""

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)

    def fill(self, snapshot: FlatSnapshot) -> FlatSnapshot:
        """The same snapshot with tensors of its own. They are overwritten by the next `fill`."""
        needed = sum(_room(flat) for flat in (snapshot.shared, snapshot.contexts))
        if self._block.numel() < needed:
            self._block = torch.empty(0, dtype=torch.uint8)  # let the old one go first
            self._block = torch.empty(needed, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        middle = _room(snapshot.shared)
        return replace(
            snapshot,
            shared=_copied(snapshot.shared, self._block[:middle]),
            contexts=_copied(snapshot.contexts, self._block[middle:]),
        )


def _room(flat: Flat) -> int:
    return sum(_aligned(spec.size) for spec in flat.skeleton.tensors)


def _copied(flat: Flat, block: torch.Tensor) -> Flat:
    copies = []
    start = 0
    for spec, (name, tensor) in zip(flat.skeleton.tensors, flat.tensors, strict=True):
        row = block[start : start + spec.size]
        if spec.size:
            _copy(byte_row(tensor), row)
        copies.append((name, row.view(DTYPES[spec.dtype]).view(tuple(spec.shape))))
        start += _aligned(spec.size)
    return Flat(flat.skeleton, copies)


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    if source.device.type == "cpu":
        # The C library's memmove: unlike torch's copy, it goes around the cache where a tensor is large.
        target.numpy()[:] = source.numpy()
    else:
        target.copy_(source)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
