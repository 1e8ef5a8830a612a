"""The moves of a job: what it was asked for, and when a move that it has refused, or has not made as it reported, is tried
again. Pure: time is an argument.

No move is repeated without a pause that grows: a job that is busy is asked again after a tenth of a second, then after twice
that, up to two seconds; one that refuses, or whose status contradicts a move that it reported, after two seconds, up to half
a minute.
"""

from __future__ import annotations

from collections.abc import Sequence

from gyrostat.cluster.next_move import misplaced
from gyrostat.core.backoff import Backoff
from gyrostat.core.devices import Devices

BUSY = Backoff(first_s=0.1, longest_s=2.0)
REFUSED = Backoff(first_s=2.0, longest_s=30.0)
REPORT_BUSY_S = 5.0
"""A job that is too busy to move for this long is reported."""


class MoveRetries:
    """The moves of one attempt."""

    def __init__(self) -> None:
        self.requested: Devices = ()
        """The devices that it was asked to occupy, until it has answered."""
        self.servers: int | None = None
        """The number of parameter servers that it was asked for, until it has answered."""
        self.vacated: Devices = ()
        """The devices whose workers it was last asked to end."""
        self.reported: Devices | None = None
        """The devices that it last reported to have moved to, until its status has confirmed it."""
        self._wrong: str | None = None
        """How its status contradicted that."""
        self._refusals = 0
        """In a row."""
        self._busy = 0
        """How often in a row it was too busy."""
        self._busy_since, self._reported_busy = 0.0, False
        self._retry_at = 0.0

    def moved(self, devices: Devices, now: float) -> None:
        """It reports that it is on these. If it reported them before, and its status did not confirm it, that counts as a
        refusal."""
        if devices == self.reported:
            self.refused(now)
        else:
            self._refusals, self._busy = 0, 0
        self.reported = devices

    def check(self, occupied: Sequence[int]) -> str | None:
        """Its workers are on these, by its status. Returns what is wrong if that contradicts its report of a move, once."""
        if self.reported is None:
            return None
        before, self._wrong = self._wrong, misplaced(reported=self.reported, occupied=occupied)
        if self._wrong is None:
            self._refusals, self.reported = 0, None
        return self._wrong if self._wrong != before else None

    def refused(self, now: float) -> None:
        """The pause doubles from two seconds."""
        self._refusals, self._busy = self._refusals + 1, 0
        self._retry_at = now + REFUSED.after(self._refusals)

    def busy(self, now: float) -> bool:
        """Returns whether it has been busy for so long that this is to be reported, once."""
        if not self._busy:
            self._busy_since, self._reported_busy = now, False
        self._busy += 1
        self._retry_at = now + BUSY.after(self._busy)
        before, self._reported_busy = (
            self._reported_busy,
            self._reported_busy or now - self._busy_since >= REPORT_BUSY_S,
        )
        return self._reported_busy and not before

    def pause(self, now: float) -> float:
        """Seconds until the next try."""
        return max(0.0, self._retry_at - now)
