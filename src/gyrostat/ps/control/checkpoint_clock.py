"""When the next checkpoint is due, and how long one has taken. Pure; time is an argument."""

from __future__ import annotations

from gyrostat.ps.control.settings import PsSettings

_PAUSE = 1.0
"""Seconds after a checkpoint that has failed."""


class CheckpointClock:
    def __init__(self, settings: PsSettings) -> None:
        self._seconds, self._updates = settings.checkpoint_seconds, settings.checkpoint_updates
        self.at = float("inf")
        """When the next one is due by time."""
        self._at_update = float("inf")
        self._not_before = float("-inf")
        self._making: tuple[int, float] | None = None

    def begin(self, now: float, updates: int) -> None:
        self.at = now + self._seconds
        if self._updates is not None:
            self._at_update = updates + self._updates

    def due(self, now: float, updates: int) -> bool:
        """Once for each checkpoint."""
        if now < self.at and updates < self._at_update:
            return False
        self.begin(now, updates)
        return True

    def may_begin(self, now: float) -> bool:
        """Somebody wants one: not at once if the last one has failed."""
        return now >= self._not_before

    def failed(self, now: float) -> None:
        self._not_before = now + _PAUSE
        self.at = min(self.at, self._not_before)

    def making(self, number: int | None, now: float) -> None:
        """Call it whenever this may have changed."""
        if number is not None and (self._making is None or self._making[0] != number):
            self._making = number, now

    def taken(self, now: float) -> float:
        """Seconds since the one that is being made was begun."""
        return 0.0 if self._making is None else now - self._making[1]
