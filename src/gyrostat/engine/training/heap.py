"""Memory that one step frees is there for the next one, and a newcomer's for its first.

Gradients are freed in every step and wanted again in the next. glibc would give their pages back to the kernel in between,
and every one of them that the kernel has to find and clear anew costs more than computing on it. So workers keep what they
free, as torch does on GPUs. What a step needs at most is what the process holds from then on.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import torch

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_NEVER = -1
_LARGEST_KEPT = 32 << 20
"""Bytes. Larger blocks are the kernel's own affair, as glibc would have it too once it has seen some being freed."""


def keep_freed_memory() -> None:
    """From now on, in this process. Where the C library is another one, nothing changes."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT)
        mallopt(_TRIM_THRESHOLD, _NEVER)


def touch_room_for(tensors: Iterable[torch.Tensor]) -> None:
    """Free memory, already touched, for tensors like these, all at once. What is on other devices is left out."""
    room = [torch.zeros_like(tensor) for tensor in tensors if tensor.device.type == "cpu"]
    room.clear()
