"""When a move that a job has refused is tried again, and when the job is stopped instead. Pure: time is an argument."""

from __future__ import annotations

BUSY_S = 0.1
LONGEST_S = 30.0
TOO_BUSY_S = 5.0
"""A job that is too busy to leave devices for this long is checkpointed and stopped."""


class MoveRetries:
    """The moves of one attempt."""

    def __init__(self) -> None:
        self._refusals = 0
        """In a row."""
        self._busy_since: float | None = None
        """When it first was too busy to leave devices, if it has replied nothing else since."""
        self._retry_at = 0.0

    def succeeded(self) -> None:
        self._refusals, self._busy_since = 0, None

    def refused(self, now: float) -> None:
        """The pause doubles from two seconds."""
        self._refusals, self._busy_since = self._refusals + 1, None
        self._retry_at = now + min(2.0**self._refusals, LONGEST_S)

    def busy(self, now: float, *, leaves: bool) -> None:
        """`leaves`: it was asked to leave devices."""
        if not leaves:
            self._busy_since = None
        elif self._busy_since is None:
            self._busy_since = now
        self._retry_at = now + BUSY_S

    def pause(self, now: float) -> float:
        """Seconds until the next try."""
        return max(0.0, self._retry_at - now)

    def too_busy(self, now: float) -> bool:
        """Whether others have waited long enough for the devices that it should leave."""
        return self._busy_since is not None and now - self._busy_since >= TOO_BUSY_S
