"""Virtual time for simulations and tests."""

from __future__ import annotations


class VirtualClock:
    """A clock that stands still until it is advanced."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def now(self) -> float:
        """Seconds."""
        return self._now

    def advance(self, to: float) -> None:
        """Advance to this time; an earlier time changes nothing."""
        self._now = max(self._now, to)
