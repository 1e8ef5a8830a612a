"""Keep the memory that a request frees for the next one: a page fault costs more than computing on the page.

glibc would return the buffers of every request, some hundred KiB, to the kernel. Blocks of tables are larger than the limit:
they stay mappings of their own, which grow without being copied.
"""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_LARGEST_KEPT = 4 << 20
_MOST_KEPT = 16 << 20


def keep_request_memory() -> None:
    """From now on, in this process. Has no effect with another C library than glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT)
        mallopt(_TRIM_THRESHOLD, _MOST_KEPT)
