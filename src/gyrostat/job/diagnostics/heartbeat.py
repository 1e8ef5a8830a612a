"""Which workers have stopped responding: stopped, hung in the kernel, or disconnected. Pure; the leader sends pings and kills.

The exit of a killed worker is seen at once. A stopped worker keeps its connections open, and all others wait for it. So the
leader sends every worker a `Ping` at intervals, and a thread of the worker answers it, whatever the script is doing. A script
that holds the interpreter's lock for longer than the timeout counts as not responding, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Heartbeats:
    """`timeout_s`: seconds after the last message of a worker at which it is lost; 0: never."""

    timeout_s: float
    _last_message: dict[int, float] = field(default_factory=dict)
    _pinged_at: float = float("-inf")
    _checked_at: float = float("-inf")

    @property
    def _ping_every(self) -> float:
        return self.timeout_s / 4

    def received(self, member: int, now: float) -> None:
        """A message of this worker arrived."""
        if member in self._last_message:
            self._last_message[member] = now

    def check(self, members: Sequence[int], now: float) -> tuple[bool, list[int]]:
        """Whether to send pings now, and the workers whose timeout is over."""
        if self.timeout_s <= 0:
            return False, []
        paused = now - self._checked_at > self.timeout_s / 2  # this process did not read messages meanwhile
        before = {} if paused else self._last_message
        self._last_message = {member: before.get(member, now) for member in members}
        self._checked_at = now
        lost = [member for member, at in self._last_message.items() if now - at > self.timeout_s]
        pings = now - self._pinged_at >= self._ping_every
        if pings:
            self._pinged_at = now
        return pings, lost

    def pause(self) -> None:
        """Expect nothing until `check` is called again."""
        self._last_message = {}

    def deadline(self) -> float | None:
        """When to call `check` next."""
        if self.timeout_s <= 0 or not self._last_message:
            return None
        return self._pinged_at + self._ping_every
