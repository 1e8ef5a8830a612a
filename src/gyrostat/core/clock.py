"""Time as it is handed to those who decide: real, or virtual in simulations and tests."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds since some instant that stays the same; never goes back."""


class WallClock:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def now(self) -> float:
        return time.monotonic() - self._began


class VirtualClock:
    """Stands still until it is advanced."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def now(self) -> float:
        return self._now

    def advance(self, to: float) -> None:
        """To this time; a time that has passed leaves it where it is."""
        self._now = max(self._now, to)
