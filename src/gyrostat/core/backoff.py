"""Exponential back-off: how long to wait before something that failed is tried again."""

from __future__ import annotations

from dataclasses import dataclass

_MOST_DOUBLINGS = 64
"""More would make no difference, and the power would overflow."""


@dataclass(frozen=True)
class Backoff:
    """The delay doubles with every failure in a row, up to a limit."""

    first_s: float
    longest_s: float

    def after(self, failures: int) -> float:
        """Seconds to wait after this number of failures in a row."""
        if failures < 1:
            return 0.0
        return min(self.first_s * 2.0 ** min(failures - 1, _MOST_DOUBLINGS), self.longest_s)
