"""Keep freed memory in the process: for the next step, and for the first step of a newcomer.

Gradients are freed in every step and allocated again in the next. glibc would return their pages to the kernel in between,
and a page fault costs more than computing on the page. So workers keep what they free, as torch does on GPUs: the process
holds the memory that its largest step needs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import torch

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_NEVER = -1
_LARGEST_KEPT = 32 << 20
"""Bytes. Larger blocks are returned to the kernel: glibc's own limit for its dynamic threshold."""


def keep_freed_memory() -> None:
    """From now on, in this process. Has no effect with another C library than glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT)
        mallopt(_TRIM_THRESHOLD, _NEVER)


def touch_room_for(tensors: Iterable[torch.Tensor]) -> None:
    """Touch memory for tensors like these, all at once, and free it. Tensors on other devices are ignored."""
    room = [torch.zeros_like(tensor) for tensor in tensors if tensor.device.type == "cpu"]
    room.clear()
