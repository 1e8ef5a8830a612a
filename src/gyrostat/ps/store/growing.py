"""Arrays that grow by rows without being copied.

`ndarray.resize` reallocates; for large blocks the kernel moves pages instead of bytes. They grow by an eighth, at most 4
MiB at once: that bounds unused memory, and the time for which one update waits.
"""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

_LEAST_ROWS = 256
_MOST_BYTES = 4 << 20


def room_for(rows: int, capacity: int, row_bytes: int) -> int:
    """The capacity that an array of `capacity` rows should get to hold `rows`."""
    if rows <= capacity:
        return capacity
    more = min(capacity // 8, max(1, _MOST_BYTES // max(1, row_bytes)))
    return max(rows, capacity + more, _LEAST_ROWS)


def resize_rows(array: NDArray[Any], rows: int) -> None:
    """Change the number of rows in place; new ones are 0. No view of the array may be in use."""
    array.resize((rows, *array.shape[1:]), refcheck=False)
